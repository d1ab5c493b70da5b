"""Atomic replacement of files and folders, for formats of other programs."""

from __future__ import annotations

import os
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


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Yield a file to write, which replaces `path` atomically and durably.

    After an exception, `path` is unchanged. A symbolic link is followed and kept; an existing
    file keeps its permission bits.
    """
    target = Path(os.path.realpath(local_path(path)))
    temporary = temporary_name(target)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with (
            _core.Descriptor(temporary, flags) as descriptor,
            open(descriptor.fileno(), "w+b", closefd=False) as file,
        ):
            with suppress(FileNotFoundError):
                temporary.chmod(target.stat().st_mode & 0o7777)
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
