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

    def read_pt(self, path: Path) -> Parts:
        """Read a ``torch.save`` file without running code from it."""

    def write_pt(
        self,
        target: Target,
        model: Any,
        optimizer: Any,
        metadata: Mapping[str, Any],
        states: Mapping[str, Any],
    ) -> None:
        """Atomically write a file that ``torch.load`` reads with ``weights_only``.

        A model or optimizer of None is left out; the others are dicts of arrays by name.
        """

    def read_tree(self, path: Path) -> Any:
        """Read any value from a ``torch.save`` file without running code from it."""

    def read_ranks(self, paths: list[Path]) -> Any:
        """Read the value that each rank of a job saved to a file, and join the parts of tensors."""

    def parts_of(self, tree: Any, path: Path) -> Parts:
        """Split a tree into model, optimizer, plain values, and named states."""

    def write_tree(self, tree: Any, file: IO[bytes]) -> None:
        """Write any value with ``torch.save``."""

    def read_dcp(self, path: Path, selection: Selection) -> Parts:
        """Read a checkpoint of torch.distributed.checkpoint, written by any number of ranks."""

    def write_dcp(
        self,
        target: Target,
        model: Any,
        optimizer: Any,
        metadata: Mapping[str, Any],
        states: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint that torch.distributed.checkpoint reads, in place of an old one.

        A model or optimizer of None is left out; the others are dicts of arrays by name.
        """
