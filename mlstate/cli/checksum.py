"""``mlstate checksum``: write checksums of files that another program wrote next to them."""

from __future__ import annotations

import argparse
from pathlib import Path

from .._common.local_path import local_path
from .._common.text import bytes_text, count_text, printable
from ..checkpoint import checksum
from ._common import Commands, add_command, print_result, stat_path
from ._progress import progress_of

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate checksum`` to `commands`; it sets ``run``."""
    help_text = "write checksums next to files of another program, for load and verify"
    usages = {
        "path": "a folder, or a file of any format; it does not change",
        "--force": "replace existing checksums",
    }
    add_command(commands, "checksum", help_text, run_checksum, usages)


def _bytes_to_read(path: str) -> int:
    """Return the bytes of a file, or of the files directly in a folder, for the progress."""
    place = Path(local_path(path))
    files = place.iterdir() if place.is_dir() else [place]
    return sum(file.stat().st_size for file in files if file.is_file())


def run_checksum(arguments: argparse.Namespace) -> int:
    """Write the checksums of the user's files, print their number, and return 0."""
    if "://" not in arguments.path:
        stat_path(arguments.path)
    with progress_of("checksum", lambda: _bytes_to_read(arguments.path)) as progress:
        files = checksum(arguments.path, overwrite=arguments.force, progress=progress)
    size = f"{count_text(len(files), 'file')}, {bytes_text(sum(files.values()))}"
    text = f"{printable(arguments.path)}: checksums of {size}, written"
    return print_result(arguments, {"path": arguments.path, "files": files}, [text])
