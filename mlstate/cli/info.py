"""``mlstate info``: print the versions, the processor and the core's choices, for bug reports."""

from __future__ import annotations

import argparse

from ._common import Commands, add_command, print_result

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate info`` to `commands`; it sets ``run``."""
    text = "show versions, processor and choices, for bug reports"
    add_command(commands, "info", text, run_info)


def run_info(arguments: argparse.Namespace) -> int:
    """Print one line for each fact, or all facts as JSON."""
    from .._info import info

    facts = info()
    return print_result(arguments, facts.to_dict(), str(facts).splitlines())
