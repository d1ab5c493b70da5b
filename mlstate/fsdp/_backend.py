"""What an integration provides for the reduction of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class ModuleHooks(Protocol):
    """Hooks on the parameters of a module, until they are removed."""

    parameters: dict[str, Any]
    is_full: bool
    unsent: dict[str, int]

    def begin_pass(self, on_end: Callable[[], None], rank: int) -> Callable[[], Any]:
        """Call a function at the end of the running backward pass, unless an error aborts it."""

    def outdated(self) -> str:
        """Return why gradients of the module would stay unreduced, or an empty string."""

    def keep_unsent(self, name: str) -> None:
        """Note that a `no_sync` pass has added to a parameter's gradient."""

    def take(self, name: str, token: Any) -> tuple[Any, Callable[[], None] | None]:
        """Return a parameter's gradient, and remove it unless it is to be kept."""

    def take_missing(self, name: str, token: Any) -> tuple[Any, Callable[[], None] | None]:
        """Apply `take` to a gradient of earlier passes that this pass did not compute."""

    def gather_full(self, buckets: Iterable[Any], group: Any, timeout: float | None) -> None:
        """Add the reduced full gradients to the existing gradient of each parameter."""

    def drop_full(self) -> None:
        """Remove all gradients, because not all are reduced."""

    def remove(self) -> None:
        """Remove the hooks."""


class GradientBackend(Protocol):
    """Operations on a framework's gradients, and hooks that receive them."""

    def readable(self, tensor: Any) -> Any:
        """Return the tensor as memory of the core, or None if only the framework can add it."""

    def copy_of(self, tensor: Any, dtype: str | None) -> Any:
        """Return a copy for accumulation, in C order if the tensor is strided."""

    def item_bytes(self, dtype: str, like: Any) -> int:
        """Return the size of an element of a dtype in bytes."""

    def tensor_in(self, memory: Any, dtype: str, like: Any) -> Any:
        """Return a tensor over `memory` with the shape of `like`; it keeps the memory alive."""

    def add_gradient(self, total: Any, tensor: Any) -> None:
        """Add with the framework's operation, for other devices, layouts and subclasses."""

    def norm_partial(self, tensor: Any) -> tuple[float, int]:
        """Return the sum of squares and the number of non-finite elements."""

    def why_not_reduced(self, tensor: Any) -> str:
        """Return why a parameter or gradient cannot be reduced, or an empty string."""

    def parameters_of(self, module: Any) -> Mapping[str, Any]:
        """Return the parameters of a module by name; a shared one has only its first name."""

    def reduce_on_device(
        self, group: Any, entry: Any, terms: Any, timeout: float | None
    ) -> tuple[float, int]:
        """Reduce a gradient on a device; return sum of squares and non-finite elements."""

    def hook_module(
        self,
        module: Any,
        units: Mapping[str, Any],
        receive: Callable[[str, Any], None],
        *,
        is_full: bool,
        keep: bool,
    ) -> ModuleHooks:
        """Register hooks on a module's parameters; `receive` gets each name and parameter.

        `is_full`: reduced gradients are stored in ``parameter.grad``. `keep`: unreduced ones stay
        there.
        """
