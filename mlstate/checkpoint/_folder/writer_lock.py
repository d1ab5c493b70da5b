"""Lock of a local folder: one writer at a time; dead owners, the error "another writer".

The lock is an ``flock`` on the file ``lock``. The file's text names the owner and the generation
that it is writing. An ``flock`` outlives its owner if a forked child still has the descriptor.
So a dead owner is recognised by host, boot id, process id and start time, and the file is then
replaced by a new one.

Reading the text, locking the file and writing the new text must be atomic. Otherwise a process
could hold the lock while the text still names a dead owner, and the next process would replace
the file. So these steps run under an ``flock`` on the folder, held only for that moment. Owners
on other hosts (NFS) cannot be recognised: only one host may write.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from typing import Any

from ... import _core
from ..._common.atomic_file import Target, change_mode, mode_within
from ..._common.regular_file import NOT_REGULAR
from ..._common.store_error import store_error
from ...errors import StoreError
from .names import LOCK, MANIFEST

_TRIES = 64  # attempts to lock the file while other writers replace it
_PAUSE = 0.05  # seconds between two attempts; normally the first few attempts suffice
_UNLOCKABLE = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)
_GENERATION = re.compile(r"[0-9a-f]{16}\Z", re.ASCII)


def _boot_id() -> str:
    """Return the identifier of this boot of the machine; "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(200).strip()  # a UUID of 36 characters
    except (OSError, ValueError):
        return ""


def _start_time(pid: int) -> str:
    """Return the start time of the process `pid` in ticks since boot; "" if unknown.

    It tells whether a process id was given to another process since.
    """
    text = ""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # field 22; the second field, a name in parentheses, may have spaces
            text = file.read(4096).rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError, ValueError):
        pass
    return text


def _pid_space() -> str:
    """Return the namespace of process ids, which differs between containers; "" if unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _me() -> dict[str, Any]:
    """Return what identifies this process in a lock's text: host, boot, process id, start time."""
    import socket

    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot": _boot_id(),
        "pid_space": _pid_space(),
        "pid": pid,
        "start": _start_time(pid),
    }


def _alive(owner: dict[str, Any]) -> bool:
    """Return whether the process that a lock's text names may still be running.

    `owner`: the text's JSON, with the members of `_me`. True if this cannot be known: without
    ``/proc``, or if it hides the processes of other users.
    """
    me = _me()
    if owner.get("host") != me["host"]:
        return True  # unknown on this host
    if owner.get("boot") and me["boot"] and owner["boot"] != me["boot"]:
        return False
    if owner.get("pid_space", "") != me["pid_space"]:
        return True  # its process id has no meaning in this namespace
    pid = owner.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # EPERM: the process exists, and belongs to another user
        pass
    start = _start_time(pid)
    return not owner.get("start") or not start or owner["start"] == start


def _try_lock(descriptor: _core.Descriptor) -> bool:
    """Try to lock an open file or folder; return False if another process holds the lock.

    Returns True too if the file system has no locks. Raises other errors of the system.
    """
    try:
        return descriptor.lock()
    except OSError as error:
        if error.errno not in _UNLOCKABLE:
            raise
    return True


def _lock_folder(descriptor: _core.Descriptor) -> bool:
    """Try to lock an open folder; return False if another writer holds its lock.

    Only one writer at a time may inspect the lock file. Returns True too if folders cannot be
    locked.
    """
    try:
        return _try_lock(descriptor)
    except OSError as error:
        if error.errno != errno.EBADF:  # NFS locks only descriptors that are open for writing
            raise
    return True


class WriterLock:
    """The lock of a writing process.

    `timeout` is the caller's ``lock_timeout``, or None if the caller has no such parameter.

    `holder` is closed until the lock is taken, and unlocks at the end of its `with` statement. No
    interrupt can prevent this, not even a second one during the clean-up after the first::

        with lock.holder:
            lock.acquire()
    """

    is_unsure = False  # whether a `commit` succeeded can always be read from the folder

    def __init__(
        self, folder: str, subject: str = "checkpoint", timeout: float | None = None
    ) -> None:
        """Prepare the lock of the local folder at the path `folder`; `acquire` takes it.

        `subject`: name of the locked thing in errors. `timeout`: seconds to wait for another
        writer; None: fail at once.
        """
        self._timeout = timeout
        self._subject = subject
        self._folder = folder
        self._path = os.path.join(folder, LOCK)
        self._manifest = os.path.join(folder, MANIFEST)
        self.holder = _core.Descriptor()  # dropping it closes and unlocks, too
        self._is_new = False
        self._owner: dict[str, Any] = {}  # this process, as the lock's text names it
        self.unfinished: str | None = None  # generation of a writer that died

    def acquire(self) -> None:
        """Take the lock, and set `unfinished` if its last owner died during a save.

        After the timeout, raises StoreError (EBUSY) that names the owner. The lock is then not
        held; after an exception that is not an OSError, the end of `holder` unlocks.
        """
        import time

        self._owner = _me()
        end = time.monotonic() + (self._timeout or 0.0)
        while True:
            try:
                for _ in range(_TRIES):
                    with _core.Descriptor(self._folder, os.O_RDONLY) as folder:
                        is_alone = _lock_folder(folder)
                        if is_alone and self._try():
                            return
                    if not is_alone:
                        time.sleep(_PAUSE)
                raise self._busy_error("other writers keep replacing it")
            except OSError as error:
                self.release()  # we may hold it, with a text that could not be written
                left = end - time.monotonic()
                is_busy = isinstance(error, StoreError) and error.errno == errno.EBUSY
                if not (is_busy and left > 0):
                    action = f"cannot lock the {self._subject}"
                    raise store_error(error, action, self._path) from None
            time.sleep(min(_PAUSE, left))

    def _busy_error(self, reason: str) -> StoreError:
        """Return StoreError (EBUSY) for a lock that another writer holds, with a remedy.

        `reason`: who holds it.
        """
        remedy = "repeat the call when it has ended"
        if self._timeout is not None:
            remedy = f"waited {self._timeout:g} s; to wait longer, pass lock_timeout= in seconds"
        error = OSError(errno.EBUSY, f"{reason}: {remedy}")
        return store_error(error, f"cannot lock the {self._subject}", self._path)

    def _try(self) -> bool:
        """Try once to take the lock, while the folder is locked.

        With the lock, it sets `unfinished`, names this process in the text, and keeps that
        generation there until its files are deleted. Returns False if another writer replaced the
        file, or if this call replaced the file of a dead owner: then try again. Raises StoreError
        (EBUSY) if the owner may be alive.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = self.holder
        descriptor.open(self._path, flags)
        if not stat.S_ISREG(os.fstat(descriptor.fileno()).st_mode):
            raise OSError(errno.EINVAL, NOT_REGULAR)
        if not _try_lock(descriptor):
            self._refuse_or_replace(descriptor)
            self.release()
            return False
        if not self._is_current(descriptor):
            self.release()  # another writer replaced the file meanwhile
            return False
        status = os.fstat(descriptor.fileno())
        self._is_new = status.st_size == 0
        if self._is_new:
            self._limit_mode(descriptor.fileno(), status.st_mode)
        generation = self._text(descriptor).get("generation")
        # its files will be deleted, so only a valid generation is accepted
        is_valid = isinstance(generation, str) and _GENERATION.match(generation)
        self.unfinished = generation if is_valid else None
        self._write(self.unfinished)
        return True

    def _limit_mode(self, number: int, mode: int) -> None:
        """Remove permissions from a new lock file that other files of the checkpoint do not have.

        `number`: its descriptor. `mode`: its permissions now. The bits for execution stay, because
        FAT has them on every file and refuses to change them.
        """
        limited = mode & (mode_within(self._folder, self._manifest) | 0o111)
        if limited != mode & 0o777:
            change_mode(number, limited)

    def _is_current(self, descriptor: _core.Descriptor) -> bool:
        """Return whether the open file is still the lock file: another writer may replace it."""
        try:
            current = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(current, os.fstat(descriptor.fileno()))

    def _text(self, descriptor: _core.Descriptor) -> dict[str, Any]:
        """Return the JSON object in the lock file: owner and generation; {} if it has none."""
        # a writer killed before ftruncate leaves the end of a longer text after the first line
        line = os.pread(descriptor.fileno(), 4096, 0).partition(b"\n")[0]
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def _refuse_or_replace(self, descriptor: _core.Descriptor) -> None:
        """Raise StoreError (EBUSY) if the owner of a held lock may be alive, else replace the file.

        A dead owner's children can still hold the lock; a new file has a new lock.
        """
        owner = self._text(descriptor)
        if not owner or _alive(owner):
            # an owner that has just taken the lock has not written its text yet
            name = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
            who = name if owner else "another process"
            raise self._busy_error(f"{who} is writing it")
        target = Target.of(self._path, follow_links=False)
        if not self._is_current(descriptor):
            return
        # keep the text: the new file must name the unfinished generation too
        try:
            target.write_content(lambda file: file.write(os.pread(descriptor.fileno(), 4096, 0)))
        except StoreError as error:
            # where the folder cannot be locked, another writer may have replaced the file first
            if error.errno not in (errno.EEXIST, errno.ENOENT):
                raise

    def _write(self, generation: str | None) -> None:
        """Write the lock's text: this process, and `generation`, the save in progress or None."""
        text = json.dumps({**self._owner, "generation": generation}).encode()
        number = self.holder.fileno()
        os.pwrite(number, text + b"\n", 0)
        os.ftruncate(number, len(text) + 1)

    def note(self, generation: str | None) -> None:
        """Record the generation (16 hex digits) before its first file is written.

        None: nothing is being written. Raises StoreError if the text cannot be written.
        """
        try:
            self._write(generation)
            if generation is not None:
                os.fsync(self.holder.fileno())
                if self._is_new:  # otherwise a power failure could lose the file
                    _core.folder_sync(os.path.dirname(self._path))
                    self._is_new = False
        except OSError as error:
            raise store_error(error, "cannot write the lock", self._path) from None

    def commit(self, data: bytes, root: str | None = None) -> None:
        """Replace the manifest by `data` durably.

        `root`: path of a second copy, which is written before it; None: no copy.
        """
        mode = mode_within(self._folder, self._manifest)
        for path in (MANIFEST,) if root is None else (root, MANIFEST):
            _core.file_replace(os.path.join(self._folder, path), data, mode)

    def release(self) -> None:
        """Unlock and close the file; do nothing if it is closed.

        In a forked child, the parent keeps its lock.
        """
        self.holder.close()

    def __enter__(self) -> WriterLock:
        self.acquire()
        return self

    def __exit__(self, *unused: object) -> None:
        self.release()
