"""Loads of other programs' weights compared with their file of checksums, also in stores."""

from __future__ import annotations

import os
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING

from ..._common.caller import find_caller
from ..._common.file_checksums import (
    NAME,
    Checksums,
    Record,
    changed_ranges,
    changed_size,
    find_of_file,
    find_of_folder,
    parse,
)
from ...errors import ChecksumError
from .._folder.weight_names import is_index

if TYPE_CHECKING:
    from collections.abc import Callable

    from .._folder.protocol import Files


def find_checksums(folder: Files) -> Checksums | None:
    """Return the checksums of a folder, or of the one file that the caller's path names.

    None if `checksum` was not called for it.
    """
    if folder.is_local:
        if folder.file and not is_index(folder.file):
            recorded = find_of_file(os.path.join(folder.path, folder.file))
            return recorded and Checksums(recorded[1], {folder.file: recorded[0]})
        return find_of_folder(folder.path)
    for name in [f"{folder.file}.{NAME}", NAME] if folder.file else [NAME]:
        with suppress(FileNotFoundError):
            return parse(folder.read(name), os.path.join(folder.path, name))
    return None


def changed_text(
    data: bytes, record: Record, progress: Callable[[int], object] | None = None
) -> str:
    """Return how bytes differ from the record of their file; "" if they do not.

    `progress`: called with the bytes of each compared block.
    """
    if len(data) != record.nbytes:
        return changed_size(len(data), record)
    ranges = changed_ranges(BytesIO(data), record, progress)
    if not ranges:
        return ""
    begin, nbytes = ranges[0]
    return f"bytes {begin} to {begin + nbytes} have changed"


def require_index(folder: Files, name: str, data: bytes) -> None:
    """Raise ChecksumError if the index file `name` in `folder` differs from its checksum.

    `data`: its bytes. Nothing happens without a checksum.
    """
    checksums = find_checksums(folder)
    if checksums is not None and name in checksums.records:
        text = changed_text(data, checksums.records[name])
        if text:
            error = ChecksumError(f"{name}: {text} since {checksums.path} was written")
            error.path = os.path.join(folder.path, name)
            raise error


def records_of(folder: Files, files: tuple[str, ...]) -> tuple[Record | None, ...]:
    """Return the checksums' record of each file; () if the folder has no checksums.

    A file that the checksums do not list has None, and causes a warning.
    """
    checksums = find_checksums(folder)
    if checksums is None:
        return ()
    records = tuple(map(checksums.records.get, files))
    for name, record in zip(files, records, strict=True):
        if record is None:
            text = f"{checksums.path} does not list {name}: its bytes are not verified"
            find_caller().warn(text)
    return records
