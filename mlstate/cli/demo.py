"""``mlstate demo``: move the cache of a language model between context sizes."""

from __future__ import annotations

import argparse
import os

from .._common.local_path import local_path
from ..checkpoint._folder.local import LocalFolder
from ..checkpoint._store.open_path import refuse_existing
from ._common import Commands

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate demo`` to `commands`.

    Parsed arguments have the function of the command as ``run``.
    """
    help_text = "move a language model's cache between real Core ML packages, and watch"
    parser = commands.add_parser("demo", help=help_text, description=help_text)
    parser.add_argument(
        "--picture",
        metavar="PNG",
        default="mlstate_demo.png",
        help="where to write the picture (default: %(default)s); '' for none",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing picture")
    parser.set_defaults(run=run_demo)


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the demo and write its picture.

    Return 1 if a check failed or damage was not repaired, else 0. An existing picture is refused
    before the demo, unless ``--force`` is given.
    """
    if arguments.picture:
        refuse_existing(LocalFolder(os.fsdecode(local_path(arguments.picture))), arguments.force)
    from ..demo.story import run

    report = run(arguments.picture or None)
    same = report.identical and report.untouched and report.reduced.identical
    same = same and report.planned.identical and report.trained.identical
    same = same and report.rolled.agrees and report.rolled.ordered
    return 0 if same and report.kept.repaired else 1
