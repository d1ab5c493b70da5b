"""Files that appear whole or not at all, for formats that other programs define."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# What a new file may be, less the umask.
_NEW_FILE = 0o666


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system lets a folder be synced."""
    if os.name == "nt":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


def temporary_name(target: Path) -> Path:
    """Return a name beside the target that nothing else has."""
    return target.with_name(f".mlstate-{os.urandom(8).hex()}.tmp")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Give a file to write, which takes the place of `path` once it is on the disk.

    An exception leaves what was there. A symbolic link is followed and stays; an existing file
    keeps its permission bits.
    """
    target = Path(os.path.realpath(path))
    temporary = temporary_name(target)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    number = os.open(temporary, flags, _NEW_FILE)
    try:
        with os.fdopen(number, "w+b") as file:
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
