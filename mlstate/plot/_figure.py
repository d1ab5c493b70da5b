"""Figures, units and colours that all plots share."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours; STATES are those of a bar's parts or of curves, in this order.
USED, FREE, TEXT = "#2b6cb0", "#e2e8f0", "#1a202c"
STATES = ("#2b6cb0", "#dd8a2c", "#38a169", "#8e5bb8", "#c94f63", "#4a9c9c", "#8a8f98")
AGAIN, AWAY, BUDGET, LIGHT = "#dd8a2c", "#8e5bb8", "#c94f63", "#90b4dc"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure that notebooks display; `width` and `height`: in inches.

    Raises ImportError, with a remedy, if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib: pip install 'mlstate[plot]'", name="matplotlib"
        ) from error

    class Picture(Figure):
        """A figure that notebooks display without pyplot, whose import takes a second."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    return Picture(figsize=(width, height), layout="constrained")


def bytes_unit(most: float) -> tuple[float, str]:
    """Return bytes and name of the unit for an axis whose largest value is `most` bytes."""
    power = next((p for p in (3, 2, 1) if most >= 1024**p), 0)
    return 1024.0**power, ("bytes", "KiB", "MiB", "GiB")[power]


def seconds_unit(most: float) -> tuple[float, str]:
    """Return seconds and name of the unit for an axis whose largest value is `most` seconds."""
    return next((u for u in ((1.0, "s"), (1e-3, "ms")) if most >= u[0]), (1e-6, "µs"))
