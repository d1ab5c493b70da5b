"""Files of other programs compared with their checksums, and blobs of the Hub with their names."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import IO, TYPE_CHECKING

from ..._common.file_checksums import NAME, Checksums, Record, find_changes, is_checksums_name
from ..._common.local_path import local_folder
from ..._common.regular_file import open_regular
from ..._common.store_error import store_error
from ...errors import FormatError, MLStateError, StoreError
from .._folder.local import LocalFolder
from .._folder.names import TEMPORARY
from .._folder.weight_names import SUFFIX, is_index
from .._report import Problem, VerifyReport, file_problem, problem_of
from .._store.weight_checksums import find_checksums
from .safetensors_verify import FileHeader, change_problems, read_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..._common.callback import Progress
    from .._folder.protocol import Folder

_BLOB = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}", re.ASCII)
_READ = 1 << 20  # bytes


def local_place(path: str | os.PathLike[str]) -> LocalFolder:
    """Return a local folder, or the folder of a file, which is then its `file`."""
    name = local_folder(path)
    return LocalFolder(name) if os.path.isdir(name) else LocalFolder(*os.path.split(name))


def list_files(folder: str, *, refuses_links: bool) -> list[str]:
    """Return the paths of all files, relative to `folder`, without hidden subfolders.

    Files of checksums and temporary files are left out. A link to a folder is not followed, because
    its files may be another folder's: with `refuses_links` it raises ValueError, else it is
    skipped. Raises StoreError if a folder cannot be listed.
    """

    def raise_error(error: OSError) -> None:
        raise store_error(error, "cannot list the folder", folder) from None

    names = []
    for path, folders, files in os.walk(folder, onerror=raise_error):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if refuses_links and os.path.islink(os.path.join(path, name)):
                raise ValueError(
                    f"{os.path.join(path, name)} is a link to a folder: write the checksums of "
                    "that folder, or replace the link"
                )
        names += [
            os.path.relpath(os.path.join(path, name), folder).replace(os.sep, "/")
            for name in sorted(files)
            if not is_checksums_name(name) and not TEMPORARY.match(name)
        ]
    return names


def header_of(path: str) -> FileHeader | None:
    """Return the header of a safetensors file; None for others and damaged headers."""
    with suppress(MLStateError):
        if path.endswith(SUFFIX):
            return read_header(path)
    return None


# ---- checksums ----


@contextmanager
def _open_file(folder: Folder, name: str) -> Iterator[tuple[IO[bytes], str]]:
    """Yield a file of a folder, open for reading, and its local path; "" for one in memory."""
    if not folder.is_local and not name.endswith(SUFFIX):
        yield BytesIO(folder.read(name)), ""
        return
    # True: all of the file is needed, with or without checksums in it
    with folder.file_to_verify(name, lambda path: True) as path, open_regular(path) as file:
        yield file, path


def record_problems(folder: Folder, name: str, record: Record, progress: Progress) -> list[Problem]:
    """Return the problems of a file that differs from its record of size and checksums.

    `progress`: called with the bytes of each block. Each damaged range of a tensor is a problem. A
    missing, unreadable or resized file is one problem. Raises an error of a store that does not
    answer.
    """
    try:
        with _open_file(folder, name) as (file, path):
            changes = find_changes(file, record, progress)
            header = header_of(path) if changes else None
    except (MLStateError, OSError) as error:
        if folder.is_outage(error):
            raise
        return [problem_of("changed", name, error)._replace(length=record.nbytes)]
    text = "the bytes have changed since their checksums were written"
    return change_problems("changed", name, changes, header, text)


def compare_files(
    folder: Folder,
    names: Iterable[str],
    checksums: Checksums | None,
    report: VerifyReport,
    progress: Progress,
) -> None:
    """Compare files with their checksums, if any; add bytes and problems to `report`.

    `progress`: called with numbers of bytes. Raises an error of a store that does not answer.
    """
    records = checksums.records if checksums else {}
    for name in names:
        if (record := records.get(name)) is not None:
            report.bytes += record.nbytes
            report.problems += record_problems(folder, name, record, progress)


def find_or_note(folder: Folder, report: VerifyReport) -> Checksums | None:
    """Return the checksums of a folder, if any, and note in `report` that they are compared.

    A damaged file of checksums is a problem in it, and `report.checksums` is False then. Raises an
    error of a store that does not answer.
    """
    try:
        checksums = find_checksums(folder)
    except (FormatError, StoreError) as error:
        if folder.is_outage(error):
            raise
        name = os.path.basename(str(error.path)) if error.path else NAME
        report.problems.append(file_problem("checksums", name, str(error)))
        report.checksums = False
        return None
    if checksums is not None:
        report.compared.append(checksums.title)
    return checksums


def compare_recorded(folder: Folder, report: VerifyReport, progress: Progress) -> bool:
    """Compare the files of a folder, or its one `file`, with their checksums and blobs.

    The result is added to `report`, with the files that the checksums do not list as strange. It
    returns False if nothing is recorded. `progress`: called with numbers of bytes. Raises
    StoreError if a folder cannot be listed.
    """
    one = "" if is_index(folder.file) else folder.file
    names = [one] if one else []
    if folder.is_local and not one:
        names = list_files(folder.path, refuses_links=False)
    blobs = _blobs_of(folder.path, names) if folder.is_local else {}
    count = len(report.problems)
    checksums = find_or_note(folder, report)
    if len(report.problems) > count:
        return True
    if checksums is not None:
        compare_files(folder, names if one else checksums.records, checksums, report, progress)
        listed = checksums.records
        report.strange = sorted({*report.strange, *(name for name in names if name not in listed)})
    for name, digest in blobs.items():
        report.problems += _blob_problems(os.path.join(folder.path, name), name, digest, progress)
        with suppress(OSError):
            report.bytes += os.path.getsize(os.path.join(folder.path, name))
    if blobs:
        text = f"the SHA-256 or SHA-1 in the names of {len(blobs)} blobs of the Hub"
        report.compared.append(text)
    is_recorded = bool(checksums or blobs)
    report.checksums = report.checksums or is_recorded
    return is_recorded


# ---- blobs of the Hub ----


def _blobs_of(folder: str, names: list[str]) -> dict[str, str]:
    """Return the digest of each blob of Hugging Face's cache, by the first of its names.

    `names`: files of `folder`, which may be links to blobs. The cache names a blob by its digest.
    Only one name for each, so that it is read once.
    """
    blobs = {}
    digests: set[str] = set()
    for name in names:
        path = os.path.join(folder, name)
        target = os.readlink(path) if os.path.islink(path) else os.path.abspath(path)
        parent, base = os.path.split(target)
        is_blob = os.path.basename(parent) == "blobs" and _BLOB.fullmatch(base)
        if is_blob and base not in digests:
            digests.add(base)
            blobs[name] = base
    return blobs


def _blob_problems(path: str, name: str, expected: str, progress: Progress) -> Iterator[Problem]:
    """Yield a problem if the file `path` in the Hub's cache does not match the name of its blob.

    It is also a problem if the file is missing or cannot be read. `name`: of the file in the
    problem. `expected`: the digest in the blob's name, a SHA-256 (64 digits) or a git SHA-1.
    `progress`: called with the bytes of each step.
    """
    import hashlib

    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            algorithm, digest = "SHA-256", hashlib.sha256()
            if len(expected) != 64:  # a file that git stores itself
                start = b"blob %d\0" % size
                algorithm, digest = "git SHA-1", hashlib.sha1(start, usedforsecurity=False)
            while data := file.read(_READ):
                digest.update(data)
                if progress is not None:
                    progress(len(data))
    except (FormatError, OSError) as error:
        yield problem_of("changed", name, error)
        return
    if digest.hexdigest() != expected:
        got = digest.hexdigest()
        text = f"its {algorithm} is {got}, but its blob in the Hub's cache is {expected}"
        yield file_problem("changed", name, text, length=size)
