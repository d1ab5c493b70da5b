"""Pictures; matplotlib is imported by the functions that draw."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

__all__ = ["plot_occupancy"]

_USED, _FREE, _TEXT = "#2b6cb0", "#e2e8f0", "#1a202c"


def plot_occupancy(stages: Sequence[tuple[str, int, int]]) -> Figure:
    """Draw how full a KV cache was, stage by stage.

    Parameters
    ----------
    stages : sequence of (str, int, int)
        Label, tokens in the cache, and its sequence length; drawn from top to bottom.

    Returns
    -------
    matplotlib.figure.Figure
        Save it with ``figure.savefig("cache.png")``; a notebook shows it as it is.

    Raises
    ------
    ImportError
        If matplotlib is not installed (``pip install 'mlstate[plot]'``).
    ValueError
        If there are no stages, or one holds more tokens than positions.

    Examples
    --------
    >>> from mlstate.plot import plot_occupancy
    >>> figure = plot_occupancy([("prefill", 180, 512), ("compact", 180, 256)])
    >>> len(figure.axes)
    1
    """
    if not stages:
        raise ValueError("there are no stages to draw")
    for label, tokens, length in stages:
        if not 0 <= tokens <= length:
            raise ValueError(f"'{label}' holds {tokens} tokens in {length} positions")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib: pip install 'mlstate[plot]'", name="matplotlib"
        ) from error

    class Picture(Figure):
        """A figure that notebooks show without pyplot, which takes a second to import."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    rows = range(len(stages))
    figure = Picture(figsize=(8, 1.3 + 0.45 * len(stages)), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(rows, [stage[2] for stage in stages], color=_FREE, label="free")
    axes.barh(rows, [stage[1] for stage in stages], color=_USED, label="tokens")
    for row, (_, tokens, length) in enumerate(stages):
        share = 100 * tokens / length if length else 0
        axes.text(length, row, f"  {tokens} of {length}  ({share:.0f} %)", va="center", color=_TEXT)
    axes.set_yticks(list(rows), [stage[0] for stage in stages])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(max(stage[2] for stage in stages), 1))
    axes.set_xticks(sorted({0, *(stage[2] for stage in stages)}))
    axes.set_xlabel("positions of the cache")
    axes.set_title("How full the KV cache is", loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    figure.legend(loc="outside lower right", ncols=2, frameon=False)
    return figure
