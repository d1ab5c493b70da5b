"""Calls of a model's blocks, for measurement or comparison of each block."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from .apply_plan import Interceptor, run_blocks
from .rng_and_buffers import (
    copy_objects,
    devices_of,
    enter_graph,
    generator_states,
    set_generator_states,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch


def arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the model arguments for a sample: a tensor, a tuple or a dict."""
    args, kwargs = ((), sample) if isinstance(sample, dict) else (sample, {})
    args = args if isinstance(args, tuple) else (args,)
    if not tensors_in((args, kwargs)):
        raise TypeError(f"sample has no tensor: {type(sample).__name__}")
    return args, kwargs


class BlockCall:
    """One call of a block, with arguments detached from the graph."""

    def __init__(self, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        import torch
        from torch.utils import _pytree

        self._call = call
        leaves, self._spec = _pytree.tree_flatten((args, kwargs))
        self._leaves = [
            (leaf.detach(), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else (leaf, None)
            for leaf in leaves
        ]

    def tensors(self) -> list[tuple[torch.Tensor, bool]]:
        """Return the tensor arguments, and whether they require gradients."""
        return [(leaf, flag) for leaf, flag in self._leaves if flag is not None]

    def bind(self, *, copies: bool = True) -> Callable[[], Any]:
        """Return the call with its arguments, for one run.

        Each run gets its own copies of objects that the block may change, such as a KV cache.
        Without `copies`, it gets the objects themselves, so that later blocks of the model see
        the changes.
        """
        from torch.utils import _pytree

        objects = [leaf if flag is None else None for leaf, flag in self._leaves]
        if copies:
            objects = copy_objects(objects)
        leaves = [
            made if flag is None else enter_graph(leaf.detach()) if flag else leaf.detach()
            for (leaf, flag), made in zip(self._leaves, objects, strict=True)
        ]
        args, kwargs = _pytree.tree_unflatten(leaves, self._spec)
        return partial(self._call, *args, **kwargs)

    def __call__(self) -> Any:
        return self.bind()()


def tensors_in(out: Any) -> list[torch.Tensor]:
    import torch
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]


def seed_of(out: Any) -> torch.Tensor | None:
    """Return a loss whose gradients are ones, allocated when the backward pass needs them."""
    import torch

    class Seed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            ctx.like = [(t.shape, t.dtype, t.device) for t in tensors]
            return torch.zeros((), device=tensors[0].device)

        @staticmethod
        def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor, ...]:
            return tuple(torch.ones(s, dtype=t, device=d) for s, t, d in ctx.like)

    wanted = [tensor for tensor in tensors_in(out) if tensor.requires_grad]
    apply: Any = Seed.apply
    return apply(*wanted) if wanted else None


class Pass:
    """One run of the model that measures each block when it is called."""

    def __init__(self, names: Sequence[str], measure: Callable[[BlockCall], Any]) -> None:
        self._names = names
        self._measure = measure
        self.next = 0

    def run(
        self, module: Any, modules: Sequence[Any], found: Sequence[Any], args: Any, kwargs: Any
    ) -> None:
        """Call the model once."""
        import torch

        args, kwargs = copy_objects((args, kwargs))
        interceptor = Interceptor(found, self.enter)
        try:
            with torch.enable_grad():
                if isinstance(module, torch.nn.Module):
                    module(*args, **kwargs)
                else:
                    run_blocks(modules, self.enter, args, kwargs)
        finally:
            interceptor.remove()
        if self.next < len(self._names):
            raise ValueError(f"the model did not call {self._names[self.next]}")

    def enter(
        self, positions: tuple[int, ...], original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Measure a block, run it, and return its detached output."""
        from torch.utils import _pytree

        if self.next not in positions:
            turn = self._names[self.next] if self.next < len(self._names) else "none"
            raise ValueError(
                f"{self._names[positions[0]]} was called, expected {turn}: the blocks of a chain "
                "run in order, each once"
            )
        self.next += 1
        call = BlockCall(original, args, kwargs)
        self._measure(call)
        out = call.bind(copies=False)()
        leaves, spec = _pytree.tree_flatten(out)
        return _pytree.tree_unflatten([_leaf(leaf) for leaf in leaves], spec)


def _leaf(value: Any) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


@contextmanager
def untouched(modules: Sequence[Any], args: Any, kwargs: Any) -> Iterator[None]:
    """Restore generators, buffers and gradients at exit; gradients are zeros inside."""
    import torch

    states = generator_states(devices_of(tensors_in((args, kwargs))))
    real = [module for module in modules if isinstance(module, torch.nn.Module)]
    buffers = {id(b): (b, b.detach().clone()) for m in real for b in m.buffers()}
    parameters = {id(p): p for m in real for p in m.parameters() if p.requires_grad}
    gradients = [(p, p.grad) for p in parameters.values()]
    try:
        for parameter, _ in gradients:
            parameter.grad = torch.zeros_like(parameter)
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for buffer, before in buffers.values():
            buffer.data.copy_(before)
        set_generator_states(states)
