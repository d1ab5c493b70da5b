"""Puts that a thread writes; their data is copied first."""

from __future__ import annotations

from threading import Condition
from typing import TYPE_CHECKING, Any

import numpy as np

from .._common.log import log

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future, ThreadPoolExecutor

    from .._types import NDArray


class PendingPuts:
    """A queue of puts, one thread that writes them in order, and a budget for their copies."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._changed = Condition()
        self._queue: list[NDArray] = []  # tokens of the puts that are not written
        self._executor: ThreadPoolExecutor | None = None
        self.nbytes = 0

    def common(self, ids: NDArray) -> int:
        """Return how many first tokens a prompt shares with one that is being written."""
        with self._changed:
            return max((_common_tokens(ids, other) for other in self._queue), default=0)

    def submit(
        self, ids: NDArray, records: list[Any], write: Callable[[list[Any]], int]
    ) -> Future[int]:
        """Copy records and let the thread write them; write them here if they are too large."""
        from concurrent.futures import Future, ThreadPoolExecutor

        size = sum(part.nbytes for record in records for part in record[3])
        with self._changed:
            self._changed.wait_for(lambda: not self._queue or self.nbytes + size <= self._most)
            if size <= self._most:
                self._executor = self._executor or ThreadPoolExecutor(1, "mlstate-prompts")
                self.nbytes += size
                self._queue.append(ids)
        if size > self._most:
            done: Future[int] = Future()
            done.set_result(write(records))
            return done
        try:
            copies = [(*record[:3], [np.array(part) for part in record[3]]) for record in records]
            assert self._executor is not None
            return self._executor.submit(self._run, ids, size, copies, write)
        except BaseException:
            self._forget(ids, size)
            raise

    def _run(
        self, ids: NDArray, size: int, records: list[Any], write: Callable[[list[Any]], int]
    ) -> int:
        try:
            return write(records)
        except Exception as error:
            log("ERROR", "a prompt of %d tokens is not stored: %s", len(ids), error)
            raise
        finally:
            records.clear()
            self._forget(ids, size)

    def _forget(self, ids: NDArray, size: int) -> None:
        with self._changed:
            self._queue = [each for each in self._queue if each is not ids]
            self.nbytes -= size
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for all puts."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)


def _common_tokens(ids: NDArray, other: NDArray) -> int:
    count = min(len(ids), len(other))
    different = np.flatnonzero(ids[:count] != other[:count])
    return int(different[0]) if len(different) else count
