"""``mlstate checksum``: write checksums of files that another program wrote next to them."""

from __future__ import annotations

import argparse

from .._common.text import bytes_text, count_text
from ..checkpoint import checksum
from ._common import Commands, add_command, bytes_of_files, print_result, shared, stat_path
from ._progress import progress_of

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate checksum`` to `commands`; it sets ``run``."""
    help_text = "write checksums next to files of another program, for load and verify"
    usages = {
        "path": "a folder, or a file of any format; it does not change",
        **shared("--overwrite"),
    }
    add_command(commands, "checksum", help_text, run_checksum, usages)


def run_checksum(arguments: argparse.Namespace) -> int:
    """Write the checksums of the user's files, print their number, and return 0."""
    if "://" not in arguments.path:
        stat_path(arguments.path)
    with progress_of("checksum", lambda: bytes_of_files(arguments.path)) as progress:
        files = checksum(arguments.path, overwrite=arguments.overwrite, progress=progress)
    size = f"{count_text(len(files), 'file')}, {bytes_text(sum(files.values()))}"
    text = f"{arguments.path}: checksums of {size}, written"
    return print_result(arguments, {"path": arguments.path, "files": files}, [text])
