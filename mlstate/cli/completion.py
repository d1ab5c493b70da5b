"""``mlstate --print-completion``: print completion scripts for shells, made by shtab."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PrintCompletion"]

SHELLS = ("bash", "zsh", "fish", "tcsh")
_PATHS = {"path", "first", "second", "source", "target", "package", "picture"}


class PrintCompletion(argparse.Action):
    """Print the completion script for one shell, and exit."""

    def __init__(self, option_strings: list[str], dest: str) -> None:
        help_text = "print a completion script for a shell"
        super().__init__(option_strings, dest, choices=SHELLS, help=help_text)

    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: Any, *__: object) -> None:
        """Print the completion script for `shell` and exit; argparse calls this.

        Raises ImportError without the package shtab.
        """
        try:
            import shtab
        except ImportError:
            raise ImportError(
                "shell completion needs shtab: pip install 'mlstate[completion]'", name="shtab"
            ) from None
        for action in _actions(parser):
            if action.dest in _PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, shell))
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield all arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
