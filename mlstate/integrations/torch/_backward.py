"""Gradients of torch models, as soon as the backward pass has made them."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

from ...errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

    import torch

    from ..._fsdp import FSDP
    from ..._fsdp_unit import FSDPShardingUnit


def parameters_of(module: Any) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a module by name; those that are shared have one name."""
    return dict(module.named_parameters())


def tied_to(module: Any, name: str) -> str | None:
    """Return the name that `parameters_of` has for a parameter that is shared under `name`."""
    parameter = dict(module.named_parameters(remove_duplicate=False)).get(name)
    return next((n for n, p in module.named_parameters() if p is parameter), None)


def watch(parameter: torch.nn.Parameter, ready: Callable[[Any], None]) -> Any:
    """Call `ready` with a parameter's gradient each time it is there, as far as it was made.

    Returns what ends this by its ``remove``.
    """
    register: Any = parameter.register_post_accumulate_grad_hook
    return register(lambda watched: ready(watched.grad))


class _NodeHook:
    """A hook on a node of autograd, which torch lets go with its last reference."""

    def __init__(self, node: Any, function: Callable[[Any], None]) -> None:
        self._node = node
        self._handle = node.register_prehook(function)

    def remove(self) -> None:
        self._handle.remove()
        self._node = None


def watch_before(parameter: torch.nn.Parameter, before: Callable[[], None]) -> Any:
    """Call `before` each time a gradient is about to be added to ``parameter.grad``.

    Returns an object whose ``remove`` ends this.
    """
    from torch.autograd.graph import get_gradient_edge

    return _NodeHook(get_gradient_edge(parameter).node, lambda _: before())


def call_at_end(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that is under way has ended."""
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(function)


class _Pass:
    """A backward pass that is under way; torch lets it go when that ends, or fails."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def end(self) -> None:
        self._ended()


def begin_pass(ended: Callable[[], None], rank: int) -> weakref.ref[Any]:
    """Call `ended` when the backward pass that is under way ends, unless an error cuts it short.

    Returns a reference that lives as long as the pass does.
    """
    if _is_inside_another():
        error = CollectiveError(
            f"backward pass on rank {rank}: its first gradient came from a pass inside another "
            "one, whose end is not that of all gradients; for activation checkpointing pass "
            "use_reentrant=False"
        )
        error.name, error.rank = "backward pass", rank
        raise error
    now = _Pass(ended)
    call_at_end(now.end)
    return weakref.ref(now)


def _is_inside_another() -> bool:
    """Whether a function of one backward pass started the pass that is under way."""
    from torch.autograd.function import BackwardCFunction

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False


def why_not_reduced(tensor: torch.Tensor) -> str:
    """Say what a parameter or gradient is that cannot be reduced as it is, or nothing."""
    import torch

    if hasattr(tensor, "placements"):
        return (
            "a DTensor, which torch shards itself; for FSDP2 there is "
            "mlstate.integrations.torch.reduce_scatter_with"
        )
    if tensor.layout != torch.strided:
        return f"{tensor.layout}, not dense"
    if tensor.device.type == "meta":
        return "on the meta device, without elements"
    return ""


def reduce_on_device(
    group: Any,
    gradient: torch.Tensor,
    counts: Sequence[int],
    out: torch.Tensor,
    op: str,
    divisor: float,
    timeout: float | None,
) -> tuple[float, int]:
    """Reduce a gradient that is not in main memory; return squares and what is not finite."""
    import torch

    wide = gradient
    if divisor != 1 or out.dtype != gradient.dtype:
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    total = group.reduce_scatter(wide.reshape(-1), op=op, counts=list(counts), timeout=timeout)
    if divisor != 1:
        total = total / divisor
    flat = out.view(-1)
    flat.copy_(total)
    if not flat.dtype.is_floating_point:
        return float(flat.double().square().sum()), 0
    return float(flat.double().square().sum()), int((~flat.isfinite()).sum())


def gather_full(
    fsdp: FSDP, units: Sequence[FSDPShardingUnit], parameters: Mapping[str, torch.nn.Parameter]
) -> None:
    """Gather the parts of reduced gradients from all ranks into ``parameter.grad``.

    Parameters of one dtype and device travel in one message.
    """
    kinds: dict[Any, list[tuple[FSDPShardingUnit, torch.nn.Parameter]]] = {}
    for unit in units:
        parameter = parameters[unit.parameter_name]
        kinds.setdefault((parameter.dtype, parameter.device), []).append((unit, parameter))
    for pairs in kinds.values():
        _gather_pairs(fsdp.process_group, pairs, fsdp.timeout)


def _gather_pairs(
    group: Any, pairs: Sequence[tuple[FSDPShardingUnit, torch.nn.Parameter]], timeout: float | None
) -> None:
    import torch

    mine = torch.cat([u.local_gradient.detach().reshape(-1).to(p.dtype) for u, p in pairs])
    counts = [sum(unit.counts[rank] for unit, _ in pairs) for rank in range(group.world_size)]
    whole = group.all_gather(mine, counts=counts, timeout=timeout)
    ranks = [
        part.split([unit.counts[rank] for unit, _ in pairs])
        for rank, part in enumerate(whole.split(counts))
    ]
    for number, (_, parameter) in enumerate(pairs):
        full = torch.cat([parts[number] for parts in ranks]).view(parameter.shape)
        if parameter.grad is None:  # not used in this pass
            parameter.grad = full
        else:
            parameter.grad.detach().copy_(full)
