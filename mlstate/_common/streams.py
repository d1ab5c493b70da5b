"""CUDA stream of the caller, for a task that another thread runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

ResultT = TypeVar("ResultT")


def on_current_stream(task: Callable[[], ResultT]) -> Callable[[], ResultT]:
    """Return a task for another thread that runs on the caller's current CUDA stream.

    Each thread begins with the default stream, which does not wait for the streams on which the
    caller computes the task's tensors. Without CUDA, `task` itself is returned.

    Only the stream of the caller's current device counts. If the task's tensors are on another
    device, the caller must synchronize them or make their device the current one before the call.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # absent while torch is being imported
    if cuda is None or not cuda.is_initialized():
        return task
    stream = cuda.current_stream()

    def run() -> ResultT:
        """Run the task on the stream, and on its device."""
        with cuda.stream(stream):
            return task()

    return run
