"""Format of ``mlstate.checksums.json``, and reads of files compared with it.

`mlstate.checkpoint.checksum` writes it next to the files, and docs/format_shards.md specifies it. A
file is divided into parts, of a safetensors file the header and each tensor; each MiB of a part has
a CRC32C.
"""

from __future__ import annotations

import os
import re
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from .. import _core
from ..errors import ChecksumError, FormatError, StorePermissionError
from .caller import find_caller
from .regular_file import open_regular
from .store_error import format_error, store_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .callback import Progress

NAME = "mlstate.checksums.json"
FORMAT = "mlstate.checksums"
VERSION = 1
BLOCK = 1 << 20  # bytes that one checksum covers
_MOST_BYTES = 512 << 20  # of the file itself
_MOST_DEPTH = 4  # of nested arrays and objects in it
_MOST_SIZE = (1 << 63) - 1  # of a listed file
_DIGITS = re.compile(r"(?:[0-9a-f]{8})*\Z", re.ASCII)
_REMEDY = (
    "verify=False reads the files without it, mlstate checksum --overwrite writes it again from "
    "the files as they are now"
)


class Record(NamedTuple):
    """Size, parts and checksums of one file, as the core takes them."""

    nbytes: int
    starts: bytes  # offsets of the parts, native 64-bit integers
    crcs: bytes  # of the blocks of all parts, native 32-bit integers

    def blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield each block of at most 1 MiB, in file order, as `compare_blocks` takes it."""
        import numpy as np

        starts = [*np.frombuffer(self.starts, np.uint64).tolist(), self.nbytes]
        crcs = iter(np.frombuffer(self.crcs, np.uint32).tolist())
        for start, end in pairwise(starts):
            for offset in range(start, end, BLOCK):
                yield start, offset, min(BLOCK, end - offset), next(crcs)


class Checksums(NamedTuple):
    """The content of one file of checksums; the names of files are relative paths."""

    path: str
    records: dict[str, Record]

    @property
    def title(self) -> str:
        """The text that names them in reports."""
        return f"the checksums in {os.path.basename(self.path)}"


class Change(NamedTuple):
    """A changed range of a file, in the part of it at the offset `part`.

    A changed size is in no part (-1), and has a text.
    """

    part: int
    offset: int
    length: int
    text: str = ""

    @property
    def end(self) -> int:
        """The offset of the end."""
        return self.offset + self.length


def is_checksums_name(name: str) -> bool:
    """Return whether a file has the name of a file of checksums."""
    return name == NAME or name.endswith(f".{NAME}")


# ---- parsing ----


def _check_name(name: str) -> None:
    if "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{name!r} is not the path of a file in the folder")


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST_SIZE


def _record_of(entry: Any) -> Record:
    """Return the record of one file from its JSON object `entry`; raise ValueError if malformed.

    Its parts start at increasing offsets, the first at 0, and an empty file has none; each MiB of
    a part has 8 hex digits.
    """
    import numpy as np

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
    offsets = np.array([*starts, nbytes], np.uint64)
    is_increasing = bool((offsets[1:] > offsets[:-1]).all())
    if bool(starts) != bool(nbytes) or starts[:1] not in ([], [0]) or not is_increasing:
        raise ValueError("the parts do not cover the file")
    lengths = offsets[1:] - offsets[:-1]
    blocks = int(((lengths - np.uint64(1)) // np.uint64(BLOCK) + np.uint64(1)).sum())
    if len(digits) != 8 * blocks or not _DIGITS.match(digits):
        raise ValueError(f"it has {len(digits)} digits of checksums, not {8 * blocks}")
    crcs = np.frombuffer(bytes.fromhex(digits), ">u4").astype(np.uint32)
    return Record(nbytes, offsets[:-1].tobytes(), crcs.tobytes())


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


def find_of_folder(folder: str) -> Checksums | None:
    """Return the checksums of a local folder, from its own file or its parent folder's.

    None without such a file, or without permission to read the parent's. Raises as `read_local`; a
    malformed file of the parent that does not name the folder is a warning.
    """
    checksums = read_local(f"{folder.rstrip('/')}/{NAME}")
    parent, _, name = os.path.abspath(folder).rpartition("/")
    if checksums is not None or not name:
        return checksums
    try:
        parent_checksums = read_local(f"{parent}/{NAME}")
    except StorePermissionError:
        return None
    except FormatError as error:
        if _names_folder(f"{parent}/{NAME}", name):
            raise
        text = f"{error}. It does not name {name!r}, which is read without it"
        find_caller().warn(text)
        return None
    records = {
        path.removeprefix(f"{name}/"): record
        for path, record in (parent_checksums.records if parent_checksums else {}).items()
        if path.startswith(f"{name}/")
    }
    return parent_checksums._replace(records=records) if parent_checksums and records else None


def _names_folder(path: str, name: str) -> bool:
    """Return whether the malformed file of checksums `path` has a file of the folder `name`."""
    import json

    text = json.dumps(name, ensure_ascii=False)[:-1] + "/"
    try:
        with open_regular(path) as file:
            return text.encode(errors="surrogateescape") in file.read(_MOST_BYTES)
    except OSError:  # not a regular file
        return False


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


def find_of_path(path: str) -> Checksums | None:
    """Return the checksums of a local folder or file, of a file only its own; None without."""
    if os.path.isdir(path):
        return find_of_folder(path)
    recorded = find_of_file(path)
    return recorded and Checksums(recorded[1], {os.path.basename(path): recorded[0]})


# ---- comparing ----


def compare_blocks(
    file: IO[bytes], blocks: Iterable[tuple[int, int, int, int]], progress: Progress = None
) -> list[Change]:
    """Return the changed ranges of an open file; changed blocks of a part that touch are one.

    `blocks`: offset of the part, own offset, length (at most 1 MiB) and CRC32C of each. `progress`
    is called with the bytes of each block. Raises OSError if a block cannot be read.
    """
    buffer = memoryview(bytearray(BLOCK))
    changes: list[Change] = []
    for part, offset, length, crc in blocks:
        file.seek(offset)
        block = buffer[:length]
        if file.readinto(block) != length or _core.crc32c(block) != crc:  # type: ignore[attr-defined]
            start = offset
            if changes and changes[-1].part == part and changes[-1].end == offset:
                start = changes.pop().offset
            changes.append(Change(part, start, offset + length - start))
        if progress is not None:
            progress(length)
    return changes


def find_changes(file: IO[bytes], record: Record, progress: Progress = None) -> list[Change]:
    """Return the changes of an open file since it was recorded; a changed size is the only one.

    `progress`: called with the bytes of each block. Raises OSError if a block cannot be read.
    """
    size = file.seek(0, os.SEEK_END)
    if size == record.nbytes:
        return compare_blocks(file, record.blocks(), progress)
    start, end = sorted((size, record.nbytes))
    change = "the file has changed since its checksums were written"
    text = f"{change}: it has {size:,} bytes, and had {record.nbytes:,}"
    return [Change(-1, start, end - start, text)]


def require_recorded(file: IO[bytes], path: str, checksums: Checksums, name: str) -> None:
    """Raise ChecksumError if the open file `path` differs from its record, of the file `name`."""
    for change in find_changes(file, checksums.records[name]):
        text = (
            f"bytes {change.offset} to {change.end} have changed since their checksums were written"
        )
        failure = ChecksumError(f"{path}: {change.text or text} ({checksums.path})")
        failure.path, failure.offset = path, change.offset
        raise failure


def require_unchanged(path: str) -> None:
    """Raise ChecksumError if a file, or a file of a folder, differs from its checksums.

    Without checksums nothing is read. Raises StoreError if a file cannot be read, and FormatError
    if the file of checksums is malformed. Readers of formats whose bytes the core does not read
    call it first.
    """
    checksums = find_of_path(path)
    for name in checksums.records if checksums else ():
        assert checksums is not None
        file_path = os.path.join(path, name) if os.path.isdir(path) else path
        try:
            with open_regular(file_path) as file:
                require_recorded(file, file_path, checksums, name)
        except OSError as error:
            raise store_error(error, "cannot read the file", file_path) from None
