"""Operations of one group, one after the other: here, or in a thread that waits for them."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from ._work import Work

if TYPE_CHECKING:
    from collections.abc import Callable

    Task: TypeAlias = Callable[[], Any]


class Turns:
    """The order in which a group's operations take place: that in which they were called.

    Parameters
    ----------
    name : str
        Of the thread that runs what was started with ``async_op=True``. It starts when there
        is work and ends when there is none, and Python waits for it when it ends.
    rank : int
        This process's, for `Work`.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name = name
        self._rank = rank
        self._turn = threading.Lock()  # held while an operation is under way
        self._lock = threading.Lock()  # of the two below, never held for long
        self._queue: deque[tuple[Work, Task]] = deque()
        self._worker: threading.Thread | None = None

    def run(self, operation: str, task: Task, *, async_op: bool = False) -> Any:
        """Run a task after those that came before it, and return its result.

        With `async_op` return a `Work` at once; the thread runs the task.
        """
        if async_op:
            return self._enqueue(operation, task)
        with self._turn:
            with self._lock:
                waiting = bool(self._queue)
            if not waiting:
                return task()
        return self._enqueue(operation, task).wait()

    def run_at_once(self, operation: str, task: Task) -> Work:
        """Run a task now, in this thread, and return a `Work` that has ended."""
        work = Work(operation, self._rank)
        work.set_result(self.run(operation, task))
        return work

    def _enqueue(self, operation: str, task: Task) -> Work:
        work = Work(operation, self._rank)
        with self._lock:
            self._queue.append((work, task))
            if self._worker is None:
                self._worker = threading.Thread(target=self._drain, name=self._name)
                self._worker.start()
        return work

    def _drain(self) -> None:
        """Run tasks until none is left: what the thread does."""
        while True:
            with self._turn:
                with self._lock:
                    if not self._queue:
                        self._worker = None
                        return
                    work, task = self._queue.popleft()
                try:
                    result = task()
                except BaseException as error:
                    work.set_error(error)
                else:
                    del task  # arrays are let go before anyone can wait for that
                    work.set_result(result)
                    del result
                del work

    def join(self) -> None:
        """Wait until no operation is under way or waits."""
        with self._lock:
            worker = self._worker
        if worker is not None:
            worker.join()
