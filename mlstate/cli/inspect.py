"""``mlstate inspect``: list tensors, shards, metadata of a checkpoint or file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._common.report import Table
from .._common.text import bytes_text, count_text, steps_text
from ..checkpoint import CheckpointManager, inspect
from ..checkpoint._checkpoint.checkpoint import in_order, stored_text, tensor_table
from ..checkpoint._folder.names import SECTIONS
from ..checkpoint._store.chosen_names import chosen_names
from ._common import (
    PATH_HELP,
    Commands,
    add_arguments,
    add_command,
    find,
    kind_of,
    print_result,
    shared,
    step_of,
    value_lines,
)

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..checkpoint.records import ShardRecord, TensorRecord

__all__ = ["add"]

_SHARDS = ["shard", "rank", "shape", "bytes", "version", "file", "offset"]
# attributes of a checkpoint that --json prints
_SIZES = ("parameters", "nbytes", "stored_nbytes")
_SAVE = ("generation", "sequence", "step", "created", "writer", "world_size")
_STATES = ("model", "optimizer", "states", "quantization", "metadata")


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate inspect`` to `commands`.

    Parsed arguments have the function of the command as ``run``.
    """
    text = "list what a checkpoint or a file holds"
    usages = {"path": PATH_HELP, **shared("--step", "--monitor", "--mode", "--names")}
    parser = add_command(commands, "inspect", text, run_inspect, usages)
    detail = parser.add_mutually_exclusive_group()
    add_arguments(detail, {"--shards": "list shards too", "--summary": "list no tensors"})


def _data_of(facts: dict[str, Any]) -> dict[str, Any]:
    """Return attributes of a record or a checkpoint as JSON values; sizes are called "bytes" there.

    Layers of a sparse or compressed shard are listed too, and only of these.
    """
    data = {name.replace("nbytes", "bytes"): value for name, value in facts.items()}
    if "layout" in data:
        data["layout"] = data["layout"].steps
    if (layers := data.pop("layers", None)) is not None:
        data["layers"] = [_data_of(layer._asdict()) for layer in layers]
    return data


def _shard_rows(record: ShardRecord) -> list[list[object]]:
    """Return a table row for the shard, and one for each layer of a sparse or compressed shard.

    Hidden bytes of a layer are those that later layers replace.
    """
    place, size = f"{record.key} [{record.part}]", bytes_text(record.nbytes)
    row = [place, record.rank, record.shape, size, record.version]
    if record.layers is None:
        return [[*row, record.path, record.offset]]
    storage = count_text(len(record.layers), "layer") if record.layers else "all zeros"
    rows: list[list[object]] = [[*row, storage, None]]
    for layer in record.layers:
        hidden = layer.held_nbytes - layer.visible_nbytes
        size = bytes_text(layer.nbytes) + (f" {layer.codec}" if layer.codec else "")
        size += f", {bytes_text(hidden)} hidden" if hidden else ""
        rows.append([None, None, None, size, None, layer.path, layer.offset])
    return rows


def _steps(checkpoint: Checkpoint) -> list[int]:
    is_run = kind_of(checkpoint._source) == "checkpoint"
    return sorted(CheckpointManager(checkpoint.path).steps()) if is_run else []


def _has_checksums(checkpoint: Checkpoint) -> bool | None:
    """Return whether all bytes have checksums of mlstate, in the files or next to them.

    None: unknown, because the file was read whole.
    """
    shards = checkpoint.shards()
    if not shards and checkpoint.tensors():
        return None
    return bool(shards) and all(shard.crc32c is not None or shard.layers for shard in shards)


def _tensors(checkpoint: Checkpoint, arguments: argparse.Namespace) -> list[TensorRecord]:
    """Return the tensors of a checkpoint to list: those that ``--names`` selects, in order.

    The list is empty with ``--summary``. Raises TensorNotFoundError for a name without a match,
    also with ``--summary``.
    """
    tensors = in_order(checkpoint.tensors())
    keys = [[t.key for t in tensors if t.section == section] for section in SECTIONS]
    chosen = dict(zip(SECTIONS, map(set, chosen_names(keys, arguments.names, "")[1]), strict=True))
    return [] if arguments.summary else [t for t in tensors if t.key in chosen[t.section]]


def _checkpoint_data(checkpoint: Checkpoint, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a checkpoint as the JSON values that ``--json`` prints.

    The options of the command select tensors and shards.
    """
    tensors = _tensors(checkpoint, arguments)
    data = {
        "path": checkpoint.path,
        "format": kind_of(checkpoint._source),
        **_data_of({name: getattr(checkpoint, name) for name in (*_SIZES, *_SAVE, *_STATES)}),
        "steps": _steps(checkpoint),
        "checksums": _has_checksums(checkpoint),
        "files": checkpoint.files(),
        "tensors": [_data_of(record._asdict()) for record in tensors],
    }
    if arguments.shards:
        data["shards"] = [_data_of(record._asdict()) for record in _shards(checkpoint, tensors)]
    return data


def _shards(checkpoint: Checkpoint, tensors: list[TensorRecord]) -> list[ShardRecord]:
    listed = {(t.section, t.key) for t in tensors}
    return [shard for shard in checkpoint.shards() if (shard.section, shard.key) in listed]


def _lines(checkpoint: Checkpoint, arguments: argparse.Namespace) -> list[str | Table]:
    """Return a line with counts, the states and metadata, and a table of tensors.

    With ``--shards``, also a table of the shards of these tensors.
    """
    tensors = _tensors(checkpoint, arguments)
    kind = kind_of(checkpoint._source)
    label = {"huggingface": "Hugging Face folder", "safetensors": "file"}.get(kind, kind)
    if kind == "huggingface" and Path(arguments.path).is_file():
        label = "file"
    parts = [
        label if checkpoint.step is None else f"step {checkpoint.step}",
        count_text(len(checkpoint.tensors()), "tensor"),
        count_text(checkpoint.parameters, "parameter"),
        stored_text(checkpoint.nbytes, checkpoint.stored_nbytes),
    ]
    if label != "file":
        parts[-1] += f" in {count_text(len(checkpoint.files()), 'file')}"
        parts.append(count_text(checkpoint.world_size, "rank"))
    has_checksums = _has_checksums(checkpoint)
    if kind in ("huggingface", "safetensors") and has_checksums is not None:
        parts.append("with checksums" if has_checksums else "no checksums")
    lines = [f"{arguments.path}: {', '.join(parts)}"]
    if kind == "checkpoint":
        saved = f"saved {checkpoint.created} by {checkpoint.writer}"
        lines.append(f"{saved}, generation {checkpoint.generation}")
    for label, state in (("model", checkpoint.model), ("optimizer", checkpoint.optimizer)):
        lines += value_lines(label, state if state != {"kind": "state"} else None)
    if checkpoint.states:
        lines.append(f"states: {', '.join(sorted(checkpoint.states))}")
    if checkpoint.quantization:
        lines.append(f"quantized: {checkpoint.quantization}")
    lines += value_lines("metadata", checkpoint.metadata)
    if steps := _steps(checkpoint):
        lines.append(f"steps: {steps_text(steps)}")
    shards = _shards(checkpoint, tensors) if arguments.shards else []
    rows = [row for shard in shards for row in _shard_rows(shard)]
    return [*lines, tensor_table("", tensors), Table("", _SHARDS, rows)]


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print the contents of the user's checkpoint or file; return 0."""
    checkpoint = inspect(find(arguments.path, step_of(arguments, arguments.path)))
    if arguments.json:
        return print_result(arguments, _checkpoint_data(checkpoint, arguments), ())
    return print_result(arguments, None, _lines(checkpoint, arguments))
