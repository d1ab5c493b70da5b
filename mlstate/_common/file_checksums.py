"""Format of ``mlstate.checksums.json``, and reads of files compared with it.

`mlstate.checkpoint.checksum` writes it next to the files, and docs/format.md specifies it. A file
is divided into parts, of a safetensors file the header and each tensor; each MiB of a part has a
CRC32C.
"""

from __future__ import annotations

import os
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _core
from ..errors import ChecksumError, FormatError, StorePermissionError
from .regular_file import open_regular
from .store_error import format_error, store_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME = "mlstate.checksums.json"
FORMAT = "mlstate.checksums"
VERSION = 1
BLOCK = 1 << 20  # bytes that one checksum covers
_MOST_BYTES = 512 << 20  # of the file itself
_MOST_DEPTH = 4  # of nested arrays and objects in it
_MOST_SIZE = (1 << 63) - 1  # of a listed file
_DIGITS = re.compile(r"(?:[0-9a-f]{8})*\Z", re.ASCII)
_REMEDY = (
    "verify=False reads the files without it, mlstate checksum --force writes it again from the "
    "files as they are now"
)


class Record(NamedTuple):
    """Size, parts and checksums of one file, as the core takes them."""

    nbytes: int
    starts: bytes  # offsets of the parts, native 64-bit integers
    crcs: bytes  # of the blocks of all parts, native 32-bit integers

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield offset, length (at most 1 MiB) and CRC32C of each block, in file order."""
        import numpy as np

        starts = [*np.frombuffer(self.starts, np.uint64).tolist(), self.nbytes]
        crcs = iter(np.frombuffer(self.crcs, np.uint32).tolist())
        for start, end in pairwise(starts):
            for offset in range(start, end, BLOCK):
                yield offset, min(BLOCK, end - offset), next(crcs)


class Checksums(NamedTuple):
    """The content of one file of checksums; the names of files are relative paths."""

    path: str
    records: dict[str, Record]


def is_checksums_name(name: str) -> bool:
    """Return whether a file has the name of a file of checksums."""
    return name == NAME or name.endswith(f".{NAME}")


# ---- parsing ----


def _check_name(name: str) -> None:
    if "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{name!r} is not the path of a file in the folder")


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST_SIZE


def make_record(nbytes: int, starts: list[int], digits: str) -> Record:
    """Return the record of a file of `nbytes` bytes.

    `starts`: offsets of its parts, the first 0; empty for an empty file. `digits`: 8 hex digits for
    each MiB of each part. Raises ValueError if they do not fit.
    """
    import numpy as np

    if bool(starts) != bool(nbytes):
        raise ValueError("the parts do not cover the file")
    offsets = np.array([*starts, nbytes], np.uint64)
    if starts and (starts[0] != 0 or not bool((offsets[1:] > offsets[:-1]).all())):
        raise ValueError("the parts do not cover the file")
    lengths = offsets[1:] - offsets[:-1]
    blocks = int(((lengths - np.uint64(1)) // np.uint64(BLOCK) + np.uint64(1)).sum())
    if len(digits) != 8 * blocks or not _DIGITS.match(digits):
        raise ValueError(f"it has {len(digits)} digits of checksums, not {8 * blocks}")
    crcs = np.frombuffer(bytes.fromhex(digits), ">u4").astype(np.uint32)
    return Record(nbytes, offsets[:-1].tobytes(), crcs.tobytes())


def _record_of(entry: Any) -> Record:
    """Return the record of one file from its JSON object `entry`; raise ValueError if malformed."""
    if not isinstance(entry, dict):
        raise ValueError("it is not an object")
    nbytes: Any = entry.get("bytes")
    digits = entry.get("crc32c")
    starts = entry.get("starts", [0] if nbytes else [])
    if not _is_size(nbytes):
        raise ValueError('"bytes" is not a size')
    if not isinstance(starts, list) or not all(map(_is_size, starts)):
        raise ValueError('"starts" is not a list of offsets')
    if not isinstance(digits, str):
        raise ValueError('"crc32c" is not a text')
    return make_record(nbytes, starts, digits)


def _records_of(document: Any) -> dict[str, Record]:
    """Return the records by file name from the JSON `document` of a file of checksums.

    Raises ValueError if it is malformed or of another version.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f'"format" is not "{FORMAT}"')
    version = document.get("format_version")
    if version != VERSION or isinstance(version, bool):
        raise ValueError(f"its version is {version!r}, and this mlstate reads version {VERSION}")
    files = document.get("files")
    if not isinstance(files, dict) or document.get("block_bytes") != BLOCK:
        raise ValueError(f'"files" is not an object, or "block_bytes" is not {BLOCK}')
    records = {}
    for name, entry in files.items():
        _check_name(name)
        try:
            records[name] = _record_of(entry)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
    return records


def parse(data: bytes, path: str) -> Checksums:
    """Return the checksums in the bytes of a file of checksums.

    `path`: of the file, for errors. Raises FormatError, or ChecksumError if the bytes changed.
    """
    import json

    try:
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        _core.json_checksum_check(data, path)
        _core.json_check(data, _MOST_DEPTH, path)
        return Checksums(path, _records_of(json.loads(data)))
    except FormatError as error:
        cls = ChecksumError if isinstance(error, ChecksumError) else FormatError
        failure = cls(f"{path}: the file of checksums is damaged: {error}; {_REMEDY}")
    except ValueError as error:
        failure = FormatError(f"{path}: the file of checksums is not valid: {error}; {_REMEDY}")
    failure.path = path
    raise failure


def build(entries: dict[str, dict[str, Any]]) -> bytes:
    """Return the bytes of a file of checksums.

    `entries`: JSON members (``bytes``, ``starts``, ``crc32c``) by relative path. Raises ValueError
    for a path that leaves the folder.
    """
    import json

    head = {"format": FORMAT, "format_version": VERSION, "block_bytes": BLOCK}
    lines = []
    for name, entry in entries.items():
        _check_name(name)
        lines.append(f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(entry)}")
    text = json.dumps(head)[1:-1] + ', "files": {\n' + ",\n".join(lines) + "\n}}\n"
    return _core.json_checksum_set(b'{"checksum":"00000000",\n' + text.encode())


# ---- finding ----


def read_local(path: str) -> Checksums | None:
    """Return the checksums in the file at a path; None if it does not exist.

    Raises StoreError, and FormatError if it is malformed.
    """
    if not _core.path_exists(path):  # most files have no checksums, and an open costs more
        return None
    try:
        with open_regular(path) as file:
            return parse(file.read(_MOST_BYTES + 1), path)  # `parse` refuses more bytes
    except (FileNotFoundError, NotADirectoryError):  # a dangling link
        return None
    except IsADirectoryError:
        raise format_error(
            f"{path}: a folder has the name of the file of checksums", path
        ) from None
    except OSError as error:
        raise store_error(error, "cannot read the checksums", path) from None


def below(checksums: Checksums, prefix: str) -> Checksums | None:
    """Return the records whose paths begin with `prefix`, by the rest of the path.

    None if there are none.
    """
    records = {
        name.removeprefix(prefix): record
        for name, record in checksums.records.items()
        if name.startswith(prefix)
    }
    return checksums._replace(records=records) if records else None


def find_of_folder(folder: str) -> Checksums | None:
    """Return the checksums of a local folder, from its own file or its parent folder's.

    None without such a file, or without permission to read the parent's. Raises as `read_local`.
    """
    checksums = read_local(f"{folder.rstrip('/')}/{NAME}")
    parent, _, name = os.path.abspath(folder).rpartition("/")
    if checksums is not None or not name:
        return checksums
    try:
        parent_checksums = read_local(f"{parent}/{NAME}")
    except StorePermissionError:
        return None
    return None if parent_checksums is None else below(parent_checksums, f"{name}/")


def find_of_file(path: str) -> tuple[Record, str] | None:
    """Return the record of a local file, and the path of the file that has the record.

    The latter is next to the file, for this file alone or for the whole folder, or in the parent
    folder. None without a record. Raises as `read_local`.
    """
    path = os.path.abspath(path)
    folder, _, name = path.rpartition("/")
    checksums = read_local(f"{path}.{NAME}") or find_of_folder(f"{folder}/")
    if checksums is None or name not in checksums.records:
        return None
    return checksums.records[name], checksums.path


# ---- comparing ----


def changed_ranges(
    file: Any, record: Record, progress: Callable[[int], object] | None = None
) -> list[tuple[int, int]]:
    """Return offset and length of each changed block of an open file of the recorded size.

    The list is empty if nothing changed. `progress` is called with the bytes of each block. Raises
    OSError if a block cannot be read.
    """
    buffer = memoryview(bytearray(min(BLOCK, record.nbytes)))
    changed = []
    file.seek(0)
    for offset, length, crc in record.blocks():
        block = buffer[:length]
        if file.readinto(block) != length or _core.crc32c(block) != crc:
            changed.append((offset, length))
            file.seek(offset + length)
        if progress is not None:
            progress(length)
    return changed


def changed_size(size: int, record: Record) -> str:
    """Return the text of an error: a file has `size` bytes, which differs from its record."""
    return f"the file has changed: it has {size:,} bytes, and had {record.nbytes:,}"


def _require_file(path: str, record: Record, source: str) -> None:
    """Raise ChecksumError if the file `path` differs from its record, in size or content.

    `source`: path of the file of checksums, for the message. Raises StoreError if the file is
    missing or cannot be read.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            text = changed_size(size, record) if size != record.nbytes else ""
            ranges = [] if text else changed_ranges(file, record)
    except OSError as error:
        raise store_error(error, "cannot read the file", path) from None
    if ranges:
        text = f"bytes {ranges[0][0]} to {sum(ranges[0])} have changed"
    if text:
        failure = ChecksumError(f"{path}: {text} since {source} was written")
        failure.path, failure.offset = path, ranges[0][0] if ranges else 0
        raise failure


def require_unchanged(path: str) -> None:
    """Raise ChecksumError if a file, or a file of a folder, differs from its checksums.

    Without checksums nothing is read. Raises StoreError if a file cannot be read, and FormatError
    if the file of checksums is malformed. Readers of formats whose bytes the core does not read
    call it first.
    """
    if os.path.isdir(path):
        checksums = find_of_folder(path)
        for name, record in checksums.records.items() if checksums else ():
            _require_file(os.path.join(path, name), record, checksums.path if checksums else "")
    elif (recorded := find_of_file(path)) is not None:
        _require_file(path, *recorded)
