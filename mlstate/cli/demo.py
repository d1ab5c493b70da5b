"""``mlstate demo``: move the cache of a language model between context sizes."""

from __future__ import annotations

import argparse

from ._common import Commands, add_arguments, shared

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
    usages = {"--quiet": "print warnings and errors only", **shared("--overwrite")}
    add_arguments(parser, usages)
    parser.set_defaults(run=run_demo, parser=parser)


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the demo and write its picture.

    Return 1 if a check failed or damage was not repaired, else 0.
    """
    from ..demo.story import run

    report = run(arguments.picture or None, overwrite=arguments.overwrite)
    same = report.identical and report.untouched and report.reduced.identical
    same = same and report.planned.identical and report.trained.identical
    same = same and report.rolled.agrees and report.rolled.ordered
    return 0 if same and report.kept.repaired else 1
