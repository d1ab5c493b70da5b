"""Measure the memory that Python and NumPy allocate."""

import contextlib
import tracemalloc


class Trace:
    """The largest number of bytes in use, minus the bytes in use at the start."""

    peak = 0


@contextlib.contextmanager
def traced():
    """Trace allocations inside a with statement; its `peak` is set at the end."""
    trace = Trace()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield trace
    finally:
        trace.peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
