"""What the commands for checkpoints share: which one is meant, tables, progress."""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _folder
from .._checkpoint_manager import find_root
from .._text import table_text
from ..checkpoint import Checkpoint
from ..errors import MLStateError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from .._load import LoadedState

__all__ = [
    "EPILOG",
    "Folder",
    "add_command",
    "count_text",
    "find",
    "path_text",
    "print_table",
    "progress_of",
    "steps_text",
]

EPILOG = "exit status: 0 good, {no}2 wrong usage or an error"
_WIDTH = 120  # of a cell


def add_command(
    commands: argparse._SubParsersAction[Any], name: str, help_text: str, no: str | None = None
) -> argparse.ArgumentParser:
    """Add a parser that takes ``--json``; `no` says when the exit status is 1."""
    epilog = EPILOG.format(no="" if no is None else f"1 {no}, ")
    parser = commands.add_parser(name, help=help_text, description=help_text, epilog=epilog)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser  # type: ignore[no-any-return]


# ---- which checkpoint ----


class Folder(NamedTuple):
    """One checkpoint in a folder."""

    path: str
    root: str

    def checkpoint(self) -> Checkpoint:
        """Open it."""
        return Checkpoint(self.path, _root=self.root)

    def load(self, **keywords: Any) -> LoadedState:
        """Load it."""
        return self.checkpoint().load(**keywords)


def find(path: str, step: int | None) -> Folder | None:
    """Return the checkpoint that is meant; None where `path` is a plain file."""
    place = Path(path)
    if not place.is_dir():
        place.stat()  # its error is the best text about a missing file
        if step is not None:
            raise ValueError(f"{path} is one file: it has no steps; leave the step out")
        return None
    folder = str(place.absolute())
    if not any((place / name).exists() for name in (_folder.MANIFEST, *_folder.FOLDERS)):
        raise _folder.store_error(
            FileNotFoundError(2, "no checkpoint of mlstate in this folder"), "cannot read", path
        )
    return Folder(folder, _folder.MANIFEST if step is None else find_root(folder, step))


# ---- text ----


def count_text(count: int, what: str) -> str:
    """Write a number of things, which are regular words."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def path_text(path: str) -> str:
    """Write a path in one line, whatever is in it."""
    return path if path.isprintable() else repr(path)[1:-1]


def steps_text(steps: Sequence[int | None]) -> str:
    """List steps."""
    return ", ".join("?" if step is None else str(step) for step in steps) or "none"


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print all rows; nothing where there are none."""
    if rows:
        print(table_text(headers, rows, len(rows), _WIDTH))


# ---- progress ----


class _Line:
    """A line on the terminal that says how much is done, written anew for each per cent."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._shown = ""

    def add(self, count: int) -> None:
        self._done += count
        percent = min(100, 100 * self._done // self._total)
        text = f"{self._what} {percent:3d} %"
        if text != self._shown:
            self._shown = text
            print(f"\r{text}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._shown:
            print("\r" + " " * len(self._shown), end="\r", file=sys.stderr, flush=True)


@contextmanager
def progress_of(what: str, count: Callable[[], int]) -> Iterator[Callable[[int], object] | None]:
    """Give what is to be called with numbers of bytes; None unless a person looks on.

    `count` says how many there will be; 0 where nobody knows, and then there is no progress.
    """
    total = 0
    if sys.stderr is not None and sys.stderr.isatty():
        with suppress(MLStateError):
            total = count()
    if not total:
        yield None
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        line = _Line(what, total)
        try:
            yield line.add
        finally:
            line.close()
        return
    unit = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    with tqdm(desc=what, total=total, leave=False, file=sys.stderr, **unit) as bar:
        yield bar.update
