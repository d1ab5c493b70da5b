"""``mlstate digest``: print digests of tensors, or compare two states by them."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint._compare.digest import digest_of, has_digests
from ..state._digest import Digest
from ._common import (
    PATH_HELP,
    Commands,
    add_command,
    find,
    print_result,
    shared,
    step_of,
    step_usage,
)
from ._progress import progress_of

if TYPE_CHECKING:
    from .._common.report import Table
    from ..checkpoint._sources.protocol import Source

__all__ = ["add"]

_SIDES = ("first", "second")


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate digest`` to `commands`; it sets ``run``."""
    help_text = "print a digest of each tensor, or compare two paths by their digests"
    usages = {
        "first": f"{PATH_HELP}, or a .json file of digests",
        "second": {"nargs": "?", "help": "the same, to compare with"},
        **{f"--{side}-step N|latest|best": step_usage(side) for side in _SIDES},
        **shared("--monitor", "--mode"),
    }
    add_command(commands, "digest", help_text, run_digest, usages, {1: "they differ"})


def _digest_of(arguments: argparse.Namespace, side: str) -> tuple[Digest, Source | None]:
    """Return the digest of the path of an argument, and its source.

    Of a .json file, return the digest in it, and None.
    """
    path = getattr(arguments, side)
    if path.endswith(".json") and Path(path).is_file():
        return Digest.from_json(Path(path).read_bytes()), None
    source = find(path, step_of(arguments, path, f"{side}_step"))
    return digest_of(source, partial(progress_of, "digest")), source


def run_digest(arguments: argparse.Namespace) -> int:
    """Print the digest of the first path, or the differences; return 1 if they differ, else 0."""
    first, source = _digest_of(arguments, "first")
    if arguments.second is None:
        listed = {"digest": str(first), "tensors": {name: [*e] for name, e in first.items()}}
        return print_result(arguments, listed, [first._table()])
    second, other = _digest_of(arguments, "second")
    difference = first.diff(second)
    changed = [{"name": name, "first": [*a], "second": [*b]} for name, a, b in difference.changed]
    data: dict[str, object] = {
        "identical": difference.identical,
        "missing": difference.missing,
        "unexpected": difference.unexpected,
        "changed": changed,
        "unchanged": difference.unchanged,
    }
    lines: list[str | Table] = [difference._table()]
    if any(each is not None and has_digests(each) for each in (source, other)):
        lines.append("digests that a save recorded were compared: mlstate verify reads the files")
    return print_result(arguments, data, lines, 0 if difference.identical else 1)
