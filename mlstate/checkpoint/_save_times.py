"""When an asynchronous save did what; public through `mlstate.checkpoint`."""

from __future__ import annotations

from typing import NamedTuple

from .._common.set_module import set_module

_APART = 1e-3  # seconds: waits that are nearer to each other are one


@set_module("mlstate.checkpoint")
class SaveTimes(NamedTuple):
    """When an asynchronous save did what; see `SaveHandle.times`.

    Times are those of `time.perf_counter`, in seconds.

    Attributes
    ----------
    began : float
        `save_async` was called.
    staged : float or None
        The state could be changed; None: not yet.
    ended : float or None
        The checkpoint was on the disk, or the save had failed; None: not yet.
    waits : list of (float, float)
        When the caller was held up, by `save_async` itself, by `staged`, `wait` or `cancel`,
        or by the manager's next save: begin and end, in order. Those that are less than a
        millisecond apart are one.

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
        """How long the caller was held up in all."""
        return sum(end - start for start, end in self.waits)


def add_wait(waits: list[tuple[float, float]], start: float, end: float) -> None:
    """Add a wait that ended last, and join those that it overlaps or follows at once."""
    while waits and waits[-1][1] > start - _APART:
        start = min(start, waits.pop()[0])
    waits.append((start, end))
