"""Protocols of integrations for a framework's files: ``torch.save``, DCP."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..._common.atomic_file import Target
    from ...state._optimizer_state import OptimizerStateDict
    from .parts import Parts, Selection


class PtBackend(Protocol):
    """Reading and writing of files of ``torch.save``."""

    def read_pt(self, path: Path) -> Parts:
        """Return the content of a ``torch.save`` file without running code from it."""

    def write_pt(self, target: Target, parts: Parts) -> None:
        """Write a file that ``torch.load`` reads with ``weights_only``, atomically.

        A model or an optimizer that is None is left out. Each state is a further entry.
        """

    def entries_of(self, parts: Parts, *, numbered: bool = False) -> dict[str, Any]:
        """Return ``model``, ``optimizer`` and the named states as the framework stores them.

        `numbered`: optimizers number their parameters, in the order of their groups.
        """

    def read_tree(self, path: Path) -> Any:
        """Read any value from a ``torch.save`` file without running code from it."""

    def read_ranks(self, paths: list[Path], *, keeps_differences: bool = False) -> Any:
        """Return the value that the ranks of a job saved, each to one of `paths`.

        Parts of tensors are joined. Raises CompatibilityError if the values differ otherwise;
        `keeps_differences`: then an entry of a dict becomes a list with one item for each rank.
        """

    def optimizer_of(self, tree: Mapping[str, Any], path: Path) -> OptimizerStateDict:
        """Return the optimizer in a tree, in a form of the framework, as a state.

        `path`: of the file, for errors. Raises CompatibilityError for values that mlstate cannot
        hold, FormatError for a malformed optimizer.
        """

    def write_tree(self, tree: Any, file: IO[bytes]) -> None:
        """Write any value with ``torch.save``."""


class DcpBackend(Protocol):
    """Reading and writing of directories of torch.distributed.checkpoint."""

    def read_dcp(self, path: Path, selection: Selection) -> Parts:
        """Read a checkpoint of torch.distributed.checkpoint, written by any number of ranks."""

    def write_dcp(self, target: Target, parts: Parts) -> None:
        """Write a checkpoint that torch.distributed.checkpoint reads, in place of an old one."""
