"""Protocols that the torch integration implements for activation checkpointing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from types import TracebackType

    from ._chain import Chain
    from ._recompute_check import RecomputeReport


class AppliedStrategy(Protocol):
    """Blocks of a model whose decisions an `ActivationManager` makes, until removed."""

    blocks: tuple[str, ...]

    def remove(self) -> None:
        """Restore the blocks as before the strategy; further calls do nothing."""

    def __enter__(self) -> AppliedStrategy:
        """Return itself."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the blocks, as `remove`; an error in the ``with`` block is not suppressed."""


class ActivationBackend(Protocol):
    """Measuring and running a framework's modules by plans and strategies."""

    def profile_chain(
        self,
        module: Any,
        sample: Any,
        *,
        blocks: Any = None,
        repeats: int = 5,
        offload: bool | str | os.PathLike[str] = False,
        loss: Callable[[Any], Any] | None = None,
    ) -> Chain:
        """Measure the blocks of a model; public as `Chain.from_torch`."""

    def apply_plan(
        self,
        plan: Any,
        module: Any = None,
        *,
        blocks: Any = None,
        offload_to: str | os.PathLike[str] | None = None,
        observe: Callable[[str, int], None] | None = None,
    ) -> Any:
        """Run the blocks of a model by a plan's steps; public as `Plan.apply`."""

    def apply_strategy(self, manager: Any, module: Any, blocks: Any) -> AppliedStrategy:
        """Apply a manager to blocks of a module; see `ActivationManager.apply`."""

    def check_recompute(
        self, module: Any, plan: Any, sample: Any, *, blocks: Any = None
    ) -> RecomputeReport:
        """Recompute blocks and compare; public as `mlstate.activation.check`."""

    def cuda_memory(self, source: str) -> tuple[int, int, int, str]:
        """Return used, peak and total bytes of a CUDA device, and its name ("cuda:0").

        `source`: "cuda" for the current device, or "cuda:N".
        """
