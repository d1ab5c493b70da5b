"""When a manager saves: `save_interval_steps`, `save_time_interval`."""

from __future__ import annotations

import math
import time
from numbers import Real
from typing import TYPE_CHECKING, Any

from ..._common.arguments import check_int

if TYPE_CHECKING:
    from datetime import timedelta


def number_of_steps(name: str, value: object) -> int | None:
    """Return a manager's argument `name` as a number of steps from 1, or None; else raise."""
    if value is None:
        return None
    return check_int(name, value, 1, also=" or None")


def seconds_of(name: str, value: float | timedelta | None) -> float | None:
    """Return a manager's argument `name` as positive seconds, or None; raise for other values."""
    if value is None:
        return None
    seconds = value.total_seconds() if hasattr(value, "total_seconds") else value
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise TypeError(f"{name} must be seconds, a timedelta or None, got {type(value).__name__}")
    seconds = float(seconds)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}")
    return seconds


class SaveTimer:
    """Decides when to save: after a number of steps or after a time.

    Without these limits, every step is saved.
    """

    def __init__(self, steps: Any, interval: Any) -> None:
        """Check a manager's arguments, and begin the first interval now.

        `steps`, `interval`: ``save_interval_steps`` and ``save_time_interval``, or None.
        """
        self.steps = number_of_steps("save_interval_steps", steps)
        self.interval = seconds_of("save_time_interval", interval)
        self.last = time.monotonic()  # begin of the last save

    def is_due(self, step: int) -> bool:
        """Return whether a step is to be saved."""
        if self.steps is None and self.interval is None:
            return True
        if self.steps is not None and step % self.steps == 0:
            return True
        return self.interval is not None and time.monotonic() - self.last >= self.interval

    def note(self) -> None:
        """Record that a save begins."""
        self.last = time.monotonic()
