"""`ActivationManager.apply`: blocks under torch.utils.checkpoint, as a strategy decides."""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from .... import _core
from ...._common.arguments import check_type
from ....errors import GradientWarning
from .argument_contents import ArgumentContents, arguments_to_compare
from .module_patterns import modules_named, refuse_overlap
from .rng_and_buffers import Buffers, Surroundings, are_fake, refusal
from .tensors import version_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from ....activation._manager import ActivationManager


class AppliedStrategy:
    """Blocks whose forward pass queries a manager, until `remove`."""

    def __init__(self, manager: ActivationManager, blocks: dict[str, torch.nn.Module]) -> None:
        """Replace the forward of each block; `blocks`: by name, in order.

        `manager` decides at each call, and gets the block's index in this order.
        """
        self.blocks: tuple[str, ...] = tuple(blocks)
        self._forwards: list[_Forward] = []
        # Hooks of torch cannot replace a block's forward pass; its own `forward` can.
        warned: set[str] = set()
        self._applied = [True]  # until `remove`
        with _core.deferred_interrupts() as section:
            try:
                for number, (name, block) in enumerate(blocks.items()):
                    forward = _Forward(manager, name, number, block, self._applied, warned)
                    self._forwards.append(forward)
                    block.forward = forward
                with section.allowed():
                    pass  # a signal of the section undoes it
            except BaseException:
                self.remove()
                raise

    def remove(self) -> None:
        """Restore the blocks' own forward; later calls do nothing."""
        with _core.deferred_interrupts():
            self._applied[0] = False
            for forward in self._forwards:
                forward.restore()
            self._forwards = []

    def __enter__(self) -> AppliedStrategy:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Forward:
    """Replacement of a block's forward: plain or checkpointed, as the manager decides."""

    # Older pickles lack these.
    _before: Any = None  # the attribute `forward` of the block itself, if it has one
    applied: Sequence[bool] = (True,)  # unless it is True, the block runs as it is

    def __init__(
        self,
        manager: ActivationManager,
        name: str,
        number: int,
        block: torch.nn.Module,
        applied: list[bool],
        warned: set[str],
    ) -> None:
        self.applied, self._before = applied, vars(block).get("forward")
        self.manager, self.name, self.number = manager, name, number
        self.plain = block.forward  # the block's own forward
        self._block, self._buffers = block, Buffers(block)
        self._warned = warned  # changes of arguments that the blocks' warnings named

    def restore(self) -> None:
        """Restore the block's own forward, unless it has another one."""
        if vars(self._block).get("forward") is self:
            if self._before is None:
                del self._block.forward
            else:
                self._block.forward = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; under torch's checkpoint if the manager decides so.

        The manager gets the first tensor among the arguments, or None. Without gradients, the block
        runs as it is.
        """
        import torch
        from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

        if not (self.applied[0] and torch.is_grad_enabled()):
            return self.plain(*args, **kwargs)
        activation = next(_tensors((args, kwargs)), None)
        if not self.manager.decide(self.name, activation, self.number):
            return self.plain(*args, **kwargs)
        # checkpoint's own keywords could collide with the block's
        run = partial(self.plain, **kwargs)
        leaves = list(_tensors((args, kwargs)))
        if are_fake(leaves):
            return checkpoint(run, *args, use_reentrant=False)
        versions = [version_of(leaf) for leaf in leaves]
        arguments = arguments_to_compare(args, kwargs)
        contents = ArgumentContents(arguments) if arguments else None
        surroundings = Surroundings(self._block, self._buffers, leaves)
        is_first = True

        def run_again(*args: Any) -> Any:
            """Run the block; after the first time, in the surroundings of that run."""
            nonlocal is_first
            if is_first:
                is_first = False
                out = run(*args)
                surroundings.drop_unused()
                return out
            # torch checks only tensors that are positional arguments themselves
            if [version_of(leaf) for leaf in leaves] != versions:
                raise refusal(
                    self.name,
                    f"{self.name}: a tensor among its arguments was changed in place, by its "
                    "forward pass or since: recomputation would not give the same; use "
                    "operations that are not in place",
                )
            if contents is not None:
                self._warn_of_changes(contents, arguments_to_compare(args, kwargs))
            with surroundings.restored(self.name, self._block):
                return run(*args)

        # torch would end a recomputation at the last saved tensor, which an operator such as RReLU
        # fills later, and by an exception, which TorchScript replaces
        with set_checkpoint_early_stop(False):
            return checkpoint(run_again, *args, use_reentrant=False, preserve_rng_state=False)

    def _warn_of_changes(self, contents: ArgumentContents, arguments: dict[int | str, Any]) -> None:
        """Warn if arguments have changed, once for all items of a container and all blocks."""
        warned = self.__dict__.setdefault("_warned", set())  # older pickles lack it
        paths = {re.sub(r"\[[^]]*\]", "[]", path): path for path in contents.changes(arguments)}
        new = [path for kind, path in paths.items() if kind not in warned]
        if new:
            listed = ", ".join(new[:5]) + (", ..." if len(new) > 5 else "")
            warnings.warn(
                f"{self.name}: {listed} changed in its forward pass or since, and its "
                "recomputation gets the present value: gradients are wrong if they depend on it. "
                "Return new values instead of changing arguments; for a KV cache, pass "
                "use_cache=False",
                GradientWarning,
                stacklevel=2,
            )
            warned.update(paths)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments, also in nested tuples, lists and dicts of any subclass.

    torch's pytree skips subclasses that are not registered, and takes longer to find the first.
    """
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _blocks_of(module: torch.nn.Module, blocks: Any) -> dict[str, torch.nn.Module]:
    """Return the submodules that `blocks` names, by name, in order; None: the direct children.

    `blocks`: a pattern, or several. A module with several names has its first one. Raises
    TypeError for a pattern that is not a str, ValueError for one without a match.
    """
    if blocks is None:
        return dict(module.named_children())
    patterns = [blocks] if isinstance(blocks, str) else list(blocks)
    chosen: set[int] = set()
    for pattern in patterns:
        check_type("blocks", pattern, str, "names")
        matches = modules_named(module, pattern)
        if not matches:
            raise ValueError(f"no module is called {pattern!r}")
        chosen.update(id(block) for _, block in matches)
    return {name: block for name, block in module.named_modules() if id(block) in chosen}


def apply_strategy(
    manager: ActivationManager, module: torch.nn.Module, blocks: str | Iterable[str] | None
) -> AppliedStrategy:
    """Apply a manager to blocks of a module; see `ActivationManager.apply`."""
    import torch

    check_type("module", module, torch.nn.Module, "a torch.nn.Module")
    chosen = _blocks_of(module, blocks)
    if not chosen:
        raise ValueError(f"{type(module).__name__} has no blocks below it")
    refuse_overlap(list(chosen.items()))
    for name, block in chosen.items():
        forward = vars(block).get("forward")
        if isinstance(forward, _Forward) and forward.applied[0] is False:
            forward.restore()  # another replacement was above it at `remove`
        elif isinstance(forward, _Forward):
            raise ValueError(f"block {name!r} already has a manager: call remove() on that first")
        if isinstance(block, torch.nn.ModuleList | torch.nn.ModuleDict):
            raise ValueError(
                f"block {name!r} is a {type(block).__name__}, which has no forward: pass {name}.* "
                "for its children"
            )
    return AppliedStrategy(manager, chosen)
