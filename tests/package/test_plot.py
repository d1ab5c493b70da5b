"""Plots: their content, and the error if matplotlib is missing."""

import builtins
import sys

import numpy as np
import pytest

import mlstate
from mlstate import plot
from mlstate.activation import Chain, IntervalStrategy, Plan, SelectiveStrategy, pareto
from mlstate.checkpoint import reshard, save_async
from mlstate.checkpoint.records import SaveTimes
from mlstate.plot import plot_checkpoint, plot_occupancy, plot_pareto, plot_plan, plot_saves

pytest.importorskip("matplotlib", reason="matplotlib draws")

STAGES = [("prefill", 184, 512), ("compact", 184, 256), ("empty", 0, 0)]


def test_every_stage_is_a_bar_of_its_length():
    axes = plot_occupancy(STAGES).axes[0]
    free, tokens = axes.containers
    assert [bar.get_width() for bar in free] == [512, 256, 0]
    assert [bar.get_width() for bar in tokens] == [184, 184, 0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["prefill", "compact", "empty"]
    assert "184 of 256  (72 %)" in axes.texts[1].get_text()
    assert axes.yaxis_inverted()  # the first stage is on top


def test_the_picture_can_be_saved(tmp_path):
    path = tmp_path / "cache.png"
    plot_occupancy(STAGES).savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_notebook_shows_the_picture_without_pyplot():
    assert plot_occupancy(STAGES)._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("stages", "message"),
    [([], "stages is empty"), ([("x", 5, 4)], "'x' holds 5"), ([("x", -1, 4)], "'x' holds -1")],
)
def test_impossible_stages_are_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        plot_occupancy(stages)


def test_missing_matplotlib_names_the_extra(monkeypatch):
    real = builtins.__import__

    def no_matplotlib(name, *args, **kwargs):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(ImportError, match=r"mlstate\[plot\]"):
        plot_occupancy(STAGES)


def saved(tmp_path, layers, ranks=1):
    names = [f"h.{i}.w" for i in range(layers)]
    model = {name: np.ones((8, 32), np.float32) for name in names}
    states = {f"{name}.{state}": model[name] for name in names for state in "mv"}
    checkpoint = mlstate.save(tmp_path / "whole", model, states)
    if ranks == 1:
        return checkpoint
    return reshard(tmp_path / "whole", tmp_path / "parts", layout="rows", world_size=ranks)


def test_bytes_of_layers_and_ranks_are_stacked_by_state(tmp_path):
    figure = plot_checkpoint(saved(tmp_path, 3, ranks=4))
    layers, ranks = figure.axes
    assert [bars.get_label() for bars in layers.containers] == ["weights", "m", "v"]
    for axes, rows, kib in ((layers, 3, 1.0), (ranks, 4, 0.75)):
        assert [[bar.get_width() for bar in bars] for bars in axes.containers] == [[kib] * rows] * 3
        assert [bar.get_x() for bar in axes.containers[2]] == [2 * kib] * rows
        assert axes.get_xlabel() == "KiB"
        assert axes.yaxis_inverted()
    assert [label.get_text() for label in layers.get_yticklabels()] == ["h.0", "h.1", "h.2"]
    assert ranks.get_yticklabels()[3].get_text() == "rank 3"
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_the_middle_of_many_layers_is_one_bar(tmp_path):
    layers, ranks = plot_checkpoint(saved(tmp_path, 40)).axes
    labels = [label.get_text() for label in layers.get_yticklabels()]
    assert len(labels) == 30
    assert labels[14:17] == ["h.14", "… 11 more, mean", "h.26"]
    assert {bar.get_width() for bar in layers.containers[0]} == {1.0}
    assert len(ranks.containers[0]) == 1


def test_an_empty_checkpoint_and_odd_names_are_drawn(tmp_path):
    empty = mlstate.save(tmp_path / "empty", {})
    assert plot_checkpoint(empty)._repr_png_()
    odd = mlstate.save(tmp_path / "odd", {"$x_$^.w": np.ones(2), f"{'l' * 99}.w": np.ones(2)})
    layers, _ = plot_checkpoint(odd).axes
    assert layers.get_yticklabels()[0].get_text() == "$x_$^"
    assert plot_checkpoint(odd)._repr_png_()


CHAIN = Chain(
    [1, 1, 1, 1],
    [2, 2, 2, 2],
    [1024] * 5,
    [4096, 4096, 4096, 1024],
    names=["a", "b", "$x_$^", "d"],
    offload_bytes_per_second=1e9,
    load_bytes_per_second=1e9,
)


def heights(axes, label):
    """The steps of a line: their edges and heights."""
    patch = next(patch for patch in axes.patches if patch.get_label() == label)
    values, edges, _ = patch.get_data()
    return edges.tolist(), values.tolist()


def test_memory_of_a_plan_is_drawn_over_time():
    schedule = Plan.from_recomputed(CHAIN, [1, 2], budget_bytes=12 << 10)
    upper, lower = plot_plan(schedule).axes
    edges, values = heights(upper, "without a plan")
    assert edges == [0, 1, 2, 3, 4, 6, 8, 10, 12]
    assert values == [5, 9, 13, 14, 16, 15, 11, 7]
    run = schedule.simulate()
    edges, values = heights(upper, "with the plan")
    lasting = run.seconds > 0
    assert values == (run.peak_bytes[lasting] / 1024).tolist()
    assert edges == [0, *run.seconds[lasting].cumsum()]
    (budget,) = (line for line in upper.lines if line.get_label() == "budget")
    assert set(budget.get_ydata()) == {12.0}
    assert upper.get_ylim()[1] > 16
    assert "Peak 12.00 KiB instead of 16.00 KiB, +16.7% time" in upper.get_title(loc="left")
    assert upper.get_ylabel() == "KiB"
    assert lower.get_xlabel() == "predicted time, s"


def rows_of(axes, colour):
    """Row, start and end of each bar in one colour."""
    from matplotlib.colors import to_rgba

    shapes = [c for c in axes.collections if tuple(c.get_facecolor()[0]) == to_rgba(colour)]
    corners = [path.vertices[:4] for shape in shapes for path in shape.get_paths()]
    return sorted((c[:, 1].mean().round(), c[:, 0].min(), c[:, 0].max()) for c in corners)


def test_blocks_of_a_plan_are_drawn_when_they_run():
    steps = [("save", 0), ("offload", 0), ("forward", 1), ("save", 2), ("save", 3)]
    steps += [("backward", 3), ("backward", 2), ("drop", 2), ("save", 1), ("backward", 1)]
    rates = {"offload_bytes_per_second": 1, "load_bytes_per_second": 2}
    chain = Chain([4] * 4, [8] * 4, [1] * 5, [4] * 4, names=CHAIN.names, **rates)
    figure = plot_plan(Plan(chain, [*steps, ("drop", 1), ("load", 0), ("backward", 0)]))
    lower = figure.axes[1]
    assert rows_of(lower, plot.USED) == [(0, 0, 4), (2, 12, 16), (3, 16, 20)]
    assert rows_of(lower, plot.LIGHT) == [(1, 8, 12)]
    assert rows_of(lower, plot.AGAIN) == [(1, 36, 40)]
    assert rows_of(lower, plot.AWAY) == [(0, 4, 8), (0, 48, 50)]
    assert [label.get_text() for label in lower.get_yticklabels()] == list(CHAIN.names)
    assert lower.get_title(loc="left") == "2 kept, 1 recomputed, 1 offloaded"
    assert lower.yaxis_inverted()
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [
        "without a plan",
        "with the plan",
        "forward, all saved",
        "forward, output only",
        "forward again",
        "backward",
        "to the host and back",
    ]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_long_plans_and_those_without_times_are_drawn():
    long = Chain([1e-4] * 2000, [2e-4] * 2000, [1 << 20] * 2001, [4 << 20] * 2000)
    upper, lower = plot_plan(Plan.from_recomputed(long, range(0, 2000, 2))).axes
    assert len(lower.get_yticks()) <= 30
    assert upper.get_ylabel() == "GiB"
    assert not [line for line in upper.lines if line.get_label() == "budget"]
    timeless = Chain([0, 0], [0, 0], [1, 1, 1], [2, 2])
    upper, lower = plot_plan(Plan.from_recomputed(timeless, [1])).axes
    assert lower.get_xlabel() == "steps"
    assert heights(upper, "with the plan")[0] == [0, 1, 2, 3, 4, 5, 6]


def test_strategies_are_points_on_the_curve_of_plans():
    curve = pareto(CHAIN)
    strategies = [IntervalStrategy(2), SelectiveStrategy(["a", "$x_$^"]), IntervalStrategy(1)]
    figure = plot_pareto(curve, [*strategies, curve.plan(0)])
    line, *points = figure.axes[0].lines
    assert line.get_drawstyle() == "steps-post"
    assert list(line.get_ydata()[:-1]) == curve.seconds.tolist()
    assert (np.array(line.get_xdata()[:-1]) * 1024).tolist() == curve.budget_bytes.tolist()
    plans = [Plan.from_strategy(CHAIN, strategies[i]) for i in (0, 2)] + [curve.plan(0)]
    drawn = [(float(*point.get_xdata()), float(*point.get_ydata())) for point in points]
    assert drawn == [
        (schedule.predicted_peak_bytes / 1024, schedule.predicted_seconds) for schedule in plans
    ]
    fastest, both, every, tight = [text.get_text() for text in figure.legends[0].get_texts()]
    assert fastest == "fastest plan of each budget"
    assert both.startswith("Interval(2), Selective: ") and both.endswith(" KiB, +16.7%")
    assert every.startswith("Interval(1): ") and every.endswith("+33.3%")
    assert tight.startswith("plan, to the byte: ")
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_points_may_have_any_names_and_times():
    timeless = Chain([0, 0], [0, 0], [1, 1, 1], [2, 2])
    figure = plot_pareto(pareto(timeless), {"$x_$^": IntervalStrategy()})
    assert figure.legends[0].get_texts()[1].get_text().startswith("$x_$^: ")
    assert figure._repr_png_()
    rounded = plot_pareto(pareto(CHAIN, slots=40))
    assert rounded.legends[0].get_texts()[0].get_text().endswith("budget, 40 slots of memory")


def test_a_plan_of_another_chain_is_refused():
    other = Plan.from_recomputed(Chain([1], [1], [1, 1], [1]), [])
    with pytest.raises(ValueError, match="'mine' is a plan of another chain"):
        plot_pareto(pareto(CHAIN), {"mine": other})


# ---- saves ----

SAVES = [
    SaveTimes(100.0, 100.5, 102.0, [(100.0, 100.5)]),
    SaveTimes(103.0, 103.25, None, [(103.0, 103.25), (103.5, 103.75)]),
]


def test_saves_are_drawn_with_steps_and_waits():
    axes = plot_saves(SAVES, [(99.0, 100.0), (100.5, 104.0)]).axes[0]
    spans = {
        bars.get_label(): [(bar.get_x(), bar.get_width()) for bar in bars]
        for bars in axes.containers
    }
    assert spans == {
        "training steps": [(0, 1), (1.5, 3.5)],
        "caller held up": [(1, 0.5), (4, 0.25), (4.5, 0.25)],
        "staged": [(1, 0.5), (4, 0.25)],
        "written and synced": [(1.5, 1.5), (4.25, 0.75)],  # the second part continues
    }
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "training",
        "save 1",
        "save 2",
    ]
    assert axes.get_xlabel() == "s" and axes.yaxis_inverted()
    assert axes.get_title(loc="left") == "The caller was held up for 1 s of 5 s (20.0%)"


def test_a_handle_is_drawn_as_its_times(tmp_path):
    handle = save_async(tmp_path / "ckpt", {"w": np.ones(3)})
    handle.wait()
    drawn, same = plot_saves([handle]).axes[0], plot_saves([handle.times()]).axes[0]
    for left, right in zip(drawn.containers, same.containers, strict=True):
        assert [bar.get_bbox().bounds for bar in left] == [bar.get_bbox().bounds for bar in right]
    assert drawn.containers[0].get_label() == "caller held up"
    assert plot_saves([handle])._repr_png_().startswith(b"\x89PNG")


def test_no_saves_are_refused():
    with pytest.raises(ValueError, match="no saves"):
        plot_saves([])


def test_a_save_that_has_just_begun_is_drawn():
    (axes,) = plot_saves([SaveTimes(5.0, None, None, [])]).axes
    assert "held up for 0" in axes.get_title(loc="left")


def test_many_saves_fit_a_picture():
    many = [SaveTimes(t, t + 0.1, t + 0.5, [(t, t + 0.1)]) for t in map(float, range(1, 400))]
    figure = plot_saves(many)
    assert figure.get_size_inches()[1] < 25
    assert len(figure.axes[0].get_yticklabels()) <= 31


def test_a_checkpoint_is_plotted_from_its_path(tmp_path):
    saved(tmp_path, 3)
    for path in (tmp_path / "whole", str(tmp_path / "whole")):
        assert len(plot_checkpoint(path).axes) == 2
    with pytest.raises(TypeError, match=r"checkpoint must be a path or a Checkpoint, .*got dict"):
        plot_checkpoint({"w": np.ones(2)})
