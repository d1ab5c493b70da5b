"""Which tensor or flat run in a torch optimizer has which parameter name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .fsdp1_flat import FlatRun, flat_runs, flat_wrappers, is_flattened
from .module_names import by_name, unwrapped_name
from .optimizer import _name_parameters

if TYPE_CHECKING:
    import torch


class ParameterSlot(NamedTuple):
    """A parameter in the optimizer: its own tensor, or a run of a flat parameter."""

    owner: torch.Tensor  # the tensor in the optimizer's groups, which is the key of its states
    shape: tuple[int, ...]  # of the whole parameter
    run: FlatRun | None  # this rank's elements in FSDP1's flat parameter; None for others


def _slots_of(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module | None, names: Any
) -> dict[str, ParameterSlot]:
    """Return the parameters by name: the optimizer's, or with FSDP1's flat ones all of `module`."""
    wrappers = [] if module is None else flat_wrappers(module)
    if module is None or not wrappers:
        named = _name_parameters(optimizer, names)
        if module is not None and names is module:
            named = by_name(module, named)
        return {name: ParameterSlot(p, tuple(p.shape), None) for name, p in named.items()}
    runs = {n: run for n, run in flat_runs(module, wrappers).items() if not run.tied}
    slots = {name: ParameterSlot(run.owner, run.shape, run) for name, run in runs.items()}
    for name, p in module.named_parameters():
        if not is_flattened(p):
            slots[unwrapped_name(module, name)] = ParameterSlot(p, tuple(p.shape), None)
    return slots


def parameter_slots(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module | None, names: Any
) -> tuple[dict[str, ParameterSlot], list[list[str]]]:
    """Return an optimizer's parameters by name, and the parameter names of each group.

    `names`: as of `_name_parameters`, for parameters that are not found in `module`. Raises
    ValueError if the module lacks a parameter of the optimizer.
    """
    slots = _slots_of(optimizer, module, names)
    by_owner: dict[int, list[str]] = {}
    for name, slot in slots.items():
        by_owner.setdefault(id(slot.owner), []).append(name)
    members = []
    for group in optimizer.param_groups:
        if any(id(p) not in by_owner for p in group["params"]):
            _name_parameters(optimizer, module)  # raises an error that lists them
            raise ValueError(f"the optimizer has parameters that {type(module).__name__} lacks")
        # a flat parameter of FSDP1 has several names
        members.append([name for p in group["params"] for name in by_owner[id(p)]])
    listed = {name for group in members for name in group}
    return {name: slot for name, slot in slots.items() if name in listed}, members
