"""Which integration handles a tensor, module or optimizer; torch imported on first use.

The package calls a framework through Protocols and imports no integration by name. Each subsystem
has its own Protocol. The registry imports an integration on the first use of a framework, and the
integration registers itself then. If it lacks a Protocol, operations of that subsystem raise
TypeError.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from functools import partial

BackendT = TypeVar("BackendT")


class Framework(Protocol):
    """What every integration provides: which values it knows, and where its operations are."""

    BACKENDS: Mapping[str, str]  # the full name of a module by the Protocol that it implements

    def recognizes(self, value: object) -> bool:
        """Return whether a value is a tensor, module or optimizer of the framework."""

    def is_module(self, value: object) -> bool:
        """Return whether a value is a module of the framework."""

    def is_optimizer(self, value: object) -> bool:
        """Return whether a value is an optimizer of the framework."""


class TensorBackend(Protocol):
    """Operations on a framework's tensors that every subsystem uses."""

    def arrays_of(self, state: Any) -> dict[str, Any]:
        """Return NumPy arrays over the memory of tensors, by name; other values stay.

        Tensors on a device stay tensors.
        """

    def tensors_of(self, state: Mapping[str, Any], *, copy: bool = False) -> dict[str, Any]:
        """Return tensors over the memory of arrays by name, or with `copy` over new memory."""

    def device_of(self, device: Any) -> Any:
        """Return the device that a user named; raise ValueError if there is none."""

    def move_tensor(self, tensor: Any, device: Any) -> Any:
        """Return a leaf on a device; the tensor itself if it is there or on ``meta``."""

    def dtype_of(self, name: str) -> Any:
        """Return the framework's dtype of a name; raise ValueError if there is none."""

    def size_of(self, lengths: Iterable[int]) -> Any:
        """Return a shape of the framework's own type, such as ``torch.Size``."""

    def explain_unsupported_tensor(self, tensor: Any) -> str:
        """Return why a tensor is not plain memory, with a remedy; "" if it is."""

    def refuse_unstorable(self, name: str, tensor: Any, label: str = "") -> None:
        """Raise UnstorableError if a tensor cannot be stored.

        `name`: of the tensor. `label`: its path for the message; "": the name.
        """

    def write_into_tensor(self, out: Any, write: Callable[[Any], Any]) -> Any:
        """Let `write` fill a tensor, with the framework's checks for writes in place."""

    def digest_part(
        self, tensor: Any, shape: tuple[int, ...], starts: tuple[int, ...]
    ) -> tuple[int, int]:
        """Return what `_core.digest_part` returns, of a tensor on a device."""

    def note_written(self, tensors: Iterable[Any]) -> None:
        """Tell autograd that tensors were written to."""

    def reduce_state(self, state: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the result of ``__reduce_ex__`` of a state dict."""

    def memory_change(self, tensor: Any, source: Any) -> partial[Any]:
        """Return the change that gives a tensor the memory of `source`, without a copy.

        None as `source` leaves it without elements.
        """

    def has_given_away(self) -> bool:
        """Return whether `memory_change` removed any tensor's elements in this process."""

    def is_given_away(self, tensor: Any) -> bool:
        """Return whether `memory_change` removed this tensor's elements.

        Call it only if `has_given_away` returns true.
        """


# Frameworks by the module that users import, and the integration that registers each.
_INTEGRATIONS = {"torch": "mlstate.integrations.torch"}
_registered: dict[str, Framework] = {}
_backends: dict[tuple[str, type], Any] = {}  # modules that were used, by framework and Protocol


def register(name: str, framework: Framework) -> None:
    """Register an integration by the module that users of its framework import."""
    _registered[name] = framework


def backend_named(name: str, protocol: type[BackendT]) -> BackendT:
    """Return the implementation of a Protocol for the framework `name`.

    The integration is imported if necessary. Raises TypeError if it does not implement the
    Protocol.
    """
    backend: BackendT | None = _backends.get((name, protocol))
    if backend is None:
        if name not in _registered:
            import_module(_INTEGRATIONS[name])
        module = _registered[name].BACKENDS.get(protocol.__name__)
        if module is None:
            raise TypeError(f"the integration of {name} does not implement {protocol.__name__}")
        backend = _backends[name, protocol] = cast("BackendT", import_module(module))
    return backend


def torch_backend(feature: str, protocol: type[BackendT]) -> BackendT:
    """Return torch's implementation of a Protocol; raise ImportError without torch.

    `feature`: text for the error, in the plural; the error names the extra to install, too.
    """
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ImportError(
            f"{feature} need torch: pip install 'mlstate[torch]'", name="torch"
        ) from None
    return backend_named("torch", protocol)


def imported_backends(protocol: type[BackendT]) -> list[BackendT]:
    """Return the backends of all imported frameworks that implement a Protocol."""
    return [
        backend_named(name, protocol)
        for name in _INTEGRATIONS
        if (framework := _imported(name)) is not None and protocol.__name__ in framework.BACKENDS
    ]


def backend_of(value: object, protocol: type[BackendT]) -> BackendT:
    """Return the implementation of a Protocol for a tensor, module or optimizer.

    Only imported frameworks are asked, because no other can have created the value. Raises
    TypeError for any other value.
    """
    for name in _INTEGRATIONS:
        framework = _imported(name)
        if framework is not None and framework.recognizes(value):
            return backend_named(name, protocol)
    raise TypeError(f"{type(value).__name__} is not a tensor, module or optimizer of a framework")


def is_module(value: object) -> bool:
    """Return whether a value is a module of an imported framework."""
    return any(framework.is_module(value) for framework in _frameworks_for(value))


def is_optimizer(value: object) -> bool:
    """Return whether a value is an optimizer of an imported framework."""
    return any(framework.is_optimizer(value) for framework in _frameworks_for(value))


def _frameworks_for(value: object) -> list[Framework]:
    """Return the frameworks that may know a value; a dict needs none, so none is imported."""
    if value is None or isinstance(value, dict):
        return []
    return [framework for name in _INTEGRATIONS if (framework := _imported(name)) is not None]


def _imported(name: str) -> Framework | None:
    """Return the integration of the framework `name`; None if the framework is not imported."""
    if sys.modules.get(name) is None:  # its integration may be imported without it
        return None
    if name not in _registered:
        import_module(_INTEGRATIONS[name])
    return _registered[name]
