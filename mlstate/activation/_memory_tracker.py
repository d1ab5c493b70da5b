"""How much memory is in use; public through `mlstate.activation`."""

from __future__ import annotations

import sys
import threading
import time
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _core
from .._common.backend import backend_named
from .._common.set_module import set_module

if TYPE_CHECKING:
    from collections.abc import Callable


@set_module("mlstate.activation")
class MemoryStats(NamedTuple):
    """Memory at one moment, in bytes.

    Attributes
    ----------
    current_memory_used : int
        In use now.
    peak_memory_used : int
        The most that was in use.
    total_memory : int
        That there is: the device's; for a process the machine's, or the limit of its control
        groups where that is lower.
    source : str
        ``"process"``, ``"cuda:0"`` or ``"custom"``.
    seconds : float
        When, by the tracker's clock.

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
        """Bytes that are left, at least 0."""
        return max(0, self.total_memory - self.current_memory_used)

    @property
    def pressure(self) -> float:
        """Share of the memory that is in use."""
        return self.current_memory_used / self.total_memory


@set_module("mlstate.activation")
class MemoryTracker:
    """Tell how much memory is in use, and how much there is.

    Parameters
    ----------
    source : callable or str, optional
        ``"process"``: the resident memory of this process. ``"cuda"`` or ``"cuda:1"``: what
        torch has allocated on that device. A callable returns the bytes in use, or a pair of
        bytes in use and bytes that there are. Default: the current CUDA device once torch uses
        CUDA in this process, else the process.
    clock : callable, optional
        Returns seconds. Default: `time.monotonic`.

    Raises
    ------
    ValueError
        A source of an unknown name. From `get_stats`: a callable gave a negative number.
    TypeError
        A source or clock of a wrong type.

    Notes
    -----
    Reading a process costs some 20 us on Linux, where it reads ``/proc`` and the limits of
    control groups of version 1 and 2. Threads may share a tracker. Trackers are equal when
    their settings are.

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
        self._is_reset = False  # then peaks of before do not count

    def get_stats(self) -> MemoryStats:
        """Read the memory.

        Returns
        -------
        MemoryStats
            Now.

        Raises
        ------
        ValueError, TypeError
            The source gives what is no number of bytes.
        RuntimeError
            The source is a CUDA device that torch does not have.
        StoreError
            The system does not tell.

        Examples
        --------
        >>> from mlstate.activation import MemoryTracker
        >>> MemoryTracker(lambda: 5, clock=lambda: 0.5).get_stats().seconds
        0.5
        """
        used, peak, total, source = self._read()
        with self._lock:
            self._peak = max(self._peak, used, 0 if self._is_reset else peak)
            most = self._peak
        return MemoryStats(used, most, total, source, float((self.clock or time.monotonic)()))

    def reset(self) -> None:
        """Forget the peak: from now on it is the most that `get_stats` finds.

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

    def _read(self) -> tuple[int, int, int, str]:
        """Bytes in use, at most ever, in all; and of what."""
        if callable(self.source):
            return _read_custom(self.source())
        torch = _torch_with_cuda() if self.source is None else None
        if self.source == "process" or (self.source is None and torch is None):
            used, peak, total = _core.memory_footprint()
            return used, peak, total, "process"
        return _read_cuda("cuda" if self.source is None else self.source)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MemoryTracker):
            return NotImplemented
        return self.source == other.source and self.clock == other.clock

    def __hash__(self) -> int:
        return hash((self.source, self.clock))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        given = {"source": self.source, "clock": self.clock}
        text = ", ".join(f"{k}={v!r}" for k, v in given.items() if v is not None)
        return f"MemoryTracker({text})"


def _read_custom(said: Any) -> tuple[int, int, int, str]:
    """Check what a callable returned."""
    try:
        used, total = said if isinstance(said, tuple) and len(said) == 2 else (said, None)
        used = index(used)
        total = _core.memory_footprint()[2] if total is None else index(total)
    except TypeError:
        raise TypeError(f"source must return a number of bytes or two, got {said!r}") from None
    if used < 0 or total <= 0:
        raise ValueError(f"source returned {said!r}: bytes are not negative, and there are some")
    return used, used, total, "custom"


def _torch_with_cuda() -> Any:
    """Return torch where it is loaded and uses CUDA in this process."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # absent while torch is being imported
    return torch if cuda is not None and cuda.is_initialized() else None


def _read_cuda(source: str) -> tuple[int, int, int, str]:
    """Ask torch's allocator, and the device for its size."""
    return backend_named("torch").cuda_memory(source)
