"""Protocol of integrations for tiered states: copies between device and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


class TierBackend(Protocol):
    """Copies of a framework's tensors between devices and main memory."""

    def accelerator(self, values: Iterable[Any], device: Any) -> Any:
        """Return the device of the hot tier, or None if that is main memory."""

    def on_device(self, array: Any, device: Any) -> Any:
        """Copy an array or a tensor to new memory on a device; a tensor keeps its strides."""

    def in_memory(self, tensors: list[Any]) -> list[Any]:
        """Copy tensors to new main memory, with the same strides, after all work on them ended."""

    def tensors_of_optimizer(self, optimizer: Any, module: Any) -> dict[str, Any]:
        """Return the values of an optimizer's states, by ``"<parameter>.<state>"``."""

    def optimizer_groups(self, optimizer: Any, names: list[str]) -> dict[str, Any]:
        """Return the groups of an optimizer, by names of parameters, and its learning rate."""
