"""The five strategies compared with the specification's algorithms, and edge cases."""

import copy
import gc
import inspect
import pickle
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import strategy_model as model
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_team import run_in_threads

from mlstate import _core
from mlstate.activation import (
    CheckpointStrategy,
    IntervalStrategy,
    MemoryAwareStrategy,
    MemoryTracker,
    SelectiveStrategy,
    SizeBasedStrategy,
    SmartStrategy,
)
from mlstate.errors import CapacityError

THREADS = 8
MILLION = np.zeros(1 << 18, np.float32)  # exactly 1 MiB


def activation_of(count, itemsize=4):
    """An array of `count` elements that occupies the memory of one."""
    return np.broadcast_to(np.zeros((), f"V{itemsize}"), (count,))


class Meter:
    """A clock and a memory reading that tests set."""

    def __init__(self, used=0):
        self.ticks, self.used, self.reads = 0, used, 0

    def clock(self):
        return self.ticks / 1e7

    def memory(self):
        self.reads += 1
        return self.used


def aware(share=0.8, total=1000):
    """A memory-aware strategy and the meter that drives it."""
    meter = Meter()
    tracker = MemoryTracker(meter.memory)
    return MemoryAwareStrategy(share, tracker, total, clock=meter.clock), meter


def stats_of(used, total):
    return SimpleNamespace(current_memory_used=used, total_memory=total)


def tracked(get_stats):
    """A memory-aware strategy with a tracker, and the seconds of its clock in a list."""
    seconds, tracker = [0.0], SimpleNamespace(get_stats=get_stats)
    return MemoryAwareStrategy(tracker=tracker, clock=lambda: seconds[0]), seconds


def each_kind():
    return [
        IntervalStrategy(3),
        SelectiveStrategy(["a", "b"], ["c"]),
        SizeBasedStrategy(64, ["c"]),
        MemoryAwareStrategy(0.5),
        SmartStrategy(["c"]),
    ]


@pytest.fixture(params=range(5), ids=["interval", "selective", "size", "memory", "smart"])
def strategy(request):
    return each_kind()[request.param]


# ---- against the specification ----

NAMES = [f"layers.{i}" for i in range(20)] + ["", "größe", "層", "a\0b", "x" * 300]
CALLS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.integers(0, 5000),
        st.integers(0, 40) | st.integers(0, 2**63 - 1),
    ),
    max_size=80,
)


def same_decisions(strategy, reference, calls):
    for name, size, index in calls:
        activation = activation_of(size)
        ours_says = strategy.should_checkpoint(name, activation, index)
        assert ours_says is bool(reference.should_checkpoint(name, activation, index))


@given(CALLS, st.integers(1, 12) | st.integers(1, 2**63 - 1))
def test_interval_decides_as_specified(calls, interval):
    strategy, reference = IntervalStrategy(interval), model.Interval(interval)
    same_decisions(strategy, reference, calls)
    assert strategy.checkpointed_count == reference.checkpointed_count


@given(CALLS, st.sets(st.sampled_from(NAMES)), st.sets(st.sampled_from(NAMES)))
def test_selective_decides_as_specified(calls, chosen, excluded):
    excluded -= chosen
    same_decisions(SelectiveStrategy(chosen, excluded), model.Selective(chosen, excluded), calls)


@given(CALLS, st.integers(1, 20_000), st.sets(st.sampled_from(NAMES)))
def test_size_based_decides_as_specified(calls, limit, excluded):
    strategy, reference = SizeBasedStrategy(limit, excluded), model.SizeBased(limit, excluded)
    same_decisions(strategy, reference, calls)
    assert strategy.checkpointed_count == reference.checkpointed_count


@settings(deadline=None)
@given(CALLS, CALLS, st.sets(st.sampled_from(NAMES)))
def test_smart_decides_as_specified(calls, more, excluded):
    strategy, reference = SmartStrategy(excluded), model.Smart(excluded)
    same_decisions(strategy, reference, calls)
    assert strategy.layer_count == len(reference.layer_info)
    assert strategy.is_collecting is not reference.initialized
    strategy.reset()
    reference.reset()
    same_decisions(strategy, reference, more)


# seconds between calls, within one tick of the limits 10 and 30; shares of the memory in use
STEPS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 99_999_999, 100_000_000, 100_000_001, 300_000_000, 300_000_001])
        | st.integers(0, 500_000_000),
        st.integers(0, 1100) | st.sampled_from([640, 639, 641, 800, 799, 801]),
        st.integers(0, 30),
    ),
    max_size=60,
)


@given(STEPS, st.sampled_from([0.8, 0.5, 1.0, 0.1, 1 / 3]) | st.floats(0.001, 1))
def test_memory_aware_decides_as_specified(steps, share):
    strategy, meter = aware(share)
    reference = model.MemoryAware(share, lambda: meter.used, 1000, lambda: meter.ticks)
    for ticks, used, index in steps:
        meter.ticks += ticks
        meter.used = used
        decision = strategy.should_checkpoint("layer", None, index)
        assert decision is bool(reference.should_checkpoint("layer", None, index))
        assert strategy.current_interval == reference.current_interval


# ---- settings and names ----


def test_names_are_the_specifications():
    assert IntervalStrategy().name == "Interval(2)"
    assert SelectiveStrategy().name == "Selective"
    assert SizeBasedStrategy().name == "SizeBased(1MB)"
    assert MemoryAwareStrategy().name == "MemoryAware(80%)"
    assert SmartStrategy().name == "Smart"


@pytest.mark.parametrize(
    ("bytes_", "text"),
    [
        (1, "1B"),
        (1023, "1023B"),
        (1024, "1KB"),
        (2047, "1KB"),
        (2**20 - 1, "1023KB"),
        (2**20, "1MB"),
        (2**30 - 1, "1023MB"),
        (2**30, "1GB"),
        (2**43 + 5, "8192GB"),
    ],
)
def test_sizes_in_names_are_whole_units(bytes_, text):
    assert SizeBasedStrategy(bytes_).name == f"SizeBased({text})"


@pytest.mark.parametrize(
    ("share", "text"), [(1, "100%"), (0.8, "80%"), (0.125, "13%"), (0.004, "0%"), (0.555, "56%")]
)
def test_shares_in_names_are_whole_percent(share, text):
    assert MemoryAwareStrategy(share).name == f"MemoryAware({text})"


def test_every_strategy_fits_the_protocol(strategy):
    assert isinstance(strategy, CheckpointStrategy)
    assert list(inspect.signature(strategy.should_checkpoint).parameters) == [
        "layer_id",
        "activation",
        "layer_index",
    ]


@pytest.mark.parametrize("bad", [0, -1, -(2**63)])
def test_interval_is_above_nought(bad):
    with pytest.raises(ValueError, match=f"interval must be greater than 0, got {bad}"):
        IntervalStrategy(bad)
    with pytest.raises(ValueError, match=f"min_size_bytes must be greater than 0, got {bad}"):
        SizeBasedStrategy(bad)


@pytest.mark.parametrize("bad", [0, -0.1, 1.01, 1e-60, float("nan"), float("inf")])
def test_share_is_above_nought_and_at_most_one(bad):
    with pytest.raises(ValueError, match=f"at most 1, got {bad}"):
        MemoryAwareStrategy(bad)


def test_settings_of_wrong_types_are_named():
    for make in (IntervalStrategy, SizeBasedStrategy):
        with pytest.raises(TypeError, match="must be an integer, got float"):
            make(2.0)
        with pytest.raises(CapacityError, match="64 bits"):
            make(2**70)
    with pytest.raises(TypeError, match="must be a number, got str"):
        MemoryAwareStrategy("most")
    with pytest.raises(ValueError, match="total_memory must be greater than 0, got 0"):
        MemoryAwareStrategy(total_memory=0)
    with pytest.raises(TypeError, match="needs a method get_stats, got int"):
        MemoryAwareStrategy(tracker=5)
    with pytest.raises(TypeError, match="clock must be callable, got float"):
        MemoryAwareStrategy(clock=0.5)


@pytest.mark.parametrize("make", [SelectiveStrategy, SmartStrategy, SizeBasedStrategy])
def test_lists_of_layers_are_checked(make):
    keyword = "checkpoint_layers" if make is SelectiveStrategy else "exclude_layers"
    with pytest.raises(TypeError, match=f"{keyword} must be an iterable of layer ids, got 'abc'"):
        make(**{keyword: "abc"})
    with pytest.raises(TypeError, match=f"{keyword} must hold layer ids, which are str; got 7"):
        make(**{keyword: ["a", 7]})
    with pytest.raises(TypeError):
        make(**{keyword: 7})
    with pytest.raises(ValueError, match="surrogate"):
        make(**{keyword: ["\ud800"]})
    assert getattr(make(**{keyword: iter(["b", "a", "b"])}), keyword) == ("b", "a")


def test_overlap_lists_the_names():
    with pytest.raises(ValueError) as caught:
        SelectiveStrategy(["d", "a", "b", "c"], ["c", "x", "a"])
    assert str(caught.value) == "Layers cannot be both checkpointed and excluded: a, c"


def test_repr_shows_settings():
    assert repr(IntervalStrategy(3)) == "IntervalStrategy(interval=3)"
    assert repr(SizeBasedStrategy(64, ["c"])) == (
        "SizeBasedStrategy(min_size_bytes=64, exclude_layers=['c'])"
    )
    assert repr(SmartStrategy()) == "SmartStrategy()"
    assert len(repr(SelectiveStrategy(f"layers.{i}" for i in range(10_000)))) < 200


def test_settings_cannot_be_assigned(strategy):
    for field in strategy._settings():
        with pytest.raises(AttributeError):
            setattr(strategy, field, 1)


def test_strategies_with_equal_settings_are_equal():
    for first, second in zip(each_kind(), each_kind(), strict=True):
        assert first == second and hash(first) == hash(second)
        first.should_checkpoint("a", MILLION, 0)
        assert first == second
    kinds = each_kind()
    assert all(a != b for i, a in enumerate(kinds) for b in kinds[i + 1 :])
    assert IntervalStrategy(3) != IntervalStrategy(4)
    assert SmartStrategy(["a"]) != SmartStrategy(["b"])
    assert IntervalStrategy(3) != 3


# ---- each strategy ----


def test_interval_counts_and_resets():
    strategy = IntervalStrategy(4)
    assert [i for i in range(9) if strategy.should_checkpoint("x", None, i)] == [0, 4, 8]
    assert strategy.checkpointed_count == 3
    strategy.reset()
    assert (strategy.checkpointed_count, strategy.interval) == (0, 4)


def test_empty_selective_has_no_opinion():
    for strategy in (SelectiveStrategy(), SelectiveStrategy([], []), SelectiveStrategy(None, [])):
        assert strategy.should_checkpoint("a", None, 0) is False
        assert strategy.opinion("a", None, 0) is None
        strategy.reset()


def test_selective_has_opinions_of_its_lists_only():
    strategy = SelectiveStrategy(["a"], ["b"])
    assert [strategy.opinion(name, None, 0) for name in "abc"] == [True, False, None]
    assert [strategy.should_checkpoint(name, None, 0) for name in "abc"] == [True, False, False]


def test_size_based_takes_exactly_its_size():
    strategy = SizeBasedStrategy()
    assert strategy.should_checkpoint("a", MILLION, 0)
    assert not strategy.should_checkpoint("a", MILLION[:-1], 0)
    assert not strategy.should_checkpoint("a", np.zeros((5, 0, 7)), 0)
    assert strategy.should_checkpoint("a", activation_of(1 << 50), 0)
    assert strategy.checkpointed_count == 2
    strategy.reset()
    assert strategy.checkpointed_count == 0


def test_size_based_skips_excluded_layers():
    strategy = SizeBasedStrategy(1, ["a"])
    assert strategy.should_checkpoint("a", None, 0) is False
    with pytest.raises(TypeError, match="got NoneType"):
        strategy.should_checkpoint("b", None, 0)


def test_memory_is_read_when_an_adjustment_is_due():
    strategy, meter = aware()
    for tick in range(0, 100_000_000, 1_000_000):
        meter.ticks = tick
        strategy.should_checkpoint("x", None, 1)
    assert meter.reads == 0
    meter.ticks = 100_000_000
    strategy.should_checkpoint("x", None, 1)
    strategy.should_checkpoint("x", None, 1)
    assert meter.reads == 1


def test_memory_aware_reads_the_total_with_the_memory():
    readings = [(90, 100)]
    seconds = [0.0]
    strategy = MemoryAwareStrategy(
        tracker=MemoryTracker(lambda: readings[0]), clock=lambda: seconds[0]
    )
    seconds[0] = 10.0
    assert strategy.should_checkpoint("x", None, 1) and strategy.current_interval == 1
    readings[0], seconds[0] = (90, 1000), 50.0
    strategy.should_checkpoint("x", None, 1)
    assert strategy.current_interval == 2


def test_a_tracker_need_not_know_the_total():
    stats = SimpleNamespace(current_memory_used=1 << 60)
    strategy, seconds = tracked(lambda: stats)
    seconds[0] = 10.0
    assert strategy.should_checkpoint("x", None, 1) and strategy.current_interval == 1
    seconds[0], stats.current_memory_used = 50.0, 0
    strategy.should_checkpoint("x", None, 1)
    assert strategy.current_interval == 2


def test_memory_aware_resets_to_now():
    strategy, meter = aware()
    meter.ticks, meter.used = 100_000_000, 1000
    strategy.should_checkpoint("x", None, 1)
    assert strategy.current_interval == 1
    meter.ticks = 150_000_000
    strategy.reset()
    assert strategy.current_interval == 2
    meter.ticks = 249_999_999
    strategy.should_checkpoint("x", None, 1)
    assert strategy.current_interval == 2


@pytest.mark.parametrize(
    ("stats", "error", "text"),
    [
        (stats_of(-1, 9), ValueError, "current_memory_used = -1, expected 0"),
        (stats_of(1, 0), ValueError, "total_memory = 0, expected 1"),
        (stats_of(1.5, 9), TypeError, "current_memory_used must be"),
        (None, AttributeError, "current_memory_used"),
    ],
)
def test_invalid_tracker_stats_keep_the_interval(stats, error, text):
    strategy, seconds = tracked(lambda: stats)
    seconds[0] = 11.0
    with pytest.raises(error, match=text):
        strategy.should_checkpoint("x", None, 0)
    assert strategy.current_interval == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e30])
def test_invalid_clock_values_are_refused(bad):
    seconds = [0.0]
    strategy = MemoryAwareStrategy(clock=lambda: seconds[0])
    seconds[0] = bad
    with pytest.raises(ValueError, match="the clock returned"):
        strategy.should_checkpoint("x", None, 0)
    seconds[0] = "now"
    with pytest.raises(TypeError, match="the value of the clock must be a number"):
        strategy.should_checkpoint("x", None, 0)


def test_a_tracker_may_ask_its_strategy():
    """The tracker is called without the lock, so it may call the strategy without a deadlock."""
    strategy, seconds = tracked(lambda: strategy.reset() or stats_of(100, 100))
    seconds[0] = 11.0
    assert strategy.should_checkpoint("x", None, 1) is False  # no longer due
    assert strategy.current_interval == 2


def test_smart_forgets_on_reset():
    strategy = SmartStrategy(["c"])
    strategy.should_checkpoint("a", MILLION, 11)
    assert strategy.should_checkpoint("b", MILLION, 0)
    assert not strategy.should_checkpoint("c", MILLION, 99)
    strategy.reset()
    assert strategy.is_collecting and strategy.layer_count == 0
    assert not strategy.should_checkpoint("b", MILLION, 0)
    assert strategy.exclude_layers == ("c",)


def test_smart_refuses_sizes_that_no_sum_can_hold():
    strategy = SmartStrategy()
    half = activation_of(1 << 62, 1)
    for name in "abc":
        strategy.should_checkpoint(name, half, 0)
    with pytest.raises(CapacityError):
        strategy.should_checkpoint("d", half, 0)


# ---- arguments ----


def test_keywords_in_any_order(strategy):
    strategy.should_checkpoint(layer_index=3, layer_id="a", activation=MILLION)
    strategy.should_checkpoint("a", MILLION, layer_index=3)
    for arguments, text in [
        ((("a", MILLION), {}), "lacks the argument 'layer_index'"),
        ((("a", MILLION, 1, 2), {}), "takes 3 arguments, got 4"),
        ((("a", MILLION), {"index": 3}), "an unknown argument 'index'"),
        ((("a", MILLION), {"layer_id": "b"}), "twice the argument 'layer_id'"),
        (((), {}), "lacks the argument 'layer_id'"),
    ]:
        with pytest.raises(TypeError, match=text):
            strategy.should_checkpoint(*arguments[0], **arguments[1])


def test_invalid_arguments_are_named_and_keep_state(strategy):
    before = strategy._state()
    for name in (5, None, b"a"):
        with pytest.raises(TypeError, match=f"layer_id must be a str, got {type(name).__name__}"):
            strategy.should_checkpoint(name, MILLION, 0)
    for number in (1.0, None, "1"):
        with pytest.raises(TypeError, match="layer_index must be an integer, got "):
            strategy.should_checkpoint("a", MILLION, number)
    with pytest.raises(ValueError, match="layer_index must be 0 or more, got -1"):
        strategy.should_checkpoint("a", MILLION, -1)
    for number in (2**63, -(2**63) - 1):
        with pytest.raises(CapacityError, match="layer_index does not fit into 64 bits"):
            strategy.should_checkpoint("a", MILLION, number)
    if not isinstance(strategy, MemoryAwareStrategy):  # its state contains the time
        assert strategy._state() == before


class Described:
    """An activation that only has a shape and a dtype."""

    def __init__(self, shape, dtype="float32"):
        self.shape, self.dtype = shape, dtype


@pytest.mark.parametrize("strategy", [SizeBasedStrategy(1), SmartStrategy()], ids=lambda s: s.name)
def test_activations_need_shape_and_dtype(strategy):
    for bad in ([1.0], "tensor", 5, None):
        with pytest.raises(TypeError, match=f"activation must be .*, got {type(bad).__name__}"):
            strategy.should_checkpoint("a", bad, 0)
    with pytest.raises(ValueError, match=r"has the shape \(3, -1\)"):
        strategy.should_checkpoint("a", Described((3, -1)), 0)
    with pytest.raises(ValueError, match=r"has the shape \(None, 4\)"):
        strategy.should_checkpoint("a", Described((None, 4)), 0)
    with pytest.raises(TypeError, match="has the shape 7"):
        strategy.should_checkpoint("a", Described(7), 0)
    for dtype in (None, "float33", object()):
        with pytest.raises(TypeError, match="a dtype without a size"):
            strategy.should_checkpoint("a", Described((2,), dtype), 0)
    for shape in ((2**62, 2**62), (2**63,), (2**61, 8)):
        with pytest.raises(CapacityError, match="activation has more bytes"):
            strategy.should_checkpoint("a", Described(shape), 0)


@pytest.mark.parametrize(
    ("activation", "nbytes"),
    [
        (np.zeros((3, 5), np.float16), 30),
        (np.zeros((3, 4), ">c16")[::2, ::-1], 128),
        (np.zeros((), np.int8), 1),
        (np.float64(1), 8),
        (np.zeros(0), 0),
        (Described((2, 3), "bfloat16"), 12),
        (Described([np.int64(2), 3], np.float32), 24),
        (Described((2,), np.dtype("i2")), 4),
        (Described((2,), ">f8"), 16),
        (Described((), "float8_e5m2"), 1),
    ],
)
def test_sizes_follow_shape_and_dtype(activation, nbytes):
    assert SizeBasedStrategy(max(nbytes, 1)).should_checkpoint("a", activation, 0) is (nbytes > 0)
    assert SizeBasedStrategy(nbytes + 1).should_checkpoint("a", activation, 0) is False


def test_torch_tensors_are_measured_on_every_device(torch):
    for tensor, nbytes in [
        (torch.zeros(3, 4, dtype=torch.bfloat16), 24),
        (torch.zeros(3, 4, requires_grad=True), 48),
        (torch.zeros(3, 4, device="meta", dtype=torch.float64).t(), 96),
        (torch.zeros(1 << 40, device="meta"), 1 << 42),
        (torch.zeros(4, dtype=torch.float8_e4m3fn), 4),
        (torch.nn.Parameter(torch.zeros(5, 6)), 120),
        (torch.eye(3).to_sparse(), 36),
        (torch.zeros(2, 3, dtype=torch.complex64).conj(), 48),
        (torch.zeros(1, 3).expand(5, 3), 60),
        (torch.zeros(3, 4)[:, 1], 12),
        (torch.zeros(0, 4), 0),
        (torch.tensor(1.0), 4),
    ]:
        for _ in range(2):  # the second pass finds torch's class in the cache
            assert measured(tensor) == nbytes


def measured(activation):
    """The number of bytes as seen by a strategy and by the manager."""
    nbytes = _core.activation_bytes(activation)
    assert nbytes == 0 or SizeBasedStrategy(nbytes).should_checkpoint("a", activation, 0)
    assert not SizeBasedStrategy(nbytes + 1).should_checkpoint("a", activation, 0)
    return nbytes


def test_subclasses_of_torch_tensors_are_measured_by_shape_and_dtype(torch):
    class Plain(torch.Tensor):
        pass

    class Packed(torch.Tensor):
        nbytes = 7

    # same name as torch's class, whose bytes are read by another rule
    Same = type("Tensor", (torch.Tensor,), {"nbytes": 7})
    Asked = type(
        "Tensor",
        (torch.Tensor,),
        {
            "__getattribute__": lambda s, name: (
                9 if name == "nbytes" else object.__getattribute__(s, name)
            )
        },
    )
    measured(torch.zeros(3))
    for cls, nbytes in ((Plain, 12), (Packed, 12), (Same, 7), (Asked, 9), (torch.Tensor, 12)):
        for _ in range(2):
            assert measured(torch.zeros(3).as_subclass(cls)) == nbytes


def test_torch_function_mode_sees_measured_tensors(torch):
    from torch.overrides import TorchFunctionMode

    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.calls += 1
            return function(*args, **(kwargs or {}))

    with Count() as mode:
        assert _core.activation_bytes(torch.zeros(3)) == 12
    assert mode.calls


@pytest.mark.parametrize("nbytes", [-1, "12", 2**70, None, property(lambda self: 1 // 0)])
def test_lookalike_tensor_classes_are_measured_by_shape(nbytes):
    cls = type("Tensor", (), {"shape": (3,), "dtype": "float32", "nbytes": nbytes})
    assert measured(cls()) == 12


def test_arrays_of_a_class_named_tensor_are_measured():
    array = np.zeros((3, 4), np.float16)[:, ::2].view(type("Tensor", (np.ndarray,), {}))
    for _ in range(2):
        assert measured(array) == 12


def test_activation_errors_propagate():
    class Broken:
        dtype = "float32"

        @property
        def shape(self):
            raise RuntimeError("lazy")

    with pytest.raises(RuntimeError, match="lazy"):
        SizeBasedStrategy().should_checkpoint("a", Broken(), 0)


def test_colliding_and_subclassed_names_are_distinguished():
    class Name(str):
        __slots__ = ()

        def __hash__(self):
            return 1

        def __eq__(self, other):
            return True

    chosen = SelectiveStrategy(["é", "層", "x" * 1000, "a\0b", ""])
    for name in ("é", "層", "x" * 1000, "a\0b", ""):
        assert chosen.should_checkpoint(name, None, 0)
        assert chosen.should_checkpoint(Name(name), None, 0)
    for name in ("e", "層層", "x" * 999, "a\0c", "a"):
        assert not chosen.should_checkpoint(name, None, 0)
        assert not chosen.should_checkpoint(Name(name), None, 0)


def test_numbers_of_all_kinds_are_indexes():
    strategy = IntervalStrategy(2)
    for number in (np.int64(4), np.uint8(4), 4, 2**40, 2**62):
        assert strategy.should_checkpoint("a", None, number)
    with pytest.raises(TypeError, match="layer_index must be an integer, got bool"):
        strategy.should_checkpoint("a", None, True)
    assert not strategy.should_checkpoint("a", None, 2**63 - 1)


# ---- copies ----


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, *(lambda s, p=p: pickle.loads(pickle.dumps(s, p)) for p in (2, 5))],
    ids=["copy", "deepcopy", "pickle 2", "pickle 5"],
)
def test_copies_have_settings_and_state(strategy, duplicate):
    for i in range(30):
        strategy.should_checkpoint(f"layer {i % 15}", MILLION[: i * 7 % 40], i)
    other = duplicate(strategy)
    assert other == strategy and type(other) is type(strategy) and other is not strategy
    if not isinstance(strategy, MemoryAwareStrategy):  # its state contains the time
        assert other._state() == strategy._state()
    for i in range(30):
        arguments = f"layer {i % 20}", MILLION[: i * 5 % 40], i
        assert strategy.should_checkpoint(*arguments) is other.should_checkpoint(*arguments)
    other.should_checkpoint("c", MILLION, 0)  # the copy has its own state
    other.reset()


def test_a_copy_keeps_the_time_since_the_last_adjustment():
    strategy, meter = aware()
    meter.ticks, meter.used = 100_000_000, 900
    strategy.should_checkpoint("x", None, 0)
    meter.ticks = 150_000_000
    other = copy.copy(strategy)
    assert other._state() == strategy._state() == (0, 1, 50_000_000, 1, True, [])


def test_a_subclass_keeps_its_attributes():
    class Named(IntervalStrategy):
        label = "none"

    strategy = Named(5)
    strategy.label = "mine"
    strategy.should_checkpoint("a", None, 0)
    other = copy.copy(strategy)
    assert (other.label, other.interval, other.checkpointed_count) == ("mine", 5, 1)
    assert strategy != IntervalStrategy(5)


@pytest.mark.parametrize(
    "state",
    [
        None,
        (),
        (1,),
        (-1, 2, 0, 0, True, []),
        (0, 0, 0, 0, True, []),
        (0, 11, 0, 0, True, []),
        (0, 2, 0, -1, True, []),
        (0, "2", 0, 0, True, []),
        (0, 2, 0, 0, True, {}),
        (0, 2, 0, 0, True, [("a", -1, 1)]),
        (0, 2, 0, 0, True, [("a", 1, 0)]),
        (0, 2, 0, 0, True, [("a", 1, 1), ("a", 1, 1)]),
        (0, 2, 0, 0, True, [("a", 1)]),
        (0, 2, 0, 0, True, [5]),
        (0, 2, 0, 0, True, [(5, 1, 1)]),
    ],
)
def test_invalid_states_keep_the_strategy(strategy, state):
    before = strategy._state()
    with pytest.raises((TypeError, ValueError)):
        strategy._restore(state)
    if not isinstance(strategy, MemoryAwareStrategy):
        assert strategy._state() == before


def test_cycles_through_a_clock_are_collected():
    class Clock:
        def __call__(self):
            return 0.0

    clock = Clock()
    clock.strategy = MemoryAwareStrategy(clock=clock)
    clock_ref = weakref.ref(clock)
    del clock
    gc.collect()
    assert clock_ref() is None


# ---- threads and size ----


def in_threads(work):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        run_in_threads(work, THREADS)
    finally:
        sys.setswitchinterval(interval)


def test_threads_share_a_strategy():
    turns = 3000
    interval, sized, smart = IntervalStrategy(3), SizeBasedStrategy(1), SmartStrategy()
    activation = np.zeros(1, np.uint8)

    def work(number):
        for i in range(turns):
            assert interval.should_checkpoint("x", None, i) is (i % 3 == 0)
            assert sized.should_checkpoint("x", activation, i)
            smart.should_checkpoint(f"{i % 500}", activation, i)
            if i % 1000 == 0:
                smart._state(), pickle.dumps(smart)

    in_threads(work)
    assert interval.checkpointed_count == THREADS * turns / 3
    assert sized.checkpointed_count == THREADS * turns
    *_, layers = smart._state()
    assert len(layers) == 500 and sum(calls for *_, calls in layers) == THREADS * turns


def test_threads_adjust_once_when_it_is_due():
    reads = []
    strategy, seconds = tracked(lambda: reads.append(seconds[0]) or stats_of(0, 100))
    seconds[0] = 10.0
    in_threads(lambda number: [strategy.should_checkpoint("x", None, 0) for _ in range(500)])
    assert strategy.current_interval == 3
    assert 1 <= len(reads) <= THREADS


def test_threads_reset_a_shared_strategy():
    smart = SmartStrategy()

    def work(number):
        for i in range(2000):
            smart.should_checkpoint(f"{number} {i % 300}", MILLION, i)
            if i % 97 == 0:
                smart.reset()
            if i % 101 == 0:
                smart.layer_count, smart._state(), copy.copy(smart)

    in_threads(work)


def test_a_hundred_thousand_layers():
    smart, names = SmartStrategy(), [f"layers.{i}.attention" for i in range(100_000)]
    for i, name in enumerate(names):
        smart.should_checkpoint(name, MILLION, i)
    assert smart.layer_count == len(names)
    assert smart.should_checkpoint(names[0], MILLION, 0) is False
    assert smart.should_checkpoint(names[0], MILLION, 80_000) is True
    chosen = SelectiveStrategy(names[::2], names[1::2])
    assert all(chosen.should_checkpoint(name, None, 0) for name in names[::2])
    assert not any(chosen.should_checkpoint(name, None, 0) for name in names[1::2])
