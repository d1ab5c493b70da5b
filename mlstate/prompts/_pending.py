"""`put(asynchronous=True)`: queue and thread, `max_pending_bytes`, waits for room."""

from __future__ import annotations

import os
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _core
from .._common.log import log
from .._common.waiting import Waiters
from ..collectives._engine import OperationQueue
from ._put_handle import PutHandle
from ._transfer import copied

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._prompt import Prompt


class _Put(NamedTuple):
    """A put that is not written yet: its prompt, and the bytes of its copies."""

    prompt: Prompt
    nbytes: int


class PendingPuts:
    """A queue of puts, one thread that writes them in order, and a budget for their copies.

    A forked process has an empty queue: the parent writes the puts of before.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._start()

    def _start(self) -> None:
        """Start with an empty queue."""
        self._lock = Lock()  # protects `_queue`
        self._waiters = Waiters()
        self._queue: list[_Put] = []  # copied or being copied, and not written yet
        self._thread = OperationQueue("mlstate-prompts", 0)
        self._process = os.getpid()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(put.nbytes for put in self._queue)

    def _check_process(self) -> None:
        """Forget the thread of the parent, which a forked process does not have."""
        if self._process != os.getpid():
            self._start()  # the thread may have held the lock

    def common(self, prompt: Prompt) -> int:
        """Return the largest number of first tokens that a prompt shares with one in the queue.

        0 for an empty queue. Blocks up to there need not be stored by the next put.
        """
        self._check_process()
        with self._lock:
            return max((prompt.common(put.prompt) for put in self._queue), default=0)

    def submit(
        self, prompt: Prompt, records: list[Any], write: Callable[[list[Any]], int]
    ) -> PutHandle:
        """Copy records and let the thread write them; return a handle with the result of `write`.

        `records`: of the prompt, as for `_core.PromptLog.put`; the last item of each is a list of
        parts. `write`: called with the copied records. Waits until the budget has
        room. A put that exceeds the whole budget is written here, without copies; its errors are
        raised here.
        """
        put = _Put(prompt, sum(part.nbytes for *_, parts in records for part in parts))
        done = PutHandle()
        with _core.deferred_interrupts() as section:
            try:
                with section.allowed():
                    self._waiters.wait_for(lambda: self._reserve(put))
                    if put.nbytes > self._most:
                        done.finish(write(records))
                        return done
                    copies = [(*rest, [copied(part) for part in parts]) for *rest, parts in records]
                self._thread.run(
                    "put", lambda: self._run_put(put, copies, write, done), async_op=True
                )
            except BaseException:
                self._forget(put)
                raise
        return done

    def _reserve(self, put: _Put) -> bool:
        """Return whether there is room for a put, which is then queued unless it is too large."""
        with self._lock:
            has_room = not self._queue or self.nbytes + put.nbytes <= self._most
            if has_room and put.nbytes <= self._most:
                self._queue.append(put)
            return has_room

    def _run_put(
        self,
        put: _Put,
        records: list[Any],
        write: Callable[[list[Any]], int],
        done: PutHandle,
    ) -> None:
        """Write a put in the thread, and take it out of the queue.

        `records`: its copies; the list is emptied. `done`: gets the result of `write`, or its
        error, which is also logged.
        """
        written, failed = 0, None
        try:
            if done.start():
                written = write(records)
        except BaseException as error:
            log("ERROR", "a prompt of %d tokens is not stored: %s", len(put.prompt.ids), error)
            failed = error
        records.clear()  # frees the copies before another put gets their room
        self._forget(put)
        if not done.cancelled():
            done.finish(written, failed)
        del done, failed  # avoid a reference cycle between traceback and error

    def _forget(self, put: _Put) -> None:
        """Take a put out of the queue, if it is in it, and wake puts that wait for room."""
        with self._lock:
            self._queue = [each for each in self._queue if each is not put]
        self._waiters.wake()

    def close(self) -> None:
        """Wait until all puts are written, and end the thread; a later put starts another one."""
        self._check_process()
        self._thread.join()
