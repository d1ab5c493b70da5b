"""`export_huggingface`: writes files, by all ranks; tied weights, copies of `files_from`.

    export -> take_export      every rank: its part of the state, without tied names
           -> gather_parts     every rank: the parts to write, and the plan of the files
           -> write_folder
                -> _begin        rank 0 creates a temporary folder, and files of their final length
                -> _write_parts  every rank writes its parts at their final offsets
                -> _finish       rank 0 writes headers and the index, and renames the folder

After each step the ranks agree that all succeeded; otherwise all raise.
"""

from __future__ import annotations

import os
import shutil
import zlib
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ... import _core
from ..._common.arguments import check_callback
from ..._common.arrays import memory_key, refuse_unstorable
from ..._common.atomic_file import Target
from ..._common.backend import backend_of, is_module
from ..._common.budget import parse_size
from ..._common.converted import float_name
from ..._common.file_checksums import NAME as CHECKSUMS
from ..._common.folders import make_path
from ..._common.local_path import local_path
from ..._common.overwrite import Existing, require_free
from ..._common.regular_file import check_regular, open_regular
from ..._common.scales import CODE_FLOATS, facts_of, refuse_codes
from ..._common.set_module import set_module
from ..._common.store_error import os_errors
from ..._common.waiting import remove_folder
from ..._sharding.layout import Shard
from ...collectives._consensus import agree
from ...errors import CompatibilityError, MLStateError
from ...state import rename as rename_state
from .._backend import CheckpointBackend
from .._folder.local import LocalFolder
from .._folder.weight_names import find_weights, index_of, is_index, stem_of, weights_root
from .._options import SAVE_DEFAULTS
from .._quantized.config import OTHER_FILES, find_entry, parse_entry
from .._save.content import SaveContent, take_content
from .._save.shards import GatheredShards, gather_shards
from .._save.target import SaveTarget, check_target
from .._sources.weights import HuggingFaceSource
from .._states.collect import NO_STATES
from .._store.checkpoint_files import CheckpointFiles
from .._store.open_path import open_folder
from .config import config_of_dtype, has_codes, other_without_entry, weights_dtype
from .export_plan import ExportPlan, StateTable, drop_copies, exchange_tables, make_plan, table_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import TypeAlias

    from ...collectives import ProcessGroup
    from .._folder.protocol import Files, Folder

    _Opened: TypeAlias = dict[str, Callable[[], Any]]  # names of files, and how to open each

MAX_SHARD_BYTES = 5 * 2**30
_CONFIG = "config.json"
_NOT_COPIED = "which files_from= does not copy"
_CACHES = (".cache", ".huggingface")  # that huggingface_hub creates in a folder of downloads
# Files of weights, and their checksums, which are not copied from `files_from`.
_WEIGHTS = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx",
    ".gguf", ".ot", CHECKSUMS,
)  # fmt: skip


class Export(NamedTuple):
    """The checked arguments of an export, this rank's part of the state, and its tensors."""

    target: SaveTarget
    max_shard_bytes: int
    content: SaveContent
    table: StateTable
    marks: dict[str, Any]  # fields of the plan: `is_converted`, `code`, and `entry` of the model


def raise_together(group: ProcessGroup | None, error: BaseException | None) -> None:
    """Raise this rank's error, or another rank's; every rank calls it."""
    if group is not None:
        agree(group, "", error)
    elif error is not None:
        raise error


@contextmanager
def _agreed(group: ProcessGroup | None) -> Iterator[None]:
    """Run a block on every rank; all raise if it fails on one."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
    raise_together(group, failure)


# ---- the state ----


def _memory_of(value: Any) -> Any:
    """Return a key for an array's memory, equal for arrays that share it.

    The memory, shape, strides and dtype must be equal, and of shards the part too. None for an
    array without elements, and for values other than arrays and tensors.
    """
    array, part = value, None
    if isinstance(value, Shard):
        array, part = value.array, (value.layout, value.index, tuple(value.shape))
        if value.layout.parts == 1 and value.shape == tuple(array.shape):
            part = None  # a whole array
    key = memory_key(array)
    return None if len(key) == 1 else (*key, part)  # 1: of the object, which has no known memory


def _tied_names(model: Any, state: dict[str, Any]) -> set[str]:
    """Return the names in `state` that share the memory of an earlier name.

    They are not written again. `model`: the caller's object; a module knows them.
    """
    if is_module(model):
        return set(backend_of(model, CheckpointBackend).tied_names(model))
    seen: set[Any] = set()
    tied = set()
    for name, value in state.items():
        key = _memory_of(value)
        if key in seen:
            tied.add(name)
        elif key is not None:
            seen.add(key)
    return tied


def _refuse_entries(content: SaveContent) -> None:
    """Raise CompatibilityError if a module has entries that are not tensors.

    The format cannot hold them. Metadata of torch are dropped.
    """
    for name in content.entries:
        raise CompatibilityError(
            f"{name!r} is not a tensor, and a Hugging Face folder holds only tensors: save the "
            "module by mlstate.save, or export a dict without it",
            name=name,
        )
    content.named = NO_STATES


def _take_state(
    target: SaveTarget, model: Any, rename: Mapping[str, str] | None, dtype: str
) -> tuple[SaveContent, StateTable]:
    """Return this rank's part of the model, and its table of dtypes and shapes for other ranks.

    `rename`: rules of the caller or None. `dtype`: for floats, or "". With a group, an error is
    kept in the result, to be raised by all ranks.
    """
    content = take_content(target, model, None, None, SAVE_DEFAULTS)
    table = StateTable({}, [])
    try:
        state = content.dicts[0]
        if content.error is None:
            assert state is not None
            _refuse_entries(content)
            refuse_unstorable(state, every=True)
            tied = _tied_names(model, state)
            tensors = {name: value for name, value in state.items() if name not in tied}
            if rename is not None:
                # with several ranks, a rule may concern tensors of another rank only
                unused = "error" if target.group is None else "ignore"
                tensors = dict(rename_state(tensors, rename, unused=unused))
                tied = set()  # the old names are gone
            content.dicts = (tensors, None, None)
            table = table_of(tensors, tied, dtype)
            if dtype:
                refuse_codes(facts_of(tensors), "is not exported in another dtype")
    except BaseException as error:
        if target.group is None:
            raise
        content = SaveContent((None, None, None), {}, error)
    return content, table


# ---- the folder ----


def _target_of(
    target: SaveTarget, start: Target | None, plan: ExportPlan, other_files: _Opened
) -> Target:
    """Return the target of an export; raise StoreError (EEXIST) if it must not be replaced.

    `start`: as it was when the caller began; None: as it is now. `other_files`: the files that are
    copied to it.
    """
    start = start or Target.of(target.path)
    existing = None if start.is_vacant else _existing(start, plan.stem, other_files)
    shapes = {name: shape for file in plan.tensors for name, _, shape in file}
    overwrite = target.request.overwrite
    require_free(start.path, existing, overwrite, "huggingface", lambda: shapes)
    return start


def _existing(start: Target, stem: str, other_files: _Opened) -> Existing:
    """Return what exists at a target that is not free, for weights whose names begin with `stem`.

    A file that the new folder would not have is a reason not to replace it; hidden files and
    checksums are not, nor folders of downloads.
    """
    folder, kind = LocalFolder(start.path), "huggingface"
    root = find_weights(folder) if start.is_folder else None
    if root is None:
        return Existing(kind, foreign="is not a Hugging Face folder")
    with os_errors("cannot list the folder", start.path), os.scandir(start.path) as entries:
        is_folder = {entry.name: entry.is_dir() for entry in entries}

    def is_kept(name: str) -> bool:
        if is_folder[name]:
            return name in _CACHES
        is_weights = weights_root([name]) is not None and stem_of([name]) == stem
        return is_weights or name in other_files or name.startswith(".") or name.endswith(CHECKSUMS)

    if lost := sorted(name for name in is_folder if not is_kept(name)):
        return Existing(kind, foreign=f"would lose {lost[0]!r}, {_NOT_COPIED}")
    files = CheckpointFiles(folder)
    try:
        merged = HuggingFaceSource(files, root).merged
        shapes = {key: shape for _, key, _, _, _, shape, *_ in merged.tensors()}
    except MLStateError as error:
        return Existing(kind, dict, damage=str(error))
    return Existing(kind, lambda: shapes)


def is_copied(name: str) -> bool:
    """Return whether a file of `files_from` is copied: not hidden files, nor files of weights."""
    return not (name.startswith(".") or name.endswith(_WEIGHTS) or is_index(name))


def _files_to_copy(source: Folder) -> _Opened:
    """Return functions that open the files to copy, such as config.json, by name.

    Raises StoreError or FormatError if one cannot be copied.
    """
    if not source.is_local:
        names = sorted(filter(is_copied, source.names("")))
        return {name: partial(_open_object, source, name) for name in names}
    with os_errors("cannot list files_from=", source.path), os.scandir(source.path) as entries:
        files = [each for each in entries if is_copied(each.name) and not each.is_dir()]
    paths = sorted(file.path for file in files)
    for path in paths:
        with os_errors("cannot copy the file of files_from=", path):
            check_regular(os.stat(path), path)
    return {os.path.basename(path): partial(open_regular, path) for path in paths}


def _open_object(folder: Files, name: str) -> BytesIO:
    return BytesIO(folder.read(name))


def _temporary_name(folder: str) -> str:
    """Return an unused name in the folder's parent."""
    parent, name = os.path.split(folder)
    return os.path.join(parent, f".{name}.mlstate-{os.urandom(8).hex()}.tmp")


def _begin(folder: str, plan: ExportPlan) -> None:
    """Create `folder` with the plan's files at their final length, still without content.

    Missing parents are created too, and stay. Raises StoreError.
    """
    with os_errors("cannot create the folder", folder):
        make_path(os.path.dirname(folder))
        os.mkdir(folder)
        for file, size in zip(plan.files, plan.sizes, strict=True):
            path = os.path.join(folder, file)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with _core.Descriptor(path, flags) as descriptor:
                os.truncate(descriptor.fileno(), size)


def _checked_entry(folder: Files, plan: ExportPlan) -> ExportPlan:
    """Return the plan without its ``quantization_config`` if the files to copy have one.

    Raises CompatibilityError if floats are converted, and that entry is of a method that mlstate
    does not decode, or of a code whose scales are missing.
    """
    try:
        entry = find_entry(folder, {})
        if plan.is_converted:
            parse_entry(folder.path, entry)
    except MLStateError:
        if plan.is_converted:
            raise
        return plan._replace(entry=None)  # the file is copied as it is
    if entry is not None and plan.code:
        raise CompatibilityError(
            f"{plan.code!r} is quantized, as {folder.path} says, and has no scale: load the folder "
            "of its file with cast=, which computes the values",
            name=plan.code,
            path=folder.path,
        )
    return plan if entry is None else plan._replace(entry=None)


def _copy_file(name: str, opened: Callable[[], Any], folder: str, plan: ExportPlan) -> None:
    """Write another file of the model to `folder`, durably.

    `name`: its name. `opened`: returns the open source. ``config.json`` receives the dtype of the
    weights, and no file keeps a description of quantization if no codes are written.
    """
    is_plain = not has_codes(chain(*plan.tensors))
    with opened() as read:
        source = read
        if name == _CONFIG:
            dtype = weights_dtype(chain(*plan.tensors))
            data = config_of_dtype(read.read(), dtype, is_plain=is_plain, entry=plan.entry)
            source = BytesIO(data)
        elif name in OTHER_FILES and is_plain:
            if (rest := other_without_entry(name, read.read())) is None:
                return
            source = BytesIO(rest)
        with open(os.path.join(folder, name), "xb") as write:
            shutil.copyfileobj(source, write)
            write.flush()
            os.fsync(write.fileno())


def _finish(folder: str, final: Target, plan: ExportPlan, crcs: Any, other_files: _Opened) -> None:
    """Write headers and index, copy other files, and rename the folder to its final path.

    `folder`: the temporary path. `final`: the final one. `crcs`: checksums of all blocks.
    `other_files`: how to open the files to copy, by name. Raises StoreError, also if the final path
    changed meanwhile.
    """
    import json

    for number, file in enumerate(plan.files):
        LocalFolder(folder).overwrite_start(file, plan.header(number, crcs))
    if len(plan.files) > 1:
        text = json.dumps(plan.index_data(), indent=2, ensure_ascii=False) + "\n"
        _core.file_replace(os.path.join(folder, index_of(plan.stem)), text.encode(), 0o666)
    if plan.entry is not None and has_codes(chain(*plan.tensors)):
        other_files.setdefault(_CONFIG, partial(BytesIO, b"{}"))  # receives the entry
    with os_errors("cannot write the folder", final.path):
        for name, opened in other_files.items():
            _copy_file(name, opened, folder, plan)
        _core.folder_sync(folder)
        final.put(folder)


# ---- parts ----


def _write_parts(
    folder: str,
    plan: ExportPlan,
    batches: Iterable[_core.ShardItems],
    sync: bool,
    progress: Callable[[int], object] | None,
) -> bytes:
    """Write this rank's parts to the files of `folder`; return their checksums and bytes.

    `plan`: the files and the places of all tensors. `batches`: the shards. `sync`: make them
    durable; rank 0 does so after it wrote the headers. `progress`: called with numbers of bytes;
    None: no calls. The result, for `_checksums`, has the CRC32C of each block, combined over the
    ranks by XOR, and the bytes written of each tensor. It is compressed: most values are 0.
    """
    crcs = np.zeros(plan.starts[-1], "<u4")
    written = np.zeros(len(plan.places), "<u8")
    for shards in batches:
        _core.parts_write(shards, folder, plan.files, plan.places, crcs, written, sync, progress)
    return zlib.compress(written.tobytes() + crcs.tobytes())


def _checksums(plan: ExportPlan, shares: list[bytes]) -> Any:
    """Return the checksums of all blocks; raise ValueError if ranks left out a part.

    `shares`: the result of each rank's `_write_parts`.
    """
    count = len(plan.places)
    crcs, written = np.zeros(plan.starts[-1], "<u4"), np.zeros(count, "<u8")
    for share in shares:
        data = zlib.decompress(share)
        written += np.frombuffer(data, "<u8", count)
        crcs ^= np.frombuffer(data, "<u4", offset=8 * count)
    for name, place in plan.places.items():
        if written[place.number] != plan.nbytes[place.number]:
            raise ValueError(
                f"{name!r} is incomplete: the ranks hold {int(written[place.number]):,} of its "
                f"{plan.nbytes[place.number]:,} bytes; pass the group of all ranks that share the "
                "model, and replica=0 for one copy of each part"
            )
    return crcs


# ---- the whole export ----


def write_folder(
    target: SaveTarget,
    plan: ExportPlan,
    batches: Iterable[_core.ShardItems],
    files_from: str | os.PathLike[str] | None,
    start: Target | None = None,
    progress: Callable[[int], object] | None = None,
    written: Callable[[], object] | None = None,
) -> None:
    """Write the parts of all ranks as a folder; every rank calls it, and rank 0 commits.

    `batches`: shards of this rank, requested as they are written. `files_from`, `progress`: as for
    `export_huggingface`. `start`: as for `export`. `written`: called when this rank's shards are no
    longer needed; if it raises, the export fails. After a failure, all ranks raise and no folder
    remains; a signal waits until it is deleted.
    """
    group, folder = target.group, os.path.realpath(target.path)
    is_first, temporary = target.rank == 0, _temporary_name(folder)
    share, other_files, final = b"", dict[str, Any](), Target(folder, ())
    with _core.deferred_interrupts() as section:
        try:
            with section.allowed():
                with _agreed(group):
                    if is_first:
                        if files_from is not None:
                            source = open_folder(files_from, reads=True)
                            other_files = _files_to_copy(source)
                            # the other files there belong to weights of this name
                            plan = _checked_entry(source, plan.named(stem_of(source.names(""))))
                        final = _target_of(target, start, plan, other_files)
                        _begin(temporary, plan)
                if group is not None:
                    names = next(iter(group.gather_bytes(os.fsencode(f"{plan.stem}\0{temporary}"))))
                    stem, _, temporary = os.fsdecode(names).partition("\0")
                    plan = plan.named(stem)
                with _agreed(group):
                    share = _write_parts(temporary, plan, batches, not is_first, progress)
                    if written is not None:
                        written()
                shares = [share] if group is None else group.gather_bytes(share)
                with _agreed(group):
                    if is_first:
                        _finish(temporary, final, plan, _checksums(plan, shares), other_files)
        except BaseException:
            if is_first:
                remove_folder(temporary)
            raise


def take_export(
    path: str | os.PathLike[str],
    model: Any,
    group: ProcessGroup | None = None,
    max_shard_bytes: int | str = MAX_SHARD_BYTES,
    rename: Mapping[str, str] | None = None,
    dtype: object = None,
    overwrite: bool | None = None,
) -> Export:
    """Return the checked request of an export; the parameters are of `export_huggingface`.

    No array is copied. With a group, an error about the model is kept in ``content.error`` of the
    result, so that all ranks raise together; errors about other arguments are raised at once.
    """
    target = check_target(local_path(path), {**SAVE_DEFAULTS, "group": group}, overwrite=overwrite)
    max_bytes = parse_size("max_shard_bytes", max_shard_bytes, 1)
    dtype_name = "" if dtype is None else float_name(dtype)
    content, table = _take_state(target, model, rename, dtype_name)
    facts = facts_of(content.dicts[0] or {}) if dtype_name else {}
    code = next((name for name, (stored, _) in facts.items() if stored in CODE_FLOATS), "")
    marks = {"is_converted": bool(dtype_name), "code": code}
    return Export(target, max_bytes, content, table, marks)


def gather_parts(
    request: Export, copy: Callable[[Any], Any] | None = None
) -> tuple[GatheredShards, ExportPlan]:
    """Return this rank's shards, and the plan of the files; every rank calls it.

    `copy` copies tensors on a device. Removes tied names, and parts that other ranks write, from
    the state in `request.content`. If any rank fails, all raise.
    """
    target, content, max_bytes = request.target, request.content, request.max_shard_bytes
    raise_together(target.group, content.error)
    table = exchange_tables(target.group, request.table, [os.path.realpath(target.path), max_bytes])
    state = content.dicts[0]
    assert state is not None
    for name in table.tied:
        state.pop(name, None)
    drop_copies(target.group, table.tensors, state)
    gathered = gather_shards(target, content, copy)
    raise_together(target.group, gathered.error)
    return gathered, make_plan(table.tensors, max_bytes)._replace(**request.marks)


def export(
    request: Export,
    files_from: str | os.PathLike[str] | None = None,
    start: Target | None = None,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Export a model; the parameters are as for `export_huggingface`.

    `start`: the target when the caller began; None: as it is now.
    """
    gathered, plan = gather_parts(request)
    write_folder(request.target, plan, [gathered.shards], files_from, start, progress)


@set_module("mlstate.checkpoint")
def export_huggingface(
    path: str | os.PathLike[str],
    model: Any,
    *,
    group: ProcessGroup | None = None,
    max_shard_bytes: int | str = MAX_SHARD_BYTES,
    rename: Mapping[str, str] | None = None,
    files_from: str | os.PathLike[str] | None = None,
    dtype: object = None,
    overwrite: bool | None = None,
    progress: Callable[[int], object] | None = None,
) -> None:
    """
    Write the weights of a model as a Hugging Face folder.

    The folder has ``model.safetensors``, or several files
    ``model-0000x-of-0000y.safetensors`` and ``model.safetensors.index.json``. If `files_from` has
    the weights of PEFT or diffusers, such as ``adapter_model.safetensors`` or
    ``diffusion_pytorch_model.safetensors``, the files have this name instead. Every rank writes
    its own part of each tensor directly to its final place: no rank gathers tensors, and no pass
    over the data follows. ``from_pretrained`` of transformers loads the folder.

    Parameters
    ----------
    path : str or os.PathLike
        Folder to write. All ranks need access to its parent.
    model : torch.nn.Module or mapping of str to array
        The model, as for `save`: a plain, DDP, FSDP1 or FSDP2 module, with or without tensor
        parallelism, or a state dict of arrays and `Shard` objects.
    group : ProcessGroup, optional
        The ranks that hold the model. All of them must call this function.
    max_shard_bytes : int or str, default 5 * 2**30
        Largest size of a file's tensors in bytes. A larger tensor has its own file.
    rename : mapping of str to str, optional
        Prefixes of names to replace, as for `mlstate.state.rename`.
    files_from : str or os.PathLike, optional
        Folder, or its URL in an object store, whose files are copied, such as ``config.json`` and
        the tokenizer's files. Hidden files, subfolders and files of weights are not copied. If
        ``config.json`` has an entry ``dtype`` or ``torch_dtype``, the copy has the dtype of most
        floats of the weights, unless it has a ``quantization_config``. The copy keeps this entry
        if the weights have codes, such as 8-bit floats; otherwise it is removed.
    dtype : dtype or str, optional
        float16, bfloat16, float32 or float64: its name, or the dtype of NumPy, ml_dtypes or
        torch. All floats are written in this dtype, rounded to nearest; 8-bit floats by their
        values. Integers, bool and complex numbers keep their dtypes.
    overwrite : bool, optional
        Default: a folder of weights with the same names and shapes is replaced. True: replace any
        Hugging Face folder. False: replace nothing. A folder with files that the new one would
        lack, such as ``config.json`` without `files_from`, is always refused. See docs/files.md.
    progress : callable, optional
        Called with the number of bytes that this rank has written since the last call.

    Raises
    ------
    StoreError
        `path` exists and `overwrite` does not replace it, or it changed during the export (EEXIST),
        or the operating system refused.
    ValueError
        `path` is a URL, or the ranks pass different arguments or do not hold all parts of a
        tensor.
    FormatError, CompatibilityError
        With `dtype`, some weights are codes with scales, whose numbers alone are not their values:
        `mlstate.load` with ``cast=`` returns their values. Or `max_shard_bytes` divides the weights
        of an adapter, which PEFT reads from one file.
    TypeError, CompatibilityError
        As for `save`. Every rank raises if any rank does.

    Notes
    -----
    The export is atomic: files are written to a folder ``.NAME.mlstate-*.tmp`` in the target's
    parent, synced and renamed. After an error or interrupt this folder is deleted; a process that
    is killed leaves it behind, and it can be deleted.

    Tied weights are stored under the first of their names, as ``save_pretrained`` does. The files
    have the checksums of `save_file`, which `load` and `verify` compare. A rank's memory does not
    grow with the number of ranks, nor with `dtype`, as tensors are converted while they are
    written: it needs 512 KiB, and 12 bytes for each MiB of the model. Tensors on a device are
    copied to main memory first.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> from mlstate.checkpoint import export_huggingface
    >>> path = tempfile.mkdtemp() + "/model"
    >>> export_huggingface(path, {"a": np.ones(4), "b": np.ones(4)}, max_shard_bytes=32)
    >>> sorted(mlstate.checkpoint.inspect(path).files())
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    check_callback("progress", progress)
    request = take_export(
        path,
        model=model,
        group=group,
        max_shard_bytes=max_shard_bytes,
        rename=rename,
        dtype=dtype,
        overwrite=overwrite,
    )
    export(request, files_from, progress=progress)
