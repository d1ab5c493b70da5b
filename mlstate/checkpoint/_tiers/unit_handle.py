"""`TieredState.use`: arrays that the user gets; arrays and states replaced, added or removed."""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..._common.arrays import (
    is_torch,
    memory_key,
    memory_range,
    pairs_sharing_elements,
    refuse_masked,
)
from ..._common.dtypes import name_of
from ..._common.set_module import set_module
from ...distributed._byte_ranges import array_of
from ...errors import CompatibilityError
from .unit_file import SECTIONS, Part, Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..._sharding.layout import Tier
    from ..._types import Array


@set_module("mlstate.checkpoint")
class TieredUnit:
    """A parameter and its optimizer states, provided by `TieredState.use`.

    Attributes
    ----------
    name : str
        The parameter's name.
    tier : Tier
        Hot or warm.
    parameter : array or None
        The parameter, or this rank's shard of it; None if the unit has only states. Torch
        tensors are the module's own.
    states : dict of str to array
        Optimizer states by name.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.checkpoint import TieredState
    >>> folder = tempfile.mkdtemp() + "/tiers"
    >>> with TieredState({"w": np.ones(2)}, {"w.m": np.zeros(2)}, folder) as tiers:
    ...     with tiers.use("w") as unit:
    ...         unit.name, unit.parameter, unit.states["m"]
    ('w', array([1., 1.]), array([0., 0.]))
    """

    __slots__ = ("_before", "name", "parameter", "states", "tier")

    def __init__(self, unit: Unit) -> None:
        """Present the arrays of a unit that is in memory; no array is copied."""
        self.name: str = unit.name
        self.tier: Tier = unit.tier
        self.parameter: Any = None
        self.states: dict[str, object] = {}
        for part in unit.parts:
            if part.section == 0:
                self.parameter = part.array
            else:
                self.states[part.state] = part.array
        # to find the user's changes: other blocks may change the unit too
        self._before: tuple[Any, dict[str, object]] = self.parameter, dict(self.states)

    def __repr__(self) -> str:
        """Return name, tier, and shape and dtype of each array."""
        arrays = {"parameter": self.parameter, **self.states}
        texts = [
            f"{name} {tuple(array.shape)} {name_of(array.dtype)}"
            for name, array in arrays.items()
            if array is not None
        ]
        return ", ".join([f"TieredUnit: {self.name}", str(self.tier), *texts])


def _replacing_part(part: Part, array: Array) -> Part:
    """Return a part that holds the user's replacement `array` for `part`.

    Raises CompatibilityError if shape, dtype or kind (array or tensor) differ.
    """
    checked = Part(part.section, part.key, array)
    new, old = ((p.shape, p.dtype, p.dtype_name, p.is_tensor) for p in (checked, part))
    if new != old:
        kind = "tensor" if part.is_tensor else "array"
        error = CompatibilityError(
            f"{part.key!r} is a {kind} of {part.dtype_name} {part.shape}, and was replaced by one "
            f"of {checked.dtype_name} {checked.shape}: the old array was kept"
        )
        error.name, error.expected, error.got = part.key, str(part.shape), str(checked.shape)
        raise error
    return checked


def refuse_other_states(states: Mapping[str, object]) -> None:
    """Raise TypeError for a state of a torch optimizer that is not a tensor."""
    for name, value in states.items():
        if not is_torch(value):
            raise TypeError(
                f"{name!r} is a {type(value).__name__}: a TieredState stores only states that are "
                "tensors; save such an optimizer by mlstate.save"
            )


def refuse_shared(arrays: Mapping[str, Any]) -> None:
    """Raise ValueError if arrays of units share elements; `arrays`: by `Part.stored`."""
    for pair in pairs_sharing_elements(arrays):
        left, right = (arrays[name] for name in pair)
        sections, names = zip(*(name.split("/", 1) for name in pair), strict=True)
        if memory_key(left) != memory_key(right):
            text = "share memory, which would end when one of them moves: pass copies"
        elif sections == (SECTIONS[0], SECTIONS[0]):
            text = "are one array: tied parameters are one unit; give it under one of its names"
        else:
            text = "are one array, but must have their own elements: pass a copy"
        raise ValueError(f"{names[0]!r} and {names[1]!r} {text}")


def parts_near(parts: list[Part], others: list[Part]) -> list[Part]:
    """Return the parts among `others` with addresses in the range of one of `parts`."""
    ranges = sorted(extent for part in parts if (extent := memory_range(part.elements)) is not None)
    ends = list(accumulate((end for _, end in ranges), max))  # the last end so far
    near = []
    for part in others:
        extent = part.addresses()
        if extent is not None:
            count = bisect_left(ranges, (extent[1],))  # begin before the end of this part
            if count and ends[count - 1] > extent[0]:
                near.append(part)
    return near


def _updated_part(
    unit: Unit, part: Part, used: TieredUnit, states: Mapping[str, object]
) -> tuple[Part, Any] | None:
    """Return a part of the unit from now on, and the array with its elements; None if removed.

    See `changes_by` for the arguments.
    """
    parameter_before, states_before = used._before
    if part.section == 0:
        if used.parameter is None:
            raise CompatibilityError(f"the parameter of unit {unit.name!r} was removed")
        return part, part.array if used.parameter is parameter_before else used.parameter
    state = part.state
    if state in states_before and state not in {**states, **used.states}:
        return None
    optimizer_tensor: Any = states.get(state, part.array)
    array = used.states.get(state, optimizer_tensor)
    if array is states_before.get(state) or array is part.array:  # the user did not replace it
        array = optimizer_tensor
    if optimizer_tensor is not part.array:  # the optimizer refers to this tensor from now on
        part = _replacing_part(part, optimizer_tensor)
    return part, array


def _added_parts(unit: Unit, used: TieredUnit, states: Mapping[str, object]) -> list[Part]:
    """Return parts of the states that the unit lacks.

    See `changes_by` for the arguments. Raises ValueError for an invalid name.
    """
    known = {part.state for part in unit.parts if part.section}
    _, states_before = used._before
    added: dict[str, Any] = dict(states)
    added |= {
        name: each for name, each in used.states.items() if each is not states_before.get(name)
    }
    parts = []
    for name in [name for name in added if name not in known]:
        if not isinstance(name, str) or not name or "." in name:
            raise ValueError(
                f"{name!r} is not a valid state name: it must be nonempty and contain no dot"
            )
        key, array = f"{unit.name}.{name}", added[name]
        refuse_masked(key, array)
        parts.append(Part(1, key, array if is_torch(array) else array_of(array)))
    return parts


def changes_by(
    unit: Unit,
    used: TieredUnit,
    states: Mapping[str, object],
    refuse: Callable[[list[Part]], None],
) -> list[partial[Any]]:
    """Return the changes that take over arrays that the user replaced, and states added or removed.

    `used`: the user's handle. `states`: the states that a torch optimizer now has for the
    parameter. `refuse` raises for parts that share memory. A tensor with which the optimizer
    replaced a state becomes the part's; if the user replaced the state too, it gets the user's
    elements. A state is removed if the user removed it and the optimizer lacks it; changes by other
    blocks stay. Nothing is changed yet. Raises CompatibilityError if the
    parameter was removed, or a replacement has another shape, dtype or kind; ValueError for an
    invalid name of a state or arrays that share memory, TypeError for a state of the optimizer that
    is not a tensor.
    """
    refuse_other_states({f"{unit.name}.{name}": value for name, value in states.items()})
    updated = [
        each for part in unit.parts if (each := _updated_part(unit, part, used, states)) is not None
    ]
    parts = [part for part, _ in updated]  # of the unit from now on
    replaced = [
        (part, _replacing_part(part, array).elements)
        for part, array in updated
        if array is not part.array
    ]
    added = _added_parts(unit, used, states)
    parts += added
    if replaced or added:
        new_parts = {part.stored: part for part in parts}
        new_parts.update(
            {part.stored: Part(part.section, part.key, array) for part, array in replaced}
        )
        refuse(list(new_parts.values()))
    changes = [part.change_to(array) for part, array in replaced]
    if parts != unit.parts:
        changes.append(partial(setattr, unit, "parts", parts))
    return changes
