"""``mlstate info``: print the versions, the processor and the core's choices, for bug reports."""

from __future__ import annotations

import argparse
import json

from ._common import Commands, add_command

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate info`` to `commands`; it sets ``run``."""
    text = "show versions, processor and choices, for bug reports"
    add_command(commands, "info", text, run_info)


def run_info(arguments: argparse.Namespace) -> int:
    """Print one line for each fact, or all facts as JSON."""
    from .._info import info

    facts = info()
    print(json.dumps(facts.to_dict(), indent=2) if arguments.json else facts)
    return 0
