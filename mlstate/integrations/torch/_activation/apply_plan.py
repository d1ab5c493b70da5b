"""`Plan.apply`: finds a model's blocks, replaces their calls, refuses a wrong order of calls."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from .... import _core
from ...._common.local_path import local_path
from ...._common.set_module import set_module
from .module_patterns import modules_named, refuse_overlap
from .schedule import Block, Program, Run, flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

_HOOK = "_compiled_call_impl"  # torch.nn.Module.__call__ uses it before all hooks


def find_blocks(module: Any, blocks: Any, count: int | None) -> list[tuple[str, Any]]:
    """Return the blocks of a model with their names, in order.

    `blocks`: a pattern, a list, or None. `count`: their number; None: any. Raises ValueError if
    there are none, more or fewer, or the choice is ambiguous; see `Plan.apply`. Raises TypeError
    if a block is not callable or, without `blocks`, if `module` is neither a module nor a list.
    """
    import torch

    if blocks is None and isinstance(module, list | tuple):
        blocks = module
    if blocks is None:
        blocks_found = _children(module, count)
    elif isinstance(blocks, str):
        blocks_found = modules_named(module, blocks)
    else:
        all_modules = module.named_modules() if isinstance(module, torch.nn.Module) else ()
        names = {id(m): name for name, m in all_modules}
        blocks_found = [(names.get(id(b), f"block {i}"), b) for i, b in enumerate(blocks)]
    bad = next((block for _, block in blocks_found if not callable(block)), None)
    if bad is not None:
        raise TypeError(f"a block must be callable, got {type(bad).__name__}")
    if not blocks_found:
        raise ValueError(f"no blocks: {blocks!r} names nothing in {type(module).__name__}")
    if count is not None and len(blocks_found) != count:
        listed = ", ".join(name for name, _ in blocks_found[:6]) + (
            ", …" if len(blocks_found) > 6 else ""
        )
        raise ValueError(f"the plan is for {count} blocks, found {len(blocks_found)}: {listed}")
    return blocks_found


def _children(module: torch.nn.Module, count: int | None) -> list[tuple[str, Any]]:
    """Return the blocks of a module by name: the elements of its list of `count` modules.

    `count` None: of any number. Raises ValueError unless it has exactly one such list, or is one,
    and TypeError if it is not a module.
    """
    import torch

    lists = (torch.nn.Sequential, torch.nn.ModuleList)
    if isinstance(module, lists):
        return list(module._modules.items())
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"expected a torch.nn.Module or a list of blocks, got {module!r:.80}")
    lists_found = [(name, m) for name, m in module.named_modules() if isinstance(m, lists)]
    fitting = [(name, m) for name, m in lists_found if count is None or len(m) == count]
    if len(fitting) != 1:
        listed = ", ".join(f"{name} ({len(m)})" for name, m in lists_found[:8]) or "none"
        number = "" if count is None else f" of {count}"
        raise ValueError(
            f"which modules are the blocks? {type(module).__name__} has {len(fitting)} "
            f"Sequential or ModuleList{number}, of all: {listed}; pass blocks='layers.*' or a list"
        )
    name, chosen = fitting[0]
    return [(f"{name}.{key}", block) for key, block in chosen._modules.items()]


class _Entry(partial[Any]):
    """Replacement of a module's call."""


class Interceptor:
    """Intercepts the calls of modules, before their hooks, until `remove`.

    Calls `enter` with the positions of the called block (a tuple of its indexes in the list of
    blocks), its original call, and the arguments. The caller creates it in a section of deferred
    interrupts.
    """

    def __init__(self, blocks: Sequence[tuple[str, Any]], enter: Callable[..., Any]) -> None:
        """Make each call of a block call `enter` instead; `calls` has the blocks' own functions.

        `blocks`: names and modules, or other callables, which cannot be intercepted. A module that
        is listed several times is replaced once. Raises ValueError for a module that has a plan.
        """
        self.calls: list[Callable[..., Any]] = []
        self._undo: list[tuple[Any, Any, Any, Any]] = []
        self._positions: dict[int, list[int]] = {}
        for position, (_, block) in enumerate(blocks):
            self._positions.setdefault(id(block), []).append(position)
        originals: dict[int, Callable[..., Any]] = {}
        try:
            for name, block in blocks:
                if id(block) not in originals:
                    originals[id(block)] = self._intercept(name, block, enter)
                self.calls.append(originals[id(block)])
        except BaseException:
            self.remove()
            raise

    def _intercept(self, name: str, block: Any, enter: Callable[..., Any]) -> Callable[..., Any]:
        """Replace the call of one block by `enter`, and return the block's own function.

        `name`: of the block, for the ValueError if it has a plan already. A callable that is not a
        module is returned itself. The first argument of `enter` is a tuple of the block's indexes.
        """
        import torch

        if not isinstance(block, torch.nn.Module):
            call: Callable[..., Any] = block
            return call
        before = block.__dict__.get(_HOOK)
        if isinstance(before, _Entry):
            raise ValueError(f"{name} already has a plan: call remove() first")
        original: Callable[..., Any] = before or block._call_impl
        hook = _Entry(enter, tuple(self._positions[id(block)]), original)
        handle = None
        # not in a block that is compiled itself: this would break its own graph
        if not before and not isinstance(block, torch.jit.ScriptModule):
            handle = block.register_forward_pre_hook(_break_graph, prepend=True)
        self._undo.append((block, before, hook, handle))
        block.__dict__[_HOOK] = hook
        return original

    def remove(self) -> None:
        """Restore the blocks' own calls; later calls do nothing."""
        with _core.deferred_interrupts():
            for block, before, hook, handle in reversed(self._undo):
                if block.__dict__.get(_HOOK) is hook:
                    del block.__dict__[_HOOK]
                    if before is not None:
                        block.__dict__[_HOOK] = before
                if handle is not None:
                    handle.remove()
            self._undo = []


def _break_graph(module: torch.nn.Module, args: Any) -> None:
    """Keep torch.compile from tracing through a block, which would bypass the plan."""
    import torch

    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()


def run_blocks(
    modules: Sequence[Any], enter: Callable[..., Any] | None, args: Any, kwargs: Any
) -> Any:
    """Run blocks in sequence, each on the output of the one before; return the last output.

    `args`: the first block's input, and further arguments of all blocks. `kwargs`: keywords of all
    blocks. `enter`: runs the blocks that are not modules, whose calls no hook can replace, from
    their positions, the block and its arguments; None: call them.
    """
    import torch

    out, *others = args
    for position, block in enumerate(modules):
        inputs = (*out, *others) if isinstance(out, tuple | list) else (out, *others)
        if isinstance(block, torch.nn.Module) or enter is None:
            out = block(*inputs, **kwargs)
        else:
            out = enter((position,), block, *inputs, **kwargs)
    return out


@set_module("mlstate.integrations.torch")
class PlannedModel:
    """A model whose blocks run by a plan; `Plan.apply` returns it.

    The model keeps its parameters, the names in its state dict, and its class. Calling this
    object calls the model.

    Attributes
    ----------
    plan : Plan
        The plan.
    module : torch.nn.Module or None
        The model; None if the blocks were passed as a list.
    names : list of str
        Names of the blocks.

    Examples
    --------
    >>> import torch
    >>> from mlstate.activation import Chain, plan
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    >>> chain = Chain([1, 1], [2, 2], [64, 64, 64], [64, 128])
    >>> with plan(chain, 10_000).apply(model) as planned:
    ...     planned(torch.ones(4, 4)).sum().backward()
    >>> model[0].weight.grad.shape
    torch.Size([4, 4])
    """

    def __init__(
        self,
        plan: Any,
        module: Any,
        blocks: Sequence[tuple[str, Any]],
        folder: str | None,
        observe: Callable[[str, int], None] | None,
    ) -> None:
        """Let the plan run the blocks of `module`; `remove` undoes it.

        `module`: None for a list of blocks. `blocks`: names and callables. `folder`: of offloaded
        tensors; None: memory. `observe`: called with each step before it runs, or None.
        """
        self.plan = plan
        self.module = module
        self.names: list[str] = [name for name, _ in blocks]
        self._modules = [block for _, block in blocks]
        self._program = Program(plan.steps())
        self._options = (folder, observe)
        self._runs_directly = self._program.runs_blocks_once and observe is None
        self._local = threading.local()
        self._compiled: Callable[..., Any] | None = None
        refuse_overlap(blocks)
        with _core.deferred_interrupts() as section:
            self._interceptor: Interceptor | None = Interceptor(blocks, self._enter)
            try:
                self._blocks = [
                    Block(name, call, block)
                    for (name, block), call in zip(blocks, self._interceptor.calls, strict=True)
                ]
                with section.allowed():
                    pass  # a signal of the section undoes it
            except BaseException:
                self.remove()
                raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, or the blocks in sequence.

        A list of blocks receives the first argument, a tensor or a tuple of a block's arguments.
        The output of each block is the input of the next one. The other arguments are passed to
        every block.
        """
        if self.module is not None:
            return self.module(*args, **kwargs)
        enter = None if self._interceptor is None else self._enter
        return run_blocks(self._modules, enter, args, kwargs)

    def _enter(
        self, positions: tuple[int, ...], original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a called block by the plan, and return its output; torch.compile does not trace this.

        `positions`: of the block in the plan; several if it is listed more than once. `original`:
        its own call.
        """
        if "torch._dynamo" not in sys.modules:
            return self._run(positions, original, args, kwargs)
        call = self._compiled
        if call is None:
            import torch

            disable: Any = torch.compiler.disable  # recomputation is not compiled either
            call = self._compiled = disable(self._run)
        return call(positions, original, args, kwargs)

    def _run(
        self, positions: tuple[int, ...], original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a called block, by the plan if gradients are enabled; return its output.

        Otherwise it runs directly, also if the plan runs each block once and keeps all of its saved
        tensors, and nothing observes the steps.
        Arguments are as for `_enter`. A call of the first block starts a new pass in this thread,
        unless it continues the one under way. Raises ValueError for a call out of order.
        """
        import torch

        if not torch.is_grad_enabled() or self._runs_directly:
            return original(*args, **kwargs)
        leaves, spec = flatten(args, kwargs)
        run = getattr(self._local, "run", None)
        self._local.run = None  # an error ends the pass
        if run is None or run.next not in positions or not run.can_continue(leaves):
            if 0 not in positions:
                raise self._order_error(run, positions)
            run = Run(self._program, self._blocks, *self._options)
        out = run.run_next(args, kwargs, leaves, spec)
        if run.next < self._program.blocks:
            self._local.run = run
        return out

    def _order_error(self, run: Run | None, positions: tuple[int, ...]) -> ValueError:
        """Return the error of a block that is called out of order, with the likely reason.

        `run`: the pass under way in this thread, or None.
        """
        name = self.names[positions[0]]
        if run is None or run.next not in positions:
            turn = self.names[0 if run is None else run.next]
            return ValueError(
                f"{name} was called, expected {turn}: a plan runs all blocks in order, except "
                "under torch.no_grad()"
            )
        before = self.names[run.next - 1]
        if run.has_begun_backward:
            return ValueError(
                f"{name} was called after a backward pass through {before}, whose saved tensors "
                "are freed: run all blocks first, add the losses and call backward once"
            )
        return ValueError(
            f"the input of {name} is not the output of {before}: make the code between them part "
            "of a block"
        )

    def remove(self) -> None:
        """Remove the plan from the model; existing graphs stay valid."""
        if self._interceptor is not None:
            self._interceptor.remove()
            self._interceptor = None

    def __enter__(self) -> PlannedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        name = "blocks" if self.module is None else type(self.module).__name__
        removed = ", removed" if self._interceptor is None else ""
        return f"<PlannedModel: {name}, {self.plan!r}{removed}>"


def apply_plan(
    plan: Any,
    module: Any = None,
    *,
    blocks: Any = None,
    offload_to: str | os.PathLike[str] | None = None,
    observe: Callable[[str, int], None] | None = None,
) -> PlannedModel:
    """Run the blocks of a torch model by a plan's steps; see `Plan.apply`."""
    if module is None and blocks is None:
        raise TypeError("apply needs a module or blocks")
    block_list = find_blocks(module, blocks, plan.chain.blocks)
    if isinstance(module, list | tuple):
        module = None
    folder = None if offload_to is None else local_path(offload_to)
    return PlannedModel(plan, module, block_list, folder, observe)
