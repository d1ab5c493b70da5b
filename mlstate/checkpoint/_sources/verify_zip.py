"""Verification of zip files (``.npz``, ``.pt``) by the CRC-32 of their entries."""

from __future__ import annotations

import os
import zipfile
from contextlib import suppress
from typing import TYPE_CHECKING

from ..._common.file_kinds import dangling_blob, kind_of_file
from .._report import VerifyReport, file_problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..._common.callback import Progress

_BLOCK = 1 << 20
_SUFFIXES = (".bin", ".ckpt", ".distcp", ".npz", ".pkl", ".pt", ".pth", ".safetensors")
# Kinds of files that may hold tensors; texts, such as a config, are not compared.
_OF_TENSORS = ("torch", "safetensors", "npy", "pickle", "DCP metadata", "DCP data", "unknown")


def _read_sizes(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Iterator[int | None]:
    """Read a zip entry, and yield the bytes of each block; None, as the last, if it is damaged."""
    try:
        with archive.open(entry) as file:
            while block := file.read(_BLOCK):
                yield len(block)
    except MemoryError:
        raise
    except Exception:  # each codec raises its own class, such as zlib.error
        yield None


def _damage_of(path: str, progress: Progress) -> tuple[str, str | None]:
    """Return a text about the damage of a zip file, and the damaged entry; "" for a good file.

    A good entry matches its CRC-32. Entries that share bytes are damage: such a small file could
    take hours to read. `progress` is called with the bytes of each block read.
    """
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        text = f"the list of its entries is damaged: {error}"
        return text, None
    with archive:  # errors of `progress` are the caller's
        entries = archive.infolist()
        if sum(entry.compress_size for entry in entries) > os.path.getsize(path):
            return "the list of its entries is damaged: its entries overlap", None
        for entry in entries:
            for nbytes in _read_sizes(archive, entry):
                if nbytes is None:
                    return f"the entry {entry.filename!r} does not match its CRC-32", entry.filename
                if progress is not None:
                    progress(nbytes)
    return "", None


def verify_files(files: dict[str, str], report: VerifyReport, progress: Progress) -> None:
    """Compare the entries of zip files with their CRC-32, and add the problems to `report`.

    `files`: paths by name. `report.bytes` grows by their sizes, and `report.checksums` tells
    whether all files of tensors are zip files. `progress` is called with the bytes of each block.
    """
    checked = unchecked = 0
    for name, path in files.items():
        kind, text, entry = "unreadable", "", None
        if not os.path.isfile(path):
            text = dangling_blob(path) or "it is missing, or not a regular file"
        elif zipfile.is_zipfile(path):
            checked += 1
            kind, (text, entry) = "altered", _damage_of(path, progress)
        else:
            content = kind_of_file(path)
            unchecked += content.name in _OF_TENSORS
            if content.is_damaged and content.name != "unknown" and name.endswith(_SUFFIXES):
                text = content.sentence
        if text:
            report.problems.append(file_problem(kind, name, text, name=entry))
        with suppress(OSError):
            report.bytes += os.path.getsize(path)
    report.checksums = checked > 0 and not unchecked
    if report.checksums:
        report.compared.append("the CRC-32 of each entry of the zip file")
