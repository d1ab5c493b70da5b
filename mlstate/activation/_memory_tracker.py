"""`MemoryTracker`: memory in use, total and peak: CUDA, this process or container, a callable."""

from __future__ import annotations

import sys
import threading
import time
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _core
from .._common.backend import backend_named
from ._backend import ActivationBackend

if TYPE_CHECKING:
    from collections.abc import Callable


class MemoryStats(NamedTuple):
    """Memory at one moment, in bytes.

    Attributes
    ----------
    current_memory_used : int
        Memory in use.
    peak_memory_used : int
        Largest memory in use so far.
    total_memory : int
        Total memory: of the device, or for a process, the lower one of the machine's memory
        and the limit of its control groups.
    source : str
        ``"process"``, ``"cuda:0"`` or ``"custom"``.
    seconds : float
        Time of the measurement, by the tracker's clock.

    Examples
    --------
    >>> from mlstate.activation import MemoryTracker
    >>> stats = MemoryTracker(lambda: (30, 120), clock=lambda: 5.0).get_stats()
    >>> stats.current_memory_used, stats.total_memory, stats.available, stats.pressure
    (30, 120, 90, 0.25)
    """

    current_memory_used: int
    peak_memory_used: int
    total_memory: int
    source: str
    seconds: float

    @property
    def available(self) -> int:
        """Free memory in bytes, at least 0."""
        return max(0, self.total_memory - self.current_memory_used)

    @property
    def pressure(self) -> float:
        """Fraction of the memory that is in use."""
        return self.current_memory_used / self.total_memory


class MemoryTracker:
    """Measure memory in use and total memory.

    Parameters
    ----------
    source : callable or str, optional
        ``"process"``: resident memory of this process. ``"cuda"`` or ``"cuda:1"``: memory that
        torch has allocated on that device. A callable returns the bytes in use, or a pair of
        used and total bytes. Default: the current CUDA device once torch uses CUDA in this
        process, else the process.
    clock : callable, optional
        Returns seconds. Default: `time.monotonic`.

    Raises
    ------
    ValueError
        If the name of a source is unknown. Raised by `get_stats` if a callable returns a
        negative number.
    TypeError
        If a source or clock has a wrong type.

    Notes
    -----
    Measuring a process takes about 20 us on Linux; it reads ``/proc`` and the limits of control
    groups, versions 1 and 2. Threads may share a tracker. Trackers with equal settings are equal.

    Examples
    --------
    >>> from mlstate.activation import MemoryTracker
    >>> stats = MemoryTracker("process").get_stats()
    >>> 0 < stats.current_memory_used <= stats.peak_memory_used
    True
    >>> used = iter([100, 300, 200])
    >>> tracker = MemoryTracker(lambda: next(used))
    >>> [tracker.get_stats().peak_memory_used for _ in range(3)]
    [100, 300, 300]
    """

    def __init__(
        self,
        source: Callable[[], int | tuple[int, int]] | str | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Check the arguments, which the class describes; measures nothing yet."""
        if isinstance(source, str):
            kind, _, number = source.partition(":")
            if source != "process" and not (
                kind == "cuda" and (source == kind or number.isdecimal())
            ):
                raise ValueError(f"source must be process, cuda or cuda:N, got {source!r}")
        elif source is not None and not callable(source):
            raise TypeError(f"source must be callable or a str, got {type(source).__name__}")
        if clock is not None and not callable(clock):
            raise TypeError(f"clock must be callable, got {type(clock).__name__}")
        self.source = source
        self.clock = clock
        self._lock = threading.Lock()
        self._peak = 0
        self._is_reset = False  # after `reset`, the system's peak is ignored

    def get_stats(self) -> MemoryStats:
        """Measure the memory.

        Returns
        -------
        MemoryStats
            The current values.

        Raises
        ------
        ValueError, TypeError
            If the source returns anything but numbers of bytes.
        RuntimeError
            If torch does not have the CUDA device.
        StoreError
            If the system does not report its memory.

        Examples
        --------
        >>> from mlstate.activation import MemoryTracker
        >>> MemoryTracker(lambda: 5, clock=lambda: 0.5).get_stats().seconds
        0.5
        """
        used, peak, total, source = self._read_memory()
        with self._lock:
            self._peak = max(self._peak, used, 0 if self._is_reset else peak)
            most = self._peak
        return MemoryStats(used, most, total, source, float((self.clock or time.monotonic)()))

    def reset(self) -> None:
        """Reset the peak; the new peak is the largest value that `get_stats` measures.

        Examples
        --------
        >>> from mlstate.activation import MemoryTracker
        >>> used = iter([100, 50])
        >>> tracker = MemoryTracker(lambda: next(used))
        >>> tracker.get_stats().peak_memory_used
        100
        >>> tracker.reset()
        >>> tracker.get_stats().peak_memory_used
        50
        """
        with self._lock:
            self._peak = 0
            self._is_reset = True

    def _read_memory(self) -> tuple[int, int, int, str]:
        """Return used, peak and total bytes now, and the name of their source.

        That is "process", a CUDA device or "custom". The peak is as the system or torch reports it;
        for a callable source it equals the bytes in use.
        """
        if callable(self.source):
            return _read_custom(self.source())
        source = self.source or ("cuda" if _torch_uses_cuda() else "process")
        if source == "process":
            used, peak, total = _core.memory_footprint()
            return used, peak, total, source
        return backend_named("torch", ActivationBackend).cuda_memory(source)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MemoryTracker):
            return NotImplemented
        return self.source == other.source and self.clock == other.clock

    def __hash__(self) -> int:
        return hash((self.source, self.clock))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        arguments = {"source": self.source, "clock": self.clock}
        text = ", ".join(f"{k}={v!r}" for k, v in arguments.items() if v is not None)
        return f"MemoryTracker({text})"


def _read_custom(reading: Any) -> tuple[int, int, int, str]:
    """Return the value of a callable source, `reading`, in the form of `_read_memory`.

    `reading`: bytes in use, or a pair of bytes in use and in total. Without a total, it is the
    memory of the system. Raises TypeError or ValueError for other values.
    """
    try:
        used, total = (
            reading if isinstance(reading, tuple) and len(reading) == 2 else (reading, None)
        )
        used = index(used)
        if total is None:
            _, _, total = _core.memory_footprint()
        total = index(total)
    except TypeError:
        raise TypeError(f"source must return a number of bytes or two, got {reading!r}") from None
    if used < 0 or total <= 0:
        raise ValueError(
            f"source returned {reading!r}: expected used bytes of 0 or more and total bytes above 0"
        )
    return used, used, total, "custom"


def _torch_uses_cuda() -> bool:
    """Return whether torch is imported and uses CUDA in this process."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # absent while torch is being imported
    return cuda is not None and bool(cuda.is_initialized())
