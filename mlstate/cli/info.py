"""``mlstate info``: print the versions, the processor and the core's choices, for bug reports."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ._common import add_command

if TYPE_CHECKING:
    import argparse

__all__ = ["add"]


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the parser of ``info``."""
    parser = add_command(commands, "info", "show versions, processor and choices, for bug reports")
    parser.set_defaults(run=run_info)


def run_info(arguments: argparse.Namespace) -> int:
    """Print one line for each fact, or all facts as JSON."""
    from .._info import info

    found = info()
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else found)
    return 0
