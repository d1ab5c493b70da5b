"""Torch modules and optimizers as places to load into: each rank's own memory.

A `Place` is a tensor of this rank and the part of a checkpoint's tensor that belongs there: all
of it, a part of a layout (DTensors), or a run of elements (FSDP1's flat parameters). The core
reads each part to where it lies; ranks exchange nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ...._sharding.layout import Shard
from ....errors import CompatibilityError
from .._tensors.dtypes import torch_has
from .._tensors.memory import note_written
from .fsdp1_flat import FlatRun, flat_runs, is_flattened, reshard_flat
from .optimizer import NUMBERS, _named, group_values, is_number, refuse_unfit
from .sharded import (
    _by_name,
    _flat_sharded,
    _reshard,
    module_state,
    optimizer_parts,
    part_of,
    unwrapped_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    import torch

    from ...._common.backend import OptimizerRecord
    from ...._sharding.layout import Steps
    from ...._types import NDArray


class Place(NamedTuple):
    """Memory of this rank for a tensor of a checkpoint, and which part of it goes there."""

    tensor: torch.Tensor
    shape: tuple[int, ...]  # of the whole
    cut: Steps | int  # a layout, or where a run of elements begins
    last: int  # which part of the layout, or where the run ends


def _place(name: str, value: Any) -> Place:
    """Where this rank has a value of a state dict."""
    part = part_of(name, value)
    if isinstance(part, Shard):
        return Place(part.array, part.shape, part._steps, part.index)
    return Place(part, tuple(part.shape), (), 0)


# ---- what is saved ----


def _refuse_alone(name: str, parts: int, ranks: int) -> ValueError:
    return ValueError(
        f"{name!r} is spread over {parts} ranks, and {ranks} "
        f"{'saves' if ranks == 1 else 'save'}: give group=, with all ranks that have a part, and "
        "let every one of them call this"
    )


def _ranks_of(wrapper: Any) -> int:
    """Over how many ranks FSDP1 spreads a module, replicas included."""
    between = getattr(wrapper, "_inter_node_pg", None)
    return int(wrapper.process_group.size() * (1 if between is None else between.size()))


def _check_ranks(module: torch.nn.Module, ranks: int) -> None:
    """Refuse to save a module on fewer ranks than have it."""
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
                "the optimizer's parameters are FSDP1's, which are flat and have no names by "
                "themselves: give the module too"
            )
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh.size() > ranks:
            raise _refuse_alone(f"param_{number}", mesh.size(), ranks)


def saved_module(module: torch.nn.Module, ranks: int) -> dict[str, Any]:
    """Return what this rank stores of a module.

    Parameters
    ----------
    module : torch.nn.Module
        Plain, DDP, compiled, FSDP2 or FSDP1. Of FSDP1 every rank calls this.
    ranks : int
        How many save together.

    Returns
    -------
    dict of str to torch.Tensor or Shard
        As `module_state` gives them.

    Raises
    ------
    ValueError
        The module is spread over more ranks than save.
    TypeError
        A value is no tensor, or cut as no `Layout` can say.
    """
    _check_ranks(module, ranks)
    return module_state(module)[0]


def saved_optimizer(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module | None, ranks: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what this rank stores of an optimizer.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Of parameters that are plain, or sharded by FSDP2 or FSDP1.
    module : torch.nn.Module, optional
        Whose parameters they are. Of FSDP1 every rank calls this.
    ranks : int
        How many save together.

    Returns
    -------
    states : dict of str to array, torch.Tensor or Shard
        By ``"<parameter>.<state name>"``.
    keywords : dict
        The others of `mlstate.OptimizerStateDict`.

    Raises
    ------
    ValueError
        The module lacks parameters of the optimizer, or they are spread over more ranks than
        save.
    TypeError
        A state is neither tensor nor number, or the module of FSDP1 is missing.
    """
    if module is None:
        _check_optimizer(optimizer, ranks)
    else:
        _check_ranks(module, ranks)
    states, keywords, _ = optimizer_parts(optimizer, module)
    return states, keywords


# ---- filling ----


class Filling:
    """Memory of this rank that one section of a checkpoint is read into.

    Attributes
    ----------
    arrays : dict of str to torch.Tensor
        Where the bytes go: the tensors themselves, or for those on a device tensors in main
        memory, which `done` copies from.
    optional : frozenset of str
        Names that a checkpoint need not have, as they are others' names for the same memory.
    known : collection of str
        Names of all that is there.
    """

    def __init__(self, places: dict[str, Place], optional: Iterable[str] = ()) -> None:
        self.places = places
        self.optional = frozenset(optional)
        self.arrays = {name: _on_host(place.tensor) for name, place in places.items()}
        self.known: Collection[str] = places.keys()
        self.zeros: list[torch.Tensor] = []

    def cuts(self, keys: Sequence[str]) -> list[tuple[tuple[int, ...], Any, int]]:
        """Return what the core is to know of the places of some keys."""
        return [self.places[key][1:] for key in keys]

    def whole(self) -> None:
        """Refuse places that are parts: they cannot be cut once more.

        Raises
        ------
        TypeError
            Names the first that is a part.
        """
        for name, place in self.places.items():
            if place.cut != ():
                raise TypeError(
                    f"{name!r} is a part of a tensor, and says which: leave layout=, rank= and "
                    "world_size= away"
                )

    def zero(self, name: str) -> None:
        """Let a tensor that the checkpoint lacks become zeros when all else is read."""
        self.zeros.append(self.places[name].tensor)

    def done(self) -> None:
        """Take over what was read; nothing here fails for reasons of the checkpoint."""
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
    """Return a tensor itself, or memory like it that the core can write."""
    import torch

    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def fill_module(module: torch.nn.Module) -> Filling:
    """Return where this rank has a module's parameters and buffers.

    Parameters
    ----------
    module : torch.nn.Module
        Plain, DDP, compiled, FSDP2 or FSDP1.

    Returns
    -------
    Filling
        By the names under which `saved_module` stores them.

    Raises
    ------
    TypeError
        A value is no tensor, or cut as no `Layout` can say.
    """
    wrappers = _flat_sharded(module)
    if not wrappers:
        _reshard(module)  # of FSDP2: what was gathered of the old elements is of no use
        named = _by_name(module, module.state_dict())
        return Filling({name: _place(name, value) for name, value in named.items()})
    reshard_flat(wrappers)
    runs = flat_runs(module, wrappers)
    places = {name: Place(*run.place(run.flat)) for name, run in runs.items()}
    for name, tensor in _not_flat(module):
        places[unwrapped_name(module, name)] = _place(name, tensor)
    tied = [name for name, run in runs.items() if run.tied]
    return Filling(places, tied)


def _not_flat(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters that FSDP1 was told to ignore, and buffers that state dicts have."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        start = prefix + "." if prefix else ""
        for name, parameter in child._parameters.items():
            if parameter is not None and not is_flattened(parameter):
                yield start + name, parameter.detach()
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield start + name, buffer


# ---- filling an optimizer ----


class _Slot(NamedTuple):
    """A parameter as the optimizer has it: its own tensor, or a run of a flat one."""

    owner: torch.Tensor
    shape: tuple[int, ...]
    run: FlatRun | None


def _slots(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module | None, names: Any
) -> tuple[dict[str, _Slot], list[list[str]]]:
    """Return all parameters by name, and the names of each group."""
    wrappers = [] if module is None else _flat_sharded(module)
    if module is None or not wrappers:
        named = _named(optimizer, names)
        if module is not None and names is module:
            named = _by_name(module, named)
        slots = {name: _Slot(p, tuple(p.shape), None) for name, p in named.items()}
    else:
        runs = {n: run for n, run in flat_runs(module, wrappers).items() if not run.tied}
        slots = {name: _Slot(run.owner, run.shape, run) for name, run in runs.items()}
        for name, p in module.named_parameters():
            if not is_flattened(p):
                slots[unwrapped_name(module, name)] = _Slot(p, tuple(p.shape), None)
    by_owner: dict[int, list[str]] = {}
    for name, slot in slots.items():
        by_owner.setdefault(id(slot.owner), []).append(name)
    members = []
    for group in optimizer.param_groups:
        if any(id(p) not in by_owner for p in group["params"]):
            _named(optimizer, module)  # says which
            raise ValueError(f"the optimizer has parameters that {type(module).__name__} lacks")
        members.append([name for p in group["params"] for name in by_owner[id(p)]])
    listed = {name for group in members for name in group}
    return {name: slot for name, slot in slots.items() if name in listed}, members


def _new_state(key: str, slot: _Slot, record: OptimizerRecord) -> torch.Tensor:
    """Make a state as the optimizer would: like its parameter, or along the axes it has of it."""
    import torch

    if not torch_has(record.dtype):
        error = CompatibilityError(f"{key!r} is {record.dtype}, which torch has not")
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


def _scalar(slot: _Slot, group: dict[str, Any], array: NDArray) -> torch.Tensor:
    """Make a count of steps where the optimizer wants it."""
    import torch

    on_device = group.get("capturable") or group.get("fused")
    value = torch.from_numpy(array.copy())
    return value.to(slot.owner.device) if on_device else value


class OptimizerFilling(Filling):
    """Memory of this rank that the states of an optimizer are read into.

    States that do not exist yet are made, and given to the optimizer by `done` only.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Of a plain module, or one sharded by FSDP2 or FSDP1.
    module : torch.nn.Module, optional
        Whose parameters it has.
    records : dict of str to OptimizerRecord
        The states that are loaded, by key.
    saved : OptimizerStateDict
        What the checkpoint says of groups; without arrays.
    read : callable
        Returns arrays of some keys of the checkpoint.
    names : torch.nn.Module, list of str or None
        Where names come from.
    meant : callable
        Returns those of some keys that the load is about: other states stay as they are.

    Raises
    ------
    CompatibilityError
        The checkpoint has parameters that the optimizer lacks, or states of other shapes.
    ValueError, TypeError
        The optimizer's parameters are not the module's, or cut as no layout can say.
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
        self.slots, members = _slots(optimizer, module, names)
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
        places, alone = self._sort(saved)
        self.numbers = self._read_scalars(read(sorted(alone)) if alone else {}, alone)
        super().__init__(places)
        others = self._others()
        self.rest = {key: others[key] for key in meant(list(others))}
        self.known = {**records, **self.rest}.keys()

    def _held(self, slot: _Slot, state: str) -> Any:
        """A state that exists or was made."""
        made = self.made.get(id(slot.owner))
        if made is not None and state in made[1]:
            return made[1][state]
        return self.optimizer.state.get(slot.owner, {}).get(state)

    def _keep(self, slot: _Slot, state: str, value: Any) -> None:
        self.made.setdefault(id(slot.owner), (slot.owner, {}))[1][state] = value

    def _sort(self, saved: Any) -> tuple[dict[str, Place], dict[str, bool]]:
        """Return states that are read in place, and scalars that are set; True: as numbers."""
        numbers = {
            (name, state)
            for group in saved.param_groups
            for state in group.get(NUMBERS, ())
            for name in group.get("params", ())
        }
        places: dict[str, Place] = {}
        alone: dict[str, bool] = {}
        for key, record in self.records.items():
            slot = self.slots[record.parameter]
            state = record.state or ""
            held = self._held(slot, state)
            number = is_number(held) or (held is None and (record.parameter, state) in numbers)
            if (
                record.shape != slot.shape
                and record.shape in ((), (1,))
                and (number or slot.run or held is None)
            ):
                alone[key] = number
            elif number:
                alone[key] = True
            else:
                places[key] = self._place_of(key, slot, record, held)
        return places, alone

    def _place_of(self, key: str, slot: _Slot, record: OptimizerRecord, held: Any) -> Place:
        state = record.state or ""
        run = slot.run
        if run is not None and record.shape != slot.shape:
            error = CompatibilityError(
                f"{key!r} has shape {record.shape}, its parameter {slot.shape}: FSDP1 has its "
                "parameters flat, whose states have their shape; load into FSDP2 or a plain module"
            )
            error.name = key
            raise error
        if run is not None and slot.owner.numel() == 0:  # torch never makes a state for it
            import torch

            return Place(*run.place(torch.empty(0, dtype=getattr(torch, record.dtype))))
        if held is None:
            held = _new_state(key, slot, record)
            self._keep(slot, state, held)
        return _place(key, held) if run is None else Place(*run.place(held.detach()))

    def _read_scalars(
        self, arrays: dict[str, NDArray], alone: dict[str, bool]
    ) -> dict[tuple[int, str], tuple[_Slot, Any]]:
        """Return what is set when all is read: one value for each state of an owner."""
        found: dict[tuple[int, str], tuple[_Slot, Any]] = {}
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
                    f"{array.item()}, but FSDP1 has them in one flat parameter: wrap them "
                    "apart, or with use_orig_params=True"
                )
                error.name = key
                raise error
            first.setdefault(where, key)
            group = self.group_of[record.parameter]
            value = array.item() if alone[key] else _scalar(slot, group, array)
            found[where] = (slot, value)
        return found

    def _others(self) -> dict[str, tuple[_Slot, str, Any]]:
        """States that the optimizer has and the checkpoint has not."""
        found = {}
        for name, slot in self.slots.items():
            for state, value in self.optimizer.state.get(slot.owner, {}).items():
                key = f"{name}.{state}"
                if value is not None and key not in self.records:
                    found[key] = (slot, state, value)
        return found

    def zero(self, name: str) -> None:
        """Let a state that the checkpoint lacks become zeros when all else is read."""
        import torch

        slot, state, value = self.rest.pop(name)
        if isinstance(value, torch.Tensor):
            own = value.detach()
            flat = slot.run is not None and own.numel() == slot.owner.numel()
            self.zeros.append(slot.run.view(own) if slot.run and flat else own)
        else:
            self._keep(slot, state, type(value)(0))

    def done(self) -> None:
        """Give the optimizer what was made and read, and its groups their values."""
        super().done()
        for slot, state, value in self.rest.values():
            self._drop(slot, state, value)
        for owner, states in self.made.values():
            self.optimizer.state[owner].update(states)
        for (_, state), (slot, value) in self.numbers.items():
            self.optimizer.state[slot.owner][state] = value
        for group, values in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(values)

    def _drop(self, slot: _Slot, state: str, value: Any) -> None:
        """Forget a state that was not saved: the optimizer makes it anew when it is needed."""
        if slot.run is not None and self._shared(slot, state):
            if hasattr(value, "numel") and value.numel() == slot.owner.numel():
                slot.run.view(value.detach()).zero_()
            return
        states = self.optimizer.state.get(slot.owner)
        if states is not None:
            states.pop(state, None)
            if not states:
                del self.optimizer.state[slot.owner]

    def _shared(self, slot: _Slot, state: str) -> bool:
        """Whether another parameter of the same flat one has the state afterwards."""
        return any(
            other.owner is slot.owner and f"{name}.{state}" not in self.rest
            for name, other in self.slots.items()
        )


fill_optimizer = OptimizerFilling
