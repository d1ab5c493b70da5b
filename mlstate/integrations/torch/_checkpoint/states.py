"""`StateBackend` of torch: entries of a module for a save, memory of a module for a load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._tensors.state import tensors_of
from .load_targets import Filling, fill_module, saved_module
from .module_contract import OwnLoad
from .optimizer import optimizer_dict as optimizer_dict
from .optimizer import optimizer_state as optimizer_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def module_entries(module: torch.nn.Module) -> dict[str, Any]:
    """Return the entries that `save` stores of a module on one rank, tensors first."""
    tensors, others, _ = saved_module(module, 1)
    return {**tensors, **others}


def module_target(
    module: torch.nn.Module, source: Mapping[str, Any], *, strict: bool
) -> tuple[Filling, dict[str, Any], OwnLoad | None]:
    """Return the memory to load a module into: (filling, memory of units, load of units).

    The filling has the memory of all entries that a load copies to, by name. A unit is a submodule
    that loads its own entries. The memory of units has by name their entries that are present
    tensors, to compare their dtypes with the source. The load calls the units' own methods, and has
    not run. Without units to load, the last two are {} and None. Nothing is changed.
    `source`: the entries to load. `strict`: load all units, not only those with entries in
    `source`. Raises TypeError for a module with parts of tensors.
    """
    filling = fill_module(module)
    for name, place in filling.places.items():
        if place.cut != ():
            raise TypeError(
                f"{name!r} is a part of a tensor: load_into fills whole tensors; save the source, "
                "and load it with mlstate.load(path, into={'model': module}, group=group)"
            )
    contract = filling.contract
    if contract is None:
        return filling, {}, None
    entries = {name: value for name, value in source.items() if filling.loads_itself(name)}
    named = {contract.unit_of(name) for name in entries}
    units = [unit for unit in contract.units if strict or unit in named]
    if not units:
        return filling, {}, None
    memory = {name: each for unit in units for name, each in contract.memory(unit).items()}
    arrays = {name: entries[name] for name in entries if hasattr(entries[name], "dtype")}
    return (
        filling,
        memory,
        filling.own_load({**entries, **tensors_of(arrays)}, None, units, strict=strict),
    )
