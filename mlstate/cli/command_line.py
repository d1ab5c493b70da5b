"""Arguments, exit status 2, the text of errors and warnings of all commands.

There is one module for each command. Its function ``add(commands)`` adds the command's parser and
sets ``run``, a function from the parsed arguments to the exit status.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from .._common.text import names_hint, printable
from .._version import __version__
from ..errors import MLStateError
from . import cache, coreai, coreml, demo, info, prompts
from . import checksum as checkpoint_checksum
from . import convert as checkpoint_convert
from . import diff as checkpoint_diff
from . import digest as checkpoint_digest
from . import follow as weights_follow
from . import inspect as checkpoint_inspect
from . import prune as checkpoint_prune
from . import publish as weights_publish
from . import reshard as checkpoint_reshard
from . import verify as checkpoint_verify
from .completion import PrintCompletion

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["run_command_line"]

_ERRORS = (MLStateError, OSError, ValueError, TypeError, ImportError)
_COMMANDS = (
    checkpoint_inspect,
    checkpoint_verify,
    checkpoint_checksum,
    checkpoint_diff,
    checkpoint_digest,
    checkpoint_reshard,
    checkpoint_convert,
    checkpoint_prune,
    weights_publish,
    weights_follow,
    cache,
    coreml,
    coreai,
    prompts,
    demo,
    info,
)


def _hint_of_abbreviation(value: str, choices: list[str]) -> str:
    """Return a hint with the choice that a value such as "hf" abbreviates, or "".

    The letters of the value must occur in the choice in this order, beginning with its first one.
    """
    for choice in choices:
        letters = iter(choice)
        if value[:1] == choice[:1] and all(letter in letters for letter in value) and value:
            return f"; did you mean {choice!r}?"
    return ""


class _Parser(argparse.ArgumentParser):
    """A parser that reports a usage error in one line."""

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Raise ArgumentError, with a hint at a similar choice, if a value is not a choice."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            choices = [str(choice) for choice in action.choices or ()]
            error.message += names_hint(str(value), choices, listed=False) or _hint_of_abbreviation(
                str(value), choices
            )
            raise

    def parse_known_args(self, *arguments: Any, **keywords: Any) -> tuple[Any, list[str]]:
        """Parse arguments as argparse does, but exit with a usage error for unknown options.

        Only a command's parser knows its options, so a hint at a similar one is given here.
        """
        parsed, unknown = super().parse_known_args(*arguments, **keywords)
        if unknown:
            option = unknown[0].partition("=")[0].lstrip("-")
            options = [each.lstrip("-") for each in self._option_string_actions]
            hint = names_hint(option, options, listed=False).replace("'", "'--", 1)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"mlstate: {printable(message)} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of `mlstate` with all commands."""
    parser = _Parser(prog="mlstate", description="The state of machine-learning models.")
    parser.add_argument("--version", action="version", version=f"mlstate {__version__}")
    parser.add_argument("--print-completion", action=PrintCompletion)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands)
    topic = commands.add_parser("help", help="show the help of a command")
    topic.add_argument("command", nargs="*", help="such as verify, or cache convert")
    return parser


def _print_error(text: str) -> None:
    """Write one line to standard error, if it is open."""
    if sys.stderr is None:
        return
    try:
        print("mlstate:", printable(text.strip()), file=sys.stderr, flush=True)
    except OSError:
        _drop_output(sys.stderr)


def _error_text(error: Exception) -> str:
    """Return one line about an error for the user, with the file that it concerns.

    The path is added only if the text does not have it.
    """
    text = str(getattr(error, "strerror", None) or error)
    path = getattr(error, "path", None) or getattr(error, "filename", None)
    path_text = None if path is None else os.fsdecode(path)
    if (
        path_text is None
        or text.startswith(f"{path_text}:")
        or (os.sep in path_text and path_text in text)
    ):
        return text
    return f"{path_text}: {text}"  # no separator in the path: it may occur in the text by chance


def _print_failure(error: Exception, arguments: argparse.Namespace) -> None:
    """Write why a command failed, and the notes of `error`, in the words of the command's options.

    All in one line, to standard error.
    """
    text = ". ".join([_error_text(error), *getattr(error, "__notes__", ())])
    _print_error(_name_options(text, getattr(arguments, "parser", None)))


# A keyword, call or name of Python, followed by what replaces it, such as
# "verify(path, repair=True) (mlstate verify --repair on the command line)".
_WITH_COMMAND = re.compile(
    r"[\w.]+(?:=(?:\{.*?\}+|\S*)|\([^()]*\))? \(([^()]+) on the command line\)"
)
# The second of two remedies, which commands lack: they take options of stores from the environment.
_STORAGE_OPTIONS = re.compile(r",? or (?:pass )?storage_options(?:=\{.*?\}+)?")


def _name_options(text: str, parser: argparse.ArgumentParser | None) -> str:
    """Replace the calls and keywords in an error's text by the words of the command line.

    `parser`: of the command, whose options replace keywords; None: keywords stay.
    """
    text = _STORAGE_OPTIONS.sub("", _WITH_COMMAND.sub(r"\1", text))
    for action in () if parser is None else parser._actions:
        if not action.option_strings:
            continue
        option = action.option_strings[0]
        # not a part of a longer word, a path or a quoted text
        keyword = rf"(?<![\w/.\\'\"-]){action.dest}"
        if action.nargs == 0:
            text = re.sub(rf"{keyword}={action.const}\b", option, text)
        else:
            text = re.sub(rf"{keyword}=(['\"]?)([\w.]+)\1", rf"{option} \2", text)
            text = re.sub(rf"{keyword}=", option, text)
        if "_" in action.dest:  # else it may be a word of the text
            text = re.sub(rf"{keyword}(?![\w/.'\"-])=?", option, text)
    return text


def _run_command(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status; print each warning as one line, once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            with ExitStack() as stack:
                if getattr(arguments, "quiet", False):  # `demo` has no such option
                    null = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
                    stack.enter_context(redirect_stdout(null))
                    stack.enter_context(redirect_stderr(null))  # the progress
                return arguments.run(arguments)  # type: ignore[no-any-return]
        finally:
            for text in dict.fromkeys(str(warning.message) for warning in caught):
                text = _name_options(text, getattr(arguments, "parser", None))
                _print_error(f"warning: {text}")


def _parse_and_run(argv: Sequence[str] | None, arguments: argparse.Namespace) -> int:
    """Run the command of `argv` (None: of this process) and return its exit status.

    `arguments` receives the parsed values.
    """
    parser = _parser()
    try:
        parser.parse_args(argv, arguments)
        if hasattr(arguments, "command"):  # of help
            parser.parse_args([*arguments.command, "--help"])
    except SystemExit as stop:  # --help, --version or wrong usage; argparse printed the text
        return stop.code if isinstance(stop.code, int) else 0
    if not hasattr(arguments, "run"):  # no command
        parser.print_help()
        return 0
    paths = arguments.path if isinstance(getattr(arguments, "path", None), list) else None
    if paths is None:
        return _run_command(arguments)
    statuses = []
    for arguments.path in paths:
        try:
            statuses.append(_run_command(arguments))
        except BrokenPipeError:
            raise
        except _ERRORS as error:
            _print_failure(error, arguments)
            statuses.append(2)
    return min(filter(None, statuses), default=0)


def _flush_output() -> None:
    if sys.stdout is not None:  # None if the caller closed it
        sys.stdout.flush()


def _drop_output(stream: TextIO) -> None:
    """Let a failed stream write to the null device: Python would flush its buffer again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def run_command_line(argv: Sequence[str] | None) -> int:
    """Run one command and return the exit status; `argv` None: the process's arguments.

    Errors are printed as one line, and the status is 2. A closed pipe gives 0.
    """
    arguments = argparse.Namespace()
    try:
        status = _parse_and_run(argv, arguments)
        _flush_output()
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        _drop_output(sys.stdout)
        return 0
    except _ERRORS as error:
        _print_failure(error, arguments)
        try:
            _flush_output()
        except OSError:  # e.g. the disk is full
            _drop_output(sys.stdout)
        return 2
    return status
