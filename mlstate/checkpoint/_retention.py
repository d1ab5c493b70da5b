"""Which steps of a run a manager keeps, when it saves, and the signal that ends a job."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from .._common.arguments import check_int

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime, timedelta

    from ._folder.names import Root
    from ._store.manifest import Manifest

MODES = ("min", "max")


def _count(name: str, value: object) -> int | None:
    """Return a number of steps from 1, or None."""
    if value is None:
        return None
    return check_int(name, value, 1, also=" or None")


def _seconds(name: str, value: float | timedelta | None) -> float | None:
    """Return a time in seconds, or None."""
    if value is None:
        return None
    seconds = value.total_seconds() if hasattr(value, "total_seconds") else value
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise TypeError(f"{name} must be seconds, a timedelta or None, got {type(value).__name__}")
    seconds = float(seconds)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}")
    return seconds


def _created(manifest: Manifest) -> datetime:
    from datetime import UTC, datetime

    try:
        return datetime.fromisoformat(manifest.created.replace("Z", "+00:00"))
    except ValueError:  # written by another program
        return datetime.fromtimestamp(0, UTC)


class Retention(NamedTuple):
    """Rules for steps that a manager keeps in addition to the newest ones."""

    best: int | None  # number of steps with the best metric
    monitor: str | None  # key of the metric in the metadata of a step
    mode: str  # whether a lower ("min") or a higher ("max") metric is better
    period: int | None  # steps that are multiples of it are kept
    interval: float | None  # seconds since the last step kept by this rule

    def is_empty(self) -> bool:
        """Return whether no rule is set."""
        return self.best is None and self.period is None and self.interval is None

    def without_one(self) -> Retention:
        """Return rules that keep one of the best steps less."""
        return self if self.best is None else self._replace(best=self.best - 1)

    def metric(self, manifest: Manifest) -> float | None:
        """Return the metric of a step; None if it has none, or NaN."""
        value = manifest.metadata.get(self.monitor) if self.monitor is not None else None
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            return None
        return value

    def ranked(self, roots: list[tuple[Root, Manifest]]) -> list[tuple[Root, Manifest]]:
        """Return the steps with a metric, the best one first; of equal ones the newer first."""
        scored = [(self.metric(entry[1]), number, entry) for number, entry in enumerate(roots)]
        sign = 1 if self.mode == "min" else -1
        sorted_scores = [
            (sign * value, -number, entry) for value, number, entry in scored if value is not None
        ]
        return [entry for *_, entry in sorted(sorted_scores, key=lambda each: each[:2])]

    def kept(
        self, roots: list[tuple[Root, Manifest]], can_load: Callable[[Manifest], bool]
    ) -> set[str]:
        """Return the generations of the steps that the rules keep; `roots` are oldest first."""
        generations: set[str] = set()
        left = self.best or 0
        for _, manifest in self.ranked(roots) if left else ():
            if left and can_load(manifest):
                generations.add(manifest.generation)
                left -= 1
        last: datetime | None = None
        for _, manifest in roots:
            step = manifest.step
            if self.period is not None and step is not None and step % self.period == 0:
                generations.add(manifest.generation)
            if self.interval is not None:
                created = _created(manifest)
                is_due = last is None or (created - last).total_seconds() >= self.interval
                if is_due and can_load(manifest):
                    generations.add(manifest.generation)
                    last = created
        return generations


NO_RULES = Retention(None, None, "min", None, None)


def check_retention(best: Any, monitor: Any, mode: Any, period: Any, interval: Any) -> Retention:
    """Return the rules of a manager's arguments; raise if one of them is wrong."""
    if monitor is not None and not isinstance(monitor, str):
        raise TypeError(f"monitor must be a key of metadata, got {type(monitor).__name__}")
    if mode not in MODES:
        raise ValueError(f"mode must be 'min' or 'max', got {mode!r}")
    if best is not None and monitor is None:
        raise ValueError("keep_best= needs monitor=, the key of the metric in metadata=")
    return Retention(
        _count("keep_best", best),
        monitor,
        mode,
        _count("keep_period", period),
        _seconds("keep_time_interval", interval),
    )


class SaveTimer:
    """Decides when to save: after a number of steps or after a time.

    Without these limits, every step is saved.
    """

    def __init__(self, steps: Any, interval: Any) -> None:
        self.steps = _count("save_interval_steps", steps)
        self.interval = _seconds("save_time_interval", interval)
        self.last = time.monotonic()

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
        old = self._old.pop(number, None)
        if signal.getsignal(number) == self._receive:
            signal.signal(number, signal.SIG_DFL if old is None else old)

    def close(self) -> None:
        """Restore the handlers from before the watch."""
        if threading.current_thread() is threading.main_thread():
            for number in list(self._old):
                self._restore(number)
