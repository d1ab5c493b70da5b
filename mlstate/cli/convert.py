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
from ..checkpoint._huggingface.export import export, take_export
from ..checkpoint._load import load
from ._common import FORCE_HELP, Commands, add_command, find, stat_path

if TYPE_CHECKING:
    from ..checkpoint._files.convert import Place
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
    parser.add_argument("--step", type=int, metavar="N", help="of a run (default: the newest)")
    parser.add_argument("--force", action="store_true", help=FORCE_HELP)
    folder = parser.add_argument_group("--to huggingface")
    folder.add_argument(
        "--files-from", metavar="FOLDER", help="copy its config and tokenizer files too"
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
    where = find(arguments.source, arguments.step) if read in ("mlstate", "huggingface") else None
    if where is None:
        model = _read(arguments.source, read, arguments.step)[0]
    elif where.files.folder.is_local:
        model = load(where, mmap=True, verify="first").model
    else:
        model = load(where).model
    if model is None:
        raise ValueError(f"{arguments.source} holds no model to export")
    files_from = options.pop("files_from", None)
    export(take_export(arguments.target, model, **options), files_from, start)
    return model  # type: ignore[no-any-return]


def _read(path: str, name: str, step: int | None) -> Any:
    if step is None:
        return read_any(path, format=name)
    where = find(path, step) if name == "mlstate" else None
    if where is None:
        raise ValueError(f"{path} is not an mlstate checkpoint: it has no steps")
    return parts_of(load(where))


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
    if _is_same(source, target):
        raise ValueError("the target must be another path than the source")
    read = arguments.source_format or format_of(source)
    write = arguments.target_format or format_of(target)
    check_format(source, read)
    check_format(target, write)
    is_whole = {read, write} == {"mlstate", "lightning"}
    # Lightning names folders .ckpt
    start = begin_write(target, write, arguments.force, any_suffix=is_whole)
    options = _export_options(arguments, write)
    parts: dict[str, Any] = {"model": None, "optimizer": None}
    if is_whole:
        origin = _load_folder(arguments) if read == "mlstate" else Path(arguments.source)
        parts["model"] = convert_lightning(origin, start)
    elif write == "huggingface":
        assert isinstance(start, Target)
        model, optimizer = _export(arguments, read, options, start), None
    else:
        model, optimizer, metadata = _read(arguments.source, read, arguments.step)
        write_any(target, model, optimizer, metadata, format=write, target=start)
    if not is_whole:
        parts = {"model": _part_data(model), "optimizer": _part_data(optimizer)}
    if arguments.json:
        data = {
            "source": _absolute(source),
            "source_format": read,
            "target": _absolute(target),
            "target_format": write,
            **parts,
        }
        print(json.dumps(data, indent=2))
        return 0
    written = [
        f"{name} of {count_text(part['tensors'], 'tensor')}, {bytes_text(part['bytes'])}"
        for name, part in parts.items()
        if part is not None
    ]
    print(f"{printable(arguments.target)} ({write}): {'; '.join(written)}")
    return 0
