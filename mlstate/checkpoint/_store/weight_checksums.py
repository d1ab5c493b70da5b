"""Loads of other programs' weights compared with their file of checksums, also in stores."""

from __future__ import annotations

import os
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING

from ..._common.caller import find_caller
from ..._common.file_checksums import NAME, Checksums, Record, find_of_path, parse, require_recorded
from .._folder.weight_names import is_index

if TYPE_CHECKING:
    from .._folder.protocol import Files


def find_checksums(folder: Files) -> Checksums | None:
    """Return the checksums of a folder, or of the one file that the caller's path names.

    None if `checksum` was not called for it.
    """
    if folder.is_local:
        name = "" if is_index(folder.file) else folder.file
        return find_of_path(os.path.join(folder.path, name) if name else folder.path)
    for name in [f"{folder.file}.{NAME}", NAME] if folder.file else [NAME]:
        with suppress(FileNotFoundError):
            return parse(folder.read(name), os.path.join(folder.path, name))
    return None


def require_index(folder: Files, name: str, data: bytes) -> None:
    """Raise ChecksumError if the index file `name` in `folder` differs from its checksum.

    `data`: its bytes. Nothing happens without a checksum.
    """
    checksums = find_checksums(folder)
    if checksums is not None and name in checksums.records:
        require_recorded(BytesIO(data), os.path.join(folder.path, name), checksums, name)


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
