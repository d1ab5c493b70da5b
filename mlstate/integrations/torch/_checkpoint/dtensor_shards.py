"""A rank's part of a module and optimizer for a save: DTensor, FSDP1, FSDP2; tied names."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...._sharding.layout import Layout, Shard
from ....checkpoint._states.excluded import NONE_EXCLUDED, Excluded
from .._tensors.state import refuse_unstorable, state_dict_of
from .fsdp1_flat import flat_wrappers
from .module_contract import ModuleContract, OwnLoad, saves_itself
from .module_names import by_name, unwrapped_name
from .optimizer import (
    _collect_states,
    _kind_of,
    _name_parameters,
    is_number,
    is_tensor,
    keywords_from,
    packed_states,
    stored_states,
)
from .optimizer_contract import check_contract
from .optimizer_slots import parameter_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    Store = Callable[[], None]

_STEPS = 4  # largest number of divisions of a layout, one after the other


# ---- tensors ----


def _sharding_error(name: str, value: Any, why: str) -> TypeError:
    """Return the error for a tensor whose sharding cannot be stored; `why`: reason and remedy."""
    placements = getattr(value, "placements", None)
    where = f"a DTensor with placements {placements}" if placements is not None else "a tensor"
    return TypeError(f"{name!r} is {where}: {why}")


def _sharding_order(name: str, value: Any) -> list[int]:
    """Return the mesh dimensions that shard a DTensor, in the order of division.

    This is the order of the mesh, except for dimensions that torch marks as divided earlier: FSDP
    on top of tensor parallelism along the same axis. Raises TypeError, with the tensor's `name`,
    for other placements, and for another order that torch records.
    """
    order: list[int] = []
    mesh = value.device_mesh
    # from the last dimension of the mesh, because a split factor counts those that follow it
    for number, placement in reversed(list(enumerate(value.placements))):
        if placement.is_replicate():
            continue
        factor = getattr(placement, "split_factor", None)
        if not hasattr(placement, "dim") or placement.is_partial():
            raise _sharding_error(
                name, value, "only Shard and Replicate can be collected; redistribute() it first"
            )
        if factor is None:
            order.insert(0, number)
            continue
        # torch's stride counts the parts of all divisions of this axis before this one
        before = 1
        for other in order:
            before *= mesh.size(other) if value.placements[other].dim == placement.dim else 1
        if factor != before:
            raise _sharding_error(
                name,
                value,
                f"strides of {factor} cannot be described by a Layout; redistribute() it",
            )
        order.append(number)
    for entry in getattr(getattr(value, "_spec", None), "shard_order", None) or ():
        if any(hasattr(value.placements[n], "split_factor") for n in entry.mesh_dims):
            continue  # the factors tell the order of this axis, not the entry
        if [n for n in order if value.placements[n].dim == entry.tensor_dim] != [*entry.mesh_dims]:
            raise _sharding_error(
                name,
                value,
                f"axis {entry.tensor_dim} is divided by the mesh dimensions {entry.mesh_dims} in "
                "this order; redistribute() it to Replicate first, then to the order of the mesh",
            )
    return order


def _part_of_dtensor(name: str, value: Any) -> Any:
    """Return a DTensor's local tensor: as a `Shard`, or plain if it is not sharded.

    A rank with a copy of another's part gets a replica number above 0. Raises TypeError, with the
    tensor's `name`, for a layout that cannot be stored, such as uneven shards.
    """
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise _sharding_error(name, value, "this rank is not in its mesh")
    local = value.detach().to_local()
    if hasattr(local, "wait"):  # a running collective
        local = local.wait()
    order = _sharding_order(name, value)
    if len(order) > _STEPS:
        raise _sharding_error(name, value, f"a Layout has {_STEPS} steps at most")
    index = replica = 0  # numbers of the part, and of this copy of it
    for number in order:
        index = index * mesh.size(number) + coordinate[number]
    for number, placement in enumerate(value.placements):
        if placement.is_replicate():
            replica = replica * mesh.size(number) + coordinate[number]
    if not order:
        return _detached_memory(name, local)
    layout = Layout([(value.placements[n].dim, mesh.size(n)) for n in order])
    shape = tuple(value.shape)
    if layout.shape(shape, index) != tuple(local.shape):
        raise _sharding_error(
            name,
            value,
            f"part {index} of {layout!r} of shape {shape} has shape {layout.shape(shape, index)}, "
            f"the local tensor has {tuple(local.shape)}; join the parts, and divide the whole by "
            "distribute_tensor()",
        )
    return Shard(_detached_memory(name, local), layout, index, shape=shape, replica=replica)


def _part_of_sharded(name: str, value: Any, replica: int) -> Shard:
    """Return this rank's rows of a ShardedTensor, as FSDP1 creates them, as a shard.

    `replica`: number of this copy of the rows. A rank without rows gets an empty shard. Raises
    TypeError, with the tensor's `name`, for another division.
    """
    import torch.distributed as dist

    group = value._process_group
    parts, index = dist.get_world_size(group), dist.get_rank(group)
    shape = tuple(value.shape)
    layout = Layout.rows(parts)
    shards = value.local_shards()
    part_shape = layout.shape(shape, index)
    if len(shards) > 1:
        raise TypeError(f"{name!r} is a ShardedTensor with {len(shards)} shards on one rank")
    if not shards:
        import torch

        # an empty tensor with the dtype of the other shards
        empty = torch.empty(part_shape, dtype=value.metadata().tensor_properties.dtype)
        return Shard(empty, layout, index, shape=shape, replica=replica)
    metadata = shards[0].metadata
    first_row = -(-shape[0] // parts) * index  # all parts but the last ones have ceil(rows / parts)
    if metadata.shard_offsets != [first_row, *([0] * (len(shape) - 1))] or (
        tuple(metadata.shard_sizes) != part_shape
    ):
        raise TypeError(
            f"{name!r} is a ShardedTensor whose shard {metadata.shard_sizes} at "
            f"{metadata.shard_offsets} is not part {index} of {parts} of the rows of {shape}"
        )
    tensor = shards[0].tensor.detach()
    return Shard(_detached_memory(name, tensor), layout, index, shape=shape, replica=replica)


def _detached_memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached tensor over the same memory; raise if it has no plain memory."""
    refuse_unstorable(name, tensor)
    return tensor.detach()


def part_of(name: str, value: Any, replica: int = 0) -> Any:
    """Return this rank's part of a value in torch's state dict, over the value's own memory.

    `name`: for errors. `replica`: number of this copy for a ShardedTensor, which does not record
    it. Raises TypeError for a value that is not a tensor, or whose sharding cannot be stored.
    """
    if hasattr(value, "local_shards"):
        return _part_of_sharded(name, value, replica)
    if not is_tensor(value):
        raise TypeError(
            f"{name!r} is a {type(value).__name__}, not a tensor: remove it from the state first, "
            "and store it separately"
        )
    if hasattr(value, "device_mesh"):
        return _part_of_dtensor(name, value)
    return _detached_memory(name, value)


# ---- modules ----


def needs_all_ranks(source: Any, module: torch.nn.Module) -> str:
    """Return why all ranks must collect a state together; empty if each can do so alone.

    `source`: `module` itself, or its optimizer. The reason continues a sentence, as in "of a module
    of FSDP1".
    """
    if not flat_wrappers(module):
        return ""
    if source is module:
        return "of a module of FSDP1"
    states = "with" if source.state else "without"
    return f"of an optimizer of FSDP1, {states} states"


def tied_names(module: torch.nn.Module) -> set[str]:
    """Return the names of a module's state whose tensor has an earlier name, without prefixes.

    Ranks of a sharded module agree on it, also if they hold no element of a tensor. Entries of
    submodules that save by their own methods are left out: they need not be the module's memory.
    The set is empty if the module itself saves by its own methods.
    """
    others = [f"{path}." for path, child in module.named_modules() if path and saves_itself(child)]
    if saves_itself(module):
        return set()
    seen: set[int] = set()
    tied = set()
    for named in (module.named_parameters, module.named_buffers):
        for name, value in named(remove_duplicate=False):
            if id(value) in seen and not name.startswith(tuple(others)):
                tied.add(unwrapped_name(module, name))
            seen.add(id(value))
    return tied


def _replica_of(wrappers: list[Any]) -> int:
    """Return this rank's replica number if FSDP1 shards only within nodes, else 0."""
    import torch.distributed as dist

    between = getattr(wrappers[0], "_inter_node_pg", None)  # the ranks that hold equal shards
    return 0 if between is None else dist.get_rank(between)


@contextmanager
def _suppress_warnings() -> Iterator[None]:
    """Suppress torch's warnings about its own internals, which users cannot act on."""
    with warnings.catch_warnings():
        for category in (FutureWarning, UserWarning, DeprecationWarning):
            warnings.simplefilter("ignore", category)
        yield


def module_state(
    module: torch.nn.Module, *, fill: bool = False
) -> tuple[dict[str, Any], Store | None]:
    """Return this rank's part of a module's state, and a function that writes copies back.

    The function is None if all values share the module's memory. For FSDP1, whose parts are copies,
    every rank must call both. `fill`: the state will be filled, so submodules that load their
    entries themselves get copies too. Names have no prefixes of wrappers.
    """
    wrappers = flat_wrappers(module)
    if not wrappers:
        contract = ModuleContract(module, state_dict_of(module))
        if fill and contract.units:
            return _state_to_fill(contract)
        return {name: part_of(name, value) for name, value in contract.entries.items()}, None
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    replica = _replica_of(wrappers)
    with _suppress_warnings():
        sharded = get_model_state_dict(module)
        state = {name: part_of(name, value, replica) for name, value in sharded.items()}

    def store() -> None:
        with _suppress_warnings():
            set_model_state_dict(module, sharded)

    return state, store


def _state_to_fill(contract: ModuleContract) -> tuple[dict[str, Any], Store]:
    """Return a module's state with copies for submodules that load themselves, and their loader.

    If the loader fails, it restores the submodules.
    """
    copies = {}
    for name, value in contract.entries.items():
        part_of(name, value)  # raises if it is not a tensor
        if contract.unit_of(name) is not None:
            copies[name] = value.detach().clone()
    load = OwnLoad(contract, contract.units, copies, contract.metadata_of_module(), strict=True)

    def store() -> None:
        try:
            load.apply()
        except BaseException:
            load.undo()
            raise

    state = {n: part_of(n, copies.get(n, value)) for n, value in contract.entries.items()}
    return state, store


# ---- optimizers ----


def _reshard(module: torch.nn.Module) -> None:
    """Restore FSDP2's sharded parameters, which optimizers hold, after a forward pass.

    The pass leaves gathered parameters in the module.
    """
    loaded = sys.modules.get("torch.distributed.fsdp")
    fsdp_class: Any = getattr(loaded, "FSDPModule", None)
    for child in module.modules() if fsdp_class is not None else ():
        if isinstance(child, fsdp_class):
            child.reshard()


def optimizer_parts(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module | None, *, fill: bool = False
) -> tuple[dict[str, Any], dict[str, Any], Store | None]:
    """Return this rank's part of an optimizer's states, as `included_parts`; none is left out."""
    return included_parts(optimizer, module, NONE_EXCLUDED, fill=fill)


def included_parts(
    optimizer: torch.optim.Optimizer,
    module: torch.nn.Module | None,
    excluded: Excluded,
    *,
    fill: bool = False,
) -> tuple[dict[str, Any], dict[str, Any], Store | None]:
    """Return this rank's part of an optimizer's states, by ``"<parameter>.<state name>"``.

    Also returns the other arguments of `OptimizerStateDict`, and a function that writes
    numbers back, which are 0-d arrays among the states; None without numbers. For FSDP1, whose
    states are copies, all ranks must call this, and the function is None. `fill`: the states will
    be filled in place; raises TypeError if that is impossible. `excluded`: states to leave out.
    `module`: gives the names of the parameters; None: the names in the optimizer's groups, or
    numbers.
    """
    wrappers = [] if module is None else flat_wrappers(module)
    if module is not None and wrappers:
        if fill:
            raise TypeError(
                "an optimizer of FSDP1 cannot be filled in place: gather its state, and load it "
                "by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )
        return (*_parts_of_flat(optimizer, module, _replica_of(wrappers), excluded), None)
    if module is not None:
        _reshard(module)
    named = _name_parameters(optimizer, module)
    if module is not None:
        named = by_name(module, named)
    values = _included(_collect_states(named, optimizer), excluded)
    _refuse_local(named, values)
    groups, stored = stored_states(optimizer.param_groups, named, values, excluded)
    nested = packed_states(groups)
    if fill and nested:
        raise TypeError(
            f"{min(nested)!r} is not a tensor or a number, and cannot be filled in place: load the "
            "optimizer by mlstate.load(into=)"
        )
    states = {k: part_of(k, v) if is_tensor(v) else v for k, v in stored.items()}
    numbers = {key: stored[key] for key, value in values.items() if is_number(value)}

    def store() -> None:
        for key, array in numbers.items():
            name, _, state = key.rpartition(".")
            optimizer.state[named[name]][state] = array.item()

    keywords = keywords_from(_kind_of(optimizer), groups, stored)
    return states, keywords, store if numbers else None


def _included(values: dict[str, Any], excluded: Excluded) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not excluded.matches(key)}


def _refuse_local(named: dict[str, Any], values: dict[str, Any]) -> None:
    """Raise TypeError for a plain state that has only the local shape of its DTensor parameter.

    Nothing records which part it is. `named`: parameters by name. `values`: states by key.
    """
    for key, value in values.items():
        parameter = named[key.rpartition(".")[0]]
        if hasattr(parameter, "device_mesh") and not hasattr(value, "device_mesh"):
            local = tuple(parameter.to_local().shape)
            have = tuple(getattr(value, "shape", ()))
            if have and have == local != tuple(parameter.shape):
                raise TypeError(
                    f"{key!r} is a plain tensor of shape {have}, which is what this rank has of "
                    f"a parameter of shape {tuple(parameter.shape)}: let the optimizer keep "
                    "DTensors, as zeros_like(parameter) makes them"
                )


def _any_rank(local_flag: bool, module: torch.nn.Module) -> bool:
    """Return whether `local_flag` is true on any rank of an FSDP1 module; all ranks must call.

    A rank may hold no elements of it, so its own answer is not enough.
    """
    import torch
    import torch.distributed as dist

    wrapper = flat_wrappers(module)[0]
    flag = torch.tensor(int(local_flag), device=wrapper.compute_device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=wrapper.process_group)
    return bool(flag.item())


def _parts_of_flat(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, replica: int, excluded: Excluded
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an FSDP1 optimizer's states by key as shards, and the keywords of its state.

    All ranks must call it. `replica`: number of this rank among those with the same shards.
    `excluded`: states to leave out.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    check_contract(optimizer)
    _name_parameters(optimizer, module)  # raises for parameters of other modules
    if not _any_rank(bool(optimizer.state), module):  # torch would run a step to create states
        _, members = parameter_slots(optimizer, module, module)
        pairs = zip(optimizer.param_groups, members, strict=True)
        named = [{**group, "params": names} for group, names in pairs]
        groups, _ = stored_states(named, [n for names in members for n in names], {}, excluded)
        return {}, keywords_from(_kind_of(optimizer), groups, {})
    with _suppress_warnings():
        state_dict: dict[str, Any] = dict(get_optimizer_state_dict(module, optimizer))
    values = {
        f"{name}.{state}": value
        for name, by_state in state_dict["state"].items()
        for state, value in by_state.items()
    }
    values = _included(values, excluded)
    listed = [name for group in state_dict["param_groups"] for name in group["params"]]
    groups, stored = stored_states(state_dict["param_groups"], listed, values, excluded)
    states = {k: part_of(k, v, replica) if is_tensor(v) else v for k, v in stored.items()}
    return states, keywords_from(_kind_of(optimizer), groups, stored)
