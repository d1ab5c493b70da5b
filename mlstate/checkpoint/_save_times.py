"""Times of an asynchronous save; public through `mlstate.checkpoint`."""

from __future__ import annotations

from typing import NamedTuple

from .._common.set_module import set_module

_APART = 1e-3  # seconds: waits with a smaller gap are merged


@set_module("mlstate.checkpoint")
class SaveTimes(NamedTuple):
    """Times of an asynchronous save; see `SaveHandle.times`.

    Times are in seconds, from `time.perf_counter`.

    Attributes
    ----------
    began : float
        When `save_async` was called.
    staged : float or None
        When the save was staged; None if it is not yet.
    ended : float or None
        When the checkpoint was on disk, or the save failed; None if it has not ended.
    waits : list of (float, float)
        Begin and end of each interval that blocked the caller, in order: by `save_async`
        itself, by `staged`, `wait` or `cancel`, or by the manager's next save. Intervals less
        than a millisecond apart are merged.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.checkpoint import save_async
    >>> handle = save_async(tempfile.mkdtemp() + "/ckpt", {"w": np.zeros(3)})
    >>> _ = handle.wait()
    >>> times = handle.times()
    >>> times.began <= times.staged <= times.ended
    True
    >>> 0 < times.blocked_seconds
    True
    """

    began: float
    staged: float | None
    ended: float | None
    waits: list[tuple[float, float]]

    @property
    def blocked_seconds(self) -> float:
        """Total time that the caller was blocked."""
        return sum(end - start for start, end in self.waits)


def add_wait(waits: list[tuple[float, float]], start: float, end: float) -> None:
    """Add the wait that ended last, merged with earlier ones that overlap or nearly touch it."""
    while waits and waits[-1][1] > start - _APART:
        start = min(start, waits.pop()[0])
    waits.append((start, end))
