"""`checksum`: write checksums of files of other programs, next to them."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .. import _core
from .._common.arguments import check_callback
from .._common.atomic_file import Target
from .._common.callback import Progress, ProgressErrors
from .._common.file_checksums import BLOCK, FORMAT, NAME, build
from .._common.file_kinds import is_damage
from .._common.overwrite import Existing, refusal, require_free
from .._common.regular_file import open_regular
from .._common.set_module import set_module
from .._common.store_error import os_errors, store_error
from ..errors import FormatError, StoreNotFoundError
from ._files.checksums_verify import header_of, list_files, local_place
from ._sources.open_source import open_source

if TYPE_CHECKING:
    from collections.abc import Callable


def _identity(file: Any) -> tuple[int, ...]:
    """Return facts about an open file that change if it is replaced or written."""
    info = os.fstat(file.fileno())
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def _read_entry(path: str, progress: Progress) -> dict[str, Any]:
    """Return a file's entry for the checksums: JSON members with its size and CRC32C digits.

    Raises StoreError (EBUSY) if the file changes meanwhile. `progress` is called with the bytes
    read since the last call.
    """
    tensors = header.tensors if (header := header_of(path)) else []
    starts = [0, *sorted(tensor.offset for tensor in tensors if tensor.nbytes)]
    with open_regular(path) as file:
        before = _identity(file)
        _, _, nbytes, _ = before
        starts = starts if nbytes else []
        digits, buffer = [], memoryview(bytearray(min(BLOCK, nbytes)))
        is_complete = all(start < nbytes for start in starts)  # False: shorter than at `header_of`
        for start, end in pairwise([*starts, nbytes]):
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

    A single file is listed alone. Raises ValueError for URLs and for checkpoints of mlstate, and
    FormatError for content that is damaged.
    """
    remedy = (
        "call this for a local copy, and upload the file of checksums too; load and verify read it "
        "in a store"
    )
    try:
        with suppress(StoreNotFoundError):  # any folder may have checksums
            source = open_source(path, only_local=("checksum", remedy))
            if source.format == "mlstate":
                text = "is a checkpoint of mlstate: its files have checksums already"
                raise ValueError(f"{source.path} {text}")
    except FormatError as error:  # formats that mlstate does not read may have checksums
        if is_damage(error):
            raise
    folder = local_place(path)
    if folder.file:
        return folder.path, [folder.file], os.path.join(folder.path, f"{folder.file}.{NAME}")
    names = list_files(folder.path, refuses_links=True)
    if not names:
        raise ValueError(f"{folder.path} has no files")
    return folder.path, names, os.path.join(folder.path, NAME)


def _read_old(target: Target) -> bytes:
    """Return the bytes of the target file; b"" without one, or if it is not regular."""
    if not target.is_file:
        return b""
    with os_errors("cannot read the checksums", target.path), open_regular(target.path) as file:
        return file.read()


def _existing(old: bytes) -> Existing | None:
    """Return the kind of the bytes of a target; None if there are none."""
    if not old:
        return None
    is_own = FORMAT.encode() in old
    return Existing(FORMAT, dict, foreign="" if is_own else "is not a file of checksums")


@set_module("mlstate.checkpoint")
def checksum(
    path: str | os.PathLike[str],
    *,
    overwrite: bool | None = None,
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
    overwrite : bool, optional
        Default: existing checksums stay as they are if the files still match them. True: replace
        them, because you want the change. False: replace nothing. See docs/files.md.
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
        The path is a file that is damaged by its content, such as a pointer of git-LFS or a page of
        HTML, or a file is a FIFO, socket or device.
    StoreError
        Checksums exist that differ (EEXIST), a file changes while it is read (EBUSY), or the
        operating system refuses.

    Notes
    -----
    The file is written atomically, and has its own checksum. docs/format_shards.md specifies it.
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
    check_callback("progress", progress)
    folder, names, target_path = _files_to_list(path)
    target = Target.of(target_path, follow_links=False)
    old = _read_old(target)
    require_free(target_path, _existing(old), overwrite, FORMAT)
    entries = {}
    with ProgressErrors(progress) as guarded:
        for name in names:
            file_path = os.path.join(folder, name)
            with os_errors("cannot read the file", file_path):
                entries[name] = _read_entry(file_path, guarded)
    new = build(entries)
    if old and overwrite is None and new != old:
        raise refusal(target_path, "the files no longer match it")
    with os_errors("cannot write the checksums", target_path):
        target.write_content(lambda file: file.write(new))
    return {name: entry["bytes"] for name, entry in entries.items()}
