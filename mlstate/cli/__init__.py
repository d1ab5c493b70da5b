"""The command line: ``mlstate`` and ``python -m mlstate``.

One module for each command; each has ``add(commands)``, which adds its parser and sets
``run``, a function from the parsed arguments to the exit status.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from typing import TYPE_CHECKING, NoReturn

from .._version import __version__
from ..errors import MLStateError
from . import (
    checkpoint_convert,
    checkpoint_diff,
    checkpoint_inspect,
    checkpoint_prune,
    checkpoint_reshard,
    checkpoint_verify,
    coreml,
    demo,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_COMMANDS = (
    checkpoint_inspect,
    checkpoint_verify,
    checkpoint_diff,
    checkpoint_reshard,
    checkpoint_convert,
    checkpoint_prune,
    coreml,
    demo,
)


class _Parser(argparse.ArgumentParser):
    """A parser that reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"mlstate: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mlstate", description="The state of machine-learning models.")
    parser.add_argument("--version", action="version", version=f"mlstate {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add(commands)
    return parser


def _say(text: str) -> None:
    """Write one line to standard error."""
    print("mlstate:", " ".join(text.split()), file=sys.stderr)


def _describe(error: Exception) -> str:
    """One line about an error, with the file that it concerns."""
    text = str(getattr(error, "strerror", None) or error)
    path = getattr(error, "path", None) or getattr(error, "filename", None)
    shown = None if path is None else os.fsdecode(path)
    return text if shown is None or shown in text else f"{shown}: {text}"


def _run(arguments: argparse.Namespace) -> int:
    """Run the command; warnings become lines of their own, without a source line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            status: int = arguments.run(arguments)
        finally:
            for warning in caught:
                _say(f"warning: {warning.message}")
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Default: what the process was called with.

    Returns
    -------
    int
        The exit status: 0 good, 1 the answer is no, 2 wrong usage or an error, 130 interrupted.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # --help, --version or wrong usage: all was said
        return stop.code if isinstance(stop.code, int) else 0
    try:
        status = _run(arguments)
        if sys.stdout is not None:  # closed by who wants the exit status alone
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130  # as shells have it
    except (MLStateError, OSError, ValueError, TypeError, ImportError) as error:
        _say(_describe(error))
        return 2
    return status
