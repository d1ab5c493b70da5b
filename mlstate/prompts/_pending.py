"""`put(asynchronous=True)`: queue and thread, `max_pending_bytes`, waits for room."""

from __future__ import annotations

import os
from threading import Condition
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._common.log import log
from ._transfer import copied

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future, ThreadPoolExecutor

    from .._types import NDArray


class _Put(NamedTuple):
    """A put that is not written yet."""

    tokens: NDArray
    nbytes: int  # of the copies


class PendingPuts:
    """A queue of puts, one thread that writes them in order, and a budget for their copies.

    A forked process has an empty queue: the parent writes the puts of before.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._changed = Condition()
        self._queue: list[_Put] = []  # copied or being copied, and not written yet
        self._executor: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(put.nbytes for put in self._queue)

    def _check_process(self) -> None:
        """Forget the thread of the parent, which a forked process does not have."""
        if self._process != os.getpid():
            self._changed = Condition()  # the thread may have held it
            self._queue, self._executor, self._process = [], None, os.getpid()

    def common(self, ids: NDArray) -> int:
        """Return the largest number of first tokens that `ids` shares with a prompt in the queue.

        0 for an empty queue. Blocks up to there need not be stored by the next put.
        """
        self._check_process()
        with self._changed:
            return max((_common_tokens(ids, put.tokens) for put in self._queue), default=0)

    def submit(
        self, ids: NDArray, records: list[Any], write: Callable[[list[Any]], int]
    ) -> Future[int]:
        """Copy records and let the thread write them; return a future of the result of `write`.

        `ids`: the tokens of the prompt. `records`: as for `_core.PromptLog.put`; the last item of
        each is a list of parts. `write`: called with the copied records. Waits until the budget has
        room. A put that exceeds the whole budget is written here, without copies; its errors are
        raised here.
        """
        from concurrent.futures import Future, ThreadPoolExecutor

        put = _Put(ids, sum(part.nbytes for *_, parts in records for part in parts))
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._has_room(put.nbytes))
                if put.nbytes <= self._most:
                    self._executor = self._executor or ThreadPoolExecutor(1, "mlstate-prompts")
                    self._queue.append(put)
            if put.nbytes <= self._most:
                copies = [(*rest, [copied(part) for part in parts]) for *rest, parts in records]
                assert self._executor is not None
                return self._executor.submit(self._run_put, put, copies, write)
        except BaseException:
            self._forget(put)
            raise
        done: Future[int] = Future()
        done.set_result(write(records))
        return done

    def _has_room(self, nbytes: int) -> bool:
        return not self._queue or self.nbytes + nbytes <= self._most

    def _run_put(self, put: _Put, records: list[Any], write: Callable[[list[Any]], int]) -> int:
        """Write a put in the thread, and take it out of the queue.

        `records`: its copies; the list is emptied. Returns the result of `write`. An error is
        logged, and raised by the future.
        """
        try:
            return write(records)
        except Exception as error:
            log("ERROR", "a prompt of %d tokens is not stored: %s", len(put.tokens), error)
            raise
        finally:
            records.clear()  # frees the copies before another put gets their room
            self._forget(put)

    def _forget(self, put: _Put) -> None:
        """Take a put out of the queue, if it is in it, and wake puts that wait for room."""
        with self._changed:
            self._queue = [each for each in self._queue if each is not put]
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until all puts are written, and end the thread; a later put starts another one."""
        self._check_process()
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)


def _common_tokens(ids: NDArray, other: NDArray) -> int:
    """Return how many first tokens two prompts share."""
    count = min(len(ids), len(other))
    different = np.flatnonzero(ids[:count] != other[:count])
    return int(different[0]) if len(different) else count
