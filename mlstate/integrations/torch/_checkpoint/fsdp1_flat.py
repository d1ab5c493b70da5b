"""FSDP1's flat parameters: which elements of each parameter this rank has.

FullyShardedDataParallel concatenates the parameters of a unit and gives each rank an equal shard
of the result. So each rank has a contiguous run of a parameter's elements in C order, or none.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from .module_names import unwrapped_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


def flat_wrappers(module: torch.nn.Module) -> list[Any]:
    """Return the FSDP1 wrappers in a module."""
    loaded = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if loaded is None:
        return []
    wrapper_class = loaded.FullyShardedDataParallel
    return [child for child in module.modules() if isinstance(child, wrapper_class)]


class FlatRun(NamedTuple):
    """The run of a parameter's elements that this rank has."""

    owner: torch.Tensor  # the tensor in the optimizer: the flat or the original parameter
    flat: torch.Tensor  # this rank's shard of the unit
    shape: tuple[int, ...]  # shape of the whole parameter
    begin: int  # index of the run's first element in the parameter
    length: int
    offset: int  # offset of the run in `flat`
    in_owner: int  # offset of the run in `owner`
    tied: bool  # another name of a parameter that has a run already

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the run's elements in `tensor`, which has the owner's layout, such as a state."""
        return tensor.reshape(-1)[self.in_owner : self.in_owner + self.length]

    def place(self, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], int, int]:
        """Return the run's memory in `tensor`, the whole parameter's shape, and begin and end.

        `tensor`: `flat`, or one with the owner's layout. Begin and end of the run count elements of
        the whole parameter.
        """
        is_flat = tensor is self.flat
        start = self.offset if is_flat else self.in_owner
        part = tensor.reshape(-1)[start : start + self.length]
        return part, self.shape, self.begin, self.begin + self.length


def is_flattened(tensor: torch.Tensor) -> bool:
    """Return whether FSDP1 manages a parameter: a flat parameter, or a view of one."""
    return bool(getattr(tensor, "_fsdp_flattened", False) or hasattr(tensor, "_is_flat_param"))


def reshard_flat(wrappers: Iterable[Any]) -> None:
    """Free the whole parameters that a forward pass left, so that the sharded ones are in use.

    `wrappers`: FSDP1 modules, of `flat_wrappers`; those that shard nothing are left as they are.
    """
    for wrapper in wrappers:
        handle = wrapper._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        # The root keeps gathered parameters although its shard is in use again. Before the first
        # forward pass there are none.
        if hasattr(handle.flat_param, "_full_param_padded"):
            handle.reshard(True)


def flat_runs(module: torch.nn.Module, wrappers: Iterable[object]) -> dict[str, FlatRun]:
    """Return this rank's runs of all parameters of FSDP1 units, by name without prefixes.

    A parameter without elements on this rank has a run of length 0. `wrappers`: the units to
    consider.
    """
    chosen = {id(wrapper) for wrapper in wrappers}
    runs: dict[str, FlatRun] = {}
    for prefix, child in module.named_modules():
        handle: Any = getattr(child, "_handle", None) if id(child) in chosen else None
        if handle is None:
            continue
        start = prefix + "." if prefix else ""
        # by the names of the submodule and of its parameter, as torch names the first of tied ones
        runs_by_owner: dict[tuple[str, str], FlatRun] = {}
        for number, fqn in enumerate(handle.flat_param._fqns):
            name = unwrapped_name(module, start + fqn)
            runs[name] = _run(name, handle, number)
            info = handle.flat_param._param_infos[number]
            runs_by_owner[info.module_name, info.param_name] = runs[name]
        for shared in handle.flat_param._shared_param_infos:
            first = runs_by_owner[shared.prim_module_name, shared.prim_param_name]
            below = ".".join(filter(None, (shared.module_name, shared.param_name)))
            runs[unwrapped_name(module, start + below)] = first._replace(tied=True)
    return runs


def _run(name: str, handle: Any, number: int) -> FlatRun:
    """Return the elements of a parameter that this rank has in FSDP1's flat parameter.

    `handle`: torch's handle of the unit. `number`: index of the parameter in it. Raises TypeError
    for a parameter that tensor parallelism cuts too.
    """
    flat = handle.flat_param
    if flat._param_extensions[number] is not None:
        raise TypeError(
            f"{name!r} is cut by tensor parallelism under FSDP1: use fully_shard (FSDP2), whose "
            "parameters record their layout"
        )
    info = flat._shard_param_infos[number]
    is_complete = not handle.uses_sharded_strategy
    begin = info.intra_param_start_idx if info.in_shard else 0
    count = info.numel_in_shard if info.in_shard else 0
    offset = info.offset_in_shard if info.in_shard else 0
    owner = flat._params[number] if handle._use_orig_params else flat
    if is_complete and count != flat._numels[number]:
        raise TypeError(f"{name!r} is not whole on this rank, though it is not sharded")
    return FlatRun(
        owner=owner,
        flat=flat.detach(),
        shape=tuple(flat._shapes[number]),
        begin=begin,
        length=count,
        offset=offset,
        # an original parameter of the optimizer has only this rank's run
        in_owner=0 if handle._use_orig_params else offset,
        tied=False,
    )
