"""`main` of ``mlstate``: Ctrl-C before and during a command, the exit of the process.

This module imports only the modules for handling Ctrl-C: `main` imports NumPy and the commands.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # importing typing takes milliseconds
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

__all__ = ["main", "run_process"]

_INTERRUPTED = 130  # exit status of an interrupted process in shells


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Default: the arguments of the process.

    Returns
    -------
    int
        Exit status: 0 success, 1 a check failed, 2 wrong usage or an error, 130 interrupted.
    """
    try:
        from .command_line import run_command_line

        return run_command_line(argv)
    except KeyboardInterrupt:
        return _INTERRUPTED


def run_process() -> NoReturn:
    """Run the command line as the whole process, and exit with its status.

    During imports and at exit nothing is written, and Ctrl-C ends the process at once: there, a
    KeyboardInterrupt could be lost or be printed by a callback of an import.
    """

    def leave(*_: object) -> NoReturn:
        os._exit(_INTERRUPTED)

    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # nohup ignores it
    if is_ours:
        signal.signal(signal.SIGINT, leave)
    try:
        from . import command_line  # noqa: F401  # imports NumPy
    except ImportError as error:  # NumPy is missing, or MLSTATE_CPU names an unknown set
        print("mlstate:", error, file=sys.stderr)
        sys.exit(2)
    if sys.stdout is not None:  # escape names that the terminal cannot show, as stderr does
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        try:
            if is_ours:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            status = main()
        finally:
            if is_ours:
                signal.signal(signal.SIGINT, leave)
    except KeyboardInterrupt:  # also one that arrives while the handler changes
        status = _INTERRUPTED
    sys.exit(status)
