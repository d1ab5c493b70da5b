"""The line of progress on the terminal: per cent, speed, remaining time."""

from __future__ import annotations

import math
import sys
import time
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from .._common.text import bytes_text
from ..errors import MLStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .._common.callback import Progress

_LEAST_SECONDS = 0.1  # between two texts


class _Line:
    """A line on the terminal: per cent, speed and remaining time, rewritten at most 10 times/s."""

    def __init__(self, label: str, total: int) -> None:
        """Begin with no byte of `total`; nothing is printed yet."""
        self._label, self._total, self._done = label, total, 0
        self._printed_text = ""
        self._began, self._printed_at = time.monotonic(), -math.inf  # seconds

    def update(self, count: int) -> None:
        """Count `count` more bytes, and rewrite the line, at most 10 times per second."""
        self._done += count
        now = time.monotonic()
        if now - self._printed_at < _LEAST_SECONDS and self._done < self._total:
            return
        self._printed_at = now
        text = f"{self._label} {min(100, 100 * self._done // self._total):3d} %"
        seconds = now - self._began
        if seconds >= _LEAST_SECONDS:
            speed = self._done / seconds
            left = max(0, self._total - self._done) / speed if speed else 0.0
            text += f", {bytes_text(int(speed))}/s, {_clock_text(left)} left"
        if text != self._printed_text:
            width = len(self._printed_text)
            self._printed_text = text
            print(f"\r{text:{width}}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._printed_text:
            print("\r" + " " * len(self._printed_text), end="\r", file=sys.stderr, flush=True)


def _clock_text(seconds: float) -> str:
    """Return a time as minutes and seconds, or hours, minutes and seconds."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def progress_of(label: str, count: Callable[[], int]) -> Iterator[Progress]:
    """Yield a function that adds bytes to the line, or None if stderr is not a terminal.

    `label`: start of the line. `count`: returns the total of bytes; if it is 0 or unknown, None is
    yielded too.
    """
    total = 0
    if sys.stderr is not None and sys.stderr.isatty():
        with suppress(MLStateError):
            total = count()
    if not total:
        yield None
        return
    bar: Any
    try:
        from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        bar = _Line(label, total)
    else:
        unit = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
        bar = tqdm(desc=label, total=total, leave=False, file=sys.stderr, **unit)
    with closing(bar):
        yield bar.update
