"""``mlstate inspect``: list the contents of a checkpoint or a safetensors file."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from .._common.file_checksums import find_of_file
from .._common.local_path import local_folder
from .._common.text import bytes_text, count_text, printable, shorten, steps_text
from ..checkpoint import CheckpointManager, inspect, load_metadata
from ..checkpoint._checkpoint import stored_text
from ..checkpoint._files.safetensors_verify import read_header
from ._common import (
    PATH_HELP,
    Commands,
    add_command,
    check_is_safetensors,
    find,
    kind_of,
    print_table,
)

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint, ShardRecord, TensorRecord

__all__ = ["add"]

_TENSORS = ("tensor", "state", "dtype", "shape", "shards", "bytes", "version")
_SHARDS = ("shard", "rank", "shape", "bytes", "version", "file", "offset")
_TEXT = 200  # characters of a JSON value


def add(commands: Commands) -> None:
    """Add the parser of ``inspect``."""
    parser = add_command(
        commands, "inspect", "list what a checkpoint or a .safetensors file holds", run_inspect
    )
    parser.add_argument("path", help=PATH_HELP)
    parser.add_argument("--step", type=int, metavar="N", help="of a run (default: the newest)")
    parser.add_argument("--shards", action="store_true", help="list shards too")


def _tensor_data(record: TensorRecord) -> dict[str, Any]:
    data = record._asdict()
    data["bytes"] = data.pop("nbytes")
    data["stored_bytes"] = data.pop("stored_nbytes")
    return {**data, "layout": record.layout.steps}


def _shard_data(record: ShardRecord) -> dict[str, Any]:
    data = record._asdict()
    data["bytes"] = data.pop("nbytes")
    if record.layers is None:
        del data["layers"]
        return data
    data["layers"] = [layer._asdict() for layer in record.layers]
    for layer in data["layers"]:
        layer["bytes"] = layer.pop("nbytes")
        layer["held_bytes"] = layer.pop("held_nbytes")
        layer["visible_bytes"] = layer.pop("visible_nbytes")
    return data


def _shard_rows(record: ShardRecord) -> list[list[str]]:
    """Return a row for the shard, and one for each layer of a sparse or compressed shard."""
    row = [
        f"{record.key} [{record.part}]",
        str(record.rank),
        str(record.shape),
        bytes_text(record.nbytes),
        str(record.version),
    ]
    if record.layers is None:
        return [[*row, str(record.path), str(record.offset)]]
    storage = count_text(len(record.layers), "layer") if record.layers else "all zeros"
    rows = [[*row, storage, ""]]
    for layer in record.layers:
        hidden = layer.held_nbytes - layer.visible_nbytes
        size = bytes_text(layer.nbytes) + (f" {layer.codec}" if layer.codec else "")
        size += f", {bytes_text(hidden)} hidden" if hidden else ""
        rows.append(["", "", "", size, "", layer.path, str(layer.offset)])
    return rows


def _steps(checkpoint: Checkpoint) -> list[int]:
    is_run = kind_of(checkpoint._root) == "checkpoint"
    return sorted(CheckpointManager(checkpoint.path).steps()) if is_run else []


def _has_checksums(checkpoint: Checkpoint) -> bool:
    """Return whether all bytes have checksums, in the files or next to them."""
    return all(shard.crc32c is not None or shard.layers for shard in checkpoint.shards())


def _checkpoint_data(checkpoint: Checkpoint, shards: bool) -> dict[str, Any]:
    data = {
        "path": checkpoint.path,
        "format": kind_of(checkpoint._root),
        "bytes": checkpoint.nbytes,
        "stored_bytes": checkpoint.stored_nbytes,
        "generation": checkpoint.generation,
        "sequence": checkpoint.sequence,
        "step": checkpoint.step,
        "steps": _steps(checkpoint),
        "created": checkpoint.created,
        "writer": checkpoint.writer,
        "world_size": checkpoint.world_size,
        "checksums": _has_checksums(checkpoint),
        "files": checkpoint.files(),
        "model": checkpoint.model,
        "optimizer": checkpoint.optimizer,
        "metadata": checkpoint.metadata,
        "tensors": [_tensor_data(record) for record in checkpoint.tensors()],
    }
    if shards:
        data["shards"] = [_shard_data(record) for record in checkpoint.shards()]
    return data


def _print_value(label: str, value: object) -> None:
    """Print a value as one line of JSON; print nothing if it is empty."""
    if value:
        print(f"{label}: {shorten(json.dumps(value, ensure_ascii=False), _TEXT)}")


def _print_checkpoint(checkpoint: Checkpoint, path: str, shards: bool) -> None:
    tensors = checkpoint.tensors()
    kind = kind_of(checkpoint._root)
    label = {"huggingface": "Hugging Face folder", "safetensors": "file"}.get(kind, kind)
    parts = [
        label if checkpoint.step is None else f"step {checkpoint.step}",
        count_text(len(tensors), "tensor"),
        f"{stored_text(checkpoint.nbytes, checkpoint.stored_nbytes)} in "
        f"{count_text(len(checkpoint.files()), 'file')}",
        count_text(checkpoint.world_size, "rank"),
    ]
    if kind != "checkpoint":
        parts.append("with checksums" if _has_checksums(checkpoint) else "no checksums")
    print(f"{printable(path)}: {', '.join(parts)}")
    if kind == "checkpoint":
        text = (
            f"saved {checkpoint.created} by {checkpoint.writer}, generation {checkpoint.generation}"
        )
        print(printable(text))
    for label, state in (("model", checkpoint.model), ("optimizer", checkpoint.optimizer)):
        _print_value(label, state if state != {"kind": "state"} else None)
    _print_value("metadata", checkpoint.metadata)
    steps = _steps(checkpoint)
    if steps:
        print(f"steps: {steps_text(steps)}")
    rows = [
        [t.parameter, t.state or "", t.dtype, str(t.shape), str(t.shards),
         stored_text(t.nbytes, t.stored_nbytes), str(t.version)]
        for t in tensors
    ]  # fmt: skip
    print_table(_TENSORS, rows)
    if shards:
        print_table(_SHARDS, [row for shard in checkpoint.shards() for row in _shard_rows(shard)])


def _inspect_file(path: str, as_json: bool) -> None:
    place = local_folder(path)
    header = read_header(place)
    metadata = load_metadata(place)
    has_checksums = header.has_checksums or find_of_file(place) is not None
    if as_json:
        tensors = [
            {
                "key": t.key,
                "dtype": t.dtype,
                "shape": t.shape,
                "offset": t.offset,
                "bytes": t.nbytes,
            }
            for t in header.tensors
        ]
        data = {
            "path": place,
            "format": "safetensors",
            "bytes": header.nbytes,
            "checksums": has_checksums,
            "metadata": metadata,
            "tensors": tensors,
        }
        print(json.dumps(data, indent=2))
        return
    checksums = "with checksums" if has_checksums else "no checksums"
    tensors_text = count_text(len(header.tensors), "tensor")
    print(f"{printable(path)}: file, {tensors_text}, {bytes_text(header.nbytes)}, {checksums}")
    _print_value("metadata", metadata)
    rows = [[t.key, t.dtype, str(t.shape), bytes_text(t.nbytes)] for t in header.tensors]
    print_table(("tensor", "dtype", "shape", "bytes"), rows)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print the contents of the checkpoint or file."""
    folder = find(arguments.path, arguments.step)
    if folder is None:
        check_is_safetensors(arguments.path)
        _inspect_file(arguments.path, arguments.json)
        return 0
    checkpoint = inspect(folder)
    if arguments.json:
        print(json.dumps(_checkpoint_data(checkpoint, arguments.shards), indent=2))
    else:
        _print_checkpoint(checkpoint, arguments.path, arguments.shards)
    return 0
