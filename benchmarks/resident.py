"""Peak of resident memory, for processes that measure one call."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys


def status_mib(field: str) -> float:
    """Read a field of /proc/self/status."""
    with open("/proc/self/status", encoding="utf-8") as file:  # noqa: PTH123
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) / 1024


def forget_peak() -> float:
    """Reset the peak of resident memory, if the system can, and return it."""
    # elsewhere, or on a kernel without it, the peak so far is nearly the resident memory
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:  # noqa: PTH123
        file.write("5")
    return peak()


def peak() -> float:
    """Return the peak of resident memory in MiB."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    return status_mib("VmHWM")


def trim() -> None:
    """Return free memory to the system, if the C library can."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
