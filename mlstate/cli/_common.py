"""Options that commands share: ``--step``, ``--names``; the checkpoint or file at a path."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from .._common.local_path import local_path
from .._common.store_error import store_error
from .._common.text import table_text
from ..checkpoint._files.formats import SUFFIXES
from ..checkpoint._files.lightning import SUFFIX as LIGHTNING
from ..checkpoint._folder.local import hub_hint
from ..checkpoint._folder.names import FOLDERS, MANIFEST
from ..checkpoint._folder.weight_names import is_weights_root, weights_root
from ..checkpoint._load import chosen_names
from ..checkpoint._load_whole import WholePath, has_safetensors_header, whole_path
from ..checkpoint._steps.step_choice import find_best, find_root
from ..checkpoint._store.open_path import RootPath, is_url, open_files, open_folder
from ..errors import MLStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

EPILOG = "exit status: 0 good, {status_1}2 wrong usage or an error"
PATH_HELP = "a checkpoint, a run, a Hugging Face model, a folder or file of torch, or a .npz file"
FORCE_HELP = "replace an existing target, all steps of a run included"
_WIDTH = 120  # characters of a cell


def add_command(
    commands: Commands,
    name: str,
    help_text: str,
    run: Callable[[argparse.Namespace], int],
    status_1: str | None = None,
) -> argparse.ArgumentParser:
    """Add the parser of the command `name` to `commands`, with the option ``--json``; return it.

    `run`: called with the parsed arguments; returns the exit status. `status_1`: meaning of exit
    status 1 in the help; None: it does not occur.
    """
    epilog = EPILOG.format(status_1="" if status_1 is None else f"1 {status_1}, ")
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help_text, description=help_text, epilog=epilog
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_lock_timeout(parser: argparse.ArgumentParser) -> None:
    """Add `--lock-timeout`, the seconds to wait for another writer, to a command's parser."""
    parser.add_argument(
        "--lock-timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait while another process writes (default: 0, fail at once)",
    )


def _step(text: str) -> int | str:
    """Parse the value of ``--step``."""
    return text if text in ("latest", "best") else int(text)


_step.__name__ = "step"  # argparse: "invalid step value"


def add_step(parser: argparse._ActionsContainer, name: str = "step", of: str = "run") -> None:
    """Add ``--step``, or an option of another `name`, to a command's parser.

    `name` ends in "step", by which `number_of_step` finds the option. `of`: the folder that the
    help refers to.
    """
    parser.add_argument(
        f"--{name}",
        type=_step,
        metavar="N",
        help=f"of the {of}: a number, latest, or best by --monitor (default: latest)",
    )


def add_monitor(parser: argparse.ArgumentParser) -> None:
    """Add the options ``--monitor`` and ``--mode``, which define the best step."""
    parser.add_argument("--monitor", metavar="KEY", help="the metadata that --step best compares")
    text = "which value is best (default: min)"
    parser.add_argument("--mode", choices=("min", "max"), help=text)


def add_names(parser: argparse.ArgumentParser) -> None:
    """Add `--names`, which selects tensors, to a command's parser."""
    parser.add_argument(
        "--names",
        action="append",
        metavar="NAME",
        help="only these tensors, layers or globs, such as 'layers.*.bias' (may be repeated)",
    )


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


# ---- finding the checkpoint ----


def kind_of(root: str) -> str:
    """Return the format of a root: ``checkpoint``, ``huggingface`` or ``safetensors``.

    `root`: path in its folder. The last format is one file in a store.
    """
    if weights_root([root]) is not None:
        return "huggingface"
    return "safetensors" if is_weights_root(root) else "checkpoint"


def stat_path(path: str) -> None:
    """Raise the OSError for a path that does not exist or cannot be accessed.

    For a missing path that looks like a model of the Hub, it names the command that downloads it.
    """
    try:
        Path(local_path(path)).stat()
    except FileNotFoundError as error:
        text = f"{error.strerror}{hub_hint(path)}"
        raise FileNotFoundError(error.errno, text, path) from None


def find(path: str, step: int | None) -> RootPath | None:
    """Return the root of the checkpoint at a path; None if `path` is a file.

    `step`: number; None: the newest. Raises StoreError if the folder has no checkpoint, ValueError
    for a `step` of a path without steps.
    """
    location = _find(path, step, reads_whole=False)
    assert not isinstance(location, WholePath)
    return location


def find_any(path: str, step: int | None) -> RootPath | WholePath | None:
    """Return what `find` does, or the path of another program's file or folder.

    None if `path` is a plain safetensors file, or a file of no known format.
    """
    return _find(path, step, reads_whole=True)


def _find(path: str, step: int | None, *, reads_whole: bool) -> RootPath | WholePath | None:
    """Return the checkpoint or file that commands read at `path`.

    A RootPath for a checkpoint (a run, a step, a URL, a Hugging Face folder), a WholePath for a
    file or folder without an index, such as a ``.npz``, if `reads_whole`, and None for any other
    file, such as a safetensors file. `step`: number; None: the newest. Raises StoreError if nothing
    can be read, and ValueError for a `step` of one file or of a Hugging Face folder.
    """
    if is_url(path):
        store = open_files(path, reads=True)
        root = MANIFEST
        with suppress(MLStateError):  # reading the checkpoint reports the reason
            root = store.open_root()[0]
        return RootPath(store, root if step is None else find_root(store, step))
    place = Path(local_path(path))
    is_folder = place.is_dir()
    if not is_folder:
        stat_path(path)
    files = open_files(path)
    # another root than MANIFEST: the folder holds weights of Hugging Face, which have no steps
    root = files.current_root() if is_folder else MANIFEST
    if step is not None and (root != MANIFEST or not is_folder):
        kind = "a Hugging Face folder" if is_folder else "one file"
        raise ValueError(f"{path} is {kind}: it has no steps; leave the step out")
    if root != MANIFEST:
        return RootPath(files, root)
    if is_folder and any((place / name).exists() for name in (MANIFEST, *FOLDERS)):
        return RootPath(files, MANIFEST if step is None else find_root(files, step))
    foreign = whole_path(open_folder(path)) if reads_whole else None
    if foreign is not None and (is_folder or foreign.format != "safetensors"):
        return foreign
    if is_folder:
        hint = _reader_hint(place)
        text = "no checkpoint of mlstate in this folder" + (f"; {hint}" if hint else "")
        raise store_error(FileNotFoundError(2, text), "cannot read", path)
    return None


# ---- files and folders of other programs ----


def _reader_hint(place: Path) -> str | None:
    """Return a text with the command that reads another program's file or folder, or None.

    `place`: its path.
    """
    suffix = place.suffix.lower()
    if suffix in (".mlpackage", ".mlmodel"):
        return f"mlstate coreml states reads a {suffix}"
    if suffix == ".aimodel":
        return "mlstate coreai reads an .aimodel"
    if place.is_dir():
        is_dcp = (place / ".metadata").exists()
        return "mlstate convert reads a torch distributed checkpoint" if is_dcp else None
    name = "lightning" if suffix == LIGHTNING else SUFFIXES.get(suffix)
    return name and f"mlstate convert reads a {suffix} file (format {name})"


def check_is_safetensors(path: str) -> None:
    """Raise ValueError for a file of another kind, with the command that reads it.

    A damaged ``.safetensors`` file, and a path without a file, pass: the caller reports the reason.
    """
    place = Path(local_path(path))
    if place.suffix.lower() == ".safetensors" or not place.is_file():
        return
    if not has_safetensors_header(str(place)):
        hint = f"mlstate convert reads {' '.join(SUFFIXES)}, and with --from any suffix"
        raise ValueError(f"{path} is not a .safetensors file: {_reader_hint(place) or hint}")


# ---- text ----


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print all rows; print nothing for an empty table."""
    if rows:
        print(table_text(headers, rows, len(rows), _WIDTH))
