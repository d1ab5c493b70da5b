"""What an integration provides for a framework's own file formats."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..._common.atomic_file import Target
    from .parts import Parts, Selection


class FileBackend(Protocol):
    """Reading and writing of files of torch and of distributed checkpoints."""

    def read_pt(self, path: Path) -> Parts: ...
    def write_pt(
        self,
        target: Target,
        model: Any,
        optimizer: Any,
        metadata: Mapping[str, Any],
        states: Mapping[str, Any],
    ) -> None: ...
    def read_tree(self, path: Path) -> Any: ...
    def parts_of(self, tree: Any, path: Path) -> Parts: ...
    def write_tree(self, tree: Any, file: IO[bytes]) -> None: ...
    def read_dcp(self, path: Path, selection: Selection) -> Parts: ...
    def write_dcp(
        self,
        target: Target,
        model: Any,
        optimizer: Any,
        metadata: Mapping[str, Any],
        states: Mapping[str, Any],
    ) -> None: ...
