"""Options and output that commands share; the checkpoint or file at a path."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .._common.local_path import local_path
from .._common.report import Table
from .._common.text import printable, shorten
from ..checkpoint import CheckpointManager
from ..checkpoint._folder.local import hub_hint
from ..checkpoint._sources.open_source import open_source
from ..checkpoint._store.open_path import is_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ..checkpoint._sources.protocol import Source


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
# by the usage of an argument: its help text, or keywords of `add_argument`
Usages: TypeAlias = "Mapping[str, Any]"

PATH_HELP = "a checkpoint, a run, a Hugging Face model, a folder or file of torch, or a .npz file"
_WIDTH = 120  # characters of a cell
_TEXT = 1000  # characters of a JSON value
_LEAF = 80  # of a text in it
_ITEMS = 8  # of a list in it


def add_command(
    commands: Commands,
    name: str,
    help_text: str,
    run: Callable[[argparse.Namespace], int],
    usages: Usages | None = None,
    statuses: Mapping[int, str] | None = None,
) -> argparse.ArgumentParser:
    """Add the parser of the command `name` to `commands`, with the option ``--json``; return it.

    `run`: called with the parsed arguments; returns the exit status. `usages`: see `add_arguments`.
    `statuses`: meaning of exit statuses other than 0 and 2, for the help.
    """
    meanings = {0: "good", 2: "wrong usage or an error", **(statuses or {})}
    texts = (f"{status} {meanings[status]}" for status in sorted(meanings))
    epilog = f"exit status: {', '.join(texts)}"
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help_text, description=help_text, epilog=epilog
    )
    output = {"--json": "print JSON", "--quiet": "print warnings and errors only"}
    add_arguments(parser, {**output, **(usages or {})})
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_arguments(parser: argparse._ActionsContainer, usages: Usages) -> None:
    """Add arguments by their usage, such as ``path``, ``--keep N`` or ``--dry-run``.

    `usages`: the help text of each, or keywords of `add_argument`. An option with a text, and
    without a value, is a flag. Dots after the value: the option may be repeated.
    """
    for usage, settings in usages.items():
        name, _, value = usage.partition(" ")
        options: dict[str, Any] = {"metavar": value.removesuffix("...")} if value else {}
        if value.endswith("..."):
            options["action"] = "append"
        elif name.startswith("-") and not value and isinstance(settings, str):
            options["action"] = "store_true"
        options |= {"help": settings} if isinstance(settings, str) else settings
        parser.add_argument(name, **options)


def step_usage(of: str) -> dict[str, Any]:
    """Return the keywords for an option with a step of the run `of`."""
    text = f"of the {of}; best is the one by --monitor (default: latest)"
    return {"type": _step, "help": text}


def _step(text: str) -> int | str:
    """Parse the value of ``--step``."""
    if text in ("latest", "best"):
        return text
    try:
        return int(text)
    except ValueError:
        expected = f"expected a number, latest or best, got {text!r}"
        raise argparse.ArgumentTypeError(expected) from None


_SHARED: Usages = {
    "--step N|latest|best": step_usage("run"),
    "--monitor KEY": "the metadata that the step best is chosen by",
    "--mode": {"choices": ("min", "max"), "help": "which value is best (default: min)"},
    "--names NAME...": "only these tensors, layers or globs, such as 'layers.*.bias' (may be "
    "repeated)",
    "--overwrite": {
        "action": "store_true",
        "default": None,
        "help": "replace an existing target, even a run or one with other tensors",
    },
    "--lock-timeout SECONDS": {
        "type": float,
        "default": 0.0,
        "help": "wait while another process writes (default: 0, fail at once)",
    },
}


def shared(*names: str) -> Usages:
    """Return the usages of options that several commands have, by their names."""
    return {usage: each for usage, each in _SHARED.items() if usage.partition(" ")[0] in names}


def add_actions_of(commands: Commands, name: str, help_text: str) -> Commands:
    """Add a command that has actions, and return the object that adds them."""
    parser = commands.add_parser(name, help=help_text, description=help_text)
    return parser.add_subparsers(title="actions", metavar="ACTION", required=True)


def step_of(arguments: argparse.Namespace, path: str, option: str = "step") -> int | None:
    """Return the step of the run at `path` that the user chose; None: the newest.

    `option`: of the step. A command may have several options for steps: ``--monitor`` and
    ``--mode`` are for those with the value "best". Raises ValueError if they have no use, or one of
    the options lacks its metric.
    """
    step = getattr(arguments, option)
    steps = [value for name, value in vars(arguments).items() if name.endswith("step")]
    rules = {"monitor": arguments.monitor, "mode": arguments.mode}
    for name, value in rules.items():
        if value is not None and "best" not in steps:
            raise ValueError(
                f"--{name} {value} tells which step is the best: pass --step best too, or leave "
                "it out"
            )
    if step != "best":
        return None if step == "latest" else step
    if arguments.monitor is None:
        raise ValueError(
            "--step best needs the metric: pass --monitor loss or another key of the metadata, "
            "and --mode max if the largest is best"
        )
    find(path, "latest")  # raises if the path cannot have steps
    return CheckpointManager(path, **rules).checkpoint("best").step


# ---- finding the source ----


def stat_path(path: str) -> None:
    """Raise the OSError for a path that does not exist or cannot be accessed.

    For a missing path that looks like a model of the Hub, it names the command that downloads it.
    """
    try:
        Path(local_path(path)).stat()
    except FileNotFoundError as error:
        text = f"{error.strerror}{hub_hint(path)}"
        raise FileNotFoundError(error.errno, text, path) from None


def require_path(path: str) -> None:
    """Raise as `stat_path` for a local path; a URL, and a link, are opened later."""
    if not is_url(path) and not os.path.islink(local_path(path)):
        stat_path(path)


def bytes_of_files(path: str) -> int:
    """Return the bytes of a file, or of all files in a folder, for the progress."""
    place = Path(local_path(path))
    files = [place, *place.rglob("*")]
    return sum(file.stat().st_size for file in files if file.is_file())


def find(path: str, step: int | str | None = None, format: str | None = None) -> Source:
    """Return what commands read at a path or URL; nothing but the kind of it is read.

    `step`: None for the newest. `format`: read the path as this format; None: by its content.
    Raises StoreError or FormatError if nothing can be read, ValueError for a step of a path without
    steps.
    """
    require_path(path)
    return open_source(path, step=step, format=format)


def kind_of(source: Source) -> str:
    """Return the name of a source's format in the output of commands."""
    return "checkpoint" if source.format == "mlstate" else source.format


# ---- output ----


def print_result(
    arguments: argparse.Namespace, data: object, lines: Iterable[str | Table], status: int = 0
) -> int:
    """Print the result of a command, as JSON or as lines and tables; return the exit status.

    Of an empty table, only the title is printed.
    """
    if arguments.json:
        print(json.dumps(data, indent=2))
        return status
    for line in lines:
        text = printable(line) if isinstance(line, str) else line.text(line.total, _WIDTH)
        if text or line == "":
            print(text)
    return status


def value_lines(label: str, value: object) -> list[str]:
    """Return a value as one line of JSON; nothing if it is empty."""
    text = shorten(json.dumps(_shorten_lists(value), ensure_ascii=False), _TEXT)
    return [f"{label}: {text}"] if value else []


def _shorten_lists(value: object) -> object:
    """Return a JSON value with the first items of its long lists, and parts of its long texts."""
    if isinstance(value, dict):
        return {key: _shorten_lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        more = len(value) - _ITEMS
        hidden = [f"… {more:,} more"] if more > 0 else []
        return [*map(_shorten_lists, value[:_ITEMS]), *hidden]
    return shorten(value, _LEAF) if isinstance(value, str) else value
