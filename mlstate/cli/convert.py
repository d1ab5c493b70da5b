"""``mlstate convert``: its options, source and target, which entries; warnings of the others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .._common.converted import float_name
from .._common.text import bytes_text, count_text
from ..checkpoint import inspect
from ..checkpoint._convert.convert import convert
from ..checkpoint._convert.formats import FLAT, find_format
from ..checkpoint._convert.formats import NAMES as FORMATS
from ._common import (
    Commands,
    add_arguments,
    add_command,
    find,
    print_result,
    require_path,
    shared,
    step_of,
)
from ._progress import progress_of

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate convert`` to `commands`; it sets ``run``."""
    help_text = "convert between checkpoints and files of torch, Lightning, Hugging Face, NumPy"
    entries = "model, optimizer, or the name of another entry; several by commas"
    usages = {
        "source": "a folder, a URL, or a file of any name",
        "target": "target; its suffix selects the format (none: a checkpoint)",
        "--from": _format("source_format", "read the source as this format, whatever its content"),
        "--to": _format("format", "whatever the suffix of the target"),
        **shared("--step", "--monitor", "--mode", "--overwrite"),
        "--only NAMES...": f"convert only these: {entries}",
        "--skip NAMES...": "convert all but these",
        "--names NAME...": "convert only these tensors: a name, a layer, or a pattern such as "
        "'layers.*'",
        "--rename OLD=NEW...": "replace a prefix of names; --names has the new ones",
        "--dtype DTYPE": {
            "dest": "cast",  # of the load
            "help": "of the model's floats: float16, bfloat16, float32 or float64 (short: fp16, "
            "bf16)",
        },
    }
    parser = add_command(commands, "convert", help_text, run_convert, usages)
    usages = {
        "--files-from FOLDER": "copy its config and tokenizer files too (default: those of a "
        "Hugging Face source)",
        "--max-shard-bytes SIZE": "of a file, such as 2GB (default: 5 GiB)",
    }
    add_arguments(parser.add_argument_group("--to huggingface"), usages)


def _format(dest: str, text: str) -> dict[str, Any]:
    return {"dest": dest, "choices": FORMATS, "help": text}


def _entries(values: list[str] | None) -> list[str]:
    """Return the names in the values of ``--only`` or ``--skip``, several by commas."""
    return [name for names in values or () for name in names.split(",")]


def _rules(arguments: argparse.Namespace) -> dict[str, str] | None:
    """Return the rules of ``--rename``; raise ValueError for malformed ones."""
    rules: dict[str, str] | None = None
    for rule in arguments.rename or ():
        old, equals, new = rule.partition("=")
        if not equals:
            raise ValueError(f"--rename {rule}: write OLD=NEW, such as 'module.=' or 'a.=b.'")
        rules = rules or {}
        if rules.setdefault(old, new) != new:
            raise ValueError(f"--rename {old}= is given twice, with {rules[old]!r} and {new!r}")
    return rules


def run_convert(arguments: argparse.Namespace) -> int:
    """Read the source, write the target, print a summary, and return 0."""
    require_path(arguments.source)
    step = step_of(arguments, arguments.source)

    def total() -> int:
        if find_format(arguments.format, arguments.target) != "huggingface":
            return 0
        source = find(arguments.source, step, arguments.source_format)
        records = inspect(source).tensors()
        return sum(record.nbytes for record in records if record.section == "params")

    with progress_of("convert", total) as progress:
        data = convert(
            arguments.source,
            arguments.target,
            format=arguments.format,
            source_format=arguments.source_format,
            step=step,
            only=_entries(arguments.only),
            skip=_entries(arguments.skip),
            names=arguments.names,
            rename=_rules(arguments),
            dtype=float_name(arguments.cast, "--dtype") if arguments.cast else None,
            files_from=arguments.files_from,
            max_shard_bytes=arguments.max_shard_bytes,
            overwrite=arguments.overwrite,
            progress=progress,
        )
    format, states = data["target_format"], data["states"]
    sizes = {name: data[name] for name in ("model", "optimizer")}
    texts = [
        f"{name} of {count_text(size['tensors'], 'tensor')}, {bytes_text(size['bytes'])}"
        for name, size in sizes.items()
        if size is not None
    ]
    texts += [f"states {', '.join(states)}"] if states else []
    texts += [] if data["step"] is None else [f"step {data['step']}"]
    lines = [f"{arguments.target} ({format}): {'; '.join(texts)}"]
    if format in FLAT and None not in sizes.values():
        text = "names begin with model. and optimizer.; --only model writes the model's own names"
        lines.append(text)
    if format == "huggingface" and not (Path(arguments.target) / "config.json").exists():
        text = "no config.json was written: --files-from FOLDER copies it, and the tokenizer"
        lines.append(text)
    return print_result(arguments, data, lines)
