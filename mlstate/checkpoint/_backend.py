"""What an integration provides for saves and loads of modules and optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class OptimizerRecord(NamedTuple):
    """A checkpoint's description of an optimizer state."""

    parameter: str
    state: str | None
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[int | None, ...] | None


class CheckpointBackend(Protocol):
    """Operations on a framework's modules and optimizers as parts of a checkpoint."""

    def saved_module(
        self, module: Any, ranks: int
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return a module's tensors, its other entries, and the framework's metadata."""

    def saved_optimizer(
        self, optimizer: Any, module: Any, ranks: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return an optimizer's states and keywords, for saving by a number of ranks."""

    def tied_names(self, module: Any) -> set[str]:
        """Return the names of a module's state whose tensor has an earlier name."""

    def has_standard_state_dict(self, optimizer: Any) -> bool:
        """Return whether `state` and `param_groups` are all that ``state_dict()`` has."""

    def fill_module(self, module: Any) -> Any:
        """Return this rank's memory for a module's state, by the names of `saved_module`."""

    def own_load(
        self,
        filling: Any,
        entries: Mapping[str, Any],
        metadata: Mapping[str, dict[str, Any]] | None,
        units: list[Any],
        *,
        strict: bool,
    ) -> Any:
        """Prepare a load of some submodules by their own `load_state_dict`, and return it.

        `filling`: the target's memory. `entries`: values to load by name. `metadata`: of torch's
        modules, None if it was not saved. `units`: the submodules.
        """

    def fill_optimizer(
        self,
        optimizer: Any,
        module: Any,
        records: dict[str, OptimizerRecord],
        saved: Any,
        read: Callable[[list[str]], dict[str, Any]],
        names: Any,
        meant: Callable[[list[str]], list[str]],
        *,
        shapes: Mapping[str, tuple[int, ...]],
        strict: bool,
        complete: bool,
        cast: bool,
    ) -> Any:
        """Return this rank's memory for the states of an optimizer, to be filled by `read`."""
