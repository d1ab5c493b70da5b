"""Atomic replacement of files and folders, for formats of other programs."""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from .. import _core
from .local_path import local_path

if TYPE_CHECKING:
    from collections.abc import Iterator


def temporary_name(target: Path) -> Path:
    """Return an unused name in the target's folder."""
    return target.with_name(f".mlstate-{os.urandom(8).hex()}.tmp")


def change_mode(number: int, mode: int) -> None:
    """Set the permission bits of an open file, unless it has them already.

    File systems without permissions, such as FAT and CIFS, refuse every change.
    """
    try:
        os.fchmod(number, mode)
    except OSError:
        if stat.S_IMODE(os.fstat(number).st_mode) != mode:
            raise


def _old_mode(target: Path) -> int | None:
    """Return the permission bits of the file to be replaced; None if there is none.

    Raises ValueError, as the core does, for anything that is not a file or a folder.
    """
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError(
            f"{target}: only a regular file can be replaced, not a FIFO, socket, device or link"
        )
    return stat.S_IMODE(mode)


@contextmanager
def replacing(path: str | os.PathLike[str], *, follow_links: bool = True) -> Iterator[IO[bytes]]:
    """Yield a file to write, which replaces `path` atomically and durably.

    After an exception, `path` is unchanged. A symbolic link is followed and kept, or refused if
    not `follow_links`; an existing file keeps its permission bits.
    """
    place = local_path(path)
    target = Path(os.path.realpath(place) if follow_links else place)
    mode = _old_mode(target)
    temporary = temporary_name(target)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with (
            _core.Descriptor(temporary, flags) as descriptor,
            open(descriptor.fileno(), "w+b", closefd=False) as file,
        ):
            if mode is not None:
                change_mode(file.fileno(), mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    _core.folder_sync(str(target.parent))


def replace_folder(new: str | Path, target: str | Path) -> None:
    """Rename a folder to `target`, durably; an older folder there is deleted after that.

    Between two renames, `target` does not exist. If the second one fails, the old folder is
    renamed back.
    """
    import shutil

    old = f"{new}.old"
    replaces = os.path.isdir(target) and bool(os.listdir(target))
    if replaces:
        os.rename(target, old)
    try:
        os.rename(new, target)
    except BaseException:
        if replaces:
            os.rename(old, target)
        raise
    _core.folder_sync(os.path.dirname(target))
    if replaces:
        shutil.rmtree(old, ignore_errors=True)
