"""What an integration provides for activation checkpointing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from ._chain import Chain
    from ._recompute_check import RecomputeReport


class AppliedStrategy(Protocol):
    """Blocks of a model whose decisions an `ActivationManager` makes, until removed."""

    blocks: tuple[str, ...]

    def remove(self) -> None:
        """Restore the blocks; further calls do nothing."""

    def __enter__(self) -> AppliedStrategy: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


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
    ) -> Chain: ...
    def apply_plan(
        self,
        plan: Any,
        module: Any = None,
        *,
        blocks: Any = None,
        offload_to: str | os.PathLike[str] | None = None,
        observe: Callable[[str, int], None] | None = None,
    ) -> Any: ...
    def apply_strategy(self, manager: Any, module: Any, blocks: Any) -> AppliedStrategy: ...
    def check_recompute(
        self, module: Any, plan: Any, sample: Any, *, blocks: Any = None
    ) -> RecomputeReport: ...
    def operator_contexts(self, saved: Iterable[str]) -> tuple[Any, Any]: ...
    def cuda_memory(self, source: str) -> tuple[int, int, int, str]: ...
