"""`Layout` and `Shard`: how a tensor is divided among ranks: rows, axis, flat; versions, tiers."""

from __future__ import annotations

from enum import StrEnum
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import _core
from .._common.arguments import check_int, check_type
from .._common.arrays import is_torch
from .._common.set_module import set_module

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .._types import Array

Steps: TypeAlias = "tuple[tuple[int | str, int], ...]"
# How to cut every tensor: steps (None: as it was saved), index of the part, number of ranks (with
# None, 0: whole). Or for each tensor: whole shape, then steps and index, or begin and end of a
# range of elements.
Cutting: TypeAlias = "tuple[Steps | None, int, int]"
Cuts: TypeAlias = "Cutting | list[tuple[tuple[int, ...], Steps | int, int]]"

LAYOUT_NAMES = _core.layout_names()


@set_module("mlstate.checkpoint")
class Tier(StrEnum):
    """The place where a part of a state is kept; each member equals the str of its value.

    Examples
    --------
    >>> from mlstate.checkpoint import Tier
    >>> Tier("cold"), Tier.HOT == "hot"
    (<Tier.COLD: 'cold'>, True)
    """

    HOT = "hot"  # the memory of an accelerator
    WARM = "warm"  # main memory
    COLD = "cold"  # a file


TIERS = tuple(Tier)


def _step(step: Any) -> tuple[int | str, int]:
    """Return a step of a layout (axis or "flat", number of parts); refuse a negative axis."""
    axis, parts = step
    if not isinstance(axis, str) and index(axis) < 0:
        raise ValueError(f"a layout counts axes from 0, got axis {axis}")
    return axis, parts


@set_module("mlstate.checkpoint")
class Layout:
    """How a tensor is divided into parts, such as one for each rank.

    Each step divides one axis, or the remaining elements in C order (``"flat"``, only as the
    last step). Each part gets ``ceil(n / parts)`` of ``n`` indices, as in `torch.chunk`, so the
    last parts may be smaller or empty. With several steps the parts are numbered in row-major
    order: the index of the last step changes fastest. Functions take the names ``"rows"``,
    ``"flat"`` and ``"whole"`` for the layouts of these methods with one part for each rank.

    Parameters
    ----------
    steps : iterable of (int or "flat", int)
        Axis and number of parts of each step, at most four steps. Empty: the whole tensor.

    Raises
    ------
    ValueError
        An axis is negative, a step has no parts, or a flat step is not the last step.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.checkpoint import Layout
    >>> rows = Layout.rows(4)
    >>> [rows.take(np.arange(5), i).tolist() for i in range(4)]
    [[0, 1], [2, 3], [4], []]
    >>> Layout.axis(1, 2) * Layout.rows(3)
    Layout([(1, 2), (0, 3)])
    """

    __slots__ = ("_parts", "_steps")

    def __init__(self, steps: Iterable[tuple[int | str, int]] = ()) -> None:
        """Check the steps, which the class describes, and count the parts."""
        checked_steps = tuple(_step(step) for step in steps)
        _core.layout_project(checked_steps, 0, 0, None)  # raises for invalid steps
        self._steps: Steps = checked_steps
        self._parts = prod(parts for _, parts in checked_steps)

    @classmethod
    def whole(cls) -> Layout:
        """Return the layout with a single part, the whole tensor.

        Examples
        --------
        >>> from mlstate.checkpoint import Layout
        >>> Layout.whole().parts
        1
        """
        return cls()

    @classmethod
    def rows(cls, parts: int) -> Layout:
        """Return the layout that divides the first axis, as FSDP2 does.

        Parameters
        ----------
        parts : int
            Number of parts.

        Examples
        --------
        >>> from mlstate.checkpoint import Layout
        >>> Layout.rows(2)
        Layout([(0, 2)])
        """
        return cls([(0, parts)])

    @classmethod
    def axis(cls, axis: int, parts: int) -> Layout:
        """Return the layout that divides one axis, as tensor parallelism does.

        Parameters
        ----------
        axis : int
            The axis, counted from 0.
        parts : int
            Number of parts.

        Examples
        --------
        >>> from mlstate.checkpoint import Layout
        >>> Layout.axis(1, 2)
        Layout([(1, 2)])
        """
        return cls([(axis, parts)])

    @classmethod
    def flat(cls, parts: int) -> Layout:
        """Return the layout that divides the flattened tensor, as FSDP1 does.

        Parameters
        ----------
        parts : int
            Number of parts.

        Examples
        --------
        >>> from mlstate.checkpoint import Layout
        >>> Layout.flat(2)
        Layout([('flat', 2)])
        """
        return cls([("flat", parts)])

    @property
    def steps(self) -> tuple[tuple[int | str, int], ...]:
        """The steps, in the form of the constructor's argument."""
        return self._steps

    @property
    def parts(self) -> int:
        """Number of parts."""
        return self._parts

    def __mul__(self, other: Layout) -> Layout:
        if not isinstance(other, Layout):
            return NotImplemented
        return Layout([*self.steps, *other.steps])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._steps == other._steps

    def __hash__(self) -> int:
        return hash(self._steps)

    def __repr__(self) -> str:
        return f"Layout({list(self.steps)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.steps,)

    def shape(self, shape: tuple[int, ...], index: int) -> tuple[int, ...]:
        """Return the shape of a part.

        Parameters
        ----------
        shape : tuple of int
            Shape of the whole tensor.
        index : int
            Index of the part.

        Returns
        -------
        tuple of int
            Shape of the part; one-dimensional for layouts that end with a flat step.

        Raises
        ------
        ValueError
            `index` is out of range.
        CompatibilityError
            The tensor lacks an axis of the layout.

        Examples
        --------
        >>> from mlstate.checkpoint import Layout
        >>> Layout.rows(4).shape((5, 3), 3), Layout.flat(4).shape((5, 3), 3)
        ((0, 3), (3,))
        """
        _, lengths, begin, end, flat = _core.layout_part(self._steps, tuple(shape), index)
        return (end - begin,) if flat else lengths

    def take(self, array: Any, index: int) -> Any:
        """Return a part of an array or tensor, as a view if possible.

        Parameters
        ----------
        array : array or torch.Tensor
            The whole tensor.
        index : int
            Index of the part.

        Returns
        -------
        array or torch.Tensor
            A view. A flat part of a non-contiguous tensor is a copy.

        Raises
        ------
        ValueError, CompatibilityError
            As for `shape`.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.checkpoint import Layout
        >>> Layout.axis(1, 2).take(np.arange(6).reshape(2, 3), 1)
        array([[2],
               [5]])
        """
        # the part is the elements `begin` to `end`, in C order, of a box: first index and length by
        # axis; without a flat step, it is the whole box
        starts, lengths, begin, end, flat = _core.layout_part(
            self._steps, tuple(array.shape), index
        )
        slices = [slice(start, start + n) for start, n in zip(starts, lengths, strict=True)]
        box = array[tuple(slices)]
        return box.reshape(-1)[begin:end] if flat else box

    def shard(self, array: Any, index: int, **keywords: Any) -> Shard:
        """Return a part of an array as a `Shard`.

        Parameters
        ----------
        array : array or torch.Tensor
            The whole tensor.
        index : int
            Index of the part.
        **keywords
            ``version``, ``tier``, ``replica`` of the `Shard`.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.checkpoint import Layout
        >>> Layout.rows(2).shard(np.arange(6).reshape(3, 2), 1)
        Shard(1 of 2 of (3, 2), Layout([(0, 2)]))
        """
        shape = tuple(array.shape)
        return Shard(self.take(array, index), self, index, shape=shape, **keywords)


@set_module("mlstate.checkpoint")
class Shard:
    """A rank's part of a tensor, with its layout and index.

    Use it in place of an array as a value of a state dict that `mlstate.save` stores.

    Parameters
    ----------
    array : array
        The part's elements in C order; they may have another shape than the part. The array is
        not copied.
    layout : Layout, optional
        How the tensor is divided. Default: a single part.
    index : int, default 0
        Index of the part.
    shape : tuple of int, optional
        Shape of the whole tensor. Required if there are several parts, because their sizes may
        differ.
    version : int, optional
        Version counter of this shard, from 1. mlstate trusts this version and does not verify
        it: a shard with the version of the last save is neither read nor written again.
        Default: bytes are compared.
    tier : {"hot", "warm", "cold"}, optional
        Where the shard is kept; recorded in the checkpoint.
    replica : int, default 0
        If above 0, another rank has the same part as replica 0. Only replica 0 is stored.

    Raises
    ------
    TypeError
        `shape` is missing, or `layout` is not a Layout.
    ValueError
        `index`, `version`, `tier` or `replica` is out of range, or the array has another number
        of elements than the part.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.checkpoint import Layout, Shard
    >>> shard = Shard(np.zeros((2, 8)), Layout.rows(4), 1, shape=(7, 8))
    >>> shard.shape, shard.array.shape
    ((7, 8), (2, 8))
    """

    __slots__ = ("_version", "array", "index", "layout", "replica", "shape", "tier")

    def __init__(
        self,
        array: Any,
        layout: Layout | None = None,
        index: int = 0,
        *,
        shape: Iterable[int] | None = None,
        version: int | None = None,
        tier: str | None = None,
        replica: int = 0,
    ) -> None:
        """Check the arguments (see the class) and keep the array; nothing is copied."""
        layout = Layout() if layout is None else layout
        check_type("layout", layout, Layout)
        if shape is None:
            if layout.parts > 1:
                raise TypeError(
                    "pass shape= of the whole tensor: parts may be uneven, so one part does not "
                    "determine it"
                )
            shape = array.shape
        version = None if version is None else check_int("version", version, 1)
        if tier is not None and tier not in TIERS:
            raise ValueError(f"tier must be one of {', '.join(TIERS)}, got {tier!r}")
        self.array: Any = array
        self.layout: Layout = layout
        self.index: int = index
        lengths = (check_int("a length in shape", length, 0) for length in shape)
        self.shape: tuple[int, ...] = tuple(lengths)
        self.tier: str | None = tier
        self.replica: int = check_int("replica", replica, 0)
        self._version = version or 0
        expected, got = layout.shape(self.shape, index), tuple(array.shape)
        if prod(expected) != prod(got):
            raise ValueError(
                f"part {index} of {layout.parts} of a tensor of shape {self.shape} has shape "
                f"{expected}, but the array has shape {got}"
            )

    @property
    def version(self) -> int | None:
        """Version counter given by the caller; None if not given."""
        return self._version or None

    @property
    def dtype(self) -> Any:
        """Dtype of the array."""
        return self.array.dtype

    @property
    def _steps(self) -> Steps:
        return self.layout._steps

    def _with_array(self, array: Array, tier: str | None) -> Shard:
        """Return the same part, of the same version, with another array and tier."""
        return Shard(
            array,
            self.layout,
            self.index,
            shape=self.shape,
            version=self.version,
            tier=tier,
            replica=self.replica,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(self.array.nbytes)

    @property
    def _mlstate_part(self) -> str | None:
        """Text of the part's place in the tensor; None for all elements. The core reads it."""
        starts, lengths, begin, end, _ = _core.layout_part(self._steps, self.shape, self.index)
        if end - begin == prod(self.shape):
            return None
        if len(lengths) == 1:  # a flat part is a box too
            starts, lengths, begin, end = (starts[0] + begin,), (end - begin,), 0, end - begin
        box = ", ".join(f"{start}:{start + n}" for start, n in zip(starts, lengths, strict=True))
        flat = "" if end - begin == prod(lengths) else f".flat[{begin}:{end}]"
        return f"{self.shape}[{box}]{flat}"

    @property
    def __array_interface__(self) -> Any:
        """Lets state dicts accept a shard as the array that it holds."""
        import numpy as np

        return np.asarray(self.array).__array_interface__

    @property
    def __dlpack__(self) -> Any:
        """Export of a torch tensor, whose dtype or device NumPy may not support."""
        if not is_torch(self.array):
            raise AttributeError("a shard of an array has __array_interface__")
        if self.array.is_neg():  # torch would export the elements with the other sign
            return self._refuse_negated
        return self.array.detach().__dlpack__

    def _refuse_negated(self, **_: Any) -> Any:
        """Raise BufferError, as torch does for views that are conjugated when read."""
        raise BufferError("a view that is negated when read: store its resolve_neg()")

    @property
    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__

    def __repr__(self) -> str:
        part = f"{self.index} of {self.layout.parts} of {self.shape}"
        return f"Shard({part}, {self.layout!r})"


def steps_of(layout: Layout | str | None, world_size: int) -> Steps | None:
    """Return the steps of a layout argument: a Layout, one of `LAYOUT_NAMES`, or None for None.

    `world_size`: number of parts of a layout that is given by name. Raises ValueError for any other
    argument.
    """
    if layout is None:
        return None
    if isinstance(layout, Layout):
        return layout._steps
    if isinstance(layout, str) and layout in LAYOUT_NAMES:
        parsed = _core.layout_parse(layout)
        assert parsed is not None
        return tuple((axis, world_size) for axis, _ in parsed[0])
    hint = ""
    if isinstance(layout, str) and layout in ("columns", "column", "cols"):
        hint = f"; pass Layout.axis(1, {world_size}) for columns"
    accepted = ["a Layout", *map(repr, LAYOUT_NAMES)]
    raise ValueError(
        f"layout must be {', '.join(accepted[:-1])} or {accepted[-1]}, got {layout!r}{hint}"
    )
