"""Threads for requests and uploads, also while the interpreter exits during a save.

`concurrent.futures` refuses new tasks then.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_PAUSE = 0.05  # seconds between two calls of `progress`


def run_tasks(
    tasks: Iterable[Callable[[], object]],
    threads: int,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Run tasks in `threads` threads until all have ended; raise the first error of a task.

    `progress`: as for `ParallelTasks.wait`.
    """
    with ParallelTasks(tasks, threads) as started:
        started.wait(progress)


class ParallelTasks:
    """Started tasks; a context manager whose end drops the tasks that have not begun."""

    def __init__(self, tasks: Iterable[Callable[[], object]], threads: int) -> None:
        """Start up to `threads` threads, which run the tasks in order.

        If the system has no thread left, those that have started run all tasks. Raises RuntimeError
        if none could start; no task runs then.
        """
        self._left = deque(tasks)
        self._errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        for _ in range(min(threads, len(self._left))):
            thread = threading.Thread(target=self._work, name="mlstate store")
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
                break
            self._threads.append(thread)

    def _work(self) -> None:
        """Run tasks in this thread until none is left.

        An error is kept for `wait`, and no thread begins another task.
        """
        while self._left:
            try:
                task = self._left.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                task()
            except BaseException as error:
                self._errors.append(error)
                self._left.clear()

    def wait(self, progress: Callable[[int], object] | None = None) -> None:
        """Wait until all tasks have ended; raise the first error of a task.

        `progress` is called with 0 about 20 times a second. An exception from it stops the wait.
        """
        for thread in self._threads:
            while thread.is_alive():
                thread.join(None if progress is None else _PAUSE)
                if progress is not None:
                    progress(0)
        if self._errors:
            raise self._errors[0]

    def __enter__(self) -> ParallelTasks:
        return self

    def __exit__(self, *unused: object) -> None:
        self._left.clear()
        for thread in self._threads:
            thread.join()
