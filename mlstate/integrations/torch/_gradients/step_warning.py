"""Warning for optimizer steps over parameters whose gradients were removed."""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

from ....fsdp._hook_registry import live_hooks
from .backward import ModuleHooks

if TYPE_CHECKING:
    from torch.optim import Optimizer


@cache
def watch_steps() -> None:
    """Check the parameters of every optimizer before each step, from the first call on."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_warn_of_taken_gradients)


def _warn_of_taken_gradients(optimizer: Optimizer, *_: Any) -> None:
    """Warn once for each hook object if an optimizer skips its parameters."""
    for hooks in live_hooks():
        if not isinstance(hooks, ModuleHooks) or not hooks.taken or hooks.has_warned:
            continue
        names = {id(hooks.parameters[name]): name for name in hooks.taken}
        empty = [
            names[id(parameter)]
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is None and id(parameter) in names
        ]
        if empty:
            hooks.has_warned = True
            warnings.warn(
                f"{type(optimizer).__name__}.step changes nothing in {len(empty)} parameters "
                f"({', '.join(empty[:3])}{', ...' if len(empty) > 3 else ''}): their gradients "
                "are in unit.local_gradient, and parameter.grad is None. Pass gradients='full' "
                "to register_hooks, or give the optimizer this rank's parts",
                RuntimeWarning,
                stacklevel=3,
            )
