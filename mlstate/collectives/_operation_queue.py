"""Operation queue of a group: operations run one after the other, in the caller or a thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from ._work import Work

if TYPE_CHECKING:
    from collections.abc import Callable

    Task: TypeAlias = Callable[[], Any]


class OperationQueue:
    """Runs the operations of a group in call order.

    A thread called `name` runs operations with ``async_op=True``. It starts when there is work
    and ends when the queue is empty. The interpreter waits for it at exit.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name = name
        self._rank = rank
        self._running = threading.Lock()  # held while an operation runs
        self._lock = threading.Lock()  # protects the two below; held briefly
        self._queue: deque[tuple[Work, Task]] = deque()
        self._worker: threading.Thread | None = None

    def run(self, operation: str, task: Task, *, async_op: bool = False) -> Any:
        """Run a task after all earlier ones, and return its result.

        With `async_op`, return a `Work` at once; the thread runs the task.
        """
        if async_op:
            return self._enqueue(operation, task)
        with self._running:
            with self._lock:
                waiting = bool(self._queue)
            if not waiting:
                return task()
        return self._enqueue(operation, task).wait()

    def run_at_once(self, operation: str, task: Task) -> Work:
        """Run a task in this thread, after all earlier ones; return a finished `Work`."""
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
        """Run tasks until the queue is empty; the thread's main function."""
        while True:
            with self._running:
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
                    del task  # release its arrays before `wait` can return
                    work.set_result(result)
                    del result
                del work

    def join(self) -> None:
        """Wait until all queued operations have ended."""
        with self._lock:
            worker = self._worker
        if worker is not None:
            worker.join()
