"""Open files for reading, regular files only: a FIFO could block, and a device has no end."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .. import _core
from .store_error import format_error

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BufferedReader

    from ..errors import FormatError

NOT_REGULAR = "not a regular file but a FIFO, socket or device"


def _not_regular(path: str | bytes | os.PathLike[str]) -> FormatError:
    error = format_error(f"{os.fsdecode(path)}: {NOT_REGULAR}", os.fsdecode(path))
    error.got = "special file"
    return error


def check_regular(facts: os.stat_result, path: str | bytes | os.PathLike[str]) -> None:
    """Raise unless a file is regular: FormatError for a FIFO, socket or device.

    IsADirectoryError for a folder. `facts`: the result of ``os.stat``.
    """
    if stat.S_ISDIR(facts.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(facts.st_mode):
        raise _not_regular(path)


@contextmanager
def open_regular(path: str | bytes | os.PathLike[str], flags: int = 0) -> Iterator[BufferedReader]:
    """Yield a regular file to read; a FIFO does not block.

    `flags`: further flags of ``os.open``. Raises as `check_regular`, and the system's OSError.
    """
    try:
        descriptor = _core.Descriptor(os.fsdecode(path), os.O_RDONLY | os.O_NONBLOCK | flags)
    except OSError as error:
        if error.errno != errno.ENXIO:  # of a socket, or a device without a driver
            raise
        raise _not_regular(path) from None
    with descriptor:
        check_regular(os.fstat(descriptor.fileno()), path)
        with open(descriptor.fileno(), "rb", closefd=False) as file:
            yield file
