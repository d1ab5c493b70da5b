"""What an integration provides for tiered states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


class TierBackend(Protocol):
    """Copies of a framework's tensors between devices and main memory."""

    def accelerator(self, values: Iterable[Any], device: Any) -> Any: ...
    def on_device(self, array: Any, device: Any) -> Any: ...
    def in_memory(self, tensor: Any) -> Any: ...
    def tensors_of_optimizer(self, optimizer: Any, module: Any) -> dict[str, Any]: ...
    def optimizer_groups(self, optimizer: Any, names: list[str]) -> dict[str, Any]: ...
