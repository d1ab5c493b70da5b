"""Refusal of two hooks on one parameter, the `gradients=` argument, hooks of non-torch models."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping

_lock = threading.Lock()  # protects `_live`
_live: weakref.WeakSet[Hooks] = weakref.WeakSet()


class Hooks:
    """The hooks of one `FSDPBackwardHook` on a model.

    Raises ValueError if another object has a hook on one of the parameters. `names` maps keys
    to parameter names. The key identifies a parameter in this process, and is the same for all
    `FSDPBackwardHook` objects.
    """

    def __init__(self, names: Mapping[Hashable, str]) -> None:
        """Check that no other object has hooks on these parameters; the caller adds the hooks."""
        self._names = names
        self._handles: list[Any] = []
        for other in live_hooks():
            for name in [name for key, name in names.items() if key in other._names]:
                raise ValueError(
                    f"{name}: another FSDPBackwardHook has a hook on this parameter, so its "
                    "gradient would be reduced twice; close() that object first"
                )

    def _make_live(self) -> None:
        """Let later sets of hooks see this one, until `remove`; called after the last hook."""
        with _lock:
            _live.add(self)

    def remove(self) -> None:
        """Remove the hooks from the model, if it supports removal."""
        for handle in self._handles:
            handle.remove()
        with _lock:
            _live.discard(self)


def live_hooks() -> list[Hooks]:
    """Return the sets of hooks of all `FSDPBackwardHook` objects in this process."""
    with _lock:
        return list(_live)


class ModelHooks(Hooks):
    """Hooks on an object with ``register_backward_hook``.

    They call `scatter` with a parameter's name and gradient, and return this rank's part.
    """

    def __init__(
        self, model: Any, names: Collection[str], scatter: Callable[[str, Any], Any]
    ) -> None:
        """Register `scatter(name, gradient)` as the model's backward hook of each parameter.

        `names`: of the parameters. `scatter` returns the value that replaces the gradient.
        """
        super().__init__({(id(model), name): name for name in names})
        self._model = model  # keeps the id from being reused
        for name in names:
            handle = model.register_backward_hook(name, partial(scatter, name))
            if hasattr(handle, "remove"):
                self._handles.append(handle)
        self._make_live()


def check_gradients(gradients: str, is_module: bool, keeps_others: bool) -> None:
    """Raise ValueError if `gradients` is unknown or contradicts other arguments.

    See `FSDPBackwardHook.register_hooks`. `is_module`: the model is a torch module. `keeps_others`:
    `keep_full_gradient` or `accumulate` is set.
    """
    if gradients not in ("shard", "full"):
        raise ValueError(f"gradients must be 'shard' or 'full', got {gradients!r}")
    if gradients == "shard":
        return
    if not is_module:
        raise ValueError("gradients='full' needs a torch module, whose parameters have .grad")
    if keeps_others:
        raise ValueError(
            "gradients='full' leaves reduced gradients in parameter.grad, where they are added up: "
            "do not pass keep_full_gradient and accumulate"
        )
