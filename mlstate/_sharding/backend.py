"""Protocol of integrations for sharded states: this rank's part of a module or optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class ShardBackend(Protocol):
    """Operations on modules and optimizers whose tensors are divided among ranks."""

    def part_of(self, name: str, value: Any, replica: int = 0) -> Any:
        """Return this rank's part of a value in a state dict, over the value's own memory.

        It is a `Shard`, or the value itself if it is whole. `name`: for errors. `replica`: of the
        `Shard`.
        """

    def module_state(
        self, module: Any, *, fill: bool = False
    ) -> tuple[dict[str, Any], Callable[[], None] | None]:
        """Return this rank's part of a module's state, and a function or None.

        The function writes values that were set in copies back to the module. `fill`: the state
        will be written to.
        """

    def optimizer_parts(
        self, optimizer: Any, module: Any, *, fill: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any], Callable[[], None] | None]:
        """Return this rank's part of an optimizer's states, by ``"<parameter>.<state name>"``.

        `module`: has the parameters. `fill`: the states will be written to. Returns keywords of an
        `OptimizerStateDict` too, and a function that writes copies back, or None.
        """

    def needs_all_ranks(self, source: Any, module: Any) -> str:
        """Return why all ranks must collect a state together; empty if each can do so alone."""
