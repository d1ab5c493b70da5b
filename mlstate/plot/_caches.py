"""Plots of KV caches (occupancy, content, memory) and of attention masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ._figure import AGAIN, AWAY, BUDGET, FREE, STATES, TEXT, USED, bytes_unit, new_figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure

    from .._types import NDArray
    from ..kv import KVState, RollingKVState

_MOST_PIXELS = 2048  # columns or rows of a picture

# Contents of a position, by rising importance: a pixel shows the most important one.
_EVICTED, _ZERO, _TOKEN, _SINK, _MISSING, _STALE = range(6)
_CONTENTS = (
    ("evicted", STATES[6]),
    ("zero", FREE),
    ("token", USED),
    ("sink", AWAY),
    ("zero before the last token", AGAIN),
    ("not zero after the last token", BUDGET),
)


def plot_occupancy(stages: Sequence[tuple[str, int, int]]) -> Figure:
    """Plot the occupancy of a KV cache at several stages.

    Parameters
    ----------
    stages : sequence of (str, int, int)
        Label, tokens in the cache, and its sequence length; plotted from top to bottom.

    Returns
    -------
    matplotlib.figure.Figure
        Save it with ``figure.savefig("cache.png")``; a notebook displays it.

    Raises
    ------
    ImportError
        matplotlib is not installed (``pip install 'mlstate[plot]'``).
    ValueError
        `stages` is empty, or a stage has more tokens than positions.

    Examples
    --------
    >>> from mlstate.plot import plot_occupancy
    >>> figure = plot_occupancy([("prefill", 180, 512), ("compact", 180, 256)])
    >>> len(figure.axes)
    1
    """
    if not stages:
        raise ValueError("stages is empty: pass at least one (label, tokens, length)")
    for label, tokens, length in stages:
        if not 0 <= tokens <= length:
            raise ValueError(f"'{label}' holds {tokens} tokens in {length} positions")
    rows = range(len(stages))
    figure = new_figure(8, 1.3 + 0.45 * len(stages))
    axes = figure.add_subplot()
    axes.barh(rows, [stage[2] for stage in stages], color=FREE, label="free")
    axes.barh(rows, [stage[1] for stage in stages], color=USED, label="tokens")
    for row, (_, tokens, length) in enumerate(stages):
        share = 100 * tokens / length if length else 0
        axes.text(length, row, f"  {tokens} of {length}  ({share:.0f} %)", va="center", color=TEXT)
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


def _sequence_axis(array: NDArray, seq_axis: int) -> int:
    """Return `seq_axis`, counted from 0; raise ValueError if the array has no such axis."""
    if not -array.ndim <= seq_axis < array.ndim:
        raise ValueError(f"seq_axis is {seq_axis}, and the cache has the shape {array.shape}")
    return seq_axis % array.ndim


def _nonzero_positions(array: NDArray, axis: int) -> NDArray:
    """Return which positions of each layer have an element that is not zero: (layers, positions).

    `axis`: the sequence axis of `array`. The layers are the first axis; one layer if this is the
    sequence.
    """
    innermost = np.moveaxis(array, axis, -1)  # the sequence is the last axis
    innermost = innermost[None] if axis == 0 else innermost
    is_nonzero: NDArray = (innermost != 0).any(axis=tuple(range(1, innermost.ndim - 1)))
    return is_nonzero


def _contents(used: NDArray, length: int, sinks: int) -> NDArray:
    """Return the kind of content of each position as an index of `_CONTENTS`: (layers, positions).

    `used`: which positions are not zero. `length`: number of tokens. `sinks`: first positions that
    are sinks.
    """
    position = np.arange(used.shape[1])
    kinds = np.where(used, np.where(position < sinks, _SINK, _TOKEN), _MISSING)
    return np.where(position < length, kinds, np.where(used, _STALE, _ZERO))


def _ring_contents(state: RollingKVState) -> NDArray:
    """Return the kind of content of each position so far, as in `_contents`.

    Columns are positions in the text, not slots of the ring: all positions up to the newest token,
    and at least as many as the ring has slots.
    """
    used, positions = (
        _nonzero_positions(state.array, state.seq_axis),
        state.positions(),
    )  # of each slot
    end = max(state.next_position, state.capacity)
    kinds = np.full((len(used), end), _ZERO)
    kinds[:, : state.next_position] = _EVICTED
    has_token = positions >= 0
    present = positions[has_token]
    used_in_order = np.zeros((len(used), end), bool)
    used_in_order[:, present] = used[:, has_token]
    kinds[:, present] = _contents(used_in_order, end, state.sinks)[:, present]
    return kinds


def _join_columns(kinds: NDArray) -> NDArray:
    """Join neighbouring columns so that at most `_MOST_PIXELS` remain.

    Each shows the most important of its contents, the largest number.
    """
    width = -(-kinds.shape[1] // _MOST_PIXELS)
    joined: NDArray = np.maximum.reduceat(kinds, range(0, kinds.shape[1], max(width, 1)), axis=1)
    return joined


def plot_cache(
    cache: KVState | RollingKVState | NDArray,
    *,
    length: int | None = None,
    sinks: int = 0,
    seq_axis: int = -2,
) -> Figure:
    """Plot the contents of a KV cache by layer and position.

    Parameters
    ----------
    cache : KVState, RollingKVState or ndarray
        The first axis is a row of the picture: a layer. If the sequence is the first axis, the
        picture has one row.
    length : int, optional
        Number of tokens in the cache. Default: up to the last position that is not zero. A
        RollingKVState knows its tokens.
    sinks : int
        Number of first positions to mark as sinks. A RollingKVState knows its sinks.
    seq_axis : int
        Sequence axis of an ndarray. A state knows its axis.

    Returns
    -------
    matplotlib.figure.Figure
        Tokens are blue, sinks violet, zeros pale. Positions that a RollingKVState evicted are
        grey. Orange marks a token whose entries are all zero, and red a position after the last
        token that is not zero: both are signs of an error. If there are more than 2,048
        positions, a column shows the most important of several.

    Raises
    ------
    ImportError
        matplotlib is not installed (``pip install 'mlstate[plot]'``).
    ValueError
        The cache has no positions, no layers or no axis `seq_axis`, or `length` exceeds the
        positions.

    Notes
    -----
    Reads every element of the cache.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.plot import plot_cache
    >>> cache = np.zeros((36, 1, 512, 8), np.float16)
    >>> cache[:, :, :180] = 1
    >>> plot_cache(cache).axes[0].get_title(loc="left")
    '180 tokens in 512 positions'
    """
    ring_positions = getattr(cache, "positions", None)
    if ring_positions is not None:
        state: Any = cache
        kinds, tokens, room = _ring_contents(state), state.length, state.capacity
        title = f"{tokens:,} tokens in {room:,} positions, {state.evicted:,} evicted"
    else:
        array = np.asarray(cache)
        axis = _sequence_axis(array, getattr(cache, "seq_axis", seq_axis))
        used, room = _nonzero_positions(array, axis), array.shape[axis]
        filled = np.flatnonzero(used.any(axis=0))
        tokens = int(filled[-1]) + 1 if length is None and filled.size else length or 0
        if not 0 <= tokens <= room:
            raise ValueError(f"length {tokens} is outside 0..{room}, the positions of the cache")
        kinds, title = _contents(used, tokens, sinks), f"{tokens:,} tokens in {room:,} positions"
    if not kinds.size:
        raise ValueError("the cache has no positions or no layers to draw")
    layers, end = kinds.shape
    figure = new_figure(9, 1.8 + 0.1 * min(max(layers, 4), 60))
    axes = figure.add_subplot()
    colours = [colour for _, colour in _CONTENTS]
    _draw_pixels(axes, _join_columns(kinds), colours, (0, end, layers - 0.5, -0.5))
    from matplotlib.patches import Patch

    handles = [Patch(color=_CONTENTS[i][1], label=_CONTENTS[i][0]) for i in np.unique(kinds)]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    axes.set_xlabel("position" if ring_positions is None else "position in the text")
    axes.set_ylabel("layer")
    axes.set_title(title, loc="left")
    return figure


def _draw_pixels(axes: Any, kinds: NDArray, colours: Sequence[str], extent: Any) -> None:
    """Draw an array of small integers as pixels.

    `colours`: one for each integer. `extent`: left, right, bottom and top in data units.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    axes.imshow(
        kinds,
        cmap=ListedColormap(colours),
        vmin=-0.5,
        vmax=len(colours) - 0.5,
        aspect="auto",
        interpolation="nearest",
        extent=extent,
    )
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[:].set_visible(False)


def plot_cache_memory(
    curves: Mapping[str, Sequence[tuple[int, int]]], tokens: int | None = None
) -> Figure:
    """Plot the memory of KV caches over a generation.

    Parameters
    ----------
    curves : mapping of str to sequence of (int, int)
        For each cache: its label and its changes, as number of tokens and bytes from then on, in
        increasing order.
    tokens : int, optional
        Number of tokens at the end of the generation. Default: the largest one of the curves.

    Returns
    -------
    matplotlib.figure.Figure
        One line for each cache, from its first to the last number of tokens.

    Raises
    ------
    ImportError
        matplotlib is not installed (``pip install 'mlstate[plot]'``).
    ValueError
        `curves` is empty, a curve has no points, or its numbers of tokens fall.

    Examples
    --------
    >>> from mlstate.plot import plot_cache_memory
    >>> figure = plot_cache_memory(
    ...     {"512": [(0, 9 << 20)], "256, then 512": [(0, 9 << 19), (256, 9 << 20)]}, 400
    ... )
    >>> [line.get_label() for line in figure.axes[0].lines]
    ['512', '256, then 512']
    """
    if not curves:
        raise ValueError("curves is empty: pass at least one label with its (token, bytes) points")
    for label, points in curves.items():
        places = [place for place, _ in points]
        if not places or places != sorted(places):
            raise ValueError(f"'{label}' needs points with rising numbers of tokens, got {places}")
    last = max(points[-1][0] for points in curves.values()) if tokens is None else tokens
    unit, name = bytes_unit(max(nbytes for points in curves.values() for _, nbytes in points))
    figure = new_figure(8, 4)
    axes = figure.add_subplot()
    for number, (label, points) in enumerate(curves.items()):
        visible = [(place, nbytes) for place, nbytes in points if place <= last]
        steps = [*visible, (last, visible[-1][1])] if visible else []
        axes.plot(
            [place for place, _ in steps],
            [nbytes / unit for _, nbytes in steps],
            color=STATES[number % len(STATES)],
            drawstyle="steps-post",
            linewidth=max(1.4, 3.4 - number),  # lines below others stay visible
            label=label,
        )
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.set_xlabel("tokens of the text")
    axes.set_ylabel(f"memory of the cache, {name}")
    axes.set_title("Memory over a generation", loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    legend = figure.legend(loc="outside lower center", ncols=2, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def plot_mask(mask: NDArray, *, first_row: int = 0) -> Figure:
    """Plot an attention mask.

    Parameters
    ----------
    mask : ndarray, shape (1, 1, rows, positions) or (rows, positions)
        A mask of `mlstate.kv`: 0 for an attended position.
    first_row : int
        Position of the token of the first row, such as the start of `rows`.

    Returns
    -------
    matplotlib.figure.Figure
        Attended positions are blue. If there are more than 2,048 rows or columns, only every
        n-th one is shown.

    Raises
    ------
    ImportError
        matplotlib is not installed (``pip install 'mlstate[plot]'``).
    ValueError
        The mask has another number of dimensions, or it is empty.

    Examples
    --------
    >>> from mlstate.kv import create_attention_size_mask
    >>> from mlstate.plot import plot_mask
    >>> mask = create_attention_size_mask(64, 16, 0, sinks=4, rows=(32, 64))
    >>> plot_mask(mask, first_row=32).axes[0].get_title(loc="left")
    'Each token attends to 21 positions'
    """
    shape = np.shape(mask)
    if len(shape) not in (2, 4) or shape[:-2] not in ((), (1, 1)) or 0 in shape:
        raise ValueError(
            f"mask has shape {shape}: pass a mask of (1, 1, rows, positions), not empty"
        )
    rows, columns = shape[-2:]
    mask_rows = np.asarray(mask) if len(shape) == 2 else np.asarray(mask)[0, 0]
    step = -(-columns // _MOST_PIXELS)
    sampled_rows = range(0, rows, -(-rows // _MOST_PIXELS))
    counts = [int((mask_rows[row] == 0).sum()) for row in (*sampled_rows, rows - 1)]
    low, high = min(counts), max(counts)
    count = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    plural = "" if high == 1 else "s"
    figure = new_figure(6.4, 1.6 + max(1.2, min(5, 5.4 * rows / columns)))
    axes = figure.add_subplot()
    attended = np.stack([mask_rows[row, ::step] == 0 for row in sampled_rows])
    _draw_pixels(axes, attended, (FREE, USED), (0, columns, first_row + rows, first_row))
    axes.set_xlabel("position")
    axes.set_ylabel("token")
    axes.set_title(f"Each token attends to {count} position{plural}", loc="left")
    return figure
