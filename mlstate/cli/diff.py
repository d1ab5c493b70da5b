"""``mlstate diff``: its options and exit status."""

from __future__ import annotations

import argparse
from functools import partial

from ..checkpoint._diff_sources import diff_sources
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

__all__ = ["add"]

_SIDES = ("first", "second")


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate diff`` to `commands`.

    Parsed arguments have the function of the command as ``run``.
    """
    help_text = "compare two checkpoints or files, tensor by tensor"
    tolerance = {"type": float, "default": 0.0}
    rtol = "tolerance, times the larger element: dtypes may differ then"
    usages = {
        "first": PATH_HELP,
        "second": "the same; may be the same run, for two of its steps",
        **{f"--{side}-step N|latest|best": step_usage(side) for side in _SIDES},
        **shared("--monitor", "--mode", "--names"),
        "--rtol X": {**tolerance, "help": rtol},
        "--atol X": {**tolerance, "help": "tolerance: dtypes may differ then"},
    }
    add_command(commands, "diff", help_text, run_diff, usages, {1: "they differ"})


def run_diff(arguments: argparse.Namespace) -> int:
    """Compare the two paths and print the differences; return 1 if they differ, else 0."""
    paths = [(getattr(arguments, side), f"{side}_step") for side in _SIDES]
    first, second = (find(path, step_of(arguments, path, option)) for path, option in paths)
    tolerance = {"rtol": arguments.rtol, "atol": arguments.atol}
    progress = partial(progress_of, "compare")
    difference = diff_sources(first, second, arguments.names, progress, **tolerance)
    status = 0 if difference.identical else 1
    return print_result(arguments, difference.data(), difference.tables(), status)
