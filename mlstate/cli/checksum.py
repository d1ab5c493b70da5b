"""``mlstate checksum``: write checksums of files that another program wrote next to them."""

from __future__ import annotations

import argparse
import json

from .._common.text import bytes_text, count_text, printable
from ..checkpoint import checksum
from ._common import Commands, add_command, stat_path

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``checksum``."""
    help_text = "write checksums next to files of another program, for load and verify"
    parser = add_command(commands, "checksum", help_text, run_checksum)
    parser.add_argument("path", help="a folder, or a file of any format; it does not change")
    parser.add_argument("--force", action="store_true", help="replace existing checksums")


def run_checksum(arguments: argparse.Namespace) -> int:
    """Write the checksums, and print the number of files."""
    if "://" not in arguments.path:
        stat_path(arguments.path)
    files = checksum(arguments.path, overwrite=arguments.force)
    if arguments.json:
        print(json.dumps({"path": arguments.path, "files": files}, indent=2))
    else:
        size = bytes_text(sum(files.values()))
        text = f"checksums of {count_text(len(files), 'file')}, {size}, written"
        print(f"{printable(arguments.path)}: {text}")
    return 0
