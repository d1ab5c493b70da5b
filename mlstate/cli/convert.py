"""``mlstate convert``: its options, source and target, which entries; warnings of the others."""

from __future__ import annotations

import argparse
import json
import warnings
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .._common.atomic_file import Target
from .._common.converted import float_name, is_converted
from .._common.dtypes import NAMES, name_of, numpy_dtype
from .._common.text import bytes_text, count_text, printable
from ..checkpoint._files.changes import Changes
from ..checkpoint._files.formats import FLAT, SUFFIXES, check_format, format_of, place_of
from ..checkpoint._files.parts import Parts, Selection
from ..checkpoint._files.read_write import (
    FORMATS,
    begin_write,
    convert_lightning,
    parts_of,
    read_any,
    write_any,
)
from ..checkpoint._files.torch_weights import torch_weights_root
from ..checkpoint._huggingface.export import export, take_export
from ..checkpoint._huggingface.export_loaded import export_loaded
from ..checkpoint._load import load, open_loader
from ..checkpoint._quantized.config import read_quantization
from ..checkpoint._quantized.pairs import refuse_quantized_state
from ..checkpoint._states.modules import all_entries, split_entries
from ..checkpoint._store.open_path import open_folder
from ..errors import CheckpointWarning
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
from ._progress import progress_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..checkpoint._files.formats import Place
    from ..checkpoint._load import Loader
    from ..checkpoint._loaded_state import LoadedState
    from ..checkpoint._options import LoadOptions
    from ..state import StateDict

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate convert`` to `commands`; it sets ``run``."""
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
    arguments: argparse.Namespace, source_format: str, options: dict[str, Any], start: Target
) -> dict[str, int]:
    """Export the model of the source to a Hugging Face folder.

    Return the number of its tensors, and their bytes. `options`: of the export; some are removed.
    `start`: the target as it was before, which the export replaces. Local checkpoints whose tensors
    are not quantized are verified, then mapped; others are read one tensor at a time if possible.
    Raises ValueError without a model.
    """
    source = open_folder(arguments.source, reads=True)
    is_torch = source_format == "huggingface" and _is_torch(arguments.source)
    location = None  # of the checkpoint; None: a file or folder that is read whole
    if source_format in ("mlstate", "huggingface") and not is_torch:
        location = find(arguments.source, arguments.step)
    changes = _changes(arguments)
    if is_torch or (location is not None and kind_of(location.root) == "huggingface"):
        options.setdefault("files_from", source.path)
    parts: Parts | LoadedState
    if location is None:
        parts = _read_source(arguments, source_format)[0]
    elif (chosen := _selection(arguments)) is not None:
        parts = chosen.apply(parts_of(load(location, **changes.load_options())), arguments.source)
    elif source.is_local and not (changes.dtype and read_quantization(source)):
        stored = changes._replace(dtype=None)
        parts = load(location, mmap=True, verify="first", **stored.load_options())
    else:
        loader = open_loader(location, cast("LoadOptions", changes.load_options()))
        parts = Parts(model=None, optimizer=None, metadata={}, states={})
        if loader.manifest.model is not None:
            with progress_of("convert", lambda: _model_bytes(loader)) as progress:
                size = export_loaded(
                    arguments.target, loader, start=start, progress=progress, **options
                )
            _warn_of_rest(loader.manifest.optimizer, loader.manifest.states)
            return size
    if parts.model is None:
        raise ValueError(f"{arguments.source} holds no model to export")
    files_from = options.pop("files_from", None)
    request = take_export(arguments.target, parts.model, dtype=changes.dtype, **options)
    model_size = _part_data(parts.model, changes.dtype)
    assert model_size is not None
    with progress_of("convert", lambda: model_size["bytes"]) as progress:
        export(request, files_from, start, progress)
    _warn_of_rest(parts.optimizer, parts.states)
    return model_size


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


def _is_torch(path: str) -> bool:
    """Return whether a Hugging Face folder has files of torch."""
    return torch_weights_root(open_folder(path, reads=True)) is not None


def _read_source(arguments: argparse.Namespace, source_format: str) -> tuple[Parts, int | None]:
    """Return the parts of the source that the user chose, with changed tensors, and its step.

    The step is of a checkpoint's root, or of another file as `Parts.step` finds it; it may be None.
    Raises ValueError for ``--step`` if the source has no steps.
    """
    path, chosen, changes = arguments.source, _selection(arguments), _changes(arguments)
    location = None
    # `load` makes the changes while it reads; torch's files are read whole before
    if source_format == "mlstate" or (
        source_format == "huggingface" and any(changes) and not _is_torch(path)
    ):
        location = find(path, arguments.step)
    if location is not None:
        loaded = load(location, **changes.load_options())
        parts = parts_of(loaded)
        states, _ = split_entries(parts.states)
        # Entries of torch modules that are not tensors: `load` does not rename them, and hides
        # those that have only metadata.
        if changes.names is None:
            options = cast("LoadOptions", changes.load_options())
            states |= all_entries(open_loader(location, options))
        parts = parts._replace(states=states)
        return (parts if chosen is None else chosen.apply(parts, path)), loaded.step
    if arguments.step is not None:
        raise ValueError(f"{path} is not an mlstate checkpoint: it has no steps")
    parts = read_any(path, format=source_format, selection=chosen)
    may_be_quantized = source_format in ("safetensors", "huggingface")
    if changes.dtype and may_be_quantized and parts.model is not None:
        refuse_quantized_state(path, parts.model)
    parts = changes.apply(parts, path)
    return parts, parts.step


def _selection(arguments: argparse.Namespace) -> Selection | None:
    """Return the entries to convert; None for all."""
    only, skip = (
        [name for names in values for name in names.split(",")]
        for values in (arguments.only, arguments.skip)
    )
    return Selection(only, skip) if only or skip else None


def _changes(arguments: argparse.Namespace) -> Changes:
    """Return the changes to tensors that the options describe.

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
    dtype = arguments.dtype and float_name(arguments.dtype, "--dtype")
    return Changes(dtype, arguments.names, rules)


def _load_folder(arguments: argparse.Namespace) -> Any:
    """Return the checkpoint of the source with tensors of torch, for Lightning.

    Raises ValueError if the source is a file.
    """
    location = find(arguments.source, arguments.step)
    if location is None:
        raise ValueError(f"{arguments.source} is not an mlstate checkpoint")
    return load(location, device="cpu")


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
    """Return the absolute path of a source or target, or its URL, for the JSON output."""
    if isinstance(place, Path):
        return str(place.absolute())
    return f"{place}/{place.folder.file}" if place.folder.file else str(place)


def run_convert(arguments: argparse.Namespace) -> int:
    """Read the source, write the target, print a summary, and return 0.

    Raises ValueError if formats, options or paths do not fit, before anything is written.
    """
    source, target = place_of(arguments.source, reads=True), place_of(arguments.target)
    if isinstance(source, Path):
        stat_path(arguments.source)
    arguments.step = number_of_step(arguments.source, arguments.step, arguments)
    if _is_same(source, target):
        raise ValueError("the target must be another path than the source")
    source_format = arguments.source_format or format_of(source)
    target_format = arguments.target_format or format_of(target)
    check_format(source, source_format)
    check_format(target, target_format)
    chosen = _selection(arguments)
    changes = _changes(arguments)
    is_whole = {source_format, target_format} == {"mlstate", "lightning"}
    is_whole = is_whole and chosen is None and not any(changes)
    # any suffix: Lightning also names folders .ckpt
    start = begin_write(target, target_format, arguments.force, any_suffix=is_whole)
    options = _export_options(arguments, target_format)
    sizes: dict[str, Any] = {"model": None, "optimizer": None}  # as of `_part_data`
    model: StateDict | None
    optimizer: StateDict | None
    model, optimizer, states = None, None, dict[str, Any]()
    if is_whole:
        is_folder = source_format == "mlstate"
        origin = _load_folder(arguments) if is_folder else Path(arguments.source)
        sizes["model"] = convert_lightning(origin, start)
    elif target_format == "huggingface":
        assert isinstance(start, Target)
        sizes["model"] = _export_model(arguments, source_format, options, start)
    else:
        parts, step = _read_source(arguments, source_format)
        if changes.names is not None:  # they may choose tensors of one part only
            parts = parts.without_empty()
        model, optimizer, metadata, named = parts
        states, _ = split_entries(named)
        write_any(
            target,
            model,
            optimizer,
            metadata,
            named,
            format=target_format,
            target=start,
            step=step,
        )
        sizes = {"model": _part_data(model), "optimizer": _part_data(optimizer)}
    if arguments.json:
        data = {
            "source": _absolute_path(source),
            "source_format": source_format,
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
