"""Plots of checkpoints, asynchronous saves, backward passes, shards, plans, Pareto curves."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .._common.set_module import set_module_of_exports
from .._common.text import bytes_text, shorten
from .._exports import show_exports
from ._caches import plot_cache, plot_cache_memory, plot_mask, plot_occupancy
from ._figure import (
    AGAIN,
    AWAY,
    BUDGET,
    FREE,
    LIGHT,
    STATES,
    TEXT,
    USED,
    bytes_unit,
    new_figure,
    seconds_unit,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from matplotlib.figure import Figure

    from .._types import NDArray
    from ..activation import CheckpointStrategy, Plan
    from ..activation.records import Pareto
    from ..checkpoint import Checkpoint, SaveHandle
    from ..checkpoint._pages.table import Group
    from ..checkpoint.records import SaveTimes
    from ..fsdp import FSDPShardingUnit
    from ..fsdp.records import BackwardReport

__all__ = [
    "plot_backward",
    "plot_cache",
    "plot_cache_memory",
    "plot_checkpoint",
    "plot_mask",
    "plot_occupancy",
    "plot_pareto",
    "plot_plan",
    "plot_saves",
    "plot_shards",
]

set_module_of_exports(globals())

_MARKS = "osD^v<>"  # of matplotlib, one for each strategy
_BARS = 30  # most bars or labels of an axis


def _shortened_groups(groups: list[Group]) -> list[tuple[str, dict[str, int]]]:
    """Return label and bytes by column of each bar.

    With more than `_BARS` groups, the middle ones become one bar with their mean.
    """
    named = [(group.name or "(no layer)", group.nbytes) for group in groups]
    if len(named) <= _BARS:
        return named
    half = _BARS // 2
    hidden = [nbytes for _, nbytes in named[half : 1 - half]]
    columns = dict.fromkeys(column for nbytes in hidden for column in nbytes)
    mean = {c: sum(nbytes.get(c, 0) for nbytes in hidden) // len(hidden) for c in columns}
    return [*named[:half], (f"… {len(hidden)} more, mean", mean), *named[1 - half :]]


def _draw_stack(
    axes: Any,
    rows: Sequence[tuple[str, dict[str, int]]],
    columns: list[str],
    unit: float,
    space: int,
) -> None:
    """Draw horizontal bars, one for each row, with one colour for each column.

    `rows`: label, and bytes by column; the first row is on top. `columns`: the parts of a bar, from
    left to right; there are at most as many as `STATES`. `unit`: bytes of a unit of the axis.
    `space`: number of bars for which the axes have space, so that panels agree.
    """
    starts = [0.0] * len(rows)
    for column, colour in zip(columns, STATES, strict=False):
        widths = [nbytes.get(column, 0) / unit for _, nbytes in rows]
        axes.barh(range(len(rows)), widths, left=starts, color=colour, label=column)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    labels = [f"{name[:18]}…{name[-19:]}" if len(name) > 38 else name for name, _ in rows]
    axes.set_yticks(range(len(rows)), labels, parse_math=False)
    axes.set_ylim(space - 0.4, -0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def _figure_of_stacks(
    panels: dict[str, list[Group]], columns: list[str], legend_columns: int
) -> Figure:
    """Return a figure of bars: the bytes of groups, in one panel for each title.

    `panels`: the groups by title, one or two; each group is a bar, and of many groups the middle
    ones are one bar with their mean. `columns`: names of a bar's parts, at most as many as
    `STATES`. `legend_columns`: columns of the legend.
    """
    shortened = {title: _shortened_groups(groups) for title, groups in panels.items()}
    most = max(
        (sum(nbytes.values()) for rows in shortened.values() for _, nbytes in rows), default=0
    )
    unit, label = bytes_unit(most)
    space = max(3, *map(len, shortened.values()))
    figure = new_figure(10, 1.6 + 0.27 * space)
    parts = figure.subplots(
        1, len(shortened), width_ratios=(3, 2)[: len(shortened)], squeeze=False
    )[0]
    for axes, (title, rows) in zip(parts, shortened.items(), strict=True):
        _draw_stack(axes, rows, columns, unit, space)
        axes.set_title(title, loc="left")
        axes.set_xlabel(label)
    _legend(figure, parts[0], legend_columns)
    return figure


def _legend(figure: Figure, axes: Any, columns: int) -> None:
    """Add a legend of the bars in `axes` below a figure, in `columns` columns.

    The labels may contain any text: they are set after matplotlib made the legend.
    """
    bars = axes.containers
    if not bars:
        return
    legend = figure.legend(
        bars, [""] * len(bars), loc="outside lower center", ncols=columns, frameon=False
    )
    for text, each in zip(legend.get_texts(), bars, strict=True):
        text.set_parse_math(False)
        text.set_text(shorten(each.get_label(), 38))  # matplotlib omits labels that begin with _


def plot_checkpoint(checkpoint: Checkpoint | str | os.PathLike[str]) -> Figure:
    """Plot a checkpoint's bytes by layer, and by the rank that stored them.

    Parameters
    ----------
    checkpoint : Checkpoint, str or os.PathLike
        A result of `mlstate.save`, `mlstate.checkpoint.inspect` or
        ``CheckpointManager.checkpoint(step)``, or a path for `mlstate.checkpoint.inspect`.

    Returns
    -------
    matplotlib.figure.Figure
        Weights and each optimizer state have a colour. If there are more than 30 layers or
        ranks, the middle ones are one bar that shows their mean.

    Raises
    ------
    ImportError
        matplotlib is not installed (``pip install 'mlstate[plot]'``).
    StoreError, FormatError
        A path cannot be inspected.
    TypeError
        `checkpoint` is neither a checkpoint nor a path.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> from mlstate.plot import plot_checkpoint
    >>> state = {"a.w": np.ones(1000), "b.w": np.ones(3000)}
    >>> checkpoint = mlstate.save(tempfile.mkdtemp() + "/ckpt", state)
    >>> len(plot_checkpoint(checkpoint).axes)
    2
    """
    from ..checkpoint import Checkpoint, inspect
    from ..checkpoint._pages.table import Group, column_of, columns_of, groups_of

    if isinstance(checkpoint, str | os.PathLike):
        checkpoint = inspect(checkpoint)
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            "checkpoint must be a path or a Checkpoint, such as a result of mlstate.inspect, got "
            f"{type(checkpoint).__name__}"
        )
    records = checkpoint.tensors()
    columns = columns_of(records)
    kinds = {(record.section, record.key): column_of(record, columns) for record in records}
    ranks = [Group(f"rank {rank}") for rank in range(checkpoint.world_size)]
    for shard in checkpoint.shards():
        nbytes, column = ranks[shard.rank].nbytes, kinds[shard.section, shard.key]
        nbytes[column] = nbytes.get(column, 0) + shard.nbytes
    layers = groups_of(records, columns)
    return _figure_of_stacks(
        {"Bytes of each layer": layers, "Stored by each rank": ranks}, columns, 6
    )


def plot_saves(
    saves: Sequence[SaveHandle | SaveTimes], steps: Sequence[tuple[float, float]] = ()
) -> Figure:
    """Plot asynchronous saves together with the training steps during them.

    Parameters
    ----------
    saves : sequence of SaveHandle or SaveTimes
        Handles returned by `save_async`, or their ``times()``; plotted from top to bottom.
    steps : sequence of (float, float), optional
        Begin and end of each training step, from ``time.perf_counter()``.

    Returns
    -------
    matplotlib.figure.Figure
        The top row shows the steps and, in red, when the caller was blocked. Each save has a
        row below: orange until it was staged, blue until the checkpoint was on disk. Phases
        that have not ended extend to the right edge.

    Raises
    ------
    ImportError
        matplotlib is not installed (``pip install 'mlstate[plot]'``).
    ValueError
        `saves` is empty.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.checkpoint import save_async
    >>> from mlstate.plot import plot_saves
    >>> handle = save_async(tempfile.mkdtemp() + "/ckpt", {"w": np.zeros(3)})
    >>> _ = handle.wait()
    >>> len(plot_saves([handle]).axes)
    1
    """
    from ..checkpoint._checkpoint.save_async import SaveTimes

    if not saves:
        raise ValueError("there are no saves to draw")
    times = [save if isinstance(save, SaveTimes) else save.times() for save in saves]
    times_known = [
        at for t in times for at in (t.began, t.staged, t.ended, *sum(t.waits, ())) if at
    ]
    times_known += [at for step in steps for at in step]
    first, last = min(times_known), max(times_known)
    duration = max(last - first, 1e-9)  # seconds; not 0 if all times are equal
    scale, label = seconds_unit(duration)
    count = len(times)
    figure = new_figure(10, 1.6 + 0.3 * min(max(count, 2), 2 * _BARS))
    axes = figure.subplots()

    def draw(rows: Any, spans: Sequence[tuple[float, float]], color: str, **style: Any) -> None:
        """Draw a bar for each span, from begin to end in seconds, in the row of the same index."""
        starts = [(start - first) / scale for start, _ in spans]
        lengths = [(end - start) / scale for start, end in spans]
        axes.barh(rows, lengths, left=starts, color=color, **style)

    below = range(1, count + 1)  # rows of the saves; row 0 is the training
    ends = [last if t.ended is None else t.ended for t in times]
    staged = [end if t.staged is None else t.staged for t, end in zip(times, ends, strict=True)]
    waits = [wait for t in times for wait in t.waits]
    if steps:
        draw([0] * len(steps), steps, FREE, label="training steps", edgecolor="white", height=0.8)
    draw([0] * len(waits), waits, BUDGET, label="caller held up", height=0.5)
    draw(below, [(t.began, at) for t, at in zip(times, staged, strict=True)], AGAIN, label="staged")
    draw(below, list(zip(staged, ends, strict=True)), USED, label="written and synced")
    tick_rows = _labelled_rows(count)
    axes.set_yticks(
        [0, *(n + 1 for n in tick_rows)], ["training", *(f"save {n + 1}" for n in tick_rows)]
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 1.01 * duration / scale)
    axes.set_xlabel(label)
    blocked = sum(t.blocked_seconds for t in times)
    unit, blocked_label = seconds_unit(blocked)
    axes.set_title(
        f"The caller was held up for {blocked / unit:.3g} {blocked_label} of "
        f"{duration / scale:.3g} {label} ({blocked / duration:.1%})",
        loc="left",
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def _labelled_rows(rows: int) -> list[int]:
    """Return the indices of rows to label, so that the labels stay readable."""
    return list(range(0, rows, max(1, -(-rows // _BARS))))


def plot_backward(report: BackwardReport) -> Figure:
    """Plot when the gradients of a backward pass were ready, and when they were reduced.

    Parameters
    ----------
    report : BackwardReport
        Result of ``FSDPBackwardHook.report()``.

    Returns
    -------
    matplotlib.figure.Figure
        Ticks on the bar of the backward pass are gradients. Each bucket has a row below: pale
        until its reduction starts, orange while this rank waits for others, blue while the
        sums are computed. With several ranks, the lower part shows how long each rank waited.

    Raises
    ------
    ImportError
        matplotlib is not installed (``pip install 'mlstate[plot]'``).

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.collectives import SingleGroup
    >>> from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
    >>> from mlstate.plot import plot_backward
    >>> hook = FSDPBackwardHook(FSDP(SingleGroup(), record=True))
    >>> hook.use_units({"w": FSDPShardingUnit("w", (4,), "float64", 0)})
    >>> hook.add_gradient("w", np.ones(4))
    >>> hook.finish()
    >>> len(plot_backward(hook.report()).axes)
    1
    """
    waited = report.waited
    rows = len(report.buckets)
    several = len(waited) > 1
    heights = [
        1.2 + 0.24 * min(max(rows, 3), 2 * _BARS),
        0.8 + 0.25 * min(len(waited), 2 * _BARS),
    ]
    figure = new_figure(10, heights[0] + (heights[1] if several else 0) + 0.3)
    if several:
        upper, lower = figure.subplots(2, 1, height_ratios=heights)
    else:
        upper = figure.subplots()
    upper.barh(-1, report.backward * 1e3, color=FREE, height=0.7)
    times = [at * 1e3 for _, at in report.gradients]
    upper.vlines(times, -1.35, -0.65, color=TEXT, linewidth=0.7)
    for label, color, height, spans in (
        ("full, until its turn comes", FREE, 0.3, [(b.ready, b.started) for b in report.buckets]),
        ("waits for ranks", STATES[1], 0.7, [(b.started, b.agreed) for b in report.buckets]),
        ("sums are made", USED, 0.7, [(b.agreed, b.ended) for b in report.buckets]),
    ):
        lengths = [(end - start) * 1e3 for start, end in spans]
        starts = [start * 1e3 for start, _ in spans]
        upper.barh(range(rows), lengths, height, starts, color=color, label=label)
    handles, names = upper.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper right", ncols=3, frameon=False)
    ticks = _labelled_rows(rows)
    labels = [
        f"{n}: {len(b.names)} of {b.bytes / 1e6:.3g} MB" for n, b in enumerate(report.buckets)
    ]
    upper.set_yticks([-1, *ticks], ["backward pass", *(labels[n] for n in ticks)])
    upper.invert_yaxis()
    upper.set_xlabel("ms since the first gradient")
    upper.set_title(f"{report.overlap:.0%} of the reducing is inside the backward pass", loc="left")
    upper.spines[["top", "right"]].set_visible(False)
    if several:
        late = report.straggler  # (rank, seconds) or None
        lower.barh(range(len(waited)), [t * 1e3 for t in waited], color=STATES[1], height=0.6)
        tick_rows = _labelled_rows(len(waited))
        lower.set_yticks(tick_rows, [f"rank {rank}" for rank in tick_rows])
        lower.invert_yaxis()
        lower.set_xlabel("ms waited for the others")
        title = "Nobody was waited for" if late is None else f"Rank {late[0]} was waited for"
        lower.set_title(title, loc="left")
        lower.spines[["top", "right"]].set_visible(False)
    return figure


def plot_shards(sharding_units: Mapping[str, FSDPShardingUnit]) -> Figure:
    """Plot how many bytes of the gradients each rank keeps, by parameter.

    Parameters
    ----------
    sharding_units : dict of str to FSDPShardingUnit
        Units of any one rank, with known world size.

    Returns
    -------
    matplotlib.figure.Figure
        The six largest parameters have one colour each, all others share one. If there are
        more than 30 ranks, the middle ones are one bar that shows their mean.

    Raises
    ------
    ImportError
        matplotlib is not installed (``pip install 'mlstate[plot]'``).
    ValueError
        The world size of a unit is unknown, or differs from another unit.

    Examples
    --------
    >>> from mlstate.fsdp import FSDPShardingUnit
    >>> from mlstate.plot import plot_shards
    >>> unit = FSDPShardingUnit("w", (5, 3), "float32", 0, world_size=2)
    >>> len(plot_shards({"w": unit}).axes)
    1
    """
    from ..checkpoint._pages.table import Group

    units = sorted(sharding_units.values(), key=lambda unit: -unit.full_bytes)
    columns = [unit.parameter_name for unit in units[: len(STATES) - 1]]
    others = f"{len(units) - len(columns)} others"
    for unit in units:
        if len(unit.counts) != len(units[0].counts):
            raise ValueError(
                f"{unit.parameter_name} divides by {len(unit.counts)} ranks, others by "
                f"{len(units[0].counts)}"
            )
    world = len(units[0].counts) if units else 0
    ranks = [Group(f"rank {rank}") for rank in range(world)]
    for unit in units:
        column = unit.parameter_name if unit.parameter_name in columns else others
        for rank, count in enumerate(unit.counts):
            nbytes = ranks[rank].nbytes
            nbytes[column] = nbytes.get(column, 0) + count * unit.item_bytes
    if len(units) > len(columns):
        columns.append(others)
    return _figure_of_stacks({"Gradients kept by each rank": ranks}, columns, 4)


# ---- plans ----


def _time_axis(plan: Plan) -> tuple[NDArray, float, str]:
    """Return the begin of each step and the end of the last, and the unit and label of the axis.

    The steps are those of the plan's schedule. Times are in seconds, and the unit is the number of
    seconds of one unit of the axis. If no step takes time, each step counts as 1.
    """
    import numpy as np

    seconds = plan.simulate().seconds
    if not seconds.any():
        return np.arange(len(seconds) + 1), 1.0, "steps"
    ends = np.concatenate([[0.0], np.cumsum(seconds)])
    unit, label = seconds_unit(float(ends[-1]))
    return ends, unit, f"predicted time, {label}"


def _draw_memory(axes: Any, plan: Plan, unplanned: Plan, unit: float) -> None:
    """Draw the peak memory of each step over time, with and without the plan, and the budget.

    `unplanned`: the plan that keeps everything. `unit`: bytes of a unit of the axis.
    """
    import numpy as np

    from ..activation._plan import _DROP

    colours = ((unplanned, "#a0aec0", "without a plan", 0.0), (plan, USED, "with the plan", 0.35))
    for each, colour, label, alpha in colours:
        times, scale, _ = _time_axis(each)
        # hide drops: they take no time
        lasting = (each._steps[:, 0] != _DROP) | (times[1:] > times[:-1])
        edges = np.append(times[:-1][lasting], times[-1]) / scale
        heights = each.simulate().peak_bytes[lasting] / unit
        if alpha:
            axes.stairs(heights, edges, fill=True, color=colour, alpha=alpha, linewidth=0)
        axes.stairs(heights, edges, color=colour, linewidth=1.3, label=label, baseline=0)
    if plan.budget_bytes is not None:
        axes.axhline(plan.budget_bytes / unit, color=BUDGET, linestyle="--", label="budget")
    highest = max(plan.predicted_peak_bytes, unplanned.predicted_peak_bytes, plan.budget_bytes or 0)
    axes.set_ylim(0, 1.06 * max(highest / unit, 1e-9))
    axes.spines[["top", "right"]].set_visible(False)


def _draw_blocks(axes: Any, plan: Plan) -> list[Any]:
    """Draw when each block runs, one row for each; return the handles of the legend.

    Rows of recomputed and offloaded blocks get a pale colour if there are at most 600 blocks.
    """
    import numpy as np
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    times, scale, _ = _time_axis(plan)
    kinds, rows = plan._steps[:, 0], plan._steps[:, 1]  # of each step: its kind and its block
    forward = kinds <= 1  # 0: forward, 1: save, 2: backward, 3: drop, 4: offload, 5: load
    forward_steps = np.flatnonzero(forward)
    _, first_of_block = np.unique(rows[forward], return_index=True)
    first = np.zeros(len(kinds), bool)  # whether a step is the first forward pass of its block
    first[forward_steps[first_of_block]] = True
    handles = []
    for label, colour, chosen in (
        ("forward, all saved", USED, first & (kinds == 1)),
        ("forward, output only", LIGHT, first & (kinds == 0)),
        ("forward again", AGAIN, forward & ~first),
        ("backward", "#8a8f98", kinds == 2),
        ("to the host and back", AWAY, kinds >= 4),
    ):
        steps = np.flatnonzero(chosen)
        if not len(steps):
            continue
        left, right, row = times[steps] / scale, times[steps + 1] / scale, rows[steps]
        corners = [(left, row - 0.4), (left, row + 0.4), (right, row + 0.4), (right, row - 0.4)]
        shapes: Any = np.stack([np.stack(corner, 1) for corner in corners], 1)
        # edges keep steps visible that are narrower than a pixel
        width = 0.4 if plan.chain.blocks <= 4 * _BARS else 1.2
        axes.add_collection(
            PolyCollection(shapes, facecolors=colour, edgecolors=colour, linewidths=width)
        )
        handles.append(Patch(color=colour, label=label))
    for blocks, colour in ((plan.recomputed, AGAIN), (plan.offloaded, AWAY)):
        for block in blocks if plan.chain.blocks <= 20 * _BARS else ():
            axes.axhspan(block - 0.5, block + 0.5, color=colour, alpha=0.12, linewidth=0, zorder=0)
    axes.set_xlim(0, times[-1] / scale)
    axes.set_ylim(plan.chain.blocks - 0.4, -0.6)
    return handles


def plot_plan(plan: Plan) -> Figure:
    """Plot a plan: memory over one training step, and when each block runs.

    Parameters
    ----------
    plan : Plan
        Result of `mlstate.activation.plan`, ``Pareto.plan`` or ``Plan.from_strategy``.

    Returns
    -------
    matplotlib.figure.Figure
        The upper part shows the peak memory of each step of the schedule, with and without the
        plan, and the budget. The lower part has one row for each block. Rows of recomputed
        blocks are orange, of offloaded blocks violet, of kept blocks white. If there are more
        than 30 blocks, some rows have no label.

    Raises
    ------
    ImportError
        matplotlib is not installed (``pip install 'mlstate[plot]'``).

    Notes
    -----
    Times and bytes are predicted from the chain. The peak memory of a step is drawn over its
    whole duration.

    Examples
    --------
    >>> from mlstate.activation import Chain, plan
    >>> from mlstate.plot import plot_plan
    >>> chain = Chain([1] * 4, [2] * 4, [10] * 5, [40] * 4)
    >>> len(plot_plan(plan(chain, 120)).axes)
    2
    """
    unplanned = type(plan).from_recomputed(plan.chain, [])
    most = max(plan.predicted_peak_bytes, unplanned.predicted_peak_bytes, plan.budget_bytes or 0)
    unit, label = bytes_unit(most)
    blocks = plan.chain.blocks
    lower_height = 0.9 + 0.2 * min(max(blocks, 4), _BARS)
    figure = new_figure(10, 3.6 + lower_height)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2.6, lower_height])
    _draw_memory(upper, plan, unplanned, unit)
    upper.set_ylabel(label)
    upper.set_title(
        f"Peak {bytes_text(plan.predicted_peak_bytes)} instead of "
        f"{bytes_text(unplanned.predicted_peak_bytes)}, {plan.overhead:+.1%} time",
        loc="left",
    )
    upper.tick_params(labelbottom=False)
    handles = upper.get_legend_handles_labels()[0] + _draw_blocks(lower, plan)
    ticks, names = _labelled_rows(blocks), plan.chain.names
    labels = [shorten(names[i], 30) for i in ticks]
    lower.set_yticks(ticks, labels, parse_math=False, fontsize="small")
    lower.set_ylabel("block")
    _, scale, time_label = _time_axis(plan)
    lower.set_xlabel(time_label)
    lower.xaxis.get_major_locator().set_params(integer=time_label == "steps")
    lower.set_xlim(0, max(_time_axis(each)[0][-1] / scale for each in (plan, unplanned)))
    lower.set_title(
        f"{len(plan.kept)} kept, {len(plan.recomputed)} recomputed, "
        f"{len(plan.offloaded)} offloaded",
        loc="left",
    )
    lower.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _points(chain: Any, strategies: Any) -> dict[tuple[int, float], tuple[str, Plan]]:
    """Return names and plans of strategies by (peak bytes, seconds); names at one point are joined.

    `strategies`: iterable, or mapping by label, of strategies and plans. Raises ValueError for a
    plan of another chain.
    """
    from ..activation._plan import Plan

    named = strategies.items() if hasattr(strategies, "items") else ((None, s) for s in strategies)
    points: dict[tuple[int, float], tuple[str, Plan]] = {}
    for name, each in named:
        schedule = each if isinstance(each, Plan) else Plan.from_strategy(chain, each)
        if schedule.chain != chain:
            raise ValueError(
                f"{repr(name) if name else schedule} is a plan of another chain than the curve"
            )
        name = name or (
            schedule.method if schedule.schedules == "given" else f"plan, {schedule.method}"
        )
        point = schedule.predicted_peak_bytes, schedule.predicted_seconds
        others = f"{points[point][0]}, " if point in points else ""
        points[point] = f"{others}{shorten(name, 38)}", schedule
    return points


def plot_pareto(
    curve: Pareto,
    strategies: Iterable[CheckpointStrategy | Plan] | Mapping[str, CheckpointStrategy | Plan] = (),
) -> Figure:
    """Plot time over memory for optimal plans, and the points of given strategies.

    Parameters
    ----------
    curve : Pareto
        Result of `mlstate.activation.pareto`.
    strategies : iterable or mapping of str, optional
        Strategies, which `Plan.from_strategy` converts to plans, or plans of the same chain.
        The keys of a mapping are the labels.

    Returns
    -------
    matplotlib.figure.Figure
        A strategy above the curve takes more time than the plan with the same peak. A strategy
        to the right of the curve takes more memory than the plan with the same time.

    Raises
    ------
    ImportError
        matplotlib is not installed (``pip install 'mlstate[plot]'``).
    ValueError
        A plan belongs to another chain.

    Examples
    --------
    >>> from mlstate.activation import Chain, IntervalStrategy, pareto
    >>> from mlstate.plot import plot_pareto
    >>> curve = pareto(Chain([1] * 4, [2] * 4, [10] * 5, [40] * 4))
    >>> figure = plot_pareto(curve, [IntervalStrategy(1), IntervalStrategy(2)])
    >>> [text.get_text() for text in figure.legends[0].get_texts()][1:]
    ['Interval(1): 100 B, +33.3%', 'Interval(2): 130 B, +16.7%']
    """
    points = _points(curve.chain, strategies)
    plain_seconds = curve.chain.plain_seconds
    most = max(curve.chain.plain_peak_bytes, *(peak for peak, _ in points), 0)
    unit, label = bytes_unit(most)
    time_unit, time_label = seconds_unit(max(curve[0][1], plain_seconds))
    figure = new_figure(9, 4.6 + 0.2 * (len(points) // 2))
    axes = figure.add_subplot()
    # the last step of the curve goes on a little beyond the largest peak
    budgets = [*curve.budget_bytes.tolist(), max(1.04 * most, curve[-1][0])]
    seconds = [*curve.seconds.tolist(), curve[-1][1]]
    axes.plot(
        [b / unit for b in budgets],
        [s / time_unit for s in seconds],
        color=USED,
        drawstyle="steps-post",
        linewidth=1.8,
        label=f"fastest plan of each budget{'' if curve.exact else f', {curve.method}'}",
    )
    for number, ((peak, time), (name, schedule)) in enumerate(points.items()):
        axes.plot(
            peak / unit,
            time / time_unit,
            color=STATES[1:][number % (len(STATES) - 1)],
            marker=_MARKS[number % len(_MARKS)],
            markersize=9,
            markeredgecolor="white",
            linestyle="none",
            clip_on=False,
            label=f"{name}: {bytes_text(peak)}, {schedule.overhead:+.1%}",
        )
    axes.set_xlim(left=0)
    axes.set_xlabel(f"peak of memory, {label}")
    axes.set_ylabel(f"predicted time of a step, {time_label}")
    axes.margins(x=0)
    title = f"From {bytes_text(curve[0][0])} to {bytes_text(curve[-1][0])}"
    if plain_seconds:
        scale = 100 * time_unit / plain_seconds

        def percent(time: Any) -> Any:
            return time * scale - 100

        def time_of(percent: Any) -> Any:
            return (percent + 100) / scale

        over = axes.secondary_yaxis("right", functions=(percent, time_of))
        over.set_ylabel("% over the time without a plan")
        title += f", for {curve[0][1] / plain_seconds - 1:.1%} more time at most"
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top"]].set_visible(False)
    legend = figure.legend(loc="outside lower center", ncols=2, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


show_exports(globals())
