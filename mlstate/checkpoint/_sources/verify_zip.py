"""Verification of zip files (``.npz``, ``.pt``) by the CRC-32 of their entries."""

from __future__ import annotations

import os
import zipfile
from typing import TYPE_CHECKING

from ..._common.file_kinds import dangling_blob, kind_of_file
from .._report import file_problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..._common.callback import Progress
    from .._report import VerifyReport

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


def _open_zip(path: str) -> zipfile.ZipFile:
    """Open a zip file; raise BadZipFile, NotImplementedError or ValueError if it is damaged.

    Entries that share bytes are damage: such a small file could take hours to read.
    """
    archive = zipfile.ZipFile(path)
    if sum(entry.compress_size for entry in archive.infolist()) > os.path.getsize(path):
        archive.close()
        raise zipfile.BadZipFile("its entries overlap")
    return archive


def _damaged_entry(archive: zipfile.ZipFile, progress: Progress) -> str | None:
    """Return the name of the first damaged or encrypted entry of a zip file; None without such.

    A good entry matches its CRC-32. `progress` is called with the bytes of each block read.
    """
    for entry in archive.infolist():
        for nbytes in _read_sizes(archive, entry):
            if nbytes is None:
                return entry.filename
            if progress is not None:
                progress(nbytes)
    return None


def verify_files(files: dict[str, str], report: VerifyReport, progress: Progress) -> None:
    """Compare the entries of zip files with their CRC-32, and add the problems to `report`.

    `files`: paths by name. `report.bytes` grows by their sizes, and `report.checksums` tells
    whether all files of tensors are zip
    files. `progress` is called with the bytes of each block.
    """
    checked = unchecked = 0
    for name, path in files.items():
        if not os.path.isfile(path):
            text = dangling_blob(path) or "it is missing, or not a regular file"
            report.problems.append(file_problem("unreadable", name, text))
            continue
        report.bytes += os.path.getsize(path)
        if not zipfile.is_zipfile(path):
            kind = kind_of_file(path)
            unchecked += kind.name in _OF_TENSORS
            if kind.is_damaged and kind.name != "unknown" and name.endswith(_SUFFIXES):
                report.problems.append(file_problem("unreadable", name, kind.sentence))
            continue
        checked += 1
        entry, text = None, ""
        try:
            archive = _open_zip(path)
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            text = f"the list of its entries is damaged: {error}"
        else:
            with archive:  # errors of `progress` are the caller's
                entry = _damaged_entry(archive, progress)
        if entry is not None:
            text = f"the entry {entry!r} does not match its CRC-32"
        if text:
            report.problems.append(file_problem("altered", name, text, name=entry))
    report.checksums = checked > 0 and not unchecked
    if report.checksums:
        report.compared.append("the CRC-32 of each entry of the zip file")
