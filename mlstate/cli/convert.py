"""``mlstate convert``: its options, source and target, which entries; warnings of the others."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._common.converted import float_name
from .._common.text import bytes_text, count_text
from ..checkpoint._convert.convert import Conversion, convert
from ..checkpoint._convert.formats import FLAT
from ..checkpoint._convert.formats import NAMES as FORMATS
from ..checkpoint._files.parts import Selection
from ..checkpoint._store.open_path import open_folder
from ._common import Commands, add_arguments, add_command, find, print_result, shared, step_of
from ._progress import progress_of

if TYPE_CHECKING:
    from ..checkpoint._options import LoadOptions

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate convert`` to `commands`; it sets ``run``."""
    help_text = "convert between checkpoints and files of torch, Lightning, Hugging Face, NumPy"
    entries = "model, optimizer, or the name of another entry; several by commas"
    usages = {
        "source": "a folder, a URL, or a file of any name",
        "target": "target; its suffix selects the format (none: a checkpoint)",
        "--from": _format("source", "read the source as this format, whatever its content"),
        "--to": _format("target", "whatever the suffix of the target"),
        **shared("--step", "--monitor", "--mode", "--force"),
        "--only NAMES...": f"convert only these: {entries}",
        "--skip NAMES...": "convert all but these",
        "--names NAME...": "convert only these tensors: a name, a layer, or a pattern such as "
        "'layers.*'",
        "--rename OLD=NEW...": "replace a prefix of names; --names has the new ones",
        "--dtype DTYPE": "of the model's floats: float16, bfloat16, float32 or float64 (short: "
        "fp16, bf16)",
    }
    parser = add_command(commands, "convert", help_text, run_convert, usages)
    usages = {
        "--files-from FOLDER": "copy its config and tokenizer files too (default: those of a "
        "Hugging Face source)",
        "--max-shard-bytes SIZE": "of a file, such as 2GB (default: 5 GiB)",
    }
    add_arguments(parser.add_argument_group("--to huggingface"), usages)


def _format(of: str, text: str) -> dict[str, Any]:
    return {"dest": f"{of}_format", "choices": FORMATS, "help": text}


def _selection(arguments: argparse.Namespace) -> Selection | None:
    """Return the entries to convert; None for all."""
    only, skip = (
        [name for names in values or () for name in names.split(",")]
        for values in (arguments.only, arguments.skip)
    )
    return Selection(only, skip) if only or skip else None


def _changes(arguments: argparse.Namespace) -> LoadOptions:
    """Return the options of a load that makes the changes to tensors of the command's options.

    Raises ValueError or TypeError for malformed options.
    """
    rules: dict[str, str] | None = None
    for rule in arguments.rename or ():
        old, equals, new = rule.partition("=")
        if not equals:
            raise ValueError(f"--rename {rule}: write OLD=NEW, such as 'module.=' or 'a.=b.'")
        rules = rules or {}
        if rules.setdefault(old, new) != new:
            raise ValueError(f"--rename {old}= is given twice, with {rules[old]!r} and {new!r}")
    dtype = float_name(arguments.dtype, "--dtype") if arguments.dtype else False
    return {"cast": dtype, "names": arguments.names, "rename": rules}


def run_convert(arguments: argparse.Namespace) -> int:
    """Read the source, write the target, print a summary, and return 0."""
    options = {name: getattr(arguments, name) for name in ("files_from", "max_shard_bytes")}
    request = Conversion(
        arguments.target_format,
        arguments.force,
        _selection(arguments),
        _changes(arguments),
        {name: value for name, value in options.items() if value is not None},
    )
    step = step_of(arguments, arguments.source)
    open_path = partial(find, step=step, format=arguments.source_format)
    progress = partial(progress_of, "convert")
    written = convert(arguments.source, arguments.target, request, progress, open_path)
    sizes = {"model": written.model, "optimizer": written.optimizer}
    data = {
        "source": written.source.path,
        "source_format": written.source.format,
        "target": open_folder(arguments.target).path,
        "target_format": written.format,
        **sizes,
        "states": written.states,
    }
    texts = [
        f"{name} of {count_text(size['tensors'], 'tensor')}, {bytes_text(size['bytes'])}"
        for name, size in sizes.items()
        if size is not None
    ]
    texts += [f"states {', '.join(written.states)}"] if written.states else []
    lines = [f"{arguments.target} ({written.format}): {'; '.join(texts)}"]
    if written.format in FLAT and None not in sizes.values():
        text = "names begin with model. and optimizer.; --only model writes the model's own names"
        lines.append(text)
    if written.format == "huggingface" and not (Path(arguments.target) / "config.json").exists():
        text = "no config.json was written: --files-from FOLDER copies it, and the tokenizer"
        lines.append(text)
    return print_result(arguments, data, lines)
