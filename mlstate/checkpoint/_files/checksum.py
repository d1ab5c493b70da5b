"""`checksum`: write checksums of files of other programs; verify files by them, or by Hub blobs."""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import _core
from ..._common.arguments import check_callback, check_flags
from ..._common.atomic_file import Target, replacing
from ..._common.callback import ProgressErrors
from ..._common.file_checksums import (
    BLOCK,
    NAME,
    Checksums,
    Record,
    build,
    changed_ranges,
    changed_size,
    find_of_file,
    find_of_folder,
    is_checksums_name,
)
from ..._common.local_path import local_folder
from ..._common.regular_file import open_regular
from ..._common.set_module import set_module
from ..._common.store_error import store_error
from ...errors import FormatError, MLStateError, StoreError
from .._folder.local import LocalFolder
from .._folder.names import MANIFEST, TEMPORARY
from .._folder.weight_names import find_weights, is_index
from .._report import Problem, VerifyReport, file_problem
from .._store.open_path import is_url
from .._store.weight_checksums import changed_text, find_checksums
from .safetensors_verify import merge_ranges, read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .._folder.protocol import Folder

_SUFFIX = ".safetensors"
_BLOB = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}", re.ASCII)
_READ = 1 << 20  # bytes


# ---- files of a folder ----


def _list_files(folder: str, *, refuses_links: bool) -> list[str]:
    """Return the paths of all files, relative to `folder`, without hidden subfolders.

    Files of checksums and temporary files are left out. A link to a folder is not followed, because
    its files may be another folder's: with `refuses_links` it raises ValueError, else it is
    skipped.
    """
    names = []
    for path, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if refuses_links and os.path.islink(os.path.join(path, name)):
                raise ValueError(
                    f"{os.path.join(path, name)} is a link to a folder: write the checksums of "
                    "that folder, or replace the link"
                )
        start = os.path.relpath(path, folder)
        for name in sorted(files):
            if not is_checksums_name(name) and not TEMPORARY.match(name):
                names.append(name if start == os.curdir else os.path.join(start, name))
    return [name.replace(os.sep, "/") for name in names]


def _raise(error: OSError) -> None:
    raise error


def _starts_of(path: str) -> list[int]:
    """Return the offsets at which the checksums of a file's pieces begin.

    For a safetensors file these are the header and each tensor, for others only 0.
    """
    if path.endswith(_SUFFIX):
        with suppress(FormatError):
            header = read_header(path)
            return [0, *sorted(tensor.offset for tensor in header.tensors if tensor.nbytes)]
    return [0]


def _identity(file: Any) -> tuple[int, ...]:
    """Return facts about an open file that change if it is replaced or written."""
    info = os.fstat(file.fileno())
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def _read_entry(path: str, progress: Callable[[int], object] | None) -> dict[str, Any]:
    """Return a file's entry for the checksums: JSON members with its size and CRC32C digits.

    Raises StoreError (EBUSY) if the file changes meanwhile. `progress` is called with the bytes
    read since the last call.
    """
    starts = _starts_of(path)
    with open_regular(path) as file:
        before = _identity(file)
        _, _, nbytes, _ = before
        starts = starts if nbytes else []
        digits, buffer = [], memoryview(bytearray(min(BLOCK, nbytes)))
        is_complete = all(start < nbytes for start in starts)  # False: shorter than at `_starts_of`
        for start, end in zip(starts, [*starts[1:], nbytes], strict=True):
            for offset in range(start, end, BLOCK):
                block = buffer[: min(BLOCK, end - offset)]
                is_complete = is_complete and file.readinto(block) == len(block)
                digits.append(f"{_core.crc32c(block):08x}")
                if progress is not None:
                    progress(len(block))
        if not is_complete or _identity(file) != before:
            reason = OSError(errno.EBUSY, "it changed while it was read; try again")
            raise store_error(reason, "cannot write the checksums of the file", path)
    entry: dict[str, Any] = {"bytes": nbytes}
    if len(starts) > 1:
        entry["starts"] = starts
    return {**entry, "crc32c": "".join(digits)}


def _files_to_list(path: str | os.PathLike[str]) -> tuple[str, list[str], str]:
    """Return a folder, the names of its files to list, and the path to write their checksums to.

    A single file is listed alone. Raises ValueError for URLs and for checkpoints of mlstate.
    """
    if is_url(path):
        raise ValueError(
            f"{path}: checksums are written of local files: call this for a local copy, and upload "
            "the file of checksums too; load and verify read it in a store"
        )
    full_path = local_folder(path)
    if not os.path.isdir(full_path):
        folder, name = os.path.split(full_path)
        return folder, [name], f"{full_path}.{NAME}"
    if os.path.lexists(os.path.join(full_path, MANIFEST)) or os.path.isdir(
        os.path.join(full_path, "roots")
    ):
        raise ValueError(
            f"{full_path} is a checkpoint of mlstate: its files have checksums already"
        )
    names = _list_files(full_path, refuses_links=True)
    if not names:
        raise ValueError(f"{full_path} has no files")
    return full_path, names, os.path.join(full_path, NAME)


@set_module("mlstate.checkpoint")
def checksum(
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Callable[[int], object] | None = None,
) -> dict[str, int]:
    """
    Write sizes and checksums of files that another program wrote to a file next to them.

    `load`, `load_file`, `verify` and ``mlstate convert`` use the file: they name each file that
    changed since. The files themselves, their times and their permissions do not change.

    Parameters
    ----------
    path : str or os.PathLike
        A folder with files of any formats: of Hugging Face, diffusers, PEFT or
        torch.distributed.checkpoint. All files in it and its subfolders are listed in
        ``mlstate.checksums.json`` in the folder, except in subfolders whose names start
        with a dot. Links to files are followed. Or one file, such as a ``.safetensors``, ``.pt``
        or ``.npz`` file, whose checksums are in the file with its name and
        ``.mlstate.checksums.json``.
    overwrite : bool, default False
        Replace existing checksums by new ones.
    progress : callable, optional
        Called with the number of bytes read since the last call.

    Returns
    -------
    dict of str to int
        Path of each file, relative to the folder, and its number of bytes.

    Raises
    ------
    ValueError
        The path is a URL, or a checkpoint of mlstate, which has checksums. Also if the folder has
        no files, has a link to a folder, or a file whose name is not UTF-8 or has a backslash.
    FormatError
        A file is a FIFO, socket or device.
    StoreError
        The checksums exist (EEXIST), a file changes while it is read (EBUSY), or the operating
        system refuses.

    Notes
    -----
    The file is written atomically, and has its own checksum. docs/format.md specifies it.
    The checksums, CRC32C of each MiB of the header and of each tensor, or of other files, detect
    every changed bit and nearly all other changes (all but one of 4 billion), but do not protect
    from an attacker, who can write new ones.

    Examples
    --------
    >>> import tempfile, pathlib, mlstate
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.json").write_text("{}")
    >>> mlstate.checkpoint.checksum(folder)
    {'config.json': 2}
    >>> _ = (folder / "config.json").write_text("[]")
    >>> [(p.kind, p.path) for p in mlstate.verify(folder).problems]
    [('changed', 'config.json')]
    """
    check_flags(overwrite=overwrite)
    check_callback("progress", progress)
    try:
        folder, names, target_path = _files_to_list(path)
    except OSError as error:
        raise store_error(error, "cannot list the folder", local_folder(path)) from None
    target = Target.of(target_path, follow_links=False)
    if target.entries and not overwrite:
        text = "the checksums exist; overwrite=True (--force on the command line) writes new ones"
        exists = FileExistsError(errno.EEXIST, text)
        raise store_error(exists, "cannot write the checksums", target_path)
    entries = {}
    with ProgressErrors(progress) as guarded:
        for name in names:
            file_path = os.path.join(folder, name)
            try:
                entries[name] = _read_entry(file_path, guarded)
            except OSError as error:
                raise store_error(error, "cannot read the file", file_path) from None
    try:
        with replacing(target_path, target) as file:
            file.write(build(entries))
    except OSError as error:
        raise store_error(error, "cannot write the checksums", target_path) from None
    return {name: entry["bytes"] for name, entry in entries.items()}


# ---- verification ----


class _Expected(NamedTuple):
    """The checksums and digests that the files of a folder must match."""

    folder: str
    checksums: Checksums | None
    blobs: dict[str, str]  # SHA-256, or git's SHA-1, of files of the Hub's cache
    names: list[str]  # all files that exist


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


def find_expected(path: str) -> _Expected | None:
    """Return the checksums and blob digests that files at a local path must match; None if none.

    Raises OSError if a folder cannot be listed, StoreError and FormatError about the checksums.
    """
    if os.path.isdir(path):
        folder, names = path, _list_files(path, refuses_links=False)
        checksums = find_of_folder(path)
    else:
        folder, name = os.path.split(path)
        names, recorded = [name], find_of_file(path)
        checksums = recorded and Checksums(recorded[1], {name: recorded[0]})
    blobs = _blobs_of(folder, names)
    return _Expected(folder, checksums, blobs, names) if checksums or blobs else None


def _tensors_of(path: str) -> dict[int, str]:
    """Return the tensors of a safetensors file by offset; {} for others and damaged headers."""
    with suppress(MLStateError):
        if path.endswith(_SUFFIX):
            return {each.offset: each.key for each in read_header(path).tensors if each.nbytes}
    return {}


def _problem_of(error: Exception, name: str, nbytes: int = 0) -> Problem:
    """Return the problem of the file `name` of `nbytes`, whose reading raised `error`."""
    is_missing = isinstance(error, FileNotFoundError)
    kind = "missing" if is_missing else "unreadable" if isinstance(error, OSError) else "changed"
    text = getattr(error, "strerror", None) or str(error)
    return file_problem(kind, name, text, length=nbytes)


def record_problems(
    path: str, name: str, record: Record, progress: Callable[[int], object] | None
) -> Iterator[Problem]:
    """Yield the problems of a file that differs from its record of size and checksums.

    `path`: the local file. `name`: the file in the problems. `progress`: called with the bytes of
    each block. Each damaged range is one problem. A missing, unreadable or resized file is one
    problem, too.
    """
    import numpy as np

    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.nbytes:
                start, end = sorted((size, record.nbytes))
                text = changed_size(size, record)
                yield file_problem("changed", name, text, offset=start, length=end - start)
                return
            ranges = merge_ranges(iter(changed_ranges(file, record, progress)))
    except (FormatError, OSError) as error:
        yield _problem_of(error, name, record.nbytes)
        return
    if not ranges:
        return
    keys = _tensors_of(path)
    starts = np.frombuffer(record.starts, np.uint64).tolist()
    for offset, length in ranges:
        # Offsets of the pieces with the first and the last byte of the range: only if these are one
        # tensor, the problem has its name.
        before_end = [start for start in starts if start < offset + length]
        first = max((start for start in before_end if start <= offset), default=0)
        last = before_end[-1] if before_end else 0
        key = keys.get(first) if last == first else None
        text = "the bytes have changed since their checksums were written"
        yield file_problem("changed", name, text, name=key, offset=offset, length=length)


def _blob_digest(path: str, expected: str, progress: Callable[[int], object] | None) -> str:
    """Return the hexadecimal digest of a file's bytes, as the Hub's cache names its blobs.

    `expected`: the digest in the name: 64 digits are a SHA-256, 40 are git's SHA-1. `progress`:
    called with the bytes of each step; None: no calls. Raises OSError, or FormatError for a path
    that is not a regular file.
    """
    import hashlib

    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if len(expected) == 64:
            digest = hashlib.sha256()
        else:  # a file that git stores itself
            digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        while data := file.read(_READ):
            digest.update(data)
            if progress is not None:
                progress(len(data))
    return digest.hexdigest()


def _blob_problems(
    path: str, name: str, expected: str, progress: Callable[[int], object] | None
) -> Iterator[Problem]:
    """Yield a problem if the file `path` in the Hub's cache does not match the name of its blob.

    It is also a problem if the file is missing or cannot be read. `name`: of the file in the
    problem. `expected`: the digest in the blob's name, a SHA-256 (64 digits) or a git SHA-1.
    `progress`: as for `_blob_digest`.
    """
    algorithm = "SHA-256" if len(expected) == 64 else "git SHA-1"
    try:
        got = _blob_digest(path, expected, progress)
    except (FormatError, OSError) as error:
        yield _problem_of(error, name)
        return
    if got != expected:
        text = f"its {algorithm} is {got}, but its blob in the Hub's cache is {expected}"
        yield file_problem("changed", name, text, length=os.path.getsize(path))


def compare_files(
    expected: _Expected, report: VerifyReport, progress: Callable[[int], object] | None
) -> None:
    """Compare a folder's files with their checksums and blobs; add problems to `report`.

    Also adds the bytes of these files, texts that name the checksums used, and, as strange, the
    names of files that the checksums do not list. `expected`: the checksums and blobs, by
    `find_expected`. `progress`: called with the bytes read since the last call.
    """
    checksums = expected.checksums
    records = checksums.records if checksums else {}
    for name, record in records.items():
        path = os.path.join(expected.folder, name)
        report.problems += record_problems(path, name, record, progress)
        report.bytes += record.nbytes
    for name, digest in expected.blobs.items():
        path = os.path.join(expected.folder, name)
        report.problems += _blob_problems(path, name, digest, progress)
        with suppress(OSError):
            report.bytes += os.path.getsize(path)
    if checksums:
        report.compared.append(f"the checksums in {os.path.basename(checksums.path)}")
        report.strange += [name for name in expected.names if name not in records]
    report.checksums = True
    if expected.blobs:
        count = len(expected.blobs)
        report.compared.append(f"the SHA-256 or SHA-1 in the names of {count} blobs of the Hub")


def compare_weights(
    folder: Folder, names: Iterable[str], progress: Callable[[int], object] | None
) -> tuple[int, list[Problem]]:
    """Compare files of weights with their checksums; return bytes read and problems.

    `names`: of the files to compare; empty: all that the checksums list. Nothing is compared
    without checksums. `progress`: called with numbers of bytes; None: no calls. Raises an error of
    a store that does not answer.
    """
    checksums = find_checksums(folder)
    count, problems = 0, list[Problem]()
    for name in (names or checksums.records) if checksums else ():
        assert checksums is not None
        record = checksums.records.get(name)
        if record is None:
            continue
        count += record.nbytes
        try:
            if folder.is_local or name.endswith(_SUFFIX):
                # True: all of the file is needed, with or without checksums in it
                with folder.file_to_verify(name, lambda path: True) as path:
                    problems += record_problems(path, name, record, progress)
            elif text := changed_text(folder.read(name), record, progress):
                problems.append(file_problem("changed", name, text, length=record.nbytes))
        except MLStateError as error:
            if folder.is_outage(error):
                raise
            problems.append(_problem_of(error, name, record.nbytes))
    return count, problems


def verify_weights_folder(
    folder: Folder, report: VerifyReport, progress: Callable[[int], object] | None
) -> None:
    """Compare weights with their checksums and blobs, if any; add the result to `report`.

    Damaged checksums are a problem in it. `progress`: as for `compare_weights`. Raises an error of
    a store that does not answer.
    """
    name = "" if is_index(folder.file) else folder.file
    if folder.is_local:
        _compare_local(os.path.join(folder.path, name) if name else folder.path, report, progress)
        return
    try:
        checksums = find_checksums(folder)
        if checksums is not None:
            count, problems = compare_weights(folder, [name] if name else [], progress)
            report.bytes += count
            report.problems += problems
            report.checksums = True
            report.compared.append(f"the checksums in {os.path.basename(checksums.path)}")
    except (FormatError, StoreError) as error:
        if folder.is_outage(error):
            raise
        report.problems.append(checksums_problem(error))


def _compare_local(
    path: str, report: VerifyReport, progress: Callable[[int], object] | None
) -> bool:
    """Compare files at a local path as `compare_files` does; return False if nothing is recorded.

    Errors of the file of checksums become problems. Raises StoreError if a folder cannot be listed.
    """
    try:
        expected = find_expected(path)
        if expected is None:
            return False
        compare_files(expected, report, progress)
    except (FormatError, StoreError) as error:
        report.problems.append(checksums_problem(error))
        report.checksums = False
    except OSError as error:
        raise store_error(error, "cannot list the folder", path) from None
    return True


def checksums_problem(error: FormatError | StoreError) -> Problem:
    """Return the problem of a file of checksums that is damaged or cannot be read."""
    name = os.path.basename(str(error.path)) if error.path else NAME
    return file_problem("checksums", name, str(error))


def _has_weights(folder: Folder) -> bool:
    """Return whether `load` of the folder reads weights; False for several models or variants."""
    try:
        return find_weights(folder) is not None
    except FormatError:
        return False


def verify_foreign(
    path: str, progress: Callable[[int], object] | None = None
) -> VerifyReport | None:
    """Compare a local file, or a folder without a checkpoint, with its checksums or blobs.

    Returns None if it has neither, or if the folder is a checkpoint or has one model's weights,
    which another function verifies. `progress`: as for `compare_files`. Raises StoreError if the
    folder cannot be listed; errors of the file of checksums are problems in the report.
    """
    folder = LocalFolder(path)
    if os.path.isdir(path) and (
        folder.exists(MANIFEST) or folder.exists("roots") or _has_weights(folder)
    ):
        return None
    report = VerifyReport(path)
    if not _compare_local(path, report, progress):
        return None
    report.strange.sort()
    return report
