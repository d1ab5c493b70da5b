"""``mlstate convert``: convert states from and to the files of other programs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._common.atomic_file import Target
from .._common.text import bytes_text, count_text, printable
from ..checkpoint._files.convert import (
    FORMATS,
    SUFFIXES,
    begin_write,
    check_format,
    convert_lightning,
    format_of,
    parts_of,
    place_of,
    read_any,
    write_any,
)
from ..checkpoint._files.parts import Selection
from ..checkpoint._files.torch_weights import torch_weights_root
from ..checkpoint._huggingface.export import export, take_export
from ..checkpoint._load import load
from ..checkpoint._store.open_path import open_folder
from ._common import (
    FORCE_HELP,
    Commands,
    add_command,
    add_monitor,
    add_step,
    find,
    kind_of,
    number_of_step,
    stat_path,
)

if TYPE_CHECKING:
    from ..checkpoint._files.convert import Place
    from ..checkpoint._files.parts import Parts
    from ..state import StateDict

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``convert``."""
    help_text = "convert between checkpoints and files of torch, Lightning, Hugging Face, NumPy"
    parser = add_command(commands, "convert", help_text, run_convert)
    parser.add_argument("source", help=f"a folder, a URL, or a file: {' '.join(SUFFIXES)}")
    parser.add_argument("target", help="target; its suffix selects the format (none: a checkpoint)")
    names = tuple(FORMATS)
    parser.add_argument("--from", dest="source_format", choices=names, help="whatever the suffix")
    parser.add_argument("--to", dest="target_format", choices=names, help="whatever the suffix")
    add_step(parser)
    add_monitor(parser)
    parser.add_argument("--force", action="store_true", help=FORCE_HELP)
    entries = "model, optimizer, or the name of another entry; several by commas"
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAMES",
        help=f"convert only these: {entries}",
    )
    parser.add_argument(
        "--skip", action="append", default=[], metavar="NAMES", help="convert all but these"
    )
    folder = parser.add_argument_group("--to huggingface")
    folder.add_argument(
        "--files-from",
        metavar="FOLDER",
        help="copy its config and tokenizer files too (default: those of a Hugging Face source)",
    )
    folder.add_argument(
        "--max-shard-bytes", metavar="SIZE", help="of a file, such as 2GB (default: 5 GiB)"
    )


def _export_options(arguments: argparse.Namespace, write: str) -> dict[str, Any]:
    """Return the options of an export; raise ValueError if they are given for another format."""
    names = ("files_from", "max_shard_bytes")
    values = {name: getattr(arguments, name) for name in names}
    values = {name: value for name, value in values.items() if value is not None}
    if values and write != "huggingface":
        option = next(iter(values)).replace("_", "-")
        raise ValueError(f"--{option} requires --to huggingface: the target's format is {write}")
    return values


def _export(
    arguments: argparse.Namespace, read: str, options: dict[str, Any], start: Target
) -> StateDict:
    """Export the model of the source; local checkpoints are verified, then mapped."""
    source = open_folder(arguments.source, reads=True)
    is_torch = read == "huggingface" and torch_weights_root(source) is not None
    where = None
    if read in ("mlstate", "huggingface") and not is_torch:
        where = find(arguments.source, arguments.step)
    if where is None:
        model = _read(arguments, read).model
    elif (chosen := _selection(arguments)) is not None:
        model = chosen.apply(parts_of(load(where)), arguments.source).model
    elif source.is_local:
        model = load(where, mmap=True, verify="first").model
    else:
        model = load(where).model
    if model is None:
        raise ValueError(f"{arguments.source} holds no model to export")
    is_folder = is_torch or (where is not None and kind_of(where.root) == "huggingface")
    default = source.path if is_folder else None
    files_from = options.pop("files_from", default)
    export(take_export(arguments.target, model, **options), files_from, start)
    return model


def _read(arguments: argparse.Namespace, name: str) -> Parts:
    """Return the chosen parts of the source."""
    path, chosen = arguments.source, _selection(arguments)
    if arguments.step is None:
        return read_any(path, format=name, selection=chosen)
    where = find(path, arguments.step) if name == "mlstate" else None
    if where is None:
        raise ValueError(f"{path} is not an mlstate checkpoint: it has no steps")
    parts = parts_of(load(where))
    return parts if chosen is None else chosen.apply(parts, path)


def _selection(arguments: argparse.Namespace) -> Selection | None:
    """Return the entries to convert; None for all."""
    only, skip = (
        [name for names in values for name in names.split(",")]
        for values in (arguments.only, arguments.skip)
    )
    return Selection(only, skip) if only or skip else None


def _load_folder(arguments: argparse.Namespace) -> Any:
    """Return the checkpoint of the source, with tensors of torch."""
    where = find(arguments.source, arguments.step)
    if where is None:
        raise ValueError(f"{arguments.source} is not an mlstate checkpoint")
    return load(where, device="cpu")


def _part_data(state: StateDict | None) -> dict[str, int] | None:
    return None if state is None else {"tensors": len(state), "bytes": state.nbytes}


def _is_same(source: Place, target: Place) -> bool:
    """Return whether two paths are the same file or folder, or two URLs the same checkpoint."""
    if isinstance(source, Path) and isinstance(target, Path):
        return target.exists() and source.samefile(target)
    return source == target


def _absolute(place: Place) -> str:
    if isinstance(place, Path):
        return str(place.absolute())
    return f"{place}/{place.folder.file}" if place.folder.file else str(place)


def run_convert(arguments: argparse.Namespace) -> int:
    """Read the source, write the target, and print a summary."""
    source, target = place_of(arguments.source, reads=True), place_of(arguments.target)
    if isinstance(source, Path):
        stat_path(arguments.source)
    arguments.step = number_of_step(arguments.source, arguments.step, arguments)
    if _is_same(source, target):
        raise ValueError("the target must be another path than the source")
    read = arguments.source_format or format_of(source)
    write = arguments.target_format or format_of(target)
    check_format(source, read)
    check_format(target, write)
    chosen = _selection(arguments)
    is_whole = {read, write} == {"mlstate", "lightning"} and chosen is None
    # Lightning names folders .ckpt
    start = begin_write(target, write, arguments.force, any_suffix=is_whole)
    options = _export_options(arguments, write)
    parts: dict[str, Any] = {"model": None, "optimizer": None}
    model: StateDict | None
    optimizer, states = None, dict[str, Any]()
    if is_whole:
        origin = _load_folder(arguments) if read == "mlstate" else Path(arguments.source)
        parts["model"] = convert_lightning(origin, start)
    elif write == "huggingface":
        assert isinstance(start, Target)
        model = _export(arguments, read, options, start)
    else:
        model, optimizer, metadata, states = _read(arguments, read)
        write_any(target, model, optimizer, metadata, states, format=write, target=start)
    if not is_whole:
        parts = {"model": _part_data(model), "optimizer": _part_data(optimizer)}
    if arguments.json:
        data = {
            "source": _absolute(source),
            "source_format": read,
            "target": _absolute(target),
            "target_format": write,
            **parts,
            "states": sorted(states),
        }
        print(json.dumps(data, indent=2))
        return 0
    written = [
        f"{name} of {count_text(part['tensors'], 'tensor')}, {bytes_text(part['bytes'])}"
        for name, part in parts.items()
        if part is not None
    ]
    written += [f"states {', '.join(map(printable, sorted(states)))}"] if states else []
    print(f"{printable(arguments.target)} ({write}): {'; '.join(written)}")
    return 0
