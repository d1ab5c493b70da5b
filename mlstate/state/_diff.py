"""`diff` of two states in memory: element by element; its table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _core
from .._common.report import Table
from .._common.scales import codes_of, facts_of
from .._common.text import count_text
from ..errors import CompatibilityError
from ._compatibility import as_dict
from ._tolerance import change_beyond, check_tolerances

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

LISTED = 20  # rows that a table shows


def title_of(counts: Sequence[tuple[int, str]], unchanged: int) -> str:
    """Return one line with the numbers of tensors that differ, by label, and of the others."""
    listed = [f"{count:,} {label}" for count, label in counts if count]
    if not listed:
        return f"identical: {count_text(unchanged, 'tensor')}"
    return ", ".join(listed + [f"{unchanged:,} unchanged"] * (unchanged > 0))


class TensorChange(NamedTuple):
    """How much the elements of one tensor changed.

    Attributes
    ----------
    name : str
        The tensor.
    changed, size : int
        Number of elements that differ, and number of all elements.
    nan : int
        Number of differing elements that are NaN on exactly one side. `max_abs` and `max_rel`
        ignore them.
    max_abs : float
        The largest ``|a - b|``.
    max_rel : float
        The largest ``|a - b| / max(|a|, |b|)``: 0 to 2, or infinity if one side is infinite.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.state import diff
    >>> diff({"w": np.array([1.0, 2.0, np.nan])}, {"w": np.array([1.0, 4.0, 0.0])}).changes[0]
    TensorChange(name='w', changed=2, size=3, nan=1, max_abs=2.0, max_rel=0.5)
    """

    name: str
    changed: int
    size: int
    nan: int
    max_abs: float
    max_rel: float


class StateDiff(NamedTuple):
    """The differences between two states.

    Attributes
    ----------
    missing, unexpected : list of str
        Names that only the first state, or only the second state has.
    shapes, dtypes : list of tuple
        ``(name, in the first, in the second)`` for each tensor whose shape or dtype differs, or
        that is another part of a tensor (see `Difference`).
    changes : list of TensorChange
        Tensors of the same shape and dtype whose elements differ.
    unchanged : int
        Number of tensors that are equal.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.state import diff
    >>> diff({"w": np.ones(2)}, {"w": np.ones(2)}).identical
    True
    """

    missing: list[str]
    unexpected: list[str]
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    dtypes: list[tuple[str, str, str]]
    changes: list[TensorChange]
    unchanged: int

    @property
    def identical(self) -> bool:
        """Whether the two states are equal, in the sense of ``==``."""
        return not (self.missing or self.unexpected or self.shapes or self.dtypes or self.changes)

    def _title(self) -> str:
        """Return one line with the number of tensors of each kind of difference."""
        counts = [
            (len(self.changes), "changed"),
            (len(self.shapes), "of another shape"),
            (len(self.dtypes), "of another dtype"),
            (len(self.missing), "only in the first"),
            (len(self.unexpected), "only in the second"),
        ]
        return title_of(counts, self.unchanged)

    def _table(self) -> Table:
        """Return a row for each shape and dtype mismatch, then for the largest changes.

        Names that only one state has come last.
        """
        rows: list[tuple[object, ...]] = []
        for label, pairs in (("shape", self.shapes), ("dtype", self.dtypes)):
            rows += [(name, label, None, None, f"{a} -> {b}") for name, a, b in pairs]
        for c in sorted(self.changes, key=lambda c: (-c.nan, -c.max_rel, -c.max_abs)):
            nan = f"{c.nan:,} NaN" if c.nan else None
            rows.append((c.name, f"{c.changed:,} of {c.size:,}", c.max_abs, c.max_rel, nan))
        for label, names in (("first", self.missing), ("second", self.unexpected)):
            rows += [(name, f"only in the {label}", None, None, None) for name in names]
        return Table(self._title(), _COLUMNS, rows)

    def __repr__(self) -> str:  # the title only: there may be 10,000 tensors
        return f"<StateDiff: {self._title()}>"

    def __str__(self) -> str:
        return self._table().text(LISTED)

    def _repr_html_(self) -> str:
        return self._table().html()


_COLUMNS = ["tensor", "changed", "max abs [.3g]", "max rel [.3g]", ""]


def diff(
    a: Mapping[str, Any], b: Mapping[str, Any], *, rtol: float = 0.0, atol: float = 0.0
) -> StateDiff:
    """Compare two states element by element.

    Parameters
    ----------
    a, b : mapping of str to array, or torch.nn.Module
        The states, in main memory.
    rtol, atol : float, default 0
        Two elements are equal too if ``|a - b| <= atol + rtol * max(|a|, |b|)``. If one of the two
        is above 0, the dtypes of a tensor may differ; the differences are computed in float64.
        An infinity equals only itself.

    Returns
    -------
    StateDiff
        Names that only one state has, shapes and dtypes that differ, and for each other tensor
        how many elements changed and by how much. Two elements are equal if their bits are
        equal or both are NaN. So 0.0 and -0.0 differ, with a difference of 0.

    Raises
    ------
    CompatibilityError
        The core does not know a dtype or cannot read an array's memory. With a tolerance: codes of
        quantized weights that have scales differ, such as 8-bit floats.
    TypeError
        An argument is not a mapping of str to array, or has a masked array.
    ValueError
        A tolerance is negative or NaN.

    Notes
    -----
    Arrays may have any strides and byte order; nothing is copied. The GIL is released, and
    large tensors are compared by `get_num_threads` threads. Differences are computed
    in float64. With a tolerance, tensors that differ are compared again, by NumPy in blocks of
    8 MiB, which copies arrays whose strides cannot be flattened.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.state import diff
    >>> before = {"w": np.array([1.0, 2.0, 4.0]), "b": np.zeros(2)}
    >>> after = {"w": np.array([1.0, 2.5, 4.0]), "b": np.zeros(2)}
    >>> print(diff(before, after))
    1 changed, 1 unchanged
    tensor  changed  max abs  max rel
    w       1 of 3   0.5      0.2
    """
    return diff_states(as_dict(a), as_dict(b), rtol, atol)


def diff_states(
    first: dict[str, Any],
    second: dict[str, Any],
    rtol: float,
    atol: float,
    codes: Collection[str] | None = None,
) -> StateDiff:
    """Compare two states as `diff` does.

    `codes`: names of quantized weights with scales, if the states have not all tensors; None: find
    them. Raises CompatibilityError if their numbers would be compared with a tolerance.
    """
    rtol, atol = check_tolerances(rtol, atol)
    missing, unexpected, shapes, dtypes, change_rows, unchanged = _core.state_diff(first, second)
    changes = [TensorChange(*change) for change in change_rows]
    if rtol or atol:
        # dtypes may differ, unless the shapes do too: then no elements are compared
        other_shapes = {name for name, *_ in shapes}
        compared = [entry[0] for entry in dtypes if entry[0] not in other_shapes]
        compared += [change.name for change in changes]
        dtypes, changes = [entry for entry in dtypes if entry[0] in other_shapes], []
        if codes is None:
            codes = {*codes_of(facts_of(first)), *codes_of(facts_of(second))} if compared else ()
        for name in compared:
            if name in codes:
                raise _code_error(name)
            try:
                change = change_beyond(first[name], second[name], rtol, atol)
            except TypeError as reason:  # packed floats
                text = f"{name!r}: {reason}; omit rtol and atol"
                raise CompatibilityError(text, name=name) from None
            if change is None:
                unchanged += 1
            else:
                changes.append(TensorChange(name, *change))
    return StateDiff(missing, unexpected, shapes, dtypes, changes, unchanged)


def _code_error(name: str) -> CompatibilityError:
    """Return the error for a quantized weight `name` that a tolerance cannot be applied to."""
    return CompatibilityError(
        f"{name!r} is quantized, and a tolerance is of values, not of codes: compare states that "
        "were loaded with cast=, or omit rtol= and atol=",
        name=name,
    )


def join_diffs(first: StateDiff, second: StateDiff) -> StateDiff:
    """Return the differences of both, of states with different names."""
    fields: Iterable[tuple[Any, Any]] = zip(first, second, strict=True)
    return StateDiff(*[a + b for a, b in fields])
