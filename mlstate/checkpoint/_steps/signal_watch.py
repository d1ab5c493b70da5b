"""Signals that end a job: a manager saves at the next step."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any


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
