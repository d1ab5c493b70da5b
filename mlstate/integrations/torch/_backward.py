"""Gradients of torch models, as soon as the backward pass has made them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


def parameters_of(module: Any) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a module by name; those that are shared have one name."""
    return dict(module.named_parameters())


def watch(parameter: torch.nn.Parameter, ready: Callable[[Any], None]) -> Any:
    """Call `ready` with a parameter's gradient each time it is there, as far as it was made.

    Returns what ends this by its ``remove``.
    """
    register: Any = parameter.register_post_accumulate_grad_hook
    return register(lambda watched: ready(watched.grad))


def call_at_end(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that is under way has ended."""
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(function)


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
