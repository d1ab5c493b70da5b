"""Threads and waits that an interrupt cannot leave locked.

KeyboardInterrupt is raised in the main thread, between any two calls. In the Python code of
`Thread.start`, `Event` and `Condition` it can leave a lock locked, and another thread then waits
for that lock forever. `Lock` and `RLock` are implemented in C: an interrupt cannot split `with`.
Short steps that must not be split run in a section of `_core.deferred_interrupts`.
"""

from __future__ import annotations

import time
from _thread import TIMEOUT_MAX, RLock, allocate_lock
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .. import _core

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

_POLL = 0.05  # seconds in a section until signals are handled


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; raise RuntimeError if the system has no thread left.

    An interrupt is raised after the start.
    """
    with _core.deferred_interrupts():
        thread.start()


def join_thread(thread: threading.Thread, timeout: float | None = None) -> bool:
    """Wait until a thread has ended; return False after `timeout` seconds.

    An interrupt ends the wait. In `Thread.join` it could leave a lock locked, for which the
    interpreter waits at exit.
    """
    end = None if timeout is None else time.monotonic() + timeout
    with _core.deferred_interrupts() as section:
        while True:
            left = _POLL if end is None else min(_POLL, end - time.monotonic())
            thread.join(max(left, 0))
            if not thread.is_alive():
                return True
            if left < _POLL:
                return False
            with section.allowed():
                pass


def remove_folder(path: str) -> None:
    """Delete a folder; ignore errors, as if it is missing.

    An interrupt is raised after the deletion: it could make `shutil.rmtree` close a descriptor
    twice, which another file may have by then.
    """
    import shutil

    with _core.deferred_interrupts():
        shutil.rmtree(path, ignore_errors=True)


class Waiters:
    """The threads that wait for a change; each has a lock, so an interrupt affects no other.

    In the main thread, a change and its `wake` are in one section, unless no other thread waits.
    """

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks: deque[Any] = deque()  # held; released on a change

    def wake(self) -> None:
        """Wake the waiting threads; called after the change."""
        with _core.deferred_interrupts(), suppress(IndexError):
            while True:
                self._locks.pop().release()

    def wait_for(self, has_changed: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `has_changed` returns True; return False after `timeout` seconds.

        `has_changed` is not called again after it returned True.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not has_changed():
            left = TIMEOUT_MAX if end is None else min(end - time.monotonic(), TIMEOUT_MAX)
            if not left > 0:  # also NaN
                return False
            lock = allocate_lock()
            lock.acquire()
            self._locks.append(lock)  # before the test, so that no change is missed
            try:
                if has_changed():
                    return True
                lock.acquire(timeout=left)
            finally:
                with suppress(ValueError, IndexError):  # `wake` has removed it
                    self._locks.remove(lock)
        return True


class Monitor(RLock):  # type: ignore[misc]
    """A lock whose owner can wait for a change, as with a `Condition`."""

    def __init__(self) -> None:
        self._waiters = Waiters()

    def wake(self) -> None:
        """Wake the waiting threads; called after the change."""
        self._waiters.wake()

    def wait_for(self, has_changed: Callable[[], bool]) -> None:
        """Release the lock until `has_changed`, which is called without the lock.

        A signal handler can have taken it again.
        """
        with _core.deferred_interrupts() as section:
            state = self._release_save()  # type: ignore[attr-defined]
            try:
                with section.allowed():
                    self._waiters.wait_for(has_changed)
            finally:
                self._acquire_restore(state)  # type: ignore[attr-defined]
