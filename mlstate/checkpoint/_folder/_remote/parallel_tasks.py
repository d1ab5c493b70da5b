"""Threads for requests and uploads, also while the interpreter exits during a save.

`concurrent.futures` refuses new tasks then.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from .... import _core
from ...._common.waiting import join_thread, start_thread

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
    left, started = deque(tasks), list[threading.Thread]()
    errors: list[BaseException] = []

    def work() -> None:
        """Run tasks until none is left; keep an error, and begin no other task then."""
        while left:
            try:
                task = left.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                task()
            except BaseException as error:
                errors.append(error)
                left.clear()

    with _core.deferred_interrupts() as section:
        try:
            for _ in range(min(threads, len(left))):
                thread = threading.Thread(target=work, name="mlstate store")
                try:
                    start_thread(thread)
                except RuntimeError:
                    if not started:
                        raise
                    break
                started.append(thread)
            with section.allowed():
                for thread in started:
                    while not join_thread(thread, None if progress is None else _PAUSE):
                        if progress is not None:
                            progress(0)
        finally:
            left.clear()
            with section.allowed():
                deque(map(join_thread, started), maxlen=0)
    if errors:
        raise errors[0]
