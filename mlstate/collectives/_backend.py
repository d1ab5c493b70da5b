"""Protocol of integrations that wrap groups of a framework, such as torch.distributed's."""

from __future__ import annotations

from typing import Any, Protocol


class GroupBackend(Protocol):
    """Groups of a framework as process groups."""

    def wrapped_group(self, value: object) -> Any:
        """Return the process group that wraps a group of the framework; None for other values.

        Each group is wrapped once: the same `value` returns the same object.
        """
