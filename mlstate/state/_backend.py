"""What an integration provides for states of modules and optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class StateBackend(Protocol):
    """Operations on states of a framework's modules and optimizers."""

    def optimizer_state(
        self, optimizer: Any, names: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]: ...
    def optimizer_dict(
        self, osd: Any, optimizer: Any, names: Any, *, copy: bool = False
    ) -> dict[str, Any]: ...
    def module_entries(self, module: Any) -> dict[str, Any]: ...
    def module_target(
        self, module: Any, source: Mapping[str, Any], *, strict: bool
    ) -> tuple[Any, dict[str, Any], Any]: ...
