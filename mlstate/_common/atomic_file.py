"""Atomic replacement of files, for formats of other programs."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from .. import _core
from .local_path import local_path

if TYPE_CHECKING:
    from collections.abc import Iterator


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, if the system supports syncing folders."""
    if os.name == "nt":
        return
    with _core.Descriptor(folder, os.O_RDONLY) as descriptor:
        try:
            os.fsync(descriptor.fileno())
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


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
    sync_folder(target.parent)
