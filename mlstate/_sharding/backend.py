"""What an integration provides for sharded states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class ShardBackend(Protocol):
    """Operations on modules and optimizers whose tensors are divided among ranks."""

    def part_of(self, name: str, value: Any, replica: int = 0) -> Any: ...
    def module_state(
        self, module: Any, *, fill: bool = False
    ) -> tuple[dict[str, Any], Callable[[], None] | None]: ...
    def optimizer_parts(
        self, optimizer: Any, module: Any, *, fill: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any], Callable[[], None] | None]: ...
    def needs_all_ranks(self, source: Any, module: Any) -> str: ...
