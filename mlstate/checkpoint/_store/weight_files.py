"""The weights of a Hugging Face folder: its index, and the files that hold the tensors.

Such a folder has one file ``model.safetensors``, or several files that are listed in
``model.safetensors.index.json``. The headers of the files list the tensors. The core makes an
index of them, so that everything that reads a checkpoint reads these folders too.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import _core
from ..._common.store_error import format_error, store_error
from ..._common.text import names_hint
from ...errors import FormatError, StoreNotFoundError
from .._folder.names import INDEX
from .weight_checksums import records_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .._folder.protocol import FileInfo, Folder
    from .manifest import Manifest

WRITER = "a program that writes Hugging Face folders"
_SUFFIX = ".safetensors"
_MOST_NAME = 240  # bytes of a file name, MLS_PATH_BYTES
_MOST_DEPTH = 16  # of nested arrays and objects in the index
_NUMBERED = re.compile(r"(.+)-\d{5}(-of-\d{5}\.safetensors)\Z", re.ASCII)
_SHOWN = 3  # names in an error


class WeightFiles(NamedTuple):
    """The files of a Hugging Face folder, as its index lists them."""

    files: tuple[str, ...]  # sorted names
    tensors: dict[str, str] | None  # file of each tensor; None for a folder without index
    total_bytes: int | None  # the index's total_size, if it has one


def is_weights_root(root: str) -> bool:
    """Return whether a root is a file of another program, not a manifest of mlstate."""
    return root == INDEX or root.endswith(_SUFFIX)


def _wrong(folder: Folder, root: str, text: str) -> FormatError:
    return format_error(f"{root}: {text}", os.path.join(folder.path, root))


def _listed(names: list[str]) -> str:
    """Return the first names as text, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


# ---- the index ----


def _check_file_name(folder: Folder, tensor: str, name: Any) -> None:
    """Raise unless a value of the index is the name of a file in the folder itself."""
    if not isinstance(name, str):
        text = f"the file of {tensor!r} is {name!r}, not a file name"
    elif "/" in name or "\\" in name or "\0" in name or not name.endswith(_SUFFIX):
        text = f"the file of {tensor!r} is {name!r}: not the name of a {_SUFFIX} file in the folder"
    elif len(name.encode("utf-8", "surrogatepass")) > _MOST_NAME:
        text = f"the file of {tensor!r} has a name of more than {_MOST_NAME} bytes"
    else:
        return
    error = _wrong(folder, INDEX, text)
    error.name = tensor
    raise error


def _parse(folder: Folder, data: bytes) -> WeightFiles:
    import json

    try:
        _core.json_check(data, _MOST_DEPTH, INDEX)
        document = json.loads(data)
    except (FormatError, ValueError) as error:
        raise _wrong(folder, INDEX, f"not valid JSON: {error}") from None
    tensors = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(tensors, dict) or not tensors:
        raise _wrong(folder, INDEX, 'it has no "weight_map" that names the file of each tensor')
    named: dict[Any, str] = {}
    for tensor, name in tensors.items():
        if not isinstance(name, str) or name not in named:
            _check_file_name(folder, tensor, name)
            named[name] = tensor
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    if total is not None and (isinstance(total, bool) or not isinstance(total, int)):
        raise _wrong(folder, INDEX, f"total_size is {total!r}, not a number of bytes")
    return WeightFiles(tuple(sorted(named)), tensors, total)


def _check_files(
    folder: Folder, weights: WeightFiles, infos: Mapping[str, FileInfo | None]
) -> None:
    """Raise if files are missing, or the index leaves out files of the set that it names."""
    missing = [name for name in weights.files if infos[name] is None]
    if missing and weights.tensors is None:
        reason = FileNotFoundError(2, "no such file")
        raise store_error(reason, "cannot read the file", os.path.join(folder.path, missing[0]))
    if missing:
        raise StoreNotFoundError(
            2,
            f"{INDEX} names {len(weights.files)} files, and {len(missing)} of them do not exist: "
            f"{_listed(missing)}; download or copy the folder again",
            os.path.join(folder.path, missing[0]),
        )
    sets = {match.groups() for name in weights.files if (match := _NUMBERED.match(name))}
    unnamed = [
        name
        for name in unlisted_files(folder, weights)
        if (match := _NUMBERED.match(name)) and match.groups() in sets
    ]
    if unnamed:
        raise _wrong(
            folder,
            INDEX,
            f"it leaves out {_listed(unnamed)}, which belongs to the files that it names; replace "
            "the index, or move the file away if it is a remnant",
        )


def unlisted_files(folder: Folder, weights: WeightFiles) -> list[str]:
    """Return the safetensors files of the folder that the weights do not include.

    Of one file in a store there are none: the folder may hold anything else.
    """
    if weights.tensors is None and not folder.is_local:
        return []
    names = folder.names("")
    return sorted(name for name in names if name.endswith(_SUFFIX) and name not in weights.files)


# ---- as a checkpoint ----


def _generation(infos: Mapping[str, FileInfo]) -> tuple[str, float]:
    """Return a text that changes if any file is replaced, and the time of the newest file."""
    import hashlib

    facts = [(name, *info.identity) for name, info in infos.items()]
    digest = hashlib.sha256(repr(facts).encode(), usedforsecurity=False).hexdigest()
    return digest[:16], max(info.changed for info in infos.values())


def _read_texts(folder: Folder, name: str) -> dict[str, str]:
    """Return the metadata of a file.

    {} if it is damaged or was replaced, which reading its tensors reports.
    """
    try:
        with folder.header_files((name,)) as local:
            return _core.file_metadata(os.path.join(local, name), True)
    except (FormatError, StoreNotFoundError):
        return {}


def read_weights(folder: Folder, root: str, data: bytes | None) -> Manifest:
    """Return the manifest of files of another program; `data` is the content of their index."""
    import datetime

    from .manifest import IndexRecord, Manifest

    weights = WeightFiles((root,), None, None) if data is None else _parse(folder, data)
    names = sorted({root, *weights.files})
    noted = folder.note_files(names)
    _check_files(folder, weights, noted)
    generation, changed = _generation(
        {name: info for name in names if (info := noted[name]) is not None}
    )
    created = datetime.datetime.fromtimestamp(changed, datetime.UTC)
    return Manifest(
        generation=generation,
        sequence=1,
        created=created.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        writer=WRITER,
        step=None,
        world_size=1,
        model={"kind": "state"},
        optimizer=None,
        metadata=_read_texts(folder, weights.files[0]),
        indexes=(IndexRecord(root, 0 if data is None else len(data), "00000000", 0, 0),),
        weights=weights,
    )


def read_merged_index(folder: Folder, manifest: Manifest, checked: bool) -> _core.MergedIndex:
    """Read the headers of all files, and return them as a merged index.

    If they are `checked`, the headers are compared with the checksums of `checksum`, and the index
    has those of the tensors.
    """
    weights = manifest.weights
    assert weights is not None
    records = records_of(folder, weights.files) if checked else ()
    with folder.header_files(weights.files) as local:
        merged = _core.MergedIndex.of_files(local, weights.files, records)
    if weights.tensors is not None:
        files_by_name = {shard[1]: shard[5] for shard in merged.shards()}
        if files_by_name != weights.tensors:
            raise _disagreement(folder, weights.tensors, files_by_name)
    return merged


def _disagreement(
    folder: Folder, listed: dict[str, str], files_by_name: dict[str, str]
) -> FormatError:
    """Return the error for an index that differs from the headers of the files."""
    wrong = [name for name in listed if files_by_name.get(name) != listed[name]]
    if wrong:
        name, others = wrong[0], len(wrong) - 1
        location = (
            f": it is in {files_by_name[name]!r}"
            if name in files_by_name
            else names_hint(name, files_by_name)
        )
        text = f"{name!r} is not in {listed[name]!r}, the file that the index names{location}"
    else:
        unnamed = [name for name in files_by_name if name not in listed]
        name, others = unnamed[0], len(unnamed) - 1
        text = f"it does not list {name!r}, which {files_by_name[name]!r} holds"
    if others:
        text += f"; {others} other tensor{'' if others == 1 else 's'} differ too"
    error = _wrong(folder, INDEX, text)
    error.name = name
    return error


def check_total(folder: Folder, manifest: Manifest, merged: _core.MergedIndex) -> None:
    """Raise FormatError if the index has another total size than the tensors."""
    weights = manifest.weights
    if weights is None or weights.total_bytes is None:
        return
    total = merged.heads()[0][4]
    if weights.total_bytes != total:
        error = _wrong(
            folder,
            INDEX,
            f"total_size is {weights.total_bytes:,}, but the tensors have {total:,} bytes: correct "
            "it, or load with verify=False if the tensors are the right ones",
        )
        error.expected, error.got = str(weights.total_bytes), str(total)
        raise error
