"""Torch modules and optimizers as load targets: this rank's own memory.

A `Place` is a tensor of this rank and the part of a checkpoint's tensor that it receives: all of
it, a part of a layout (DTensors), or a run of elements (FSDP1's flat parameters). The core reads
each part directly into its memory; ranks exchange no data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ...._sharding.layout import Shard
from ....errors import CompatibilityError
from .._tensors.dtypes import torch_has
from .._tensors.memory import note_written
from .._tensors.state import state_dict_of
from .dtensor_shards import (
    _flat_sharded,
    _reshard,
    is_tensor,
    module_state,
    optimizer_parts,
    part_of,
)
from .fsdp1_flat import FlatRun, flat_runs, is_flattened, reshard_flat
from .module_contract import EXTRA, ModuleContract, OwnLoad, refuse_units
from .module_names import by_name, unwrapped_name
from .optimizer import (
    _name_parameters,
    group_values,
    is_number,
    number_states,
    refuse_unfit,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import torch

    from ...._common.backend import OptimizerRecord
    from ...._sharding.layout import Steps
    from ...._types import NDArray


class Place(NamedTuple):
    """Memory of this rank for a tensor of a checkpoint, and the part that it receives."""

    tensor: torch.Tensor
    shape: tuple[int, ...]  # shape of the whole tensor
    cut: Steps | int  # steps of a layout, or begin of a run of elements
    last: int  # index of the part in the layout, or end of the run


def _place(name: str, value: Any) -> Place:
    """Return this rank's memory for a value of a state dict."""
    part = part_of(name, value)
    _refuse_overlap(name, part.array if isinstance(part, Shard) else part)
    if isinstance(part, Shard):
        return Place(part.array, part.shape, part._steps, part.index)
    return Place(part, tuple(part.shape), (), 0)


def _refuse_overlap(name: str, tensor: torch.Tensor) -> None:
    """Raise if elements of a tensor share memory, as after expand(): torch refuses the write."""
    if any(step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True)):
        error = CompatibilityError(
            f"{name!r} has elements that share memory (strides {tensor.stride()}): load into a "
            "clone() of it"
        )
        error.name = name
        raise error


# ---- saving ----


def _refuse_alone(name: str, parts: int, ranks: int) -> ValueError:
    return ValueError(
        f"{name!r} is spread over {parts} ranks, and {ranks} "
        f"{'saves' if ranks == 1 else 'save'}: pass group= with all ranks that have a part, and "
        "make this call on each of them"
    )


def _ranks_of(wrapper: Any) -> int:
    """Return the number of ranks over which FSDP1 spreads a module, including replicas."""
    between = getattr(wrapper, "_inter_node_pg", None)
    return int(wrapper.process_group.size() * (1 if between is None else between.size()))


def _check_ranks(module: torch.nn.Module, ranks: int) -> None:
    """Raise ValueError if a module is spread over more ranks than save."""
    for wrapper in _flat_sharded(module):
        if _ranks_of(wrapper) > ranks:
            name = next(iter(flat_runs(module, [wrapper])), type(module).__name__)
            raise _refuse_alone(name, _ranks_of(wrapper), ranks)
    for name, parameter in module.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh.size() > ranks:
            raise _refuse_alone(unwrapped_name(module, name), mesh.size(), ranks)


def _check_optimizer(optimizer: torch.optim.Optimizer, ranks: int) -> None:
    for number, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        if is_flattened(parameter):
            raise TypeError(
                "the optimizer's parameters are FSDP1's, which are flat and have no names: pass "
                "the module too"
            )
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh.size() > ranks:
            raise _refuse_alone(f"param_{number}", mesh.size(), ranks)


def saved_module(
    module: torch.nn.Module, ranks: int
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a module's tensors as `module_state` does, its other entries, and torch's metadata.

    For saving by a number of ranks: raises ValueError if the module is spread over more ranks.
    """
    _check_ranks(module, ranks)
    if _flat_sharded(module):
        return module_state(module)[0], {}, {}
    contract = ModuleContract(module, state_dict_of(module))
    tensors, others = {}, {}
    for name, value in contract.entries.items():
        # an extra state returns with its type: a Parameter would not
        is_extra = name.rpartition(".")[2] == EXTRA
        if is_tensor(value) and not (is_extra and getattr(value, "requires_grad", False)):
            tensors[name] = part_of(name, value)
        else:
            others[name] = value
    return tensors, others, contract.own_metadata()


def saved_optimizer(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module | None, ranks: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states and keywords of `optimizer_parts`, for saving by a number of ranks.

    Raises ValueError if the parameters are spread over more ranks.
    """
    if module is None:
        _check_optimizer(optimizer, ranks)
    else:
        _check_ranks(module, ranks)
    states, keywords, _ = optimizer_parts(optimizer, module)
    return states, keywords


# ---- loading into modules ----


class Filling:
    """Memory of this rank for one section of a checkpoint.

    The core writes `arrays`: the tensors themselves, or for tensors on a device, CPU tensors that
    `done` copies from. A checkpoint may lack the names in `optional`, which are further names of
    the same memory. `contract` lists submodules of a module that load their entries themselves.
    """

    def __init__(
        self,
        places: dict[str, Place],
        optional: Iterable[str] = (),
        contract: ModuleContract | None = None,
    ) -> None:
        self.places = places
        self.contract = contract
        self.optional = frozenset(optional)
        self.arrays = {name: _on_host(place.tensor) for name, place in places.items()}
        self.known: Collection[str] = places.keys()
        self.zeros: list[torch.Tensor] = []

    def loads_itself(self, name: str) -> bool:
        """Return whether an entry belongs to a submodule that loads its entries itself."""
        return self.contract is not None and self.contract.unit_of(name) is not None

    def cuts(self, keys: Sequence[str]) -> list[tuple[tuple[int, ...], Any, int]]:
        """Return the parts of some keys in the core's form."""
        return [self.places[key][1:] for key in keys]

    def whole(self) -> None:
        """Raise if a place is a part of a tensor, which cannot be divided again."""
        for name, place in self.places.items():
            if place.cut != ():
                raise TypeError(
                    f"{name!r} is a part of a tensor, and its layout is known: do not pass "
                    "layout=, rank= and world_size="
                )

    def zero(self, name: str) -> None:
        """Register a tensor that the checkpoint lacks, to become zeros in `done`."""
        self.zeros.append(self.places[name].tensor)

    def done(self) -> None:
        """Complete the load after all reads; the checkpoint can cause no error here."""
        import torch

        with torch.no_grad():
            for tensor in self.zeros:
                tensor.zero_()
            for name, array in self.arrays.items():
                tensor = self.places[name].tensor
                if array is not tensor:
                    tensor.copy_(array)
        note_written([place.tensor for place in self.places.values()])


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor itself, or for a tensor on a device, new CPU memory like it."""
    import torch

    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def fill_module(module: torch.nn.Module) -> Filling:
    """Return this rank's memory for a module's state, by the names of `saved_module`."""
    wrappers = _flat_sharded(module)
    if not wrappers:
        _reshard(module)  # FSDP2: gathered parameters would be outdated
        contract = ModuleContract(module, state_dict_of(module))
        entries = contract.entries.items()
        places = {n: _place(n, value) for n, value in entries if contract.unit_of(n) is None}
        return Filling(places, (), contract)
    refuse_units(module, "FSDP1")
    reshard_flat(wrappers)
    runs = flat_runs(module, wrappers)
    places = {name: Place(*run.place(run.flat)) for name, run in runs.items()}
    for name, tensor in _not_flat(module):
        places[unwrapped_name(module, name)] = _place(name, tensor)
    tied = [name for name, run in runs.items() if run.tied]
    return Filling(places, tied)


def own_load(
    filling: Filling,
    entries: Mapping[str, Any],
    metadata: Mapping[str, dict[str, Any]] | None,
    units: list[Any],
    *,
    strict: bool,
) -> OwnLoad:
    """Return the load of some units by their own methods, of entries by name.

    `metadata` is the result of `saved_module`; None if the checkpoint is not of mlstate.
    """
    contract = filling.contract
    assert contract is not None
    default = {} if metadata is None else {"version": 1}
    known = contract.metadata_by_prefix(metadata or {}, default)
    return OwnLoad(contract, units, entries, known, strict=strict)


def _not_flat(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield parameters that FSDP1 ignores, and persistent buffers."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        start = prefix + "." if prefix else ""
        for name, parameter in child._parameters.items():
            if parameter is not None and not is_flattened(parameter):
                yield start + name, parameter.detach()
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield start + name, buffer


# ---- loading into optimizers ----


class _ParameterSlot(NamedTuple):
    """A parameter in the optimizer: its own tensor, or a run of a flat parameter."""

    owner: torch.Tensor
    shape: tuple[int, ...]
    run: FlatRun | None


def _parameter_slots(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module | None, names: Any
) -> tuple[dict[str, _ParameterSlot], list[list[str]]]:
    """Return all parameters by name, and the parameter names of each group."""
    wrappers = [] if module is None else _flat_sharded(module)
    if module is None or not wrappers:
        named = _name_parameters(optimizer, names)
        if module is not None and names is module:
            named = by_name(module, named)
        slots = {name: _ParameterSlot(p, tuple(p.shape), None) for name, p in named.items()}
    else:
        runs = {n: run for n, run in flat_runs(module, wrappers).items() if not run.tied}
        slots = {name: _ParameterSlot(run.owner, run.shape, run) for name, run in runs.items()}
        for name, p in module.named_parameters():
            if not is_flattened(p):
                slots[unwrapped_name(module, name)] = _ParameterSlot(p, tuple(p.shape), None)
    by_owner: dict[int, list[str]] = {}
    for name, slot in slots.items():
        by_owner.setdefault(id(slot.owner), []).append(name)
    members = []
    for group in optimizer.param_groups:
        if any(id(p) not in by_owner for p in group["params"]):
            _name_parameters(optimizer, module)  # raises an error that lists them
            raise ValueError(f"the optimizer has parameters that {type(module).__name__} lacks")
        members.append([name for p in group["params"] for name in by_owner[id(p)]])
    listed = {name for group in members for name in group}
    return {name: slot for name, slot in slots.items() if name in listed}, members


def _new_state(key: str, slot: _ParameterSlot, record: OptimizerRecord) -> torch.Tensor:
    """Return a new state as the optimizer would create it, sharded like its parameter."""
    import torch

    if not torch_has(record.dtype):
        error = CompatibilityError(f"{key!r} is {record.dtype}, a dtype that torch lacks")
        error.name, error.got = key, record.dtype
        raise error
    dtype = getattr(torch, record.dtype)
    owner = slot.owner.detach()
    if owner.device.type == "meta":
        raise BufferError(f"{key!r} is of a parameter on torch's meta device")
    if slot.run is not None or record.shape == slot.shape:
        return torch.zeros_like(owner, dtype=dtype)
    mesh = getattr(owner, "device_mesh", None)
    if mesh is None:
        return torch.zeros(record.shape, dtype=dtype, device=owner.device)
    from torch.distributed import tensor as distributed

    axes = record.axes or ()
    placements = [
        distributed.Shard(axes.index(placement.dim))
        if placement.is_shard() and placement.dim in axes
        else distributed.Replicate()
        for placement in owner.placements  # type: ignore[attr-defined]
    ]
    return distributed.zeros(*record.shape, dtype=dtype, device_mesh=mesh, placements=placements)


def _make_scalar(slot: _ParameterSlot, group: dict[str, Any], array: NDArray) -> torch.Tensor:
    """Return a step count on the device that the optimizer requires."""
    import torch

    on_device = group.get("capturable") or group.get("fused")
    value = torch.from_numpy(array.copy())
    return value.to(slot.owner.device) if on_device else value


class OptimizerFilling(Filling):
    """Memory of this rank for the states of an optimizer.

    Missing states are created; `done` adds them to the optimizer. `read` returns the arrays of some
    keys of the checkpoint, `meant` those keys that the load includes; other states do not change.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module | None,
        records: dict[str, OptimizerRecord],
        saved: Any,
        read: Callable[[list[str]], dict[str, NDArray]],
        names: Any,
        meant: Callable[[list[str]], list[str]],
    ) -> None:
        if module is None:
            _check_optimizer(optimizer, 1 << 62)
        self.optimizer = optimizer
        self.records = records
        self.slots, members = _parameter_slots(optimizer, module, names)
        wanted = {
            name: (slot.shape, {} if slot.run else optimizer.state.get(slot.owner, {}))
            for name, slot in self.slots.items()
        }
        refuse_unfit({key: record.shape for key, record in records.items()}, wanted)
        self.groups = group_values(saved, optimizer, members)
        self.group_of = {
            name: group
            for group, names_of in zip(optimizer.param_groups, members, strict=True)
            for name in names_of
        }
        self.made: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}
        places, alone = self._sort_states(saved)
        self.numbers = self._read_scalars(read(sorted(alone)) if alone else {}, alone)
        super().__init__(places)
        others = self._list_unsaved()
        self.rest = {key: others[key] for key in meant(list(others))}
        self.known = {**records, **self.rest}.keys()

    def _find_state(self, slot: _ParameterSlot, state: str) -> Any:
        """Return a state that exists or was created, or None."""
        made = self.made.get(id(slot.owner))
        if made is not None and state in made[1]:
            return made[1][state]
        return self.optimizer.state.get(slot.owner, {}).get(state)

    def _add_state(self, slot: _ParameterSlot, state: str, value: Any) -> None:
        self.made.setdefault(id(slot.owner), (slot.owner, {}))[1][state] = value

    def _sort_states(self, saved: Any) -> tuple[dict[str, Place], dict[str, bool]]:
        """Return states to read in place, and scalar states to set; True: as a number."""
        numbers = number_states(saved.param_groups)
        places: dict[str, Place] = {}
        alone: dict[str, bool] = {}
        for key, record in self.records.items():
            slot = self.slots[record.parameter]
            state = record.state or ""
            held = self._find_state(slot, state)
            number = is_number(held) or (held is None and key in numbers)
            is_scalar = record.shape != slot.shape and record.shape in ((), (1,))
            if number or (is_scalar and (slot.run or held is None)):
                alone[key] = number
            else:
                places[key] = self._place_of(key, slot, record, held)
        return places, alone

    def _place_of(
        self, key: str, slot: _ParameterSlot, record: OptimizerRecord, held: Any
    ) -> Place:
        state = record.state or ""
        run = slot.run
        if run is not None and record.shape != slot.shape:
            error = CompatibilityError(
                f"{key!r} has shape {record.shape}, its parameter {slot.shape}: FSDP1 flattens "
                "parameters and their states; load into FSDP2 or a plain module"
            )
            error.name = key
            raise error
        if run is not None and slot.owner.numel() == 0:  # torch never creates a state for it
            import torch

            return Place(*run.place(torch.empty(0, dtype=getattr(torch, record.dtype))))
        if held is None:
            held = _new_state(key, slot, record)
            self._add_state(slot, state, held)
        return _place(key, held) if run is None else Place(*run.place(held.detach()))

    def _read_scalars(
        self, arrays: dict[str, NDArray], alone: dict[str, bool]
    ) -> dict[tuple[int, str], tuple[_ParameterSlot, Any]]:
        """Return the scalars to set in `done`: one value for each state of an owner."""
        found: dict[tuple[int, str], tuple[_ParameterSlot, Any]] = {}
        first: dict[tuple[int, str], str] = {}
        for key, array in arrays.items():
            record = self.records[key]
            slot = self.slots[record.parameter]
            where = (id(slot.owner), record.state or "")
            if slot.run is not None and slot.owner.numel() == 0:
                continue
            if where in first and arrays[first[where]].tobytes() != array.tobytes():
                error = CompatibilityError(
                    f"{first[where]!r} is {arrays[first[where]].item()} and {key!r} is "
                    f"{array.item()}, but FSDP1 stores them in one flat parameter: wrap them "
                    "separately, or with use_orig_params=True"
                )
                error.name = key
                raise error
            first.setdefault(where, key)
            group = self.group_of[record.parameter]
            value = array.item() if alone[key] else _make_scalar(slot, group, array)
            found[where] = (slot, value)
        return found

    def _list_unsaved(self) -> dict[str, tuple[_ParameterSlot, str, Any]]:
        """Return states that the optimizer has and the checkpoint lacks."""
        found = {}
        for name, slot in self.slots.items():
            for state, value in self.optimizer.state.get(slot.owner, {}).items():
                key = f"{name}.{state}"
                if value is not None and key not in self.records:
                    found[key] = (slot, state, value)
        return found

    def zero(self, name: str) -> None:
        """Register a state that the checkpoint lacks, to become zeros in `done`."""
        import torch

        slot, state, value = self.rest.pop(name)
        if isinstance(value, torch.Tensor):
            own = value.detach()
            flat = slot.run is not None and own.numel() == slot.owner.numel()
            self.zeros.append(slot.run.view(own) if slot.run and flat else own)
        else:
            self._add_state(slot, state, type(value)(0))

    def done(self) -> None:
        """Complete the load: add created and read states, and set the groups' values."""
        super().done()
        for slot, state, value in self.rest.values():
            self._drop_state(slot, state, value)
        for owner, states in self.made.values():
            self.optimizer.state[owner].update(states)
        for (_, state), (slot, value) in self.numbers.items():
            self.optimizer.state[slot.owner][state] = value
        for group, values in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(values)

    def _drop_state(self, slot: _ParameterSlot, state: str, value: Any) -> None:
        """Remove a state that was not saved; the optimizer creates it again if needed."""
        if slot.run is not None and self._is_shared(slot, state):
            if hasattr(value, "numel") and value.numel() == slot.owner.numel():
                slot.run.view(value.detach()).zero_()
            return
        states = self.optimizer.state.get(slot.owner)
        if states is not None:
            states.pop(state, None)
            if not states:
                del self.optimizer.state[slot.owner]

    def _is_shared(self, slot: _ParameterSlot, state: str) -> bool:
        """Return whether another parameter in the same flat one keeps the state."""
        return any(
            other.owner is slot.owner and f"{name}.{state}" not in self.rest
            for name, other in self.slots.items()
        )


fill_optimizer = OptimizerFilling
