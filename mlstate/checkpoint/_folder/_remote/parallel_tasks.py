"""Threads for requests and uploads, also while the interpreter exits during a save.

`concurrent.futures` refuses new tasks then.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from ...._common.waiting import Waiters, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ...._common.callback import Progress

_PAUSE = 0.05  # seconds between two calls of `progress`


def run_tasks(
    tasks: Iterable[Callable[[], object]], threads: int, progress: Progress = None
) -> None:
    """Run tasks in `threads` threads until all have ended; raise the first error of a task.

    If the system has no thread left, those that have started run all tasks. Raises RuntimeError if
    none could start; no task runs then. `progress` is called with 0 about 20 times a second. An
    exception from it, or an interrupt, ends the call after the tasks that run.
    """
    running = ParallelTasks(tasks)
    try:
        running.start(threads)
        running.wait(progress)
    finally:
        running.end()


class ParallelTasks:
    """Tasks that threads run in order."""

    def __init__(self, tasks: Iterable[Callable[[], object]]) -> None:
        """Keep the tasks; `start` starts threads that run them."""
        self._left = deque(tasks)
        self._errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._ended = deque[None]()  # an item for each thread that has ended
        self._waiters = Waiters()

    def start(self, threads: int) -> None:
        """Start up to `threads` threads, as `run_tasks`."""
        for _ in range(min(threads, len(self._left))):
            self._threads.append(threading.Thread(target=self._work, name="mlstate store"))
            try:
                start_thread(self._threads[-1])
            except RuntimeError:
                self._threads.pop()
                if not self._threads:
                    raise
                break

    def _work(self) -> None:
        """Run tasks in this thread until none is left."""
        self._run_tasks()
        self._ended.append(None)
        self._waiters.wake()

    def _run_tasks(self) -> None:
        """Run tasks until none is left; keep an error for `wait`, and begin no other task then."""
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

    def _have_ended(self) -> bool:
        """Return whether all threads have ended, except those that have not begun."""
        return len(self._ended) >= sum(thread.ident is not None for thread in self._threads)

    def wait(self, progress: Progress) -> None:
        """Wait until all tasks have ended; raise the first error of a task."""
        pause = None if progress is None else _PAUSE
        while not self._waiters.wait_for(self._have_ended, pause):
            if progress is not None:
                progress(0)
        if self._errors:
            raise self._errors[0]

    def end(self) -> None:
        """Drop the tasks that have not begun, and wait for the others."""
        self._left.clear()
        # before `Thread.join`, which returns at once after it was interrupted
        self._waiters.wait_for(self._have_ended)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
