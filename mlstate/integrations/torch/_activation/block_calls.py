"""Calls of a model with a sample, block by block; generators and gradients stay as before."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from .... import _core
from .._tensors.state import restore_table
from .apply_plan import Interceptor, find_blocks, run_blocks
from .rng_and_buffers import (
    attributes_of,
    copy_objects,
    devices_of,
    enter_graph,
    generator_states,
    generators_of,
    set_generator_states,
)
from .tensors import detach_all, storage_id, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


def discard_saved() -> Any:
    """Return a context without saved tensors, so that no backward pass is possible."""
    import torch

    def refuse(_: Any) -> Any:
        raise RuntimeError(
            "a block takes gradients inside its own forward: it cannot be recomputed"
        )

    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, refuse)


class BlockCall:
    """One call of a block, with arguments detached from the graph."""

    def __init__(self, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Record a call of a block with its arguments, to run it later.

        The tensors are detached but share memory with the arguments.
        """
        import torch
        from torch.utils import _pytree

        self._call = call
        leaves, self._spec = _pytree.tree_flatten((args, kwargs))
        self.inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]  # in their graph
        # of each leaf, whether it requires a gradient; None: it is not a tensor
        self._leaves = [
            (leaf.detach(), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else (leaf, None)
            for leaf in leaves
        ]

    def tensors(self) -> list[tuple[torch.Tensor, bool]]:
        """Return the tensor arguments, and whether they require gradients."""
        return [(leaf, flag) for leaf, flag in self._leaves if flag is not None]

    def bind(self, *, copies: bool = True) -> Callable[[], Any]:
        """Return the call with its arguments, for one run.

        `copies`: the run gets its own copies of objects that the block may change, such as a KV
        cache. Without, it gets the objects themselves, so that later blocks of the model see the
        changes.
        """
        from torch.utils import _pytree

        objects = [leaf if flag is None else None for leaf, flag in self._leaves]
        if copies:
            objects = copy_objects(objects)
        leaves = []
        for (leaf, flag), item in zip(self._leaves, objects, strict=True):
            if flag is None:
                leaves.append(item)
            else:
                leaves.append(enter_graph(leaf.detach()) if flag else leaf.detach())
        args, kwargs = _pytree.tree_unflatten(leaves, self._spec)
        return partial(self._call, *args, **kwargs)

    def __call__(self) -> Any:
        return self.bind()()


def seed_of(out: torch.Tensor) -> torch.Tensor | None:
    """Return a loss of a block's output `out` whose gradients are ones; None without gradients.

    The ones are allocated when the backward pass needs them, so that they do not count in the
    memory of the forward run.
    """
    import torch

    class Seed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            ctx.like = [(t.shape, t.dtype, t.device) for t in tensors]
            return torch.zeros((), device=tensors[0].device)

        @staticmethod
        def backward(ctx: Any, *_: object) -> tuple[torch.Tensor, ...]:
            return tuple(torch.ones(s, dtype=t, device=d) for s, t, d in ctx.like)

    outputs = [tensor for tensor in tensors_in(out) if tensor.requires_grad]
    apply: Any = Seed.apply
    return apply(*outputs) if outputs else None


def loss_of(out: Any, loss: Callable[[Any], torch.Tensor] | None) -> tuple[Any, bool]:
    """Return the loss of a model's output, and whether it is the model's own or of `loss`.

    `loss`: makes it of the output; None: the output is it, or has it (``out.loss``). Otherwise it
    takes the memory of a cross-entropy of all tensors in the output. The loss is None if nothing
    requires a gradient. Raises TypeError if `loss` does not return a scalar tensor.
    """
    import torch

    found = out if loss is None else loss(out)
    if loss is None and not isinstance(out, torch.Tensor):
        found = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(found, torch.Tensor) and not found.dim():
        return (found if found.requires_grad else None), True
    if loss is not None:
        raise TypeError(f"loss must return a scalar tensor, got {found!r:.80}")
    outputs = [tensor for tensor in tensors_in(out) if tensor.requires_grad]
    if not all(tensor.is_floating_point() and tensor.dim() for tensor in outputs):
        return seed_of(out), False
    each = [torch.log_softmax(t, -1, dtype=_at_least_float(t))[..., 0].sum() for t in outputs]
    return sum(each) if each else None, False


def _at_least_float(tensor: torch.Tensor) -> torch.dtype:
    import torch

    return torch.promote_types(tensor.dtype, torch.float32)


class SampledModel:
    """A model with its blocks in order, and arguments for a run: a tensor, a tuple or a dict."""

    def __init__(self, module: Any, sample: Any, blocks: Any, count: int | None) -> None:
        """Find the blocks of a model that is to run on `sample`.

        `sample`: a tensor, a tuple of arguments, or a dict of keywords. `blocks`: a pattern or list
        as in `Chain.from_torch`; None: the only list of `count` modules. Raises TypeError if the
        sample has no tensor, and else as `find_blocks`.
        """
        args, self.kwargs = ((), sample) if isinstance(sample, dict) else (sample, {})
        self.args = args if isinstance(args, tuple) else (args,)
        tensors = tensors_in((self.args, self.kwargs))
        if not tensors:
            raise TypeError(f"sample has no tensor: {type(sample).__name__}")
        self.device = tensors[0].device
        self.module = module
        self.named_blocks = find_blocks(module, blocks, count)
        self.names = [name for name, _ in self.named_blocks]
        self.blocks = [block for _, block in self.named_blocks]

    def run(self, enter: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
        """Call the model with gradients enabled, and return its output.

        `args`, `kwargs`: of the model. `enter`: runs the blocks of a model that is a list, as for
        `run_blocks`; None: they are called.
        """
        import torch

        with torch.enable_grad():
            if isinstance(self.module, torch.nn.Module):
                return self.module(*args, **kwargs)
            return run_blocks(self.blocks, enter, args, kwargs)

    def measure_blocks(
        self,
        measure: Callable[[BlockCall], object],
        after: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Call the model once, and call `measure` with each block's call before the block runs.

        XX ValueError
                if the model does not call its blocks in order, each once.
        """
        reached = 0

        def enter(
            positions: tuple[int, ...],
            original: Callable[..., object],
            *args: object,
            **kwargs: object,
        ) -> Any:
            """Measure a block, run it, and return its detached output."""
            nonlocal reached
            if reached not in positions:
                turn = self.names[reached] if reached < len(self.names) else "none"
                raise ValueError(
                    f"{self.names[positions[0]]} was called, expected {turn}: the blocks of a "
                    "chain run in order, each once"
                )
            reached += 1
            call = BlockCall(original, args, kwargs)
            measure(call)
            # detached, so that no block's saved tensors stay in memory
            with ExitStack() as stack:
                if after is not None:  # not even of tensors in a cache
                    stack.enter_context(discard_saved())
                out = detach_all(call.bind(copies=False)())
            if after is not None and reached == len(self.names):
                out = after(out)
            return out

        with _core.deferred_interrupts() as section:
            interceptor = Interceptor(self.named_blocks, enter)
            try:
                with section.allowed():
                    result = self.run(enter, *copy_objects((self.args, self.kwargs)))
            finally:
                interceptor.remove()
        if reached < len(self.names):
            raise ValueError(f"the model did not call {self.names[reached]}")
        return result

    def existing(self) -> set[int]:
        """Return the storages, by identity, that exist before a run: sample and the model's."""
        import torch

        roots = [m for m in (self.module, *self.blocks) if isinstance(m, torch.nn.Module)]
        tensors = tensors_in((self.args, self.kwargs))
        tensors += [t for m in roots for t in (*m.parameters(), *m.buffers())]
        return {key for key in map(storage_id, tensors) if key is not None}

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Restore generators, buffers and gradients at the end of a ``with`` statement.

        Tensors that are plain attributes are buffers too. Inside, the gradients of all parameters
        are zeros.
        """
        import torch

        # the model or the blocks may be other callables
        roots = [m for m in (self.module, *self.blocks) if isinstance(m, torch.nn.Module)]
        children = [child for m in roots for child in m.modules()]
        plain = [(vars(child), attributes_of(child)) for child in children]
        tensors = [
            *(b for m in roots for b in m.buffers()),
            *(t for _, a in plain for t in a.values()),
        ]
        buffers = {id(b): (b, b.detach().clone()) for b in tensors}
        # a run may also put another tensor in place of a buffer
        tables = [(child._buffers, dict(child._buffers.items())) for child in children]
        parameters = {id(p): p for m in roots for p in m.parameters()}
        gradients = [(p, p.grad) for p in parameters.values() if p.requires_grad]
        tensors = tensors_in((self.args, self.kwargs))
        generators = generators_of(children)
        states = generator_states({*devices_of([*tensors, *parameters.values()]), *generators})
        try:
            for parameter, _ in gradients:
                parameter.grad = torch.zeros_like(parameter)
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for table, content in tables:
                restore_table(table, content)
            for attributes, before in plain:
                attributes.update(before)
            for buffer, value in buffers.values():
                buffer.data.copy_(value)
            set_generator_states(states)
