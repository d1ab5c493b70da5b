"""`convert`: the content of one source, chosen and changed, as a target of any format."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._common.arguments import check_callback
from ..._common.atomic_file import Target
from ..._common.batches import batches_of
from ..._common.budget import parse_size
from ..._common.caller import find_caller
from ..._common.converted import float_name
from ..._common.local_path import refuse_same_path
from ..._common.overwrite import check_overwrite
from ..._common.set_module import set_module
from ...errors import CompatibilityError
from .._compare.digest import require_equal_copy
from .._files.parts import Selection
from .._huggingface.export import MAX_SHARD_BYTES, export, take_export, write_folder
from .._huggingface.export_plan import make_plan
from .._layouts.lightning import STATE
from .._load.load import open_loader
from .._options import SAVE_DEFAULTS
from .._quantized.config import ENTRY
from .._quantized.parts import known_entry
from .._save.content import take_content
from .._save.shards import gather_shards
from .._save.target import SaveFolder, check_target
from .._sources.indexed import IndexedSource
from .._sources.open_source import open_source
from .._states.modules import all_entries, is_entries, split_entries
from .._store.open_path import open_folder
from .formats import find_format
from .lightning import as_folder, is_saved
from .read_write import OtherTarget, begin_write, read_parts, write_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ... import _core
    from ..._common.callback import Progress
    from .._files.parts import Parts
    from .._load.loader import Loader
    from .._options import LoadOptions
    from .._sources.protocol import Source

_WITH_STEP = ("mlstate", "lightning")  # formats whose checkpoints always have a step
_BATCH_BYTES = 64 << 20  # of the tensors that are in memory at the same time


class Conversion(NamedTuple):
    """How to convert a source; `convert` describes the changes."""

    format: str | None  # of the target; None: by its path
    overwrite: bool | None
    selection: Selection | None  # the entries to convert; None: all
    changes: LoadOptions  # of a load: `cast`, `names` and `rename`
    export: Mapping[str, Any]  # `files_from`, `max_shard_bytes` of `export_huggingface`

    @property
    def is_whole(self) -> bool:
        """Whether nothing is chosen or changed."""
        return self.selection is None and not any(self.changes.values())

    def step_for(self, name: str, step: int | None) -> int | None:
        """Return `step` for a target of the format `name`; None if the entry "step" is left out."""
        choice = None if name in _WITH_STEP else self.selection
        return step if choice is None or choice.takes("step") else None


@set_module("mlstate")
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: str | None = None,
    source_format: str | None = None,
    step: int | str | None = None,
    only: str | Iterable[str] = (),
    skip: str | Iterable[str] = (),
    names: str | Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: object = None,
    files_from: str | os.PathLike[str] | None = None,
    max_shard_bytes: int | str | None = None,
    overwrite: bool | None = None,
    progress: Progress = None,
) -> dict[str, Any]:
    """Write the content of a checkpoint, file or folder in another format.

    ``mlstate convert`` is this function as a command.

    Parameters
    ----------
    source : str or os.PathLike
        What `load` reads: a checkpoint, a run, a Hugging Face folder, files and folders of torch,
        Lightning and NumPy, or a URL. Its content decides about its format.
    target : str or os.PathLike
        Path to write, or the URL of a checkpoint. It must not be `source`.
    format : str, optional
        Format of `target`: "mlstate", "safetensors", "npz", "torch", "dcp", "huggingface" or
        "lightning". Default: the one of an existing folder, or by the suffix: ``.safetensors``,
        ``.npz``, ``.pt``, ``.pth``, ``.bin``, ``.ckpt`` or ``.dcp``; without one, a checkpoint of
        mlstate.
    source_format : str, optional
        Read `source` as this format, without regard to its content.
    step : int or "latest", optional
        The step of a run. Default: the newest.
    only, skip : str or iterable of str, optional
        Entries to convert, or to leave out: "model", "optimizer", "step", or the name of another
        entry. A dict of tensors that is chosen alone becomes the model. Checkpoints of mlstate and
        Lightning keep the step.
    names, rename
        As for `load`: which tensors, and prefixes of names to replace.
    dtype : dtype or str, optional
        Dtype of the model's floats: float16, bfloat16, float32 or float64.
    files_from, max_shard_bytes
        As for `export_huggingface`; only for the format "huggingface". `files_from` is by default
        a `source` of that format.
    overwrite : bool, optional
        Default: a target of the same format, names and shapes is replaced. True: replace any
        target that mlstate reads, the steps of a run included. False: replace nothing. See
        docs/files.md.
    progress : callable, optional
        Called with the number of bytes written since the last call, by an export to Hugging Face.

    Returns
    -------
    dict
        The conversion: ``source`` and ``target`` (paths), ``source_format`` and
        ``target_format``, ``step`` (that was converted, or None), ``model`` and ``optimizer``
        (the number of ``tensors``, and their ``bytes``; None without one) and ``states`` (the
        names of other entries).

    Raises
    ------
    ValueError
        Formats, options or paths do not fit each other, or there is nothing to write. Nothing is
        written.
    CompatibilityError
        The format of `target` cannot hold a value.
    FormatError, ChecksumError
        `source` is malformed or damaged. Or the copy has other bits than `source`: do not use it.
    StoreError
        The operating system refused, or `target` exists (EEXIST).

    Notes
    -----
    The write is atomic. A checkpoint of Lightning becomes a folder of `MLStateCheckpointIO`, and
    such a folder a file that is equal to it, unless something is chosen or changed. Most formats
    are read into memory as a whole; an export to Hugging Face reads a few tensors at a time. If
    `source` was saved with ``digest=True``, a whole copy is read again and compared.

    Tensors of an existing target in a format of torch or NumPy are read to compare their shapes,
    unless `overwrite` is given.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> path = tempfile.mkdtemp()
    >>> _ = mlstate.save(path + "/a", {"w": np.arange(6.0)}, step=7)
    >>> mlstate.convert(path + "/a", path + "/a.npz", dtype="float32")["model"]
    {'tensors': 1, 'bytes': 24}
    >>> mlstate.load(path + "/a.npz").model["w"].dtype
    dtype('float32')
    """
    check_callback("progress", progress)
    check_overwrite(overwrite)
    lists = [[each] if isinstance(each, str) else [*each] for each in (only, skip)]
    export = {"files_from": files_from, "max_shard_bytes": max_shard_bytes}
    request = Conversion(
        format,
        overwrite,
        Selection(*lists) if any(lists) else None,
        {"cast": False if dtype is None else float_name(dtype), "names": names, "rename": rename},
        {name: value for name, value in export.items() if value is not None},
    )
    open_path = partial(open_source, source, step=step, format=source_format)
    opened, converted = _convert(source, target, request, progress, open_path)
    if request.is_whole and "lightning" not in (
        opened.format,
        converted["target_format"],
    ):
        require_equal_copy(opened, target)
    return converted


def _convert(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    request: Conversion,
    progress: Progress,
    open_path: Callable[[], Source],
) -> tuple[Source, dict[str, Any]]:
    """Write the content at `path` to `target`; return the source, and the result of `convert`.

    `open_path`: opens `path`. Raises ValueError if formats, options or paths do not fit, before
    anything is written.
    """
    source_path, place = open_folder(path, reads=True).named_path, open_folder(target).path
    refuse_same_path(source_path, place)
    name = find_format(request.format, target)
    source, is_whole = open_path(), request.is_whole
    formats = (source.format, name)
    is_ckpt = is_whole and formats == ("lightning", "mlstate")
    is_saved_ckpt = is_whole and formats == ("mlstate", "lightning") and is_saved(source)
    # any suffix: Lightning also names folders .ckpt
    start = begin_write(target, name, request.overwrite, any_suffix=is_ckpt)
    if request.export and name != "huggingface":
        option = next(iter(request.export))
        raise ValueError(f"{option}= requires format='huggingface': the target's format is {name}")

    def result(
        model: object, optimizer: object, states: list[str], step: int | None
    ) -> dict[str, Any]:
        sizes = {"model": model, "optimizer": optimizer, "states": states}
        paths = {"source": source.path, "source_format": source.format, "target": place}
        return paths | {"target_format": name, "step": step} | sizes

    if isinstance(start, OtherTarget) and name == "huggingface":
        size = _export(source, request, start.target, progress)
        return source, result(size, None, [], None)
    opened = as_folder(source, exact=True) if is_ckpt else source
    changes: LoadOptions = {"device": "cpu"} if is_saved_ckpt else request.changes
    parts = read_parts(opened, request.selection, changes)
    if name == "lightning" and STATE in parts.states and not is_saved_ckpt:
        raise CompatibilityError(
            f"{source.path}: a folder of MLStateCheckpointIO is converted as a whole: convert it "
            "without other options, and then the file with them"
        )
    if changes.get("names") is not None:  # they may choose tensors of one part only
        parts = parts.without_empty()
    start, parts = _with_entry(source, start, parts, is_cast=bool(changes.get("cast")))
    step = parts.states[STATE].get("global_step") if is_ckpt else source.manifest.step
    written = write_parts(place, name, start, parts, request.step_for(name, step))
    names = {*written.states, *written.metadata}
    states = [] if is_ckpt or is_saved_ckpt else names.intersection(split_entries(parts.states)[0])
    sizes = _size_of(written.model), _size_of(written.optimizer)
    return source, result(*sizes, sorted(states), step)


def _with_entry(
    source: Source, start: SaveFolder | OtherTarget, parts: Parts, *, is_cast: bool
) -> tuple[SaveFolder | OtherTarget, Parts]:
    """Return target and parts with the source's ``quantization_config``, unless codes are cast.

    Checkpoints have it in their manifest, other formats in the metadata.
    """
    entry = known_entry(source)
    if entry is None:
        return start, parts
    metadata = {name: value for name, value in parts.metadata.items() if name != ENTRY}
    if isinstance(start, SaveFolder):
        start = start if is_cast else start._replace(quantization_config=entry)
    elif not is_cast:
        metadata[ENTRY] = entry
    return start, parts._replace(metadata=metadata)


def _size_of(state: Mapping[str, Any] | None) -> dict[str, int] | None:
    """Return the number of tensors of a state, and their bytes; None for None."""
    if state is None:
        return None
    return {"tensors": len(state), "bytes": sum(value.nbytes for value in state.values())}


def _export(
    source: Source, request: Conversion, start: Target, progress: Progress
) -> dict[str, int]:
    """Export the model of the source to a Hugging Face folder; return its size, as of `_size_of`.

    Without a selection, few tensors are in memory at a time. `start`: the target as it was before,
    which the export replaces. Warns of other states. Raises ValueError without a model.
    """
    options = dict(request.export)
    if source.format == "huggingface":
        is_folder = isinstance(source, IndexedSource) or os.path.isdir(source.path)
        folder = source.path if is_folder else os.path.dirname(source.path)
        options.setdefault("files_from", folder)
    error = ValueError(f"{source.path} holds no model to export")
    if request.selection is None:
        loader = open_loader(source, request.changes)
        if loader.manifest.model is None:
            raise error
        size = _export_loaded(loader, options, request.overwrite, start, progress)
        has_optimizer = bool(loader.sections[1].names)
        others = [name for name in loader.states if name[0] != "."]
        states: dict[str, Any] = {**dict.fromkeys(others), **all_entries(loader)}
    else:
        parts = read_parts(source, request.selection, request.changes)
        sizes = _size_of(parts.model)
        if sizes is None:
            raise error
        size = sizes
        files_from, dtype = options.pop("files_from", None), request.changes.get("cast") or None
        written = take_export(
            start.path, parts.model, dtype=dtype, overwrite=request.overwrite, **options
        )
        written.marks["entry"] = known_entry(source)
        export(written, files_from, start, progress)
        has_optimizer, states = bool(parts.optimizer), parts.states
    rest = sorted(n for n, each in states.items() if not is_entries(n, each) or each["entries"])
    if left := [*(["optimizer"] if has_optimizer else []), *rest]:
        find_caller().warn(
            f"not converted: {', '.join(left)}; a Hugging Face folder holds a model only, and "
            "--only model leaves them out without this warning"
        )
    return size


def _export_loaded(
    loader: Loader,
    options: Mapping[str, Any],
    overwrite: bool | None,
    start: Target,
    progress: Progress,
) -> dict[str, int]:
    """Export the model of `loader` to a Hugging Face folder; return its size, as of `_size_of`.

    `options`, `start`: as for `_export`. Memory is needed for one tensor with its stored form, or
    for 64 MiB.
    """
    target = check_target(start.path, SAVE_DEFAULTS, overwrite=overwrite)
    most_bytes = options.get("max_shard_bytes", MAX_SHARD_BYTES)
    section, names = loader.sections[0], loader.chosen()[1][0]
    loader.need([(section, names, loader.request.cutting)])
    stored = loader.dtypes_and_shapes(section, names)
    facts = {name: (dtype, shape, None) for name, (dtype, shape) in stored.items()}  # not cut
    plan = make_plan(facts, parse_size("max_shard_bytes", most_bytes, 1))
    is_converted = bool(loader.request.dtype)
    plan = plan._replace(is_converted=is_converted, entry=known_entry(loader.source))

    def nbytes(name: str) -> int:
        return plan.nbytes[plan.places[name].number]

    def shards() -> Iterator[_core.ShardItems]:
        """Yield the shards of one batch of tensors after the other, as the writer needs them."""
        for file in plan.tensors:
            for batch in batches_of((name for name, *_ in file), nbytes, _BATCH_BYTES):
                state = loader.load_state(section, batch, {})
                content = take_content(target, dict(state), None, None, SAVE_DEFAULTS)
                yield gather_shards(target, content).shards

    write_folder(target, plan, shards(), options.get("files_from"), start, progress)
    return {"tensors": len(plan.nbytes), "bytes": sum(plan.nbytes)}
