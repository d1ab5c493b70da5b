"""The command line: ``mlstate`` and ``python -m mlstate``.

This module imports nothing but what it needs to handle Ctrl-C: NumPy and the commands are
imported by `main`.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing takes milliseconds
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

__all__ = ["main", "run_process"]

_INTERRUPTED = 130  # as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Default: the arguments of the process.

    Returns
    -------
    int
        The exit status: 0 good, 1 the answer is no, 2 wrong usage or an error, 130 interrupted.
    """
    try:
        from .command_line import run_command_line

        return run_command_line(argv)
    except KeyboardInterrupt:
        return _INTERRUPTED


def run_process() -> NoReturn:
    """Run the command line as the whole process, and exit with its status.

    While modules are imported and while Python exits, nothing is written and Ctrl-C ends the
    process at once: a KeyboardInterrupt could be lost or printed in an import's callback.
    """
    import os
    import signal
    import sys

    def leave(*_: object) -> NoReturn:
        os._exit(_INTERRUPTED)

    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not ignored: nohup
    if is_ours:
        signal.signal(signal.SIGINT, leave)
    try:
        from . import command_line  # noqa: F401  # imports NumPy
    except ImportError as error:  # NumPy is missing, or MLSTATE_CPU names no instruction set
        print("mlstate:", error, file=sys.stderr)
        sys.exit(2)
    if sys.stdout is not None:  # names that the terminal cannot show are escaped, as in stderr
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main()
    except KeyboardInterrupt:
        status = _INTERRUPTED
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, leave)
    sys.exit(status)
