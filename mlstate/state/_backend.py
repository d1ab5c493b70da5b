"""What an integration provides for states of optimizers."""

from __future__ import annotations

from typing import Any, Protocol


class StateBackend(Protocol):
    """Operations on states of a framework's optimizers."""

    def optimizer_state(self, optimizer: Any, names: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return an optimizer's state as arrays; see `mlstate.OptimizerStateDict.from_torch`."""

    def optimizer_dict(
        self, osd: Any, optimizer: Any, names: Any, *, copy: bool = False
    ) -> dict[str, Any]:
        """Return a dict for ``load_state_dict``; see `mlstate.OptimizerStateDict.to_torch`."""
