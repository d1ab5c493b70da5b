"""``mlstate convert``: its options, source and target, which entries; warnings of the others."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .._common.converted import float_name
from .._common.text import bytes_text, count_text, printable
from ..checkpoint._convert.convert import Conversion, convert
from ..checkpoint._convert.formats import FLAT
from ..checkpoint._convert.formats import NAMES as FORMATS
from ..checkpoint._files.parts import Selection
from ..checkpoint._store.open_path import open_folder
from ._common import Commands, add_command, add_options, find, number_of_step, print_json
from ._progress import progress_of

if TYPE_CHECKING:
    from ..checkpoint._options import LoadOptions

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate convert`` to `commands`; it sets ``run``."""
    help_text = "convert between checkpoints and files of torch, Lightning, Hugging Face, NumPy"
    parser = add_command(commands, "convert", help_text, run_convert)
    parser.add_argument("source", help="a folder, a URL, or a file of any name")
    parser.add_argument("target", help="target; its suffix selects the format (none: a checkpoint)")
    text = "read the source as this format, whatever its content"
    parser.add_argument("--from", dest="source_format", choices=FORMATS, help=text)
    parser.add_argument(
        "--to", dest="target_format", choices=FORMATS, help="whatever the suffix of the target"
    )
    add_options(parser, "--step", "--monitor", "--mode", "--force")
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
    parser.add_argument(
        "--names",
        action="append",
        metavar="NAME",
        help="convert only these tensors: a name, a layer, or a pattern such as 'layers.*'",
    )
    parser.add_argument(
        "--rename",
        action="append",
        metavar="OLD=NEW",
        help="replace a prefix of names; --names has the new ones",
    )
    parser.add_argument(
        "--dtype",
        metavar="DTYPE",
        help="of the model's floats: float16, bfloat16, float32 or float64 (short: fp16, bf16)",
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


def _selection(arguments: argparse.Namespace) -> Selection | None:
    """Return the entries to convert; None for all."""
    only, skip = (
        [name for names in values for name in names.split(",")]
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
    step = number_of_step(arguments.source, arguments.step, arguments)
    options = {name: getattr(arguments, name) for name in ("files_from", "max_shard_bytes")}
    request = Conversion(
        arguments.target_format,
        arguments.force,
        _selection(arguments),
        _changes(arguments),
        {name: value for name, value in options.items() if value is not None},
    )
    open_path = partial(find, step=step, format=arguments.source_format)
    progress = partial(progress_of, "convert")
    written = convert(arguments.source, arguments.target, request, progress, open_path)
    sizes = {"model": written.model, "optimizer": written.optimizer}
    if arguments.json:
        data = {
            "source": written.source.path,
            "source_format": written.source.format,
            "target": open_folder(arguments.target).path,
            "target_format": written.format,
            **sizes,
            "states": written.states,
        }
        return print_json(data)
    texts = [
        f"{name} of {count_text(size['tensors'], 'tensor')}, {bytes_text(size['bytes'])}"
        for name, size in sizes.items()
        if size is not None
    ]
    texts += [f"states {', '.join(map(printable, written.states))}"] if written.states else []
    print(f"{printable(arguments.target)} ({written.format}): {'; '.join(texts)}")
    if written.format in FLAT and None not in sizes.values():
        print("names begin with model. and optimizer.; --only model writes the model's own names")
    if written.format == "huggingface" and not (Path(arguments.target) / "config.json").exists():
        print("no config.json was written: --files-from FOLDER copies it, and the tokenizer")
    return 0
