"""Options and output that commands share; the checkpoint or file at a path."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .._common.local_path import local_path
from .._common.text import table_text
from ..checkpoint._folder.local import hub_hint
from ..checkpoint._sources.open_source import open_source
from ..checkpoint._steps.step_choice import find_best
from ..checkpoint._store.chosen_names import chosen_names
from ..checkpoint._store.open_path import is_url, open_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..checkpoint._sources.protocol import Source


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

EPILOG = "exit status: 0 good, {status_1}2 wrong usage or an error{status_3}"
PATH_HELP = "a checkpoint, a run, a Hugging Face model, a folder or file of torch, or a .npz file"
STEP_HELP = "of the {}: a number, latest, or best by --monitor (default: latest)"
_WIDTH = 120  # characters of a cell


def add_command(
    commands: Commands,
    name: str,
    help_text: str,
    run: Callable[[argparse.Namespace], int],
    status_1: str | None = None,
    status_3: str | None = None,
) -> argparse.ArgumentParser:
    """Add the parser of the command `name` to `commands`, with the option ``--json``; return it.

    `run`: called with the parsed arguments; returns the exit status. `status_1`, `status_3`:
    meaning of these exit statuses in the help; None: they do not occur.
    """
    epilog = EPILOG.format(
        status_1="" if status_1 is None else f"1 {status_1}, ",
        status_3="" if status_3 is None else f", 3 {status_3}",
    )
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help_text, description=help_text, epilog=epilog
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, parser=parser)
    return parser


def _step(text: str) -> int | str:
    """Parse the value of ``--step``."""
    return text if text in ("latest", "best") else int(text)


_step.__name__ = "step"  # argparse: "invalid step value"


# Options of several commands, as arguments of `add_argument`.
OPTIONS: dict[str, dict[str, Any]] = {
    "--step": {"type": _step, "metavar": "N", "help": STEP_HELP.format("run")},
    "--monitor": {"metavar": "KEY", "help": "the metadata that --step best compares"},
    "--mode": {"choices": ("min", "max"), "help": "which value is best (default: min)"},
    "--names": {
        "action": "append",
        "metavar": "NAME",
        "help": "only these tensors, layers or globs, such as 'layers.*.bias' (may be repeated)",
    },
    "--force": {
        "action": "store_true",
        "help": "replace an existing target, all steps of a run included",
    },
    "--lock-timeout": {
        "type": float,
        "default": 0.0,
        "metavar": "SECONDS",
        "help": "wait while another process writes (default: 0, fail at once)",
    },
}


def add_options(parser: argparse._ActionsContainer, *names: str) -> None:
    """Add the options `names` of `OPTIONS` to a command's parser."""
    for name in names:
        parser.add_argument(name, **OPTIONS[name])


def add_actions_of(commands: Commands, name: str, help_text: str) -> Commands:
    """Add a command that has actions, and return the object that adds them."""
    parser = commands.add_parser(name, help=help_text, description=help_text)
    return parser.add_subparsers(title="actions", metavar="ACTION", required=True)


def chosen_keys(listed: list[str] | None, sections: list[list[str]]) -> list[set[str]]:
    """Return the names in each section that ``--names`` selects; raise for one without a match."""
    _, chosen = chosen_names(sections, listed, "")
    return [set(names) for names in chosen]


def number_of_step(path: str, step: int | str | None, arguments: argparse.Namespace) -> int | None:
    """Return the number of the step that the user chose; None for the newest.

    `path`: of the run. `step`: a number, "latest", "best" or None. With "best", the metadata of all
    steps are compared, by the options ``--monitor`` and ``--mode`` in `arguments`. Raises
    ValueError for options that do not fit.
    """
    # a command may have several options for steps, and one of them must be "best"
    steps = [value for name, value in vars(arguments).items() if name.endswith("step")]
    for option in ("monitor", "mode"):
        if getattr(arguments, option) is not None and "best" not in steps:
            text = "tells which step is the best: choose the step best, or leave it out"
            raise ValueError(f"--{option} {getattr(arguments, option)} {text}")
    if step == "latest":
        return None
    if step != "best":
        return step  # type: ignore[return-value]
    if arguments.monitor is None:
        raise ValueError("--step best needs --monitor KEY, the metadata with the metric")
    files = open_files(path, reads=True)
    return find_best(files, arguments.monitor, arguments.mode)[1].step


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


def find(path: str, step: int | None, format: str | None = None) -> Source:
    """Return what commands read at a path or URL; nothing but the kind of it is read.

    `step`: number; None: the newest. `format`: read the path as this format; None: by its content.
    Raises StoreError or FormatError if nothing can be read, ValueError for a `step` of a path
    without steps.
    """
    if not is_url(path) and not os.path.islink(local_path(path)):
        stat_path(path)
    return open_source(path, choice=(step, None, None), format=format)


def kind_of(source: Source) -> str:
    """Return the name of a source's format in the output of commands."""
    return "checkpoint" if source.format == "mlstate" else source.format


# ---- output ----


def print_json(data: object, status: int = 0) -> int:
    """Print a JSON value, and return the exit status of the command."""
    print(json.dumps(data, indent=2))
    return status


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print all rows; print nothing for an empty table."""
    if rows:
        print(table_text(headers, rows, len(rows), _WIDTH))
