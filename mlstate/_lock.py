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
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from . import _core
from ._folder import store_error
from .errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def _lock(descriptor: int) -> bool:
    """Lock an open file, or a folder, for this process; False: somebody else has it."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNLOCKABLE:
            raise
    return True


@contextmanager
def _alone(folder: str) -> Iterator[bool]:
    """Be the only one that looks at the folder's lock; gives False where another one does."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            mine = _lock(descriptor)
        except OSError as error:
            if error.errno != errno.EBADF:  # NFS locks only what is open for writing
                raise
            mine = True
        try:
            yield mine
        finally:
            with suppress(OSError):  # a child that was forked meanwhile has the descriptor too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


class WriterLock:
    """Held by the process that writes; `unfinished` names a generation that a dead one left."""

    def __init__(self, folder: str, what: str = "checkpoint") -> None:
        self._what = what
        self._path = os.path.join(folder, _NAME)
        self._descriptor = -1
        self._pid = os.getpid()
        self._is_new = False
        self.unfinished: str | None = None

    def acquire(self) -> None:
        """Take the lock, or raise StoreError (EBUSY) naming who has it."""
        import time

        folder = os.path.dirname(self._path)
        try:
            for _ in range(_TRIES):
                with _alone(folder) as mine:
                    if mine and self._try():
                        return
                    replaced = mine
                if not replaced:
                    time.sleep(_PAUSE)
        except StoreError:
            raise
        except OSError as error:
            self.release()  # it may be ours, with a text that could not be written
            raise store_error(error, f"cannot lock the {self._what}", self._path) from None
        raise store_error(
            OSError(errno.EBUSY, "other writers keep replacing it"),
            f"cannot lock the {self._what}",
            self._path,
        )

    def _try(self) -> bool:
        import fcntl

        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self._path, flags, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._refuse_or_replace(descriptor)
                os.close(descriptor)
                return False
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                    raise
            if not self._is_current(descriptor):
                os.close(descriptor)  # somebody replaced the file in between
                return False
        except BaseException:
            if self._descriptor != descriptor:
                os.close(descriptor)
            raise
        self._descriptor = descriptor
        self._pid = os.getpid()
        self._is_new = os.fstat(descriptor).st_size == 0
        generation = self._text(descriptor).get("generation")
        # files are deleted by it: what no writer of ours wrote is not believed
        known = isinstance(generation, str) and _GENERATION.match(generation)
        self.unfinished = generation if known else None
        self._write(self.unfinished)
        return True

    def _is_current(self, descriptor: int) -> bool:
        try:
            there = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(descriptor))

    def _text(self, descriptor: int) -> dict[str, Any]:
        import json

        try:
            found = json.loads(os.pread(descriptor, 4096, 0))
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _refuse_or_replace(self, descriptor: int) -> None:
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
                file.write(os.pread(descriptor, 4096, 0))
            os.replace(fresh, self._path)

    def _write(self, generation: str | None) -> None:
        import json

        text = json.dumps({**_me(), "generation": generation}).encode()
        os.pwrite(self._descriptor, text + b"\n", 0)
        os.ftruncate(self._descriptor, len(text) + 1)

    def note(self, generation: str | None) -> None:
        """Write down what is being written, before anything of it is; None: nothing is."""
        try:
            self._write(generation)
            if generation is not None:
                os.fsync(self._descriptor)
                if self._is_new:  # else its name is lost with the power, and its text with it
                    _core.folder_sync(os.path.dirname(self._path))
                    self._is_new = False
        except OSError as error:
            raise store_error(error, "cannot write the lock", self._path) from None

    def release(self) -> None:
        """Let go; a forked child leaves its parent's lock alone."""
        import fcntl

        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        with suppress(OSError):  # closing does it
            if self._pid == os.getpid():
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        with suppress(OSError):  # closed all the same, and what it says is only a hint
            os.close(descriptor)

    def __enter__(self) -> WriterLock:
        self.acquire()
        return self

    def __exit__(self, *unused: object) -> None:
        self.release()
