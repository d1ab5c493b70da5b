"""`cache_folder`: bytes read from a store, kept on disk; its size limit and what is deleted.

Each object has a subfolder, named by a hash of its URL, and each range that was read is an entry
in it: a file named ``begin-end``, with a header and the bytes. Only objects whose names contain a
random id are kept, because their content never changes. Several processes may use one folder:
an entry appears by a rename, and the header's checksums tell whether it is complete. All errors
of the local disk end in fewer entries, never in a failed read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from .... import _core
from ...._common.regular_file import open_regular
from ....errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator

_IMMUTABLE = re.compile(r"(.+[./])?[0-9a-f]{16}(-\d+\.safetensors|\.\d+\.json)\Z", re.ASCII)
_FOLDER = re.compile(r"[0-9a-f]{32}\Z")
_ENTRY = re.compile(r"(\d{1,19})-(\d{1,19})\Z", re.ASCII)
_TEMPORARY = re.compile(r"\.mlstate-[0-9a-f]{16}\.tmp\Z")
# magic, hash of the object's URL, begin, end, size of the object, CRC32C of the bytes
_HEADER = struct.Struct("<8s16sQQQI")
_CHECKSUM = struct.Struct("<I")  # CRC32C of the header
_MAGIC = b"mlscache"
_OVERHEAD = _HEADER.size + _CHECKSUM.size
_LEAST_FREE = 1 << 30  # bytes of the disk that entries leave to temporary files and others
_ABANDONED = 3600.0  # seconds after which a temporary file belongs to a killed process

_Part = tuple[int, memoryview]  # offset in the object, bytes


class _Entry(NamedTuple):
    begin: int
    end: int
    path: str


class ReadCache:
    """Entries of the objects below one URL; threads and processes may share the folder.

    Beyond `most_bytes`, the entries that were not used for the longest time are deleted.
    """

    def __init__(self, folder: str, most_bytes: int | None, url: str) -> None:
        """Cache byte ranges of the store `url` in `folder`; nothing is created yet.

        `most_bytes`: limit of all entries in the folder; None: no limit.
        """
        self._folder = folder
        self._most = most_bytes  # of all entries
        self._url = url
        self._lock = threading.Lock()
        self._total: int | None = None  # bytes of all entries, if counted
        self._has_new = False
        self._problem: OSError | None = None  # the error that ended writing
        self._is_reported = False

    @staticmethod
    def accepts(path: str) -> bool:
        """Return whether the object's content never changes: roots, for example, do."""
        return _IMMUTABLE.match(path) is not None

    def _digest(self, path: str) -> bytes:
        """Return the hash of an object's URL, which names its subfolder and is in its entries."""
        return hashlib.sha256(f"{self._url}/{path}".encode()).digest()[:16]

    def _object_folder(self, path: str) -> str:
        return os.path.join(self._folder, self._digest(path).hex())

    # ---- reading ----

    def _entries(self, path: str) -> list[_Entry]:
        """Return the cached ranges of one object, [] if it has none."""
        folder = self._object_folder(path)
        try:
            names = os.listdir(folder)
        except OSError:
            return []
        matches = filter(None, map(_ENTRY.match, names))
        return [
            _Entry(int(match[1]), int(match[2]), os.path.join(folder, match[0]))
            for match in matches
        ]

    def _read(self, path: str, entry: _Entry) -> tuple[memoryview, int] | None:
        """Return the bytes of an entry and the size of the object; None if it cannot be used.

        A damaged entry is deleted.
        """
        try:
            with open_regular(entry.path, os.O_NOFOLLOW) as file:
                data = file.read()
        except (OSError, FormatError):
            return None
        with suppress(OSError):
            os.utime(entry.path)  # the time of its last use
        head, view = data[:_OVERHEAD], memoryview(data)[_OVERHEAD:]
        if len(head) == _OVERHEAD and len(view) == entry.end - entry.begin:
            nbytes, checksum = _HEADER.unpack_from(head)[4:]
            if (
                head == self._header(path, entry, nbytes, checksum)
                and _core.crc32c(view) == checksum
            ):
                return view, nbytes
        with suppress(OSError):
            os.unlink(entry.path)
        return None

    def _header(self, path: str, entry: _Entry, nbytes: int, checksum: int) -> bytes:
        """Return the header of an entry.

        `nbytes`: size of the object. `checksum`: CRC32C of the entry's bytes.
        """
        fields = _HEADER.pack(_MAGIC, self._digest(path), entry.begin, entry.end, nbytes, checksum)
        return fields + _CHECKSUM.pack(_core.crc32c(fields))

    def get(self, path: str, begin: int, end: int) -> tuple[list[_Part], int] | None:
        """Return the cached pieces of bytes `begin` to `end`, and the object's size.

        Each piece is its offset in the object and a view; in order they have all bytes of the
        range. None if a byte is missing or an entry is damaged. For an empty range: ([], 0), as no
        entry has the size.
        """
        entries, at = self._entries(path), begin
        chosen: list[_Entry] = []
        while at < end:
            fitting = [entry for entry in entries if entry.begin <= at < entry.end]
            if not fitting:
                return None
            chosen.append(max(fitting, key=lambda entry: entry.end))
            at = chosen[-1].end
        parts: list[_Part] = []
        at, nbytes = begin, 0
        for entry in chosen:
            cached = self._read(path, entry)
            if cached is None:
                return None
            view, nbytes = cached
            until = min(end, entry.end)
            parts.append((at, view[at - entry.begin : until - entry.begin]))
            at = until
        return parts, nbytes

    def get_whole(self, path: str) -> bytes | None:
        """Return all bytes of an object; None unless one entry has them."""
        for entry in self._entries(path):
            if entry.begin == 0 and (cached := self._read(path, entry)) is not None:
                view, nbytes = cached
                if nbytes == entry.end:
                    return bytes(view)
        return None

    # ---- writing ----

    def put(self, path: str, begin: int, data: Any, nbytes: int) -> None:
        """Keep bytes that begin at `begin` in an object of `nbytes` bytes.

        After an error of the disk, this and later calls do nothing; see `problem`.
        """
        size = _OVERHEAD + len(data)
        if self._problem is not None or (self._most is not None and size > self._most):
            return
        folder = self._object_folder(path)
        end = begin + len(data)
        entry = _Entry(begin, end, os.path.join(folder, f"{begin}-{end}"))
        header = self._header(path, entry, nbytes, _core.crc32c(data))
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            if not self._make_room(size):
                return
            try:
                _write(entry.path, header, data)
            except FileNotFoundError:  # another process deleted the empty subfolder
                _write(entry.path, header, data)
        except OSError as error:
            self._problem = error

    def _make_room(self, size: int) -> bool:
        """Delete entries if a new one of `size` bytes needs their space; count the new one.

        Returns False, and does not count it, if it does not fit the limit. Raises OSError (ENOSPC)
        if it would leave less than 1 GiB of the disk.
        """
        import shutil

        if shutil.disk_usage(self._folder).free < size + _LEAST_FREE:
            raise OSError(errno.ENOSPC, f"the disk has less than {_LEAST_FREE >> 20} MiB left")
        with self._lock:
            self._has_new = True
            if self._most is None:
                return True
            if self._total is None or self._total + size > self._most:
                self._total = self._trim(size)
            if self._total + size > self._most:
                return False
            self._total += size
            return True

    def discard(self, path: str) -> None:
        """Delete all entries of an object."""
        for entry in self._entries(path):
            with suppress(OSError):
                os.unlink(entry.path)

    def finish(self) -> None:
        """After new entries, delete the oldest beyond the maximum, and abandoned files."""
        with self._lock:
            if self._has_new:
                self._total, self._has_new = self._trim(0), False

    def problem(self) -> str | None:
        """Return, once, why new entries cannot be written; None if they can."""
        if self._problem is None or self._is_reported:
            return None
        self._is_reported = True
        return (
            f"{self._folder}: the cache cannot be written ({self._problem.strerror}): objects are "
            "read from the store"
        )

    def _trim(self, room: int) -> int:
        """Delete the oldest entries until `room` more bytes fit the limit; return the bytes left.

        Temporary files of killed processes are deleted too.
        """
        files, total = [], 0
        for file in _files_below(self._folder):
            with suppress(OSError):
                about = file.stat(follow_symlinks=False)
                if _TEMPORARY.match(file.name) and about.st_mtime < time.time() - _ABANDONED:
                    os.unlink(file.path)
                    continue
                total += about.st_size
                if _ENTRY.match(file.name):
                    files.append((about.st_mtime, about.st_size, file.path))
        if self._most is None or total + room <= self._most:
            return total
        for _, size, path in sorted(files):
            if total + room <= self._most - self._most // 8:  # so that this is rarely repeated
                break
            try:
                os.unlink(path)
            except FileNotFoundError:  # another process deleted it
                pass
            except OSError:
                continue
            total -= size
            with suppress(OSError):
                os.rmdir(os.path.dirname(path))
        return total


def _files_below(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield the files of all subfolders of objects; other files are not of a cache."""
    with suppress(OSError), os.scandir(folder) as objects:
        for each in objects:
            if _FOLDER.match(each.name) and each.is_dir(follow_symlinks=False):
                with suppress(OSError), os.scandir(each.path) as files:
                    yield from files


def _write(path: str, header: bytes, data: Any) -> None:
    """Create the file `path` of an entry, with `header` and then `data`; make its folder.

    It appears complete, by a rename, and only this user can read it. Raises OSError, and leaves no
    temporary file then.
    """
    folder = os.path.dirname(path)
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    temporary = os.path.join(folder, f".mlstate-{os.urandom(8).hex()}.tmp")

    def open_private(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    try:
        with open(temporary, "xb", opener=open_private) as file:
            file.write(header)
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
