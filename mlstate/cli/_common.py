"""Helpers of the checkpoint commands: finding the checkpoint, tables, progress."""

from __future__ import annotations

import argparse
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from .._common.local_path import local_path
from .._common.regular_file import open_regular
from .._common.store_error import store_error
from .._common.text import table_text
from ..checkpoint._files.convert import SUFFIXES
from ..checkpoint._files.lightning import SUFFIX as LIGHTNING
from ..checkpoint._folder.local import hub_hint
from ..checkpoint._folder.names import FOLDERS, MANIFEST
from ..checkpoint._folder.weight_names import weights_root
from ..checkpoint._manager import find_root
from ..checkpoint._store.open_path import RootPath, is_url, open_files
from ..checkpoint._store.weight_files import is_weights_root
from ..errors import MLStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

EPILOG = "exit status: 0 good, {no}2 wrong usage or an error"
PATH_HELP = "a checkpoint, the folder of a run or of a Hugging Face model, or a .safetensors file"
FORCE_HELP = "replace an existing target, all steps of a run included"
_WIDTH = 120  # characters of a cell


def add_command(
    commands: Commands,
    name: str,
    help_text: str,
    run: Callable[[argparse.Namespace], int],
    no: str | None = None,
) -> argparse.ArgumentParser:
    """Add a parser with the option ``--json``; `no` describes exit status 1 in the help."""
    epilog = EPILOG.format(no="" if no is None else f"1 {no}, ")
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help_text, description=help_text, epilog=epilog
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def add_lock_timeout(parser: argparse.ArgumentParser) -> None:
    """Add the option for the time to wait for another writer."""
    parser.add_argument(
        "--lock-timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait while another process writes (default: 0, fail at once)",
    )


# ---- finding the checkpoint ----


def kind_of(root: str) -> str:
    """Return what a root describes: ``checkpoint``, ``huggingface``, or one file in a store."""
    if weights_root([root]) is not None:
        return "huggingface"
    return "safetensors" if is_weights_root(root) else "checkpoint"


def stat_path(path: str) -> None:
    """Raise the error for a missing path; it names the command that downloads a model."""
    try:
        Path(local_path(path)).stat()
    except FileNotFoundError as error:
        text = f"{error.strerror}{hub_hint(path)}"
        raise FileNotFoundError(error.errno, text, path) from None


def find(path: str, step: int | None) -> RootPath | None:
    """Return the checkpoint for a path and step; None if `path` is a plain file."""
    if is_url(path):
        store = open_files(path, reads=True)
        root = MANIFEST
        with suppress(MLStateError):  # reading the checkpoint reports the reason
            root = store.open_root()[0]
        if step is None:
            return RootPath(store, root)
        if root != MANIFEST:
            raise ValueError(f"{path} holds weights of another program: it has no steps")
        return RootPath(store, find_root(store, step))
    place = Path(local_path(path))
    if not place.is_dir():
        stat_path(path)
        if step is not None:
            raise ValueError(f"{path} is one file: it has no steps; leave the step out")
        return None
    files = open_files(path)
    root = files.current_root()
    if root != MANIFEST:
        if step is not None:
            raise ValueError(f"{path} is a Hugging Face folder: it has no steps")
        return RootPath(files, root)
    if not any((place / name).exists() for name in (MANIFEST, *FOLDERS)):
        hint = _reader_hint(place)
        text = "no checkpoint of mlstate in this folder" + (f"; {hint}" if hint else "")
        raise store_error(FileNotFoundError(2, text), "cannot read", path)
    return RootPath(files, MANIFEST if step is None else find_root(files, step))


# ---- files and folders of other programs ----


def _reader_hint(place: Path) -> str | None:
    """Return which command reads a file or folder of another program; None if none does."""
    suffix = place.suffix.lower()
    if suffix in (".mlpackage", ".mlmodel"):
        return f"mlstate coreml states reads a {suffix}"
    if suffix == ".aimodel":
        return "mlstate coreai reads an .aimodel"
    if place.is_dir():
        is_dcp = (place / ".metadata").exists()
        return "mlstate convert reads a torch distributed checkpoint" if is_dcp else None
    name = "lightning" if suffix == LIGHTNING else SUFFIXES.get(suffix)
    return name and f"mlstate convert reads a {suffix} file (format {name})"


def _has_safetensors_header(place: Path) -> bool:
    """Return whether a file starts with the length of a header and the header's brace."""
    with open_regular(place) as file:
        start = file.read(9)
        size = file.seek(0, 2)
    return len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") <= size - 8


def check_is_safetensors(path: str) -> None:
    """Raise ValueError for a file of another kind, with the command that reads it.

    A damaged ``.safetensors`` file passes: the caller reports its damage.
    """
    place = Path(local_path(path))
    if place.suffix.lower() == ".safetensors" or not place.is_file():
        return
    if not _has_safetensors_header(place):
        hint = f"mlstate convert reads {' '.join(SUFFIXES)}, and with --from any suffix"
        raise ValueError(f"{path} is not a .safetensors file: {_reader_hint(place) or hint}")


# ---- text ----


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print all rows; print nothing for an empty table."""
    if rows:
        print(table_text(headers, rows, len(rows), _WIDTH))


# ---- progress ----


class _Line:
    """A line on the terminal with the progress in per cent, rewritten on each change."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._printed_text = ""

    def add(self, count: int) -> None:
        self._done += count
        percent = min(100, 100 * self._done // self._total)
        text = f"{self._label} {percent:3d} %"
        if text != self._printed_text:
            self._printed_text = text
            print(f"\r{text}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._printed_text:
            print("\r" + " " * len(self._printed_text), end="\r", file=sys.stderr, flush=True)


@contextmanager
def progress_of(label: str, count: Callable[[], int]) -> Iterator[Callable[[int], object] | None]:
    """Yield a function that takes numbers of bytes, or None if stderr is not a terminal.

    `count` returns the total; if it is 0 or unknown, None is yielded too.
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
        line = _Line(label, total)
        try:
            yield line.add
        finally:
            line.close()
        return
    unit = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    with tqdm(desc=label, total=total, leave=False, file=sys.stderr, **unit) as bar:
        yield bar.update
