"""`FSDPShardingUnit`, `sharding_units`: the part of a parameter that a rank keeps, its layout."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from .._common.arguments import check_int, check_items, check_type
from .._common.backend import backend_named, is_module
from .._common.dtypes import EXTENSIONS, name_of, stored_dtype
from .._common.text import shorten
from .._sharding.layout import LAYOUT_NAMES, Layout, Shard, steps_of
from ..collectives._arguments import check_group
from ..errors import CompatibilityError
from ._backend import GradientBackend

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MOST_RANKS = 1 << 20
# "flat" and "rows": one division whose parts are contiguous in the parameter, as buckets need them.
_LAYOUTS = sorted(name for name in LAYOUT_NAMES if steps_of(name, 2) in ((("flat", 2),), ((0, 2),)))


def dtype_text(dtype: Any) -> str:
    """Return the name of a dtype, equal in NumPy, ml_dtypes and torch: "bfloat16".

    `dtype`: a dtype of one of them, or a name. Raises TypeError for None or an unknown name.
    """
    if dtype is None:  # NumPy takes None as float64
        raise TypeError("dtype must be a dtype or its name, got None")
    text = str(dtype)
    if text.startswith("torch.") or text in EXTENSIONS:
        return text.removeprefix("torch.")
    try:
        return name_of(np.dtype(dtype))
    except TypeError:  # NumPy's text lacks the name
        raise TypeError(f"dtype must be a dtype or its name, got {dtype!r:.200}") from None


@cache
def _item_bytes(dtype: str) -> int:
    """Return the size of an element of the dtype called `dtype`, in bytes."""
    return EXTENSIONS.get(dtype) or int(np.dtype(dtype).itemsize)


def numpy_dtype(dtype: str) -> Any:
    """Return NumPy's dtype of a name, or the one that mlstate stores bfloat16 and others in."""
    try:
        return np.dtype(dtype)
    except TypeError:  # a dtype that NumPy lacks
        return stored_dtype(dtype)


def check_layout(layout: object) -> None:
    """Raise ValueError unless the argument `layout` is one of `_LAYOUTS`."""
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise ValueError(f"layout must be {' or '.join(map(repr, _LAYOUTS))}, got {layout!r}")


class FSDPShardingUnit:
    """A parameter and the part of its gradient that this rank keeps.

    Parameters
    ----------
    parameter_name : str
        The parameter's name in the model.
    shape : iterable of int
        Shape of the full parameter.
    dtype : dtype or str
        Dtype of the parameter: of NumPy, of torch, or a name such as ``"bfloat16"``.
    shard_index : int
        Index of the part that this rank keeps: its rank in the group.
    world_size : int, optional
        Number of ranks. Default: the size of the first group that uses the unit.
    layout : {"flat", "rows"}, default "flat"
        ``"flat"`` divides the flattened parameter into chunks of ``ceil(n / world_size)``
        elements, as FSDP1 does; ``"rows"`` divides the first axis, as FSDP2 does.

    Attributes
    ----------
    local_gradient : array or torch.Tensor or None
        The reduced part: one-dimensional for ``"flat"``, rows for ``"rows"``, never padded,
        empty if the rank owns no elements. The next backward pass overwrites this memory: copy
        it to keep the values.

    Raises
    ------
    TypeError
        If a number is not an int, or the dtype is None.
    ValueError
        If the name is empty, the layout is unknown, or the shard index is out of range.
    CompatibilityError
        If the layout is ``"rows"`` and the parameter has no dimensions.

    Notes
    -----
    ``FSDPShardingUnit`` of the specification (FSDP backward hook). There, a parameter with fewer
    elements than ranks has parts of negative size; here these parts are empty.

    Examples
    --------
    >>> from mlstate.fsdp import FSDPShardingUnit
    >>> unit = FSDPShardingUnit("fc.weight", (5, 3), "float32", 1, world_size=2)
    >>> unit.counts, unit.local_shape
    ((8, 7), (7,))
    >>> FSDPShardingUnit("fc.weight", (5, 3), "float32", 1, world_size=2, layout="rows").local_shape
    (2, 3)
    """

    __slots__ = (
        "_counts",
        "_is_lost",
        "_layout",
        "_local_shape",
        "_world_size",
        "dtype",
        "fact",
        "like",
        "local_gradient",
        "parameter_name",
        "shape",
        "shard_index",
    )

    def __init__(
        self,
        parameter_name: str,
        shape: Iterable[int],
        dtype: object,
        shard_index: int,
        *,
        world_size: int | None = None,
        layout: str = "flat",
    ) -> None:
        """Check the arguments (see the class). Part shapes need `world_size`, or `bind` later."""
        if not isinstance(parameter_name, str) or not parameter_name:
            raise ValueError(
                f"parameter_name must be a str that is not empty, got {parameter_name!r}"
            )
        check_layout(layout)
        self.shard_index: int = check_int("shard_index", shard_index, 0)
        self.parameter_name: str = parameter_name
        self.shape: tuple[int, ...] = tuple(
            check_int(f"{parameter_name}: each number of shape", n, 0)
            for n in check_items("shape", shape, "integers")
        )
        if layout == "rows" and not self.shape:
            raise CompatibilityError(
                f"{parameter_name}: a parameter without dimensions has no rows; pass layout='flat'"
            )
        self.dtype: str = dtype_text(dtype)
        self.local_gradient: Any = None
        self._is_lost = False  # whether an error dropped the local gradient
        self.like: Any = None  # the parameter, if it is a torch tensor
        self._layout = layout
        self._world_size: int | None = None
        self._counts: tuple[int, ...] = ()
        self._local_shape: tuple[int, ...] = ()
        # a text that all ranks compare: it must be equal on all of them
        self.fact: str = f"{parameter_name!r} {self.dtype} {self.shape} {layout}"
        if world_size is not None:
            self.bind(world_size)

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        """Restore a pickled unit."""
        self._is_lost = False  # pickles of older versions lack it
        for name, value in state[1].items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        world_text = "" if self._world_size is None else f" of {self._world_size}"
        return f"FSDPShardingUnit({shorten(self.fact, 400)}, shard {self.shard_index}{world_text})"

    def bind(self, world_size: int) -> None:
        """Set the number of ranks; a group calls this for a unit without `world_size`.

        Parameters
        ----------
        world_size : int
            Number of ranks.

        Raises
        ------
        ValueError
            If the unit has another number of ranks, or its shard index is out of range.
        TypeError
            If `world_size` is not an integer.

        Examples
        --------
        >>> from mlstate.fsdp import FSDPShardingUnit
        >>> unit = FSDPShardingUnit("bias", (3,), "float32", 3)
        >>> unit.bind(4)
        >>> unit.counts
        (1, 1, 1, 0)
        """
        if type(world_size) is int and self._world_size == world_size:
            return
        check_int(f"{self.parameter_name}: world_size", world_size, 1, _MOST_RANKS)
        if self._world_size not in (None, world_size):
            raise ValueError(
                f"{self.parameter_name}: this unit is for {self._world_size} ranks, but the group "
                f"has {world_size}"
            )
        if self.shard_index >= world_size:
            raise ValueError(
                f"{self.parameter_name}: shard_index {self.shard_index} is out of range: "
                f"{world_size} ranks have shards 0 to {world_size - 1}"
            )
        layout = Layout(steps_of(self._layout, world_size) or ())
        self._counts = tuple(prod(layout.shape(self.shape, i)) for i in range(world_size))
        self._local_shape = layout.shape(self.shape, self.shard_index)
        self._world_size = world_size

    def _unbound_error(self) -> ValueError:
        """Return the error for a property that needs the number of ranks."""
        return ValueError(
            f"{self.parameter_name}: pass world_size=, or use the unit with a group first"
        )

    @property
    def layout(self) -> Layout:
        """Division of the parameter among ranks, as a `mlstate.checkpoint.Layout`."""
        if self._world_size is None:
            raise self._unbound_error()
        return Layout(steps_of(self._layout, self._world_size) or ())

    @property
    def world_size(self) -> int | None:
        """Number of ranks; None until the unit is bound to a group."""
        return self._world_size

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of elements in each rank's part."""
        if self._world_size is None:
            raise self._unbound_error()
        return self._counts

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of `local_gradient`."""
        if self._world_size is None:
            raise self._unbound_error()
        return self._local_shape

    @property
    def full_bytes(self) -> int:
        """Size of the full gradient in bytes."""
        return prod(self.shape) * self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Size of an element in bytes."""
        return _item_bytes(self.dtype)

    def zeros(self) -> Any:
        """Return a new full gradient of zeros, in place of a missing one.

        It is a tensor on the parameter's device if `like` is set, else a NumPy array.
        """
        if self.like is not None:
            return self.like.new_zeros(self.shape)
        return np.zeros(self.shape, numpy_dtype(self.dtype))

    def shard(self) -> Shard:
        """Return the local gradient as a `Shard` that `mlstate.save` stores.

        Returns
        -------
        Shard
            A shard that shares the gradient's memory.

        Raises
        ------
        ValueError
            If the unit has no local gradient.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.fsdp import FSDPShardingUnit
        >>> unit = FSDPShardingUnit("bias", (3,), "float32", 0, world_size=2)
        >>> unit.local_gradient = np.ones(2, "float32")
        >>> unit.shard()
        Shard(0 of 2 of (3,), Layout([('flat', 2)]))
        """
        if self.local_gradient is None:
            raise ValueError(f"{self.parameter_name} has no local gradient")
        return Shard(self.local_gradient, self.layout, self.shard_index, shape=self.shape)


def bind_unit(unit: FSDPShardingUnit, rank: int, world_size: int) -> None:
    """Set the number of ranks of a unit, and check that it is a unit of this `rank`.

    `world_size`: number of ranks of the group. Raises TypeError if `unit` is not a sharding unit,
    ValueError if it is for another rank or number of ranks.
    """
    check_type("a unit", unit, FSDPShardingUnit, "an FSDPShardingUnit")
    unit.bind(world_size)
    if unit.shard_index != rank:
        raise ValueError(
            f"{unit.parameter_name}: rank {rank} keeps shard {rank} of this group, but the "
            f"shard_index of the unit is {unit.shard_index}"
        )


def check_unit_types(units: object) -> None:
    """Raise TypeError unless `units` is a dict of units."""
    if not hasattr(units, "items"):
        raise TypeError(
            f"sharding_units must be a dict of FSDPShardingUnit, got {type(units).__name__}"
        )
    for name, unit in units.items():
        if not isinstance(unit, FSDPShardingUnit):
            raise TypeError(f"sharding_units[{name!r}] is a {type(unit).__name__}")


def check_units(units: Mapping[str, FSDPShardingUnit]) -> None:
    """Raise TypeError or ValueError unless `units` is a dict of units by parameter name."""
    check_unit_types(units)
    for name, unit in units.items():
        if unit.parameter_name != name:
            raise ValueError(
                f"sharding_units[{name!r}] is the unit of {unit.parameter_name!r}: gradients are "
                "paired by name"
            )


def bind_units(units: Mapping[str, FSDPShardingUnit], rank: int, world_size: int) -> None:
    """Check units with `check_units`, and bind each to a group by `bind_unit`.

    `rank`: this rank, whose units they must be. `world_size`: of the group.
    """
    check_units(units)
    for unit in units.values():
        bind_unit(unit, rank, world_size)


def sharding_units(model: Any, group: Any, *, layout: str = "flat") -> dict[str, FSDPShardingUnit]:
    """Create a sharding unit for each parameter of a torch module that requires gradients.

    Parameters
    ----------
    model : torch.nn.Module
        The module.
    group : ProcessGroup
        The ranks.
    layout : {"flat", "rows"}, default "flat"
        See `FSDPShardingUnit`. Parameters without dimensions always use ``"flat"``.

    Returns
    -------
    dict of str to FSDPShardingUnit
        The units by parameter name, in the module's order.

    Raises
    ------
    TypeError
        If `model` is not a module, or `group` not a group.
    ValueError
        If `layout` is another text.

    Examples
    --------
    >>> import torch
    >>> from mlstate.collectives import SingleGroup
    >>> from mlstate.fsdp import sharding_units
    >>> sharding_units(torch.nn.Linear(3, 2, bias=False), SingleGroup(), layout="rows")
    {'weight': FSDPShardingUnit('weight' float32 (2, 3) rows, shard 0 of 1)}
    """
    if not is_module(model):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_layout(layout)
    group = check_group(group)
    return {
        name: FSDPShardingUnit(
            name,
            parameter.shape,
            parameter.dtype,
            group.rank,
            world_size=group.world_size,
            layout=layout if parameter.dim() else "flat",
        )
        for name, parameter in backend_named("torch", GradientBackend).parameters_of(model).items()
        if parameter.requires_grad
    }
