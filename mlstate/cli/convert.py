"""``mlstate convert``: its options, source and target, which entries; warnings of the others."""

from __future__ import annotations

import argparse
import json
import warnings
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._common.atomic_file import Target
from .._common.converted import float_name, is_converted
from .._common.dtypes import NAMES, name_of, numpy_dtype
from .._common.text import bytes_text, count_text, printable
from ..checkpoint._convert.formats import FLAT, check_format, format_of, place_of
from ..checkpoint._convert.formats import NAMES as FORMATS
from ..checkpoint._convert.lightning import convert_lightning, is_saved
from ..checkpoint._convert.read_write import begin_write, read_parts, write_any
from ..checkpoint._files.parts import Parts, Selection
from ..checkpoint._huggingface.export import export, take_export
from ..checkpoint._huggingface.export_loaded import export_loaded
from ..checkpoint._load.load import load, open_loader
from ..checkpoint._quantized.config import read_quantization
from ..checkpoint._sources.indexed import IndexedSource
from ..checkpoint._states.modules import split_entries
from ..errors import CheckpointWarning
from ._common import (
    FORCE_HELP,
    Commands,
    add_command,
    add_monitor,
    add_step,
    find,
    number_of_step,
)
from ._progress import progress_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..checkpoint._convert.formats import Place
    from ..checkpoint._load.loader import Loader
    from ..checkpoint._loaded_state import LoadedState
    from ..checkpoint._options import LoadOptions
    from ..checkpoint._sources.protocol import Source
    from ..state import StateDict

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


def _export_options(arguments: argparse.Namespace, target_format: str) -> dict[str, Any]:
    """Return the options of an export to Hugging Face by name, without those that are not given.

    Raises ValueError if one is given and `target_format` is not "huggingface".
    """
    names = ("files_from", "max_shard_bytes")
    values = {name: getattr(arguments, name) for name in names}
    values = {name: value for name, value in values.items() if value is not None}
    if values and target_format != "huggingface":
        option = next(iter(values)).replace("_", "-")
        text = f"--{option} requires --to huggingface: the target's format is {target_format}"
        raise ValueError(text)
    return values


def _export_model(
    arguments: argparse.Namespace, source: Source, options: dict[str, Any], start: Target
) -> dict[str, int]:
    """Export the model of the source to a Hugging Face folder.

    Return the number of its tensors, and their bytes. `options`: of the export; some are removed.
    `start`: the target as it was before, which the export replaces. Local checkpoints whose tensors
    are not quantized are verified, then mapped; others are read one tensor at a time if possible.
    Raises ValueError without a model.
    """
    if source.format == "huggingface":
        options.setdefault("files_from", _folder_of(source))
    changes, chosen = _changes(arguments), _selection(arguments)
    parts: Parts | LoadedState
    if not isinstance(source, IndexedSource) or chosen is not None:
        parts = read_parts(source, chosen, changes)
    elif source.files.folder.is_local and not (
        changes["cast"] and read_quantization(source.files.folder)
    ):
        mapped: LoadOptions = {"mmap": True, "verify": "first", "cast": False}
        parts = load(source, **(changes | mapped))
    else:
        loader = open_loader(source, changes)
        if loader.manifest.model is None:
            raise ValueError(f"{arguments.source} holds no model to export")
        with progress_of("convert", lambda: _model_bytes(loader)) as progress:
            size = export_loaded(
                arguments.target, loader, start=start, progress=progress, **options
            )
        _warn_of_rest(loader.manifest.optimizer, loader.manifest.states)
        return size
    if parts.model is None:
        raise ValueError(f"{arguments.source} holds no model to export")
    files_from = options.pop("files_from", None)
    dtype = _dtype(arguments)
    request = take_export(arguments.target, parts.model, dtype=dtype, **options)
    model_size = _part_data(parts.model, dtype)
    assert model_size is not None
    with progress_of("convert", lambda: model_size["bytes"]) as progress:
        export(request, files_from, start, progress)
    _warn_of_rest(parts.optimizer, parts.states)
    return model_size


def _folder_of(source: Source) -> Any:
    """Return the folder of a Hugging Face model, whose config and tokenizer files are copied."""
    if isinstance(source, IndexedSource):
        return source.files.path
    place = Path(source.path)
    return place if place.is_dir() else place.parent


def _model_bytes(loader: Loader) -> int:
    """Return the bytes of the chosen tensors of a model as they are exported, for the progress."""
    section, names = loader.sections[0], loader.chosen()[1][0]
    loader.need([(section, names, loader.request.cutting)])
    tensors = loader.dtypes_and_shapes(section, names).values()
    # the export refuses other dtypes, with the tensor's name
    return sum(prod(shape) * numpy_dtype(name).itemsize for name, shape in tensors if name in NAMES)


def _warn_of_rest(
    optimizer: Mapping[str, object] | None, states: Mapping[str, object] | None
) -> None:
    """Warn that the optimizer and the named states of a source are not exported."""
    names = [*(["optimizer"] if optimizer else []), *sorted(states or ())]
    if names:
        warnings.warn(
            f"not converted: {', '.join(names)}; a Hugging Face folder holds a model only, and "
            "--only model leaves them out without this warning",
            CheckpointWarning,
            stacklevel=2,
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
    return {"cast": _dtype(arguments) or False, "names": arguments.names, "rename": rules}


def _dtype(arguments: argparse.Namespace) -> str | None:
    """Return the name of the dtype for the model's floats, or None; TypeError for others."""
    return float_name(arguments.dtype, "--dtype") if arguments.dtype else None


def _part_data(state: StateDict | None, dtype: str | None = None) -> dict[str, int] | None:
    """Return the number of tensors of a state and their bytes, for the summary; None for None.

    `dtype`: name of the dtype that floats are converted to, or None.
    """
    if state is None:
        return None
    sizes = (
        prod(value.shape) * numpy_dtype(dtype).itemsize
        if dtype and is_converted(name_of(value.dtype), dtype)
        else value.nbytes
        for value in state.values()
    )
    return {"tensors": len(state), "bytes": sum(sizes)}


def _is_same(source: Place, target: Place) -> bool:
    """Return whether two paths are the same file or folder, or two URLs the same checkpoint."""
    if isinstance(source, Path) and isinstance(target, Path):
        return target.exists() and source.samefile(target)
    return source == target


def _absolute_path(place: Place) -> str:
    """Return the absolute path of a target, or its URL, for the JSON output."""
    return str(place.absolute()) if isinstance(place, Path) else str(place)


def _is_lightning(source: Source, target_format: str) -> bool:
    """Return whether the conversion is of a whole checkpoint of Lightning, from or to a folder."""
    formats = source.format, target_format
    return formats == ("lightning", "mlstate") or (
        formats == ("mlstate", "lightning") and is_saved(source)
    )


def run_convert(arguments: argparse.Namespace) -> int:
    """Read the source, write the target, print a summary, and return 0.

    Raises ValueError if formats, options or paths do not fit, before anything is written.
    """
    place, target = place_of(arguments.source, reads=True), place_of(arguments.target)
    step = number_of_step(arguments.source, arguments.step, arguments)
    if _is_same(place, target):
        raise ValueError("the target must be another path than the source")
    target_format = arguments.target_format or format_of(target)
    check_format(target, target_format)
    source = find(arguments.source, step, arguments.source_format)
    chosen, changes = _selection(arguments), _changes(arguments)
    is_whole = _is_lightning(source, target_format) and chosen is None and not any(changes.values())
    # any suffix: Lightning also names folders .ckpt
    start = begin_write(target, target_format, arguments.force, any_suffix=is_whole)
    options = _export_options(arguments, target_format)
    sizes: dict[str, Any] = {"model": None, "optimizer": None}  # as of `_part_data`
    model: StateDict | None
    optimizer: StateDict | None
    model, optimizer, states = None, None, dict[str, Any]()
    if is_whole:
        sizes["model"] = convert_lightning(source, start)
    elif target_format == "huggingface":
        assert isinstance(start, Target)
        sizes["model"] = _export_model(arguments, source, options, start)
    else:
        parts = read_parts(source, chosen, changes)
        step = source.manifest.step
        if changes["names"] is not None:  # they may choose tensors of one part only
            parts = parts.without_empty()
        model, optimizer, metadata, named, *_ = parts
        states, _ = split_entries(named)
        optimizer = write_any(
            target,
            model,
            optimizer,
            metadata,
            named,
            format=target_format,
            target=start,
            step=step,
        ).optimizer
        sizes = {"model": _part_data(model), "optimizer": _part_data(optimizer)}
    if arguments.json:
        data = {
            "source": source.path,
            "source_format": source.format,
            "target": _absolute_path(target),
            "target_format": target_format,
            **sizes,
            "states": sorted(states),
        }
        print(json.dumps(data, indent=2))
        return 0
    written = [
        f"{name} of {count_text(size['tensors'], 'tensor')}, {bytes_text(size['bytes'])}"
        for name, size in sizes.items()
        if size is not None
    ]
    written += [f"states {', '.join(map(printable, sorted(states)))}"] if states else []
    print(f"{printable(arguments.target)} ({target_format}): {'; '.join(written)}")
    if target_format in FLAT and model is not None and optimizer is not None:
        print("names begin with model. and optimizer.; --only model writes the model's own names")
    if target_format == "huggingface" and not (Path(arguments.target) / "config.json").exists():
        print("no config.json was written: --files-from FOLDER copies it, and the tokenizer")
    return 0
