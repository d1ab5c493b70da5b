"""`check_compatibility`, `keys_match`: names, shapes, dtypes that differ; hint at a rename."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import _core
from .._common.arguments import check_flags
from .._common.backend import backend_of, is_module
from .._common.report import Shown, Table
from .._common.text import shorten
from ._backend import StateBackend
from ._group_merge import match_groups, split_group
from ._optimizer_state import OptimizerStateDict
from ._rename_guess import guess_rules

LISTED = 20  # names that a message lists
LONGEST = 200  # characters of one of them


class Difference(NamedTuple):
    """One difference between two states.

    Attributes
    ----------
    kind : str
        ``"missing"``: only the source has the tensor. ``"unexpected"``: only the target has
        it. ``"shape"`` or ``"dtype"``: both have it, with different shapes or dtypes.
    name : str
        The tensor.
    source, target : tuple of int, str or None
        The two shapes, or the names of the two dtypes. For a `Shard` of several parts, its place
        in the tensor instead of a shape, such as ``"(8,)[0:4]"``.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.state import check_compatibility
    >>> check_compatibility({"w": np.ones(2)}, {"w": np.ones(3)}).differences
    [Difference(kind='shape', name='w', source=(2,), target=(3,))]
    """

    kind: str
    name: str
    source: Any = None
    target: Any = None


class CompatibilityResult(Shown):
    """The result of `check_compatibility`; callers may add their own errors and warnings.

    Attributes
    ----------
    errors, warnings : list of str
        Differences that prevent loading, and differences that do not.
    differences : list of Difference
        All differences in structured form, also those that a message leaves out.
    renames : dict of str to str
        Rules for `rename` that would make names match; empty if no rules were found.

    Examples
    --------
    >>> from mlstate.state import CompatibilityResult
    >>> result = CompatibilityResult()
    >>> result.add_warning("made by an older version")
    >>> result.is_compatible, result.has_warnings
    (True, True)
    """

    __slots__ = ("_counts", "_is_refused", "differences", "errors", "renames", "warnings")

    def __init__(self) -> None:
        """Create a result without differences, to be filled by `check_compatibility`."""
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.differences: list[Difference] = []
        self.renames: dict[str, str] = {}
        # number of matching names, of names in the source, of names in the target
        self._counts: tuple[int, int, int] = (0, 0, 0)
        # whether `load_into` refuses the shared tensors for other reasons than `errors`
        self._is_refused = False

    @property
    def is_compatible(self) -> bool:
        """Whether the list of errors is empty."""
        return not self.errors

    @property
    def has_warnings(self) -> bool:
        """Whether the list of warnings is not empty."""
        return bool(self.warnings)

    def is_loadable(self, strict: bool = True) -> bool:
        """Return whether `load_into` accepted the pair when it was checked.

        Parameters
        ----------
        strict : bool, default True
            As for `load_into`, without its ``cast``.

        Returns
        -------
        bool
            False if `load_into` would have raised: for names if `strict`, for shapes, dtypes,
            read-only or overlapping arrays, or arrays outside main memory. Also False if the
            result has errors of the caller.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.state import check_compatibility
        >>> result = check_compatibility({"w": np.ones(2)}, {"w": np.ones(2), "b": np.ones(1)})
        >>> result.is_loadable(), result.is_loadable(strict=False)
        (False, True)
        """
        check_flags(strict=strict)
        matched, source, target = self._counts
        has_all_names = matched == source == target
        return self.is_compatible and not self._is_refused and (has_all_names or not strict)

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        """Restore a pickled result; `state`: None, and the attributes by name."""
        self._is_refused = False  # pickles of older versions lack it
        for name, value in state[1].items():
            setattr(self, name, value)

    def add_error(self, error: str) -> None:
        """Add an error.

        Parameters
        ----------
        error : str
            A line of text.

        Examples
        --------
        >>> from mlstate.state import CompatibilityResult
        >>> result = CompatibilityResult()
        >>> result.add_error("another tokenizer")
        >>> result.is_compatible
        False
        """
        self.errors.append(error)

    def add_warning(self, warning: str) -> None:
        """Add a warning.

        Parameters
        ----------
        warning : str
            A line of text.

        Examples
        --------
        >>> from mlstate.state import CompatibilityResult
        >>> result = CompatibilityResult()
        >>> result.add_warning("another tokenizer")
        >>> result.is_compatible
        True
        """
        self.warnings.append(warning)

    def _table(self) -> Table:
        """Return a row for each error, then for each warning."""
        rows = [("error", text) for text in self.errors]
        rows += [("warning", text) for text in self.warnings]
        return Table(self._title(), ["", "finding"], rows)

    def _verdict(self) -> str:
        """Return the first words of the text: the result, and how many names match."""
        matched, source, target = self._counts
        if not self.is_compatible:
            return "not compatible"
        if matched == source == target:
            return "compatible, but load_into refuses it" if self._is_refused else "compatible"
        of = f"of {source:,} in the source and {target:,} in the target"
        if matched == 0:
            return f"compatible, but nothing would be loaded: no name matches {of}"
        return (
            f"compatible in part: {matched:,} name{'s match' if matched > 1 else ' matches'} {of}"
        )

    def _title(self) -> str:
        """Return the first line of the text: the verdict, and counts of errors and warnings."""
        verdict = self._verdict()
        levels = (("error", self.errors), ("warning", self.warnings))
        counts = [
            f"{len(texts)} {level}{'s' if len(texts) > 1 else ''}"
            for level, texts in levels
            if texts
        ]
        return ", ".join([verdict, *counts])

    def __str__(self) -> str:
        lines = (f"  {level}: {text}" for level, text in self._table().rows)
        return "\n".join([self._title(), *lines])


def as_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a module or another mapping as a dict; a dict itself.

    Raises TypeError, with a hint, for a path or an object that holds states. Any other object is
    returned unchanged: the core refuses it.
    """
    if isinstance(state, dict):
        return state
    if is_module(state):
        return backend_of(state, StateBackend).module_entries(state)
    if isinstance(state, str | os.PathLike):
        raise TypeError(
            f"expected a mapping of str to array, got {state!r}: mlstate.load reads a path, and "
            "mlstate.diff compares two"
        )
    if isinstance(state, Mapping):
        return dict(state)
    if hasattr(state, "state_dict"):
        raise TypeError(
            f"expected a mapping of str to array, got {type(state).__name__}: pass its state_dict()"
        )
    if hasattr(state, "model"):
        raise TypeError(
            f"expected a mapping of str to array, got {type(state).__name__}, which holds several "
            "states: pass its .model or .optimizer"
        )
    return state


def keys_match(state1: Mapping[str, Any], state2: Mapping[str, Any]) -> bool:
    """Return whether two states have the same names.

    Parameters
    ----------
    state1, state2 : mapping of str to array
        The states. The arrays are not read.

    Returns
    -------
    bool
        The order of the names does not matter.

    Raises
    ------
    TypeError
        An argument is not a mapping, or a name is not a str.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.state import keys_match
    >>> keys_match({"a": np.ones(1), "b": np.ones(1)}, {"b": np.ones(2), "a": np.ones(2)})
    True
    """
    return _core.state_keys_match(as_dict(state1), as_dict(state2))


def get_missing_keys(state1: Mapping[str, Any], state2: Mapping[str, Any]) -> set[str]:
    """Return the names that `state1` has and `state2` lacks.

    Parameters
    ----------
    state1, state2 : mapping of str to array
        The states. The arrays are not read.

    Returns
    -------
    set of str
        Empty if no name is missing.

    Raises
    ------
    TypeError
        An argument is not a mapping, or a name is not a str.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.state import get_missing_keys
    >>> get_missing_keys({"a": np.ones(1), "b": np.ones(1)}, {"b": np.ones(1)})
    {'a'}
    """
    return _core.state_missing(as_dict(state1), as_dict(state2))


def get_unexpected_keys(state1: Mapping[str, Any], state2: Mapping[str, Any]) -> set[str]:
    """Return the names that `state2` has and `state1` lacks.

    Parameters
    ----------
    state1, state2 : mapping of str to array
        The states. The arrays are not read.

    Returns
    -------
    set of str
        Empty if no name is unexpected.

    Raises
    ------
    TypeError
        An argument is not a mapping, or a name is not a str.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.state import get_unexpected_keys
    >>> get_unexpected_keys({"a": np.ones(1)}, {"a": np.ones(1), "b": np.ones(1)})
    {'b'}
    """
    return _core.state_missing(as_dict(state2), as_dict(state1))


def shapes_match(state1: Mapping[str, Any], state2: Mapping[str, Any]) -> bool:
    """Return whether `state2` has every tensor of `state1` with the same shape.

    Parameters
    ----------
    state1, state2 : mapping of str to array
        The states. Tensors that only `state2` has are ignored, and so are dtypes.

    Returns
    -------
    bool
        False if `state2` lacks a name of `state1`.

    Raises
    ------
    TypeError
        An argument is not a mapping, or a name is not a str.

    References
    ----------
    ``ShapesMatch`` of the state dict specification: a missing tensor counts as a mismatch. Use
    `check_compatibility` if partial states are acceptable.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.state import shapes_match
    >>> shapes_match({"a": np.ones(2)}, {"a": np.zeros(2), "b": np.ones(1)})
    True
    """
    return _core.state_shapes_match(as_dict(state1), as_dict(state2))


def join(names: list[str]) -> str:
    """Return names as text for a message; names after the first `LISTED` are only counted."""
    listed = ", ".join(shorten(name, LONGEST) for name in names[:LISTED])
    more = len(names) - LISTED
    return f"{listed} and {more:,} more" if more > 0 else listed


def differences_of(
    missing: list[str],
    unexpected: list[str],
    shapes: list[tuple[str, Any, Any]],
    dtypes: list[tuple[str, Any, Any]],
) -> list[Difference]:
    """Return the core's results as one list of `Difference`.

    `missing`, `unexpected`: names. `shapes`, `dtypes`: (name, in the source, in the target).
    """
    return [
        *(Difference("missing", name) for name in missing),
        *(Difference("unexpected", name) for name in unexpected),
        *(Difference("shape", *entry) for entry in shapes),
        *(Difference("dtype", *entry) for entry in dtypes),
    ]


def rename_hint(
    source: dict[str, Any],
    target: dict[str, Any],
    source_only: list[str],
    target_only: list[str],
) -> tuple[dict[str, str], str]:
    """Return rename rules that make more names of `source` match `target`, and a line for the user.

    `source_only`, `target_only`: names without a counterpart. Without a guess: {} and "".
    """
    if not source_only or not target_only:
        return {}, ""
    rules = guess_rules(source_only, target_only)
    if not rules:
        return {}, ""
    try:
        renamed = _core.state_rename(source, rules)[0]
    except ValueError:  # two names would become the same
        return {}, ""
    matched = len(renamed) - len(_core.state_missing(renamed, target))
    if matched <= len(source) - len(source_only):  # names that matched before count too
        return {}, ""
    pairs = dict(rules)
    return pairs, f"{matched:,} of {len(source):,} names match after rename(source, {pairs!r})"


def _is_refused(target: dict[str, Any], source: dict[str, Any]) -> bool:
    """Return whether `load_into` refuses the tensors that both `source` and `target` have.

    Nothing is copied. An error of the check, except MemoryError, counts as a refusal.
    """
    try:
        # neither strict nor with a cast, and a dry run; a tuple lists mismatches
        return isinstance(_core.state_load(target, source, False, False, True), tuple)
    except MemoryError:
        raise
    except Exception:  # the errors of arrays of other libraries are not known
        return True


def _compare_groups(source: OptimizerStateDict, target: OptimizerStateDict) -> list[str]:
    """Return warnings about the parameter groups of two optimizers, if both have groups."""
    groups = source.param_groups, target.param_groups
    if not all(groups) or any("params" not in group for each in groups for group in each):
        return []
    matched = match_groups(*reversed(groups))
    if matched is None:
        return [
            "param_groups: the parameters are in other groups in the source than in the target; "
            "a load matches groups by the names of their parameters, in any order"
        ]
    warnings = []
    for number, pair in enumerate(zip(matched, groups[1], strict=True)):
        left, right = (split_group(group)[0] for group in pair)
        for side, own, other in (("source", left, right), ("target", right, left)):
            names = [name for name in own if name not in other]
            if names:
                warnings.append(f"param_groups[{number}]: only in the {side}: {join(names)}")
    return warnings


def check_compatibility(
    source: Mapping[str, Any], target: Mapping[str, Any]
) -> CompatibilityResult:
    """Check whether one state can be loaded into another.

    Parameters
    ----------
    source, target : mapping of str to array, or torch.nn.Module
        The states. Only names, shapes and dtypes are read, so the arrays may be on a device,
        including torch's ``meta`` device.

    Returns
    -------
    CompatibilityResult
        A name that only one side has is a warning, so that a part of a model can be loaded.
        A different shape is an error, a different dtype a warning. The first line of the text
        tells whether all, some or no names match. ``is_loadable()`` tells whether `load_into`
        accepts the pair as it is. Parameter groups of two `OptimizerStateDict` are matched by the
        names of their parameters, in any order, as `mlstate.load` does; other parameters, and
        names of values that only one group has, are warnings. If a prefix explains the difference
        of the names, ``renames`` has the rules.

    Raises
    ------
    TypeError
        An argument is not a mapping, or a name is not a str.

    Notes
    -----
    *Missing* means that only the source has the tensor, *unexpected* that only the target does.

    References
    ----------
    ``StateCompatibilityChecker`` of the state dict specification. The specification counts a
    missing tensor as a shape mismatch; here only tensors that both sides have are compared.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.state import check_compatibility
    >>> saved = {"module.w": np.ones((2, 3)), "module.b": np.ones(2)}
    >>> print(check_compatibility(saved, {"w": np.ones((2, 3)), "b": np.ones(2)}))
    compatible, but nothing would be loaded: no name matches of 2 in the source and 2 in the \
target, 3 warnings
      warning: only in the source: module.w, module.b
      warning: only in the target: w, b
      warning: 2 of 2 names match after rename(source, {'module.': ''})
    >>> print(check_compatibility({"w": np.ones((2, 3))}, {"w": np.ones((3, 2))}))
    not compatible, 1 error
      error: w: shape (2, 3) in the source, (3, 2) in the target
    """
    source, target = as_dict(source), as_dict(target)
    missing, unexpected, shapes, dtypes = _core.state_compare(source, target)
    result = CompatibilityResult()
    result._counts = len(source) - len(missing), len(source), len(target)
    result.differences = differences_of(missing, unexpected, shapes, dtypes)
    if missing:
        result.add_warning(f"only in the source: {join(missing)}")
    if unexpected:
        result.add_warning(f"only in the target: {join(unexpected)}")
    result.renames, hint = rename_hint(source, target, missing, unexpected)
    if hint:
        result.add_warning(hint)
    if isinstance(source, OptimizerStateDict) and isinstance(target, OptimizerStateDict):
        result.warnings += _compare_groups(source, target)
    for label, add, pairs in (
        ("shape", result.add_error, shapes),
        ("dtype", result.add_warning, dtypes),
    ):
        for name, have, want in pairs:
            add(f"{shorten(name, LONGEST)}: {label} {have} in the source, {want} in the target")
    # different shapes are errors already
    result._is_refused = not shapes and (bool(dtypes) or _is_refused(target, source))
    return result
