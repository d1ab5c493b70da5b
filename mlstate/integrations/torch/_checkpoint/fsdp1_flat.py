"""FSDP1's flat parameters: which run of each parameter this rank has, and where.

FullyShardedDataParallel puts the parameters of a unit behind each other, and gives each rank an
equal piece of that. So a rank has of each parameter a run of its elements in C order, or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class FlatRun(NamedTuple):
    """The elements of a parameter that this rank has."""

    owner: torch.Tensor  # what the optimizer knows: the flat parameter, or its own
    flat: torch.Tensor  # this rank's piece of the unit
    shape: tuple[int, ...]  # of the whole parameter
    begin: int  # the first of its elements that this rank has
    length: int
    offset: int  # of that in the piece
    in_owner: int  # of that in the owner
    tied: bool  # another name of a parameter that is there already

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements in a tensor like the owner, such as a state.

        Parameters
        ----------
        tensor : torch.Tensor
            As long as the owner.
        """
        return tensor.reshape(-1)[self.in_owner : self.in_owner + self.length]

    def place(self, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], int, int]:
        """Return memory, shape of the whole, begin and end of the run.

        Parameters
        ----------
        tensor : torch.Tensor
            The piece of the unit, or one like the owner.
        """
        own = tensor is self.flat
        start = self.offset if own else self.in_owner
        part = tensor.reshape(-1)[start : start + self.length]
        return part, self.shape, self.begin, self.begin + self.length


def is_flattened(tensor: torch.Tensor) -> bool:
    """Whether FSDP1 has a parameter: the flat one, or one that is a view of it.

    Parameters
    ----------
    tensor : torch.Tensor
        A parameter.
    """
    return bool(getattr(tensor, "_fsdp_flattened", False) or hasattr(tensor, "_is_flat_param"))


def reshard_flat(wrappers: Iterable[Any]) -> None:
    """Let go of whole parameters that a forward pass left, so that pieces are what counts.

    Parameters
    ----------
    wrappers : iterable of FullyShardedDataParallel
        All of a module.
    """
    for wrapper in wrappers:
        handle = wrapper._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        # the root keeps what it gathered after its piece is in use again; before the first
        # forward pass there is nothing
        if hasattr(handle.flat_param, "_full_param_padded"):
            handle.reshard(True)


def flat_runs(module: torch.nn.Module, wrappers: Iterable[Any]) -> dict[str, FlatRun]:
    """Return what this rank has of all parameters of FSDP1's units, by name.

    Parameters
    ----------
    module : torch.nn.Module
        Their root; names begin there, without the prefixes of wrappers.
    wrappers : iterable of FullyShardedDataParallel
        All of the module.

    Returns
    -------
    dict of str to FlatRun
        Parameters of which this rank has nothing too, with a length of 0.

    Raises
    ------
    TypeError
        A parameter is cut by tensor parallelism as well.
    """
    from .sharded import unwrapped_name

    chosen = {id(wrapper) for wrapper in wrappers}
    runs: dict[str, FlatRun] = {}
    for prefix, child in module.named_modules():
        handle: Any = getattr(child, "_handle", None) if id(child) in chosen else None
        if handle is None:
            continue
        start = prefix + "." if prefix else ""
        by_part: dict[tuple[str, str], FlatRun] = {}
        for number, fqn in enumerate(handle.flat_param._fqns):
            name = unwrapped_name(module, start + fqn)
            runs[name] = _run(name, handle, number)
            info = handle.flat_param._param_infos[number]
            by_part[info.module_name, info.param_name] = runs[name]
        for shared in handle.flat_param._shared_param_infos:
            first = by_part[shared.prim_module_name, shared.prim_param_name]
            below = ".".join(filter(None, (shared.module_name, shared.param_name)))
            runs[unwrapped_name(module, start + below)] = first._replace(tied=True)
    return runs


def _run(name: str, handle: Any, number: int) -> FlatRun:
    """The run of one parameter of a unit."""
    flat = handle.flat_param
    if flat._param_extensions[number] is not None:
        raise TypeError(
            f"{name!r} is cut by tensor parallelism under FSDP1: use fully_shard (FSDP2), whose "
            "parameters say how they are cut"
        )
    info = flat._shard_param_infos[number]
    whole = not handle.uses_sharded_strategy
    begin = info.intra_param_start_idx if info.in_shard else 0
    count = info.numel_in_shard if info.in_shard else 0
    offset = info.offset_in_shard if info.in_shard else 0
    owner = flat._params[number] if handle._use_orig_params else flat
    if whole and count != flat._numels[number]:
        raise TypeError(f"{name!r} is not whole on this rank, though it is not sharded")
    return FlatRun(
        owner=owner,
        flat=flat.detach(),
        shape=tuple(flat._shapes[number]),
        begin=begin,
        length=count,
        offset=offset,
        in_owner=0 if handle._use_orig_params else offset,
        tied=False,
    )
