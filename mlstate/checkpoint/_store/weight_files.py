"""Hugging Face folder as checkpoint: its index, missing files, tensors in two files, warnings.

Such a folder has one file such as ``model.safetensors``, or several files that an index such as
``model.safetensors.index.json`` lists. The headers of the files list the tensors. The core makes an
index of them, so that everything that reads a checkpoint reads these folders too. If the folder's
index differs from the headers, a warning names the difference, and the headers count.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import _core
from ..._common.caller import find_caller
from ..._common.dtypes import DTYPES
from ..._common.store_error import format_error, store_error
from ..._common.text import names_hint
from ...errors import FormatError, StoreNotFoundError, TensorNotFoundError
from ...state._kind import KEY, kind_of_text
from .._folder.protocol import FileInfo, Files, TensorParts
from .._folder.weight_names import SUFFIX, is_set, set_files, set_of
from .manifest import IndexRecord, Manifest, foreign_manifest
from .name_globs import Names
from .weight_checksums import records_of

if TYPE_CHECKING:
    from collections.abc import Mapping


WRITER = "a program that writes Hugging Face folders"
_MOST_NAME = 240  # bytes of a file name, MLS_PATH_BYTES
_MOST_DEPTH = 16  # of nested arrays and objects in the index
_SHOWN = 3  # names in an error
_WHOLE = (None, 0, 0)  # the cutting of whole tensors


class WeightFiles(NamedTuple):
    """The files of a Hugging Face folder, as its index lists them."""

    root: str  # see weight_names.py
    files: tuple[str, ...]  # sorted names
    tensors: dict[str, str] | None = None  # file of each tensor; None for a folder without index
    total_bytes: Any = None  # the index's total_size, of any type
    missing: tuple[str, ...] = ()  # of `files`, those that do not exist

    def missing_error(self, folder: Files, text: str = "") -> StoreNotFoundError:
        """Return the error for missing files; `text`, at its start, names the needed tensors."""
        first = os.path.join(folder.path, self.missing[0])
        count = f"{len(self.missing)} of the {len(self.files)} files of {self.root} do not exist: "
        from ..._common.file_kinds import dangling_blob

        link = dangling_blob(first)
        remedy = "; download or copy the folder again, or load the tensors of the others by names="
        remedy = f"; {self.missing[0]}: {link}" if link else remedy
        return StoreNotFoundError(2, f"{text}{count}{listed(self.missing)}{remedy}", first)


def _wrong(folder: Files, root: str, text: str, name: str | None = None) -> FormatError:
    """Return a FormatError about the file `root` of a folder, and the tensor `name`."""
    return format_error(f"{root}: {text}", os.path.join(folder.path, root), name)


def _warn(folder: Files, root: str, text: str) -> None:
    find_caller().warn(f"{os.path.join(folder.path, root)}: {text}")


def listed(names: tuple[str, ...] | list[str]) -> str:
    """Return the first three names as text, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


# ---- the index ----


def _check_file_name(folder: Files, root: str, tensor: str, name: Any, suffix: str) -> None:
    """Raise FormatError unless `name`, the file of `tensor` in an index, is in the folder itself.

    `root`: the index. `suffix`: that files of the format have.
    """
    if not isinstance(name, str):
        text = f"the file of {tensor!r} is {name!r}, not a file name"
    elif "/" in name or "\\" in name or "\0" in name or not name.endswith(suffix):
        text = f"the file of {tensor!r} is {name!r}: not the name of a {suffix} file in the folder"
    elif len(name.encode("utf-8", "surrogatepass")) > _MOST_NAME:
        text = f"the file of {tensor!r} has a name of more than {_MOST_NAME} bytes"
    else:
        return
    raise _wrong(folder, root, text, tensor)


def parse_index(folder: Files, root: str, data: bytes, suffix: str = SUFFIX) -> WeightFiles:
    """Return the files and tensors that an index lists; raise FormatError if it is malformed.

    `root`: its name. `data`: its bytes. `suffix`: that all its files must have.
    """
    import json

    try:
        _core.json_check(data, _MOST_DEPTH, root)
        document = json.loads(data)
    except (FormatError, ValueError) as error:
        raise _wrong(folder, root, f"not valid JSON: {error}") from None
    tensors = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(tensors, dict) or not tensors:
        raise _wrong(folder, root, 'it has no "weight_map" that names the file of each tensor')
    named: dict[Any, str] = {}
    for tensor, name in tensors.items():
        if not isinstance(name, str) or name not in named:
            _check_file_name(folder, root, tensor, name, suffix)
            named[name] = tensor
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return WeightFiles(root, tuple(sorted(named)), tensors, total)


def list_set(folder: Files, root: str) -> WeightFiles:
    """Return the numbered files of a folder without an index; warn that it has none.

    `root`: the name pattern of the set. The warning also names missing files; without any file,
    `missing` of the result is the pattern. Raises FormatError for wrong numbers.
    """
    try:
        files, missing = set_files(folder.names(""), root)
    except FormatError as error:
        raise _wrong(folder, root, str(error)) from None
    count = len(files) + len(missing)
    if missing and files:
        text = f"and these are missing, with unknown tensors: {listed(missing)}"
        _warn(folder, root, f"the folder has no index of its {count} files, {text}")
    elif count > 1:
        _warn(folder, root, f"the folder has no index of its {count} files: all are read")
    return WeightFiles(root, tuple(sorted(files + missing)), missing=tuple(missing))


def check_unlisted(folder: Files, weights: WeightFiles, suffix: str = SUFFIX) -> None:
    """Raise FormatError if an index lists some files of a set, such as 1 of 3, but not all.

    `weights`: the files of the index.
    """
    sets = {set_of(name) for name in weights.files} - {None}
    unlisted = [name for name in unlisted_files(folder, weights, suffix) if set_of(name) in sets]
    if unlisted:
        raise _wrong(
            folder,
            weights.root,
            f"it leaves out {listed(unlisted)}, which belongs to the files that it names; replace "
            "the index, or move the file away if it is a remnant",
        )


def unlisted_files(folder: Files, weights: WeightFiles, suffix: str = SUFFIX) -> list[str]:
    """Return the files of the folder with `suffix` that the weights do not include, sorted.

    Without an index, returns [] if the caller named one file, or for a store: such a folder may
    hold anything else.
    """
    if weights.tensors is None and (folder.file or not folder.is_local):
        return []
    names = folder.names("")
    return sorted(name for name in names if name.endswith(suffix) and name not in weights.files)


# ---- as a checkpoint ----


def _generation(infos: Mapping[str, FileInfo]) -> tuple[str, float]:
    """Return 16 hex digits that change if any file is replaced, and the newest file's time."""
    import hashlib

    facts = [(name, *info.identity) for name, info in infos.items()]
    digest = hashlib.sha256(repr(facts).encode(), usedforsecurity=False).hexdigest()
    return digest[:16], max((info.changed for info in infos.values()), default=0.0)


def _read_texts(folder: Files, name: str) -> dict[str, str]:
    """Return the metadata in a safetensors file's header; {} if it is damaged or was replaced.

    Reading its tensors reports the damage.
    """
    try:
        with folder.header_files((name,)) as local:
            return _core.file_metadata(os.path.join(local, name), True)
    except (FormatError, StoreNotFoundError):
        return {}


def read_weights(folder: Files, root: str, data: bytes | None) -> Manifest:
    """Return a manifest that describes files of another program, as if `save` had written them.

    `root`: a file, an index, or a pattern of numbered files. `data`: the bytes of the index, None
    without one. Only the first file's header is read. Missing files are listed in
    `weights.missing`; raises StoreError if the only file is missing.
    """
    # the name of one file, which the caller passed, may look like a pattern
    is_set_root = is_set(root) and root != folder.file
    if data is not None:
        weights = parse_index(folder, root, data)
    elif is_set_root:
        weights = list_set(folder, root)
    else:
        weights = WeightFiles(root, (root,))
    names = sorted({*weights.files, *([] if is_set_root else [root])})
    noted = folder.note_files(names)
    weights = weights._replace(missing=tuple(name for name in weights.files if noted[name] is None))
    if weights.missing == (root,):
        reason = FileNotFoundError(2, "no such file")
        from ..._common.file_kinds import explain

        path = os.path.join(folder.path, root)
        raise explain(store_error(reason, "cannot read the file", path), path)
    if weights.tensors is not None:
        check_unlisted(folder, weights)
    infos = {name: info for name in names if (info := noted[name]) is not None}
    generation, changed = _generation(infos)
    present = [name for name in weights.files if name not in weights.missing]
    texts = _read_texts(folder, present[0]) if present else {}
    kind = texts.pop(KEY, None)
    return foreign_manifest(
        generation,
        changed,
        writer=WRITER,
        model=kind_of_text(kind if len(weights.files) == 1 else None, folder.path),
        optimizer=None,
        metadata=texts,
        # the index of another program has no checksum, and its counts are in the headers
        indexes=(IndexRecord(root, len(data or b""), "00000000", shards=0, data_bytes=0),),
        weights=weights,
    )


def without_missing(folder: Files, manifest: Manifest, names: list[str] | None) -> Manifest:
    """Return the manifest without missing files; raise if a load of `names` needs one of them.

    None as `names` (all tensors) changes nothing. So a partial download can be read: its index
    lists the tensors of missing files.
    """
    weights = manifest.weights
    if weights is None or not weights.missing or names is None:
        return manifest
    tensors = weights.tensors or {}
    lost = [tensor for tensor, file in tensors.items() if file in weights.missing]
    chosen, _ = Names(names, list(tensors)).select(lost, 0)
    if chosen:
        needed = f"{listed(chosen)} {'is' if len(chosen) == 1 else 'are'} in missing files: "
        raise weights.missing_error(folder, needed)
    present = tuple(name for name in weights.files if name not in weights.missing)
    tensors = {tensor: file for tensor, file in tensors.items() if file not in weights.missing}
    kept = weights._replace(
        files=present, missing=(), total_bytes=None, tensors=tensors if weights.tensors else None
    )
    return manifest._replace(weights=kept)


def read_merged_index(folder: Files, manifest: Manifest, checked: bool) -> _core.MergedIndex:
    """Read the headers of all files, and return them as a merged index.

    `checked`: compare the headers with the checksums of `checksum`, and include the checksums of
    the tensors in the index. Raises if a file is missing; warns of differences from the index file.
    """
    weights = manifest.weights
    assert weights is not None
    if weights.missing:
        raise weights.missing_error(folder)
    records = records_of(folder, weights.files) if checked else ()
    with folder.header_files(weights.files) as local:
        try:
            merged = _core.MergedIndex.of_files(local, weights.files, records)
        except (FormatError, StoreNotFoundError) as error:
            from ..._common.file_kinds import explain

            path = error.filename if isinstance(error, StoreNotFoundError) else error.path
            raise explain(error, path) if path else error from None
    _compare_copies(folder, merged)
    if weights.tensors is not None:
        # of a shard: section, key, number and shape of its part, rank, file, ...
        files_by_name = {key: file for _, key, _, _, _, file, *_ in merged.shards()}
        if files_by_name != weights.tensors:
            copies = {(key, file) for key, file, _ in merged.copies()}
            warn_of_differences(folder, weights, files_by_name, copies)
    return merged


def _compare_copies(folder: Files, merged: _core.MergedIndex) -> None:
    """Raise FormatError if several files hold a tensor with different bytes.

    A tensor of an unknown dtype is not compared: only loading it is an error. This needs memory for
    two tensors, unless files are mapped.
    """
    indexes: dict[str, _core.MergedIndex] = {}
    copies = merged.copies()
    dtypes = {info.name for info in DTYPES}
    opaque: set[str] = set()
    if copies:
        opaque = {key for _, key, _, _, dtype, *_ in merged.tensors() if dtype not in dtypes}
    for key, file, first_file in copies:
        if key in opaque:
            continue
        if file not in indexes:
            with folder.header_files((file,)) as local:
                indexes[file] = _core.MergedIndex.of_files(local, (file,))
        arrays = (
            folder.load(TensorParts(index, 0, [key], _WHOLE), False, True, None)[key]
            for index in (merged, indexes[file])
        )
        if bytes_of(next(arrays)) != bytes_of(next(arrays)):
            raise _copy_error(folder, key, file, first_file)


def bytes_of(array: Any) -> memoryview:
    """Return a view of a contiguous array's bytes."""
    return memoryview(array.reshape(-1).view("u1"))


def _copy_error(folder: Files, key: str, file: str, first_file: str) -> FormatError:
    """Return the FormatError for a tensor that `file` and `first_file` hold with other bytes."""
    text = f"{key!r} has other bytes than in {first_file}: parts of a tensor are not joined; move "
    return _wrong(folder, file, text + "one of the files away", key)


def warn_of_differences(
    folder: Files,
    weights: WeightFiles,
    files_by_name: dict[str, str],
    copies: set[tuple[str, str]],
) -> None:
    """Warn the user if an index of weights differs from the headers of its files.

    `files_by_name`: file of each tensor, from the headers. `copies`: (tensor, file) for tensors
    that a second file holds too.
    """
    tensors = weights.tensors or {}
    wrong = [
        name
        for name, file in tensors.items()
        if files_by_name.get(name) != file and (name, file) not in copies
    ]
    unlisted = [name for name in files_by_name if name not in tensors]
    texts = []
    if wrong:
        name = wrong[0]
        location = (
            f": it is in {files_by_name[name]!r}"
            if name in files_by_name
            else names_hint(name, files_by_name)
        )
        texts.append(f"{name!r} is not in {tensors[name]!r}, the file that it names{location}")
    if unlisted:
        texts.append(
            f"it does not list {unlisted[0]!r}, which {files_by_name[unlisted[0]]!r} holds"
        )
    others = len(wrong) + len(unlisted) - len(texts)
    if others:
        texts.append(f"{others} other tensor{'' if others == 1 else 's'} differ too")
    if texts:
        _warn(folder, weights.root, f"{'; '.join(texts)}; the files' headers are used")


def listed_only_error(weights: WeightFiles | None, name: str, folder: str) -> Exception | None:
    """Return the error for a `name` that selects only tensors that no file holds; None without any.

    `name`: the user's, which selects no stored tensor. The error tells which file should hold the
    first tensor by the index. `weights`: None if the checkpoint is of mlstate. `folder`: path for
    the error.
    """
    tensors = {} if weights is None else weights.tensors or {}
    chosen, _ = Names([name], list(tensors)).select(list(tensors), 0)
    if weights is None or not chosen:
        return None
    text = (
        f"Tensor {chosen[0]!r} is not in {tensors[chosen[0]]!r}, the file that {weights.root} names"
    )
    return TensorNotFoundError(text, name=chosen[0], path=folder)


def warn_of_total(folder: Files, manifest: Manifest, merged: _core.MergedIndex) -> None:
    """Warn the user if the index of weights records another total size than its tensors have."""
    weights = manifest.weights
    if weights is None or weights.total_bytes is None:
        return
    *_, total, _ = merged.heads()[0]  # ..., bytes of the tensors, bytes in files
    if isinstance(weights.total_bytes, bool) or weights.total_bytes != total:
        text = f"total_size is {weights.total_bytes!r:.40}, but the tensors have {total:,} bytes"
        _warn(folder, weights.root, text)
