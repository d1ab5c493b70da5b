"""`reduce_scatter_with`: gradients of FSDP2 (`fully_shard`) modules reduced by a group."""

from __future__ import annotations

import weakref
from math import prod
from typing import TYPE_CHECKING, Any

from .... import _core
from ...._common.set_module import set_module
from ....errors import CollectiveError
from ....fsdp._bucket import Entry, FullBucket, Terms
from ....fsdp._leaf_order import check_order
from ....fsdp._reducer import Reducer, Session
from ....fsdp._sharding_unit import FSDPShardingUnit
from .backward import PassErrors, check_reduction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch


@set_module("mlstate.integrations.torch")
def reduce_scatter_with(
    module: Any,
    group: Any,
    *,
    nonfinite: str = "error",
    order: str = "rank",
    timeout: float | None = None,
) -> None:
    """Make a group reduce the gradients of all FSDP2 modules in a module.

    Parameters
    ----------
    module : torch.nn.Module
        A module with submodules that ``torch.distributed.fsdp.fully_shard`` has sharded.
    group : ProcessGroup
        The ranks of the sharding, in mesh order.
    nonfinite : {"error", "allow"}, default "error"
        Whether NaN or infinity in a sum raises an error on every rank, at the end of the
        backward pass. Use ``"allow"`` if a gradient scaler looks for them.
    order : {"rank"}, default "rank"
        Order of the additions. ``"tree"`` is refused: FSDP2 itself adds up micro-batches, on one
        rank and without gradient synchronization, in an order that depends on the ranks.
    timeout : float, optional
        Timeout of each operation in seconds. Default: the group's timeout.

    Raises
    ------
    TypeError
        If `group` is not a process group.
    ValueError
        If `module` has no FSDP2 modules, they are sharded over ranks other than `group`'s, or
        `order` is ``"tree"``.

    Notes
    -----
    Gradients are summed in rank order, in float32 or wider, divided as FSDP2 requests, and
    rounded once to its ``reduce_dtype``. The bits are equal on every engine. For two ranks in
    float32 they equal torch's own; for more they can differ in the last bits, because gloo and
    NCCL add in another order. ``set_gradient_divide_factor`` also works on CPUs, where gloo
    refuses it.

    Before each module, the ranks compare 64-byte headers. If they disagree about it, or a sum is
    not finite, the other modules are still reduced. Then ``backward`` raises `CollectiveError` on
    every rank, which names module and rank, and the gradients of that module are NaN. Every rank
    must use the same modules: if ranks reduce different ones, ``backward`` raises at once on every
    rank, and later modules are not reduced; if a rank has ended its pass before, the others learn
    it at its next reduction, or at the timeout. One buffer, of the size of the largest module's
    gradients, is kept for the next step.

    On CPUs, FSDP2 waits for each reduction before the backward pass continues. Another call of
    this function replaces the group. With a two-dimensional mesh (HSDP), `group` reduces over
    the sharding ranks, and torch over the replicas.

    Examples
    --------
    >>> import tempfile, torch, torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.fsdp import fully_shard
    >>> from mlstate.integrations.torch import TorchGroup, reduce_scatter_with
    >>> store = dist.FileStore(tempfile.mkdtemp() + "/store", 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> layer = fully_shard(torch.nn.Linear(2, 1), mesh=init_device_mesh("cpu", (1,)))
    >>> reduce_scatter_with(layer, TorchGroup())
    >>> layer(torch.tensor([[1.0, 2.0]])).sum().backward()
    >>> layer.weight.grad.full_tensor()
    tensor([[1., 2.]])
    >>> dist.destroy_process_group()
    """
    from torch.distributed.fsdp import FSDPModule

    group, seconds = check_reduction(group, nonfinite, timeout)
    if check_order(order, "rank") == "tree":
        raise ValueError(
            "order='tree' needs the gradient of each micro-batch, and FSDP2 adds them up itself; "
            "register the module without fully_shard: FSDPBackwardHook(FSDP(group, order='tree'))"
            ".register_hooks(module, sharding_units(module, group))"
        )
    fsdp_modules_by_name = {n: m for n, m in module.named_modules() if isinstance(m, FSDPModule)}
    if not fsdp_modules_by_name:
        raise ValueError(
            f"there is no module of FSDP2 in this {type(module).__name__}; apply "
            "torch.distributed.fsdp.fully_shard first"
        )
    for name, parameter in module.named_parameters():
        _check_mesh(name, parameter, group)
    shared = _Reduction(group, nonfinite, seconds)
    for name, sharded in fsdp_modules_by_name.items():
        comm: Any = _ReduceScatter(name or type(module).__name__, shared)
        sharded.set_custom_reduce_scatter(comm)


def _check_mesh(name: str, parameter: Any, group: Any) -> None:
    """Raise ValueError if a parameter (`name`) is sharded over other ranks than the group's.

    A parameter that is not a DTensor passes.
    """
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return
    sharded_dims = [
        dim for dim, placement in enumerate(parameter.placements) if placement.is_shard()
    ]
    # this rank's coordinate in each of these dimensions of the mesh, and the dimension's size
    coordinates = [(mesh.get_local_rank(dim), mesh.size(dim)) for dim in sharded_dims]
    if coordinates and (group.rank, group.world_size) not in coordinates:
        sizes = " and ".join(f"{size} ranks, of which this is {rank}" for rank, size in coordinates)
        raise ValueError(
            f"{name} is sharded among {sizes}; the group has {group.world_size}, of which this is "
            f"{group.rank}"
        )


class _Reduction:
    """State shared by the modules of one `reduce_scatter_with`."""

    def __init__(self, group: Any, nonfinite: str, timeout: float | None) -> None:
        self._group = group
        self._terms = Terms(nonfinite=nonfinite)
        self._reducer = Reducer(group, self._terms, {"nonfinite": nonfinite}, timeout=timeout)
        self._free: dict[Any, torch.Tensor] = {}  # buffer to use again, by dtype
        self._errors: weakref.ref[PassErrors] | None = None  # dead after the backward pass

    def take_buffer(self, count: int, dtype: Any) -> torch.Tensor:
        """Return memory for `count` elements: another module's buffer if large enough, else new."""
        import torch

        buffer = self._free.pop(dtype, None)
        if buffer is None or len(buffer) < count:
            buffer = torch.empty(count, dtype=dtype)
        return buffer[:count]

    def _keep_buffer(self, buffer: torch.Tensor) -> None:
        """Keep an input buffer, which FSDP2 fills again for the next module."""
        if buffer.device.type == "cpu":
            self._free[buffer.dtype] = buffer if buffer._base is None else buffer._base

    def reduce(self, name: str, source: torch.Tensor, out: torch.Tensor, divisor: float) -> None:
        """Reduce the gradients of the module `name` to `out`, this rank's part.

        `source`: parts of all ranks one after the other. `divisor`: of the sums. If all ranks find
        an error, `out` becomes NaN, and the error is raised at the end of the pass; other errors
        are raised at once.
        """
        ranks, rank = self._group.world_size, self._group.rank
        unit = FSDPShardingUnit(name, source.shape, source.dtype, rank, world_size=ranks)
        unit.local_gradient = out
        entries: list[Entry] | None = [Entry(unit, source)]
        terms = self._terms._replace(divisor=divisor)
        with _core.deferred_interrupts() as section:
            session = Session(self._reducer)
            try:
                with section.allowed():
                    while entries:  # again with those on which all ranks agree, if some differ
                        _, entries = session.reduce([FullBucket(entries, terms)], entries)
                    session.finish("backward pass")
            except CollectiveError as error:
                if len(session.failures) > 1:
                    raise _out_of_step(rank, session.failures) from None
                if error.name != name:  # the group is broken
                    raise
                out.fill_(float("nan"))
                self._raise_at_end(error)
            finally:
                session.close()
                self._keep_buffer(source)

    def _raise_at_end(self, error: CollectiveError) -> None:
        """Raise at the end of the backward pass, so that other modules are still reduced."""
        current = None if self._errors is None else self._errors()
        if current is None:
            current = PassErrors()
            self._errors = weakref.ref(current)
        current.errors.append(error)


def _out_of_step(rank: int, failures: Mapping[str, tuple[int | None, str]]) -> CollectiveError:
    """Return the error, on all ranks, of ranks that reduce different modules at a time.

    `rank`: this one. `failures`: as of a session, by module.
    """
    reasons = "; ".join(f"{name!r}: {reason}" for name, (_, reason) in failures.items())
    name, (other, _) = next(iter(failures.items()))
    text = (
        f"backward pass on rank {rank}: the ranks reduce different modules, and the pass ends "
        f"here: {reasons}; with FSDP2, every rank must use the same modules"
    )
    return CollectiveError(text, name=name, rank=other)


class _ReduceScatter:
    """The reduce-scatter of one module; implements torch's protocol."""

    def __init__(self, name: str, shared: _Reduction) -> None:
        self._name = name
        self._shared = shared
        self._is_input = False  # whether the last `allocate` was for an input

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        """Return memory of the shape `size`: in alternating calls for an input and for its output.

        torch fills the input with the gradients of all ranks' parts. Only inputs on the CPU are
        reused.
        """
        import torch

        self._is_input = not self._is_input
        if self._is_input and torch.device(device).type == "cpu":
            return self._shared.take_buffer(prod(size), dtype)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce the input over the ranks, and write this rank's part to the output.

        `group`, `op`: of torch, only for the number of ranks and the divisor that they mean.
        Returns a finished work if `async_op`, else None.
        """
        divisor = _divisor(op, group.size())
        self._shared.reduce(self._name, input_tensor, output_tensor, divisor)
        return _Done() if async_op else None


class _Done:
    """A completed `Work` for torch."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _divisor(op: Any, ranks: int) -> float:
    """Return the divisor of the sums over `ranks` ranks, for a torch.distributed operation `op`.

    Raises ValueError for operations other than SUM, AVG and PREMUL_SUM.
    """
    from torch.distributed import ReduceOp

    kind = getattr(op, "op", op)
    if kind == ReduceOp.SUM:
        return 1.0
    if kind == ReduceOp.AVG:
        return float(ranks)
    if kind == ReduceOp.PREMUL_SUM:
        _, factor = op.__getstate__()  # torch has no other access to it
        return 1.0 / float(factor)
    raise ValueError(f"FSDP2 asks for {op}, expected SUM, AVG or PREMUL_SUM")
