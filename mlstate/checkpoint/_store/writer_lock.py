"""One writer at a time in a checkpoint's folder.

The lock is an ``flock`` on the file ``lock``, whose text says who holds it and which
generation he is writing. An ``flock`` outlives its owner where a forked child still has the
descriptor: an owner that is dead is recognised by host, boot, process id and start time, and
the file is replaced by a fresh one. Looking at the lock, taking it and writing down who has it
are one step for everybody, under an ``flock`` on the folder itself that is held only for that
moment: else one process takes a lock whose text still names a dead owner, and the next one
believes the text. Between hosts (NFS) nothing is recognised: one host writes.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Any

from ... import _core
from ...errors import StoreError
from .folder import new_file_mode, store_error

_NAME = "lock"
_TRIES = 64
_PAUSE = 0.05  # seconds between two tries, of which the first few are needed at most
_UNLOCKABLE = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)
_GENERATION = re.compile(r"[0-9a-f]{16}\Z", re.ASCII)


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read(200).strip()
    except (OSError, ValueError):
        return ""


def _start_time(pid: int) -> str:
    """When a process began, in ticks since boot; "" where nobody knows."""
    text = ""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read(4096).rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError, ValueError):
        pass
    return text


def _pid_space() -> str:
    """Which process ids are meant: containers of one host have their own; "" where unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _me() -> dict[str, Any]:
    import socket

    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot": _read("/proc/sys/kernel/random/boot_id"),
        "pid_space": _pid_space(),
        "pid": pid,
        "start": _start_time(pid),
    }


def _alive(owner: dict[str, Any]) -> bool:
    """Whether the owner that a lock's text names may still be at work."""
    me = _me()
    if owner.get("host") != me["host"]:
        return True  # nobody here can tell
    if owner.get("boot") != me["boot"]:
        return False
    if owner.get("pid_space", "") != me["pid_space"]:
        return True  # his number means nothing here
    pid = owner.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return not owner.get("start") or owner["start"] == _start_time(pid)


def _try_lock(descriptor: _core.Descriptor) -> bool:
    """Try to lock an open file or directory; return False if another process holds the lock."""
    try:
        return descriptor.lock()
    except OSError as error:
        if error.errno not in _UNLOCKABLE:
            raise
    return True


def _lock_folder(folder: str) -> tuple[_core.Descriptor, bool]:
    """Open the folder and try to lock it: only one writer at a time looks at the lock's file."""
    descriptor = _core.Descriptor(folder, os.O_RDONLY)
    try:
        return descriptor, _try_lock(descriptor)
    except OSError as error:
        if error.errno != errno.EBADF:  # NFS locks only what is open for writing
            raise
    return descriptor, True


def check_timeout(seconds: float) -> float:
    """Return the seconds to wait for the lock, if they are a number from 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"lock_timeout must be a number of seconds, got {type(seconds).__name__}")
    if not seconds >= 0:
        raise ValueError(f"lock_timeout must be 0 or more seconds, got {seconds}")
    return float(seconds)


class WriterLock:
    """Held by the process that writes; `unfinished` names a generation that a dead one left."""

    def __init__(self, folder: str, what: str = "checkpoint", timeout: float = 0.0) -> None:
        self._timeout = timeout
        self._what = what
        self._path = os.path.join(folder, _NAME)
        self._descriptor: _core.Descriptor | None = None  # closed, and unlocked, if it is dropped
        self._is_new = False
        self.unfinished: str | None = None

    def acquire(self) -> _core.Descriptor:
        """Take the lock, or raise StoreError (EBUSY) naming the owner after the timeout.

        The descriptor unlocks at the end of a `with` statement, whatever interrupts it.
        """
        import time

        end = time.monotonic() + self._timeout
        while True:
            try:
                return self._acquire_once()
            except StoreError as error:
                left = end - time.monotonic()
                if error.errno != errno.EBUSY or left <= 0:
                    raise
            time.sleep(min(_PAUSE, left))

    def _acquire_once(self) -> _core.Descriptor:
        import time

        try:
            for _ in range(_TRIES):
                taken = self._try_alone()
                if taken:
                    assert self._descriptor is not None
                    return self._descriptor
                if taken is None:
                    time.sleep(_PAUSE)
        except OSError as error:
            self.release()  # it may be ours, with a text that could not be written
            if isinstance(error, StoreError):
                raise
            raise store_error(error, f"cannot lock the {self._what}", self._path) from None
        except BaseException:
            self.release()
            raise
        raise store_error(
            OSError(errno.EBUSY, "other writers keep replacing it"),
            f"cannot lock the {self._what}",
            self._path,
        )

    def _try_alone(self) -> bool | None:
        """Try once, with the folder locked; None: another writer has locked the folder."""
        folder, alone = _lock_folder(os.path.dirname(self._path))
        try:
            return self._try() if alone else None
        finally:
            folder.close()

    def _try(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        self._descriptor = descriptor = _core.Descriptor(self._path, flags)
        if not _try_lock(descriptor):
            self._refuse_or_replace(descriptor)
            self.release()
            return False
        if not self._is_current(descriptor):
            self.release()  # another writer replaced the file in between
            return False
        found = os.fstat(descriptor.fileno())
        self._is_new = found.st_size == 0
        if self._is_new:
            self._limit_mode(descriptor.fileno(), found.st_mode)
        generation = self._text(descriptor).get("generation")
        # files are deleted by it: what no writer of ours wrote is not believed
        known = isinstance(generation, str) and _GENERATION.match(generation)
        self.unfinished = generation if known else None
        self._write(self.unfinished)
        return True

    def _limit_mode(self, number: int, mode: int) -> None:
        """Let others do no more with a new file than with the rest of the folder."""
        limited = mode & new_file_mode(os.path.dirname(self._path))
        if limited != mode & 0o777:
            os.fchmod(number, limited)

    def _is_current(self, descriptor: _core.Descriptor) -> bool:
        try:
            there = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(descriptor.fileno()))

    def _text(self, descriptor: _core.Descriptor) -> dict[str, Any]:
        import json

        # a writer that was stopped before it cut the file leaves the end of a longer text
        line = os.pread(descriptor.fileno(), 4096, 0).partition(b"\n")[0]
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _refuse_or_replace(self, descriptor: _core.Descriptor) -> None:
        """Somebody has it: an owner that lives, or the children of one that does not."""
        owner = self._text(descriptor)
        if not owner or _alive(owner):
            # one that has only just taken the lock has not written who it is
            known = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
            who = known if owner else "another process"
            raise store_error(
                OSError(errno.EBUSY, f"{who} is writing it"),
                f"cannot lock the {self._what}",
                self._path,
            )
        if self._is_current(descriptor):
            # its text goes on to the new file, for the sake of what is unfinished
            fresh = f"{self._path}.{os.getpid()}"
            with open(fresh, "wb") as file:
                self._limit_mode(file.fileno(), os.fstat(file.fileno()).st_mode)
                file.write(os.pread(descriptor.fileno(), 4096, 0))
            os.replace(fresh, self._path)

    def _write(self, generation: str | None) -> None:
        import json

        text = json.dumps({**_me(), "generation": generation}).encode()
        number = -1 if self._descriptor is None else self._descriptor.fileno()
        os.pwrite(number, text + b"\n", 0)
        os.ftruncate(number, len(text) + 1)

    def note(self, generation: str | None) -> None:
        """Write down what is being written, before anything of it is; None: nothing is."""
        try:
            self._write(generation)
            if generation is not None:
                assert self._descriptor is not None
                os.fsync(self._descriptor.fileno())
                if self._is_new:  # else its name is lost with the power, and its text with it
                    _core.folder_sync(os.path.dirname(self._path))
                    self._is_new = False
        except OSError as error:
            raise store_error(error, "cannot write the lock", self._path) from None

    def release(self) -> None:
        """Unlock and close the file; a forked child leaves its parent's lock alone."""
        if self._descriptor is not None:
            self._descriptor.close()

    def __enter__(self) -> WriterLock:
        self.acquire()
        return self

    def __exit__(self, *unused: object) -> None:
        self.release()
