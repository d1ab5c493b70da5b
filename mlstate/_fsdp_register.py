"""Hooks on a model that is not a torch module; checks that all models share."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_lock = threading.Lock()
_live: weakref.WeakSet[ModelHooks] = weakref.WeakSet()


class ModelHooks:
    """The hooks of one `FSDPBackwardHook` on an object with ``register_backward_hook``.

    Parameters
    ----------
    model : object
        The model.
    names : iterable of str
        Its parameters.
    scatter : callable
        Called with a name and its gradient; returns this rank's part.

    Raises
    ------
    ValueError
        Another object has a hook on one of the parameters.
    """

    def __init__(
        self, model: Any, names: Iterable[str], scatter: Callable[[str, Any], Any]
    ) -> None:
        self._model = model
        self._names = set(names)
        self._handles: list[Any] = []
        with _lock:
            others = [other for other in _live if other._model is model]
        for name in names:
            if any(name in other._names for other in others):
                raise second_hook(name)
        for name in names:
            handle = model.register_backward_hook(name, _bound(scatter, name))
            if hasattr(handle, "remove"):
                self._handles.append(handle)
        with _lock:
            _live.add(self)

    def remove(self) -> None:
        """Take the hooks off the model, as far as it can."""
        for handle in self._handles:
            handle.remove()
        with _lock:
            _live.discard(self)


def _bound(scatter: Callable[[str, Any], Any], name: str) -> Callable[[Any], Any]:
    return lambda gradient: scatter(name, gradient)


def second_hook(name: str) -> ValueError:
    """Make the error for a parameter that has a hook of another object."""
    return ValueError(
        f"{name}: another FSDPBackwardHook has a hook on this parameter, so its gradient would "
        "be reduced twice; close() that object first"
    )


def check_gradients(gradients: str, is_module: bool, keeps_others: bool) -> None:
    """Raise ValueError if `gradients` is unknown, or contradicts the other arguments."""
    if gradients not in ("shard", "full"):
        raise ValueError(f"gradients must be 'shard' or 'full', got {gradients!r}")
    if gradients == "shard":
        return
    if not is_module:
        raise ValueError("gradients='full' needs a torch module, whose parameters have .grad")
    if keeps_others:
        raise ValueError(
            "gradients='full' leaves reduced gradients in parameter.grad, where they add up: "
            "leave out keep_full_gradient and accumulate"
        )
