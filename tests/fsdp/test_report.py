"""When gradients arrived and were reduced, and which rank was waited for: reports and plots."""

import time

import numpy as np
import pytest
from gradient_model import Model, backward, hook_of, run, units_of

from mlstate import CollectiveError
from mlstate.collectives import SingleGroup
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
from mlstate.fsdp.records import BackwardReport, Bucket
from mlstate.plot import plot_backward, plot_shards

pytestmark = pytest.mark.timeout(60)

HOSTILE = "<script>alert('x')</script>\n\x1b[31m$x_$^" + "n" * 5000


def event(names, size, times, waits):
    """The times of a bucket (full, its turn, agreed, reduced), in seconds after 100."""
    return Bucket(names, size, *(100 + t for t in times), waits)


def two_buckets(waits=((0.0, 0.0), (0.5, 0.0), (1.5, 0.0))):
    """Two buckets: the first ends within the backward pass, the second half a phase later."""
    return BackwardReport(
        [("c", 100.0), ("b", 100.5), ("a", 104.0)],
        105.0,
        [
            event(("c", "b"), 3000, (0.5, 0.6, 1.1, 2.6), waits[0]),
            event(("a",), 2048, (4.0, 4.0, 5.5, 6.0), waits[1]),
            event((), 0, (6.0, 6.0, 6.1, 6.1), waits[2]),
        ],
    )


# ---- content of a report ----


def test_times_are_seconds_since_the_first_gradient():
    report = two_buckets()
    assert report.gradients == [("c", 0.0), ("b", 0.5), ("a", 4.0)]
    assert (report.backward, report.total) == (5.0, 6.0)
    first, second = report.buckets
    assert (first.names, first.bytes) == (("c", "b"), 3000)
    assert first[2:6] == pytest.approx((0.5, 0.6, 1.1, 2.6))
    assert second[2:6] == pytest.approx((4.0, 4.0, 5.5, 6.0))


def test_overlap_is_the_reduction_share_inside_backward():
    assert two_buckets().overlap == pytest.approx((2.0 + 1.0) / (2.0 + 2.0))
    late = BackwardReport(
        [("a", 100.0)], 101.0, [event(("a",), 8, (1, 2, 2, 3), (0,)), event((), 0, [4] * 4, (0,))]
    )
    assert late.overlap == 0.0
    early = BackwardReport(
        [("a", 100.0)], 109.0, [event(("a",), 8, (1, 2, 2, 3), (0,)), event((), 0, [9] * 4, (0,))]
    )
    assert early.overlap == 1.0


def test_failed_pass_keeps_its_last_bucket_in_the_report():
    report = BackwardReport(
        [("a", 100.0)], 101.0, [event(("a",), 16, (0.0, 0.0, 0.5, 2.0), (0.0, 0.0))]
    )
    assert [bucket.names for bucket in report.buckets] == [("a",)]
    assert report.total == 2.0


def test_the_rank_that_all_others_waited_for_is_named():
    report = two_buckets()
    assert report.waited == [2.0, 0.0]
    assert report.straggler == (1, 2.0)
    assert "each of the others waited 2000.0 ms for rank 1" in str(report)
    four = [(0.0,) * 4, (0.0, 3.0, 2.0, 1.0), (0.1, 0.0, 0.0, 0.0)]
    assert two_buckets(four).straggler == (0, pytest.approx(2.0 - 0.1))
    balanced = two_buckets([(0.0, 0.0), (0.1, 0.2), (0.2, 0.1)])
    assert balanced.straggler is None
    assert "waited" not in str(balanced)
    assert two_buckets([(0.0,), (1.0,), (1.0,)]).straggler is None, "there is no other rank"


def test_the_table_has_a_line_for_each_bucket():
    title, headers, first, second = str(two_buckets()).split("\n")
    assert title == (
        "4.93 KiB of gradients in 2 buckets: backward pass 5000.0 ms, all reduced after "
        "6000.0 ms, 75% of the reducing inside the backward pass; each of the others waited "
        "2000.0 ms for rank 1"
    )
    assert headers.split("  ")[0] == "bucket"
    for line, cells in (
        (first, ["0", "2: c … b", "2.93 KiB", "500.00 ms", "600.00 ms", "1500.00 ms"]),
        (second, ["1", "1: a", "2.00 KiB", "4000.00 ms", "1500.00 ms", "500.00 ms"]),
    ):
        assert [cell.strip() for cell in line.split("  ") if cell.strip()][:6] == cells
    assert repr(two_buckets()) == f"<BackwardReport: {title}>"


# ---- reports of passes ----


def test_record_true_records_a_pass():
    hook = FSDPBackwardHook(FSDP(SingleGroup()))
    hook.use_units(units_of(0, {"w": (2,)}))
    backward(hook, {"w": np.ones(2, np.float32)})
    with pytest.raises(ValueError, match="make the group's FSDP with record=True"):
        hook.report()
    hook = FSDPBackwardHook(FSDP(SingleGroup(), record=True))
    with pytest.raises(ValueError, match="no backward pass was recorded"):
        hook.report()


@pytest.mark.parametrize("world", [1, 3])
def test_report_lists_gradients_and_buckets_in_order(group, world):
    shapes = {"a": (4,), "b": (100,), "c": (3,), "d": (5,)}
    hook = hook_of(group, units_of(group.rank, shapes), record=True, bucket_bytes=30)
    for _ in range(2):
        for name in ("d", "b", "c", "a"):
            hook.add_gradient(name, np.ones(shapes[name], np.float32))
        hook.finish()
    report = hook.report()
    assert [name for name, _ in report.gradients] == ["d", "b", "c", "a"]
    assert [b.names for b in report.buckets] == [("d", "c"), ("b",), ("a",)]
    assert [b.bytes for b in report.buckets] == [32, 400, 16]
    times = [at for _, at in report.gradients]
    assert times == sorted(times)
    assert times[0] == 0.0
    for bucket in report.buckets:
        assert 0 <= bucket.ready <= bucket.started <= bucket.agreed <= bucket.ended
        assert bucket.ready >= max(at for n, at in report.gradients if n in bucket.names)
        assert len(bucket.waits) == world
    assert times[-1] <= report.backward <= report.total == report.buckets[-1].ended
    assert 0 <= report.overlap <= 1


def test_buckets_moved_during_backward_count_as_overlap():
    units = units_of(0, {"a": (4,), "b": (1 << 20,)})
    fsdp = FSDP(SingleGroup(), record=True, bucket_bytes=0)
    hook = FSDPBackwardHook(fsdp)
    hook.use_units(units)
    hook.add_gradient("b", np.ones(1 << 20, np.float32))
    deadline = time.perf_counter() + 20
    while not hook._pass.session.events and time.perf_counter() < deadline:
        time.sleep(0.001)  # the layers below
    hook.add_gradient("a", np.ones(4, np.float32))
    hook.finish()
    report = hook.report()
    assert report.buckets[0].ended < report.gradients[1][1], "reduced before the last gradient"
    assert 0 < report.overlap <= 1


def test_a_rank_that_is_late_is_named_on_all_ranks():
    def work(group):
        units = units_of(group.rank, {"a": (4,), "b": (4,)})
        hook = hook_of(group, units, record=True, bucket_bytes=0)
        for name in "ba":
            if group.rank == 1:
                time.sleep(0.2)
            hook.add_gradient(name, np.ones(4, np.float32))
        hook.finish()
        return hook.report()

    reports = run(work, 3)
    assert len({tuple(report.waited) for report in reports}) == 1, "all ranks have the same times"
    for report in reports:
        rank, seconds = report.straggler
        assert rank == 1
        assert 0.2 < seconds < 20
        assert "for rank 1" in repr(report)


def test_a_pass_that_failed_is_reported_too():
    hook = FSDPBackwardHook(FSDP(SingleGroup(), record=True, bucket_bytes=0))
    hook.use_units(units_of(0, {"a": (4,), "b": (4,)}))
    hook.add_gradient("b", np.ones(4, np.float32))
    with pytest.raises(CollectiveError, match="'a'"):
        hook.finish()
    assert [bucket.names for bucket in hook.report().buckets] == [("b",)]


def test_reduction_outside_a_pass_keeps_its_report():
    units = units_of(0, {"a": (4,)})
    hook = hook_of(SingleGroup(), units, record=True)
    backward(hook, {"a": np.ones(4, np.float32)})
    before = str(hook.report())
    hook.scatter_multiple(units_of(0, {"v": (3,)}), {"v": np.ones(3, np.float32)})
    assert str(hook.report()) == before


def test_hooks_that_reduce_one_by_one_have_no_report():
    model = Model()
    hook = FSDPBackwardHook(FSDP(SingleGroup(), record=True))
    hook.register_hooks(model, units_of(0, {"a": (4,)}))
    model.backward({"a": np.ones(4, np.float32)})
    with pytest.raises(ValueError, match="no backward pass was recorded"):
        hook.report()


def test_a_pass_without_gradients_is_a_report_without_lines():
    hook = FSDPBackwardHook(FSDP(SingleGroup(), record=True))
    hook.finish()
    report = hook.report()
    assert (report.buckets, report.gradients, report.overlap) == ([], [], 0.0)
    assert "0 B of gradients in 0 buckets" in str(report)
    assert report._repr_html_()


# ---- pictures ----


def bars_of(container):
    return [(bar.get_x(), bar.get_width()) for bar in container]


def test_timeline_shows_gradients_buckets_and_waiting_ranks():
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    figure = plot_backward(two_buckets())
    upper, lower = figure.axes
    backward, full, waits, sums = upper.containers
    assert bars_of(backward) == [(0, 5000.0)]
    assert bars_of(full) == [(pytest.approx(500), pytest.approx(100)), (4000.0, 0.0)]
    assert bars_of(waits) == [
        (pytest.approx(600), pytest.approx(500)),
        (4000.0, pytest.approx(1500)),
    ]
    assert bars_of(sums) == [
        (pytest.approx(1100), pytest.approx(1500)),
        (5500.0, pytest.approx(500)),
    ]
    (ticks,) = upper.collections
    assert [segment[0][0] for segment in ticks.get_segments()] == [0.0, 500.0, 4000.0]
    assert [label.get_text() for label in upper.get_yticklabels()] == [
        "backward pass",
        "0: 2 of 0.003 MB",
        "1: 1 of 0.00205 MB",
    ]
    assert upper.get_title(loc="left") == "75% of the reducing is inside the backward pass"
    assert upper.yaxis_inverted()
    assert [bar.get_width() for bar in lower.containers[0]] == [2000.0, 0.0]
    assert lower.get_title(loc="left") == "Rank 1 was waited for"
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_timeline_without_a_late_rank():
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    single_rank = plot_backward(two_buckets([(0.0,), (1.0,), (1.0,)]))
    assert len(single_rank.axes) == 1
    balanced = plot_backward(two_buckets([(0.0, 0.0)] * 3))
    assert balanced.axes[1].get_title(loc="left") == "Nobody was waited for"


def test_empty_and_long_timelines_are_drawn():
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    assert plot_backward(BackwardReport([], 100.0, []))._repr_png_()
    events = [event((HOSTILE,), 8, (i, i, i, i + 0.5), (0.0, 0.1)) for i in range(91)]
    figure = plot_backward(BackwardReport([(HOSTILE, 100.0)], 300.0, events))
    assert len(figure.axes[0].containers[3]) == 91
    assert len(figure.axes[0].get_yticklabels()) <= 31
    assert figure._repr_png_()


def test_the_bytes_of_each_rank_are_stacked_by_parameter():
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    units = {
        "w": FSDPShardingUnit("w", (1000,), "float64", 1, world_size=3),
        "b": FSDPShardingUnit("b", (7,), "int8", 1, world_size=3),
    }
    figure = plot_shards(units)
    (axes,) = figure.axes
    large, small = axes.containers
    assert (large.get_label(), small.get_label()) == ("w", "b")
    assert [bar.get_width() * 1024 for bar in large] == [334 * 8, 334 * 8, 332 * 8]
    assert [bar.get_width() * 1024 for bar in small] == [3, 3, 1]
    assert [bar.get_x() for bar in small] == [bar.get_width() for bar in large]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert axes.get_xlabel() == "KiB"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["w", "b"]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_many_parameters_and_ranks_are_summed_up():
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    units = {
        f"p{i}": FSDPShardingUnit(f"p{i}", (100 - i,), "uint8", 0, world_size=100)
        for i in range(40)
    }
    figure = plot_shards(units)
    (axes,) = figure.axes
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:2] == ["p0", "p1"]
    assert labels[-1] == f"{40 - len(labels) + 1} others"
    row_sums = [sum(bars[row].get_width() for bars in axes.containers) for row in range(30)]
    assert row_sums[0] == 40, "an element of each"
    assert [label.get_text() for label in axes.get_yticklabels()][15] == "… 71 more, mean"


@pytest.mark.parametrize("name", ["$x_$^", "_orig_mod.weight", HOSTILE, "ü" * 99, " "])
def test_names_of_any_kind_are_in_the_legend(name):
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    units = {name: FSDPShardingUnit(name, (5,), "int8", 0, world_size=2)}
    figure = plot_shards(units)
    (text,) = figure.legends[0].get_texts()
    assert text.get_text()[:8] == name[:8]
    assert len(text.get_text()) < 60
    assert figure._repr_png_()


def test_units_that_cannot_be_drawn():
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    with pytest.raises(ValueError, match="w: pass world_size="):
        plot_shards({"w": FSDPShardingUnit("w", (5,), "int8", 0)})
    other = FSDPShardingUnit("v", (5,), "int8", 0, world_size=3)
    with pytest.raises(ValueError, match="v divides by 3 ranks, others by 2"):
        plot_shards({"w": FSDPShardingUnit("w", (9,), "int8", 0, world_size=2), "v": other})
    assert plot_shards({})._repr_png_()
