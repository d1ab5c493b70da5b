"""When a manager saves: `save_interval_steps`, `save_time_interval`, signals that end a job."""

from __future__ import annotations

import math
import os
import signal
import threading
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


class SignalWatch:
    """Records signals until `close`; the handler itself saves nothing.

    A signal that arrives a second time is handled as before the watch, so that a job that hangs
    can be stopped.
    """

    def __init__(self, signals: tuple[int, ...]) -> None:
        """Install a handler that only records a signal; the old handlers return with `close`.

        Raises ValueError outside the main thread, and OSError or ValueError for an unknown signal;
        no handler is changed then.
        """
        self._old: dict[int, Any] = {}
        self._pid = os.getpid()
        self.received: int | None = None
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "signals can be watched only by the main thread: call watch_signals there"
            )
        try:
            for number in signals:
                self._old[number] = signal.signal(number, self._receive)
        except (OSError, TypeError, ValueError):
            self.close()
            raise

    def _receive(self, number: int, frame: object) -> None:
        self.received = number
        self._restore(number)

    def _restore(self, number: int) -> None:
        """Restore the handler of the signal `number`, unless another one has replaced this one."""
        old = self._old.pop(number, None)
        if signal.getsignal(number) == self._receive:
            # None: the old handler was not installed by Python.
            signal.signal(number, signal.SIG_DFL if old is None else old)

    def close(self) -> None:
        """Restore the handlers from before the watch."""
        if threading.current_thread() is threading.main_thread():
            for number in list(self._old):
                self._restore(number)
