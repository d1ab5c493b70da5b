"""States of several ranks, run as threads: merged, gathered and distributed."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_threads import Messages, outcomes
from tries import tries

import mlstate
from mlstate import CollectiveError, CompatibilityError, OptimizerStateDict, StateDict
from mlstate.checkpoint import Layout, Shard
from mlstate.collectives import SingleGroup
from mlstate.distributed import DistributedStateCollector
from mlstate.distributed._byte_ranges import boxes, bytes_of, read_range, write_range
from mlstate.distributed._merge import describe
from mlstate.errors import UnstorableError
from mlstate.testing import run_ranks


def run(function, world_size=2, run=run_ranks):
    """The result of `function` with the collector of each rank; raises the first error."""
    return run(world_size, lambda group: function(DistributedStateCollector(Messages(group))))


def run_all(function, world_size=2):
    """The result or the error of each rank."""
    return run(function, world_size, outcomes)


def rank_1_raises(function, error, text):
    """Rank 0 raises an error that has the class and the text of rank 1's error."""
    first, second = run_all(function)
    assert isinstance(second, error) and text in str(second)
    assert isinstance(first, CollectiveError) and first.rank == 1
    assert f"rank 1 failed: {error.__name__}: {second}" in str(first)


def same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == np.ascontiguousarray(expected).tobytes()


# ---- ranges of elements ----

SHAPES = [(), (0,), (5,), (3, 4), (2, 3, 4), (2, 0, 3), (3, 1, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["C", "F", "swapped", "torch", "torch.T"])
def test_every_range_of_elements_becomes_bytes_and_comes_back(shape, kind):
    count = int(np.prod(shape))
    array = np.arange(count, dtype=np.float32).reshape(shape)
    expected = array.tobytes()
    if kind == "F":
        array = np.asfortranarray(array)
    elif kind == "swapped":
        array = array.astype(">f4")
    elif kind.startswith("torch"):
        torch = pytest.importorskip("torch", reason="its tensors are moved")
        array = torch.from_numpy(np.array(array, order="F" if kind.endswith("T") else "C"))
    for begin in range(count + 1):
        for end in range(begin, count + 1):
            data = bytes_of(array, begin, end)
            assert data.tobytes() == expected[4 * begin : 4 * end]
            other = np.zeros_like(data)
            read_range(array, begin, end, other)
            assert other.tobytes() == data.tobytes()
            target = array.clone() if kind.startswith("torch") else array.copy(order="K")
            target[...] = -1
            write_range(target, begin, end, data)
            elements = bytes_of(target, 0, count).view(np.float32)
            assert elements[begin:end].tobytes() == data.tobytes()
            assert (elements[:begin] == -1).all()
            assert (elements[end:] == -1).all()


def test_a_range_is_few_boxes():
    assert len(list(boxes((9, 9, 9, 9), 1, 9**4 - 1))) == 7


# ---- collecting ----


class Model:
    def __init__(self):
        self.w = np.zeros(3)
        self.loaded = 0

    def get_state_dict(self):
        return StateDict(w=self.w.copy())

    def load_state_dict(self, state):
        self.loaded += 1
        self.w[:] = state["w"]


def test_local_arrays_are_not_copied():
    collector = DistributedStateCollector(SingleGroup())
    state = mlstate.ModelStateDict({"w": np.ones(2)}, model_type="x")
    assert collector.collect_local_state(state) is state
    tensors = {"w": np.ones(2), "s": Layout.rows(2).shard(np.ones(3), 1)}
    collected = collector.collect_local_state(tensors)
    assert type(collected) is StateDict
    assert all(collected[name] is tensors[name] for name in tensors)
    assert collector.collect_local_state(Model())["w"].shape == (3,)


@pytest.mark.parametrize("source", [None, 5, "text", [np.ones(2)]])
def test_sources_without_a_state_are_refused(source):
    collector = DistributedStateCollector(SingleGroup())
    with pytest.raises(TypeError, match="expected a mapping of str to arrays"):
        collector.collect_local_state(source)
    with pytest.raises(TypeError, match="model= requires a torch optimizer"):
        collector.collect_local_state({}, model=source or 1)


def test_a_group_is_asked_for():
    with pytest.raises(TypeError, match=r"TorchGroup"):
        DistributedStateCollector(object())
    with pytest.raises(ValueError, match="timeout"):
        DistributedStateCollector(SingleGroup(), timeout=0)
    assert repr(DistributedStateCollector(SingleGroup())).startswith("DistributedStateCollector(")


# ---- merging ----

COLLECTOR = DistributedStateCollector(SingleGroup())


def test_replicas_are_kept_once_and_names_united():
    first = mlstate.ModelStateDict({"a": np.ones(2)}, model_type="gpt")
    second = {"a": np.ones(2), "b": np.zeros(3)}
    merged = COLLECTOR.merge_states([first, second])
    assert merged["a"] is first["a"]
    assert merged["b"] is second["b"]
    assert merged.model_type == "gpt"
    assert list(first) == ["a"]


def test_hyperparameters_may_be_nan_or_arrays():
    def state(rank, value):
        groups = [{"params": ["w", "w"], "x": value}, {"params": [f"own {rank}"], "x": value}]
        return OptimizerStateDict({"w.m": np.ones(2)}, param_groups=groups)

    values = [lambda: np.array([1.0, np.nan]), lambda: float("nan"), lambda: (0.9, float("nan"))]
    torch = sys.modules.get("torch")
    if torch is not None:
        values.append(lambda: torch.tensor([1.0, 2.0]))
    for value in values:
        assert len(COLLECTOR.merge_states([state(0, value())]).param_groups) == 2
        merged = COLLECTOR.merge_states([state(rank, value()) for rank in range(2)])
        assert [group["params"] for group in merged.param_groups][-1] == ["own 1"]
    for first, second in ((np.ones(2), np.zeros(2)), (np.ones(2), np.ones(3)), (np.nan, 1.0)):
        with pytest.raises(CompatibilityError, match=r"on rank 1: set the same .*check=False"):
            COLLECTOR.merge_states([state(0, first), state(1, second)])


def test_different_replicas_are_reported_with_rank_and_key():
    good, bad = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    bad[1, 2], bad[0, 0] = 0.5, np.nan
    states = [{"w": good, "b": np.ones(1)}, {"w": good.copy(), "b": np.ones(1)}, {"w": bad}]
    with pytest.raises(CompatibilityError, match="w: rank 2 differs from rank 0 in 2 of 6") as got:
        COLLECTOR.merge_states(states)
    (difference,) = got.value.differences
    assert (difference.kind, difference.name, difference.ranks) == ("elements", "w", (2,))
    assert (difference.change.changed, difference.change.nan, difference.change.max_abs) == (
        2,
        1,
        0.5,
    )
    assert (got.value.name, got.value.rank) == ("w", 2)
    assert "check=False" in str(got.value)
    assert COLLECTOR.merge_states(states, check=False)["w"] is good
    assert COLLECTOR.merge_states(states[:2])["w"] is good


@pytest.mark.parametrize(
    ("other", "kind", "text"),
    [
        (np.zeros((3, 2)), "shape", r"w: shape \(3, 2\) on rank 2, \(2, 3\) on ranks 0, 1"),
        (np.zeros((2, 3), np.float32), "dtype", "w: dtype float32 on rank 2, float64 on ranks 0"),
        (Shard(np.zeros((2, 3))), "kind", "w: kind a Shard on rank 2, a whole array on ranks 0"),
    ],
)
def test_replicas_of_other_shape_or_dtype_are_reported(other, kind, text):
    states = [{"w": np.zeros((2, 3))}, {"w": np.zeros((2, 3))}, {"w": other}]
    (difference,) = COLLECTOR.compare_states(states)
    assert (difference.kind, difference.ranks) == (kind, (2,))
    with pytest.raises(CompatibilityError, match=text):
        COLLECTOR.merge_states(states)
    if kind != "kind":
        assert COLLECTOR.merge_states(states, check=False)["w"] is states[0]["w"]


def shards(array, layout, **keywords):
    return [layout.shard(array, index, **keywords) for index in range(layout.parts)]


def test_replicas_without_a_measure_are_compared_too():
    for dtype in ("S3", "M8[s]", "i4,f8"):
        first, second = np.zeros(3, dtype), np.zeros(3, dtype)
        states = [{"w": first}, {"w": second}]
        assert COLLECTOR.merge_states(states)["w"] is first
        second.view("u1")[0] = 65
        (difference,) = COLLECTOR.compare_states(states)
        assert difference.text == "w: rank 1 differs from rank 0"
        assert difference.change is None


def test_shards_are_assembled_and_gaps_reported():
    array = np.arange(15.0).reshape(5, 3)
    parts = shards(array, Layout.rows(4))
    merged = COLLECTOR.merge_states([{"w": part} for part in parts])
    same_bits(merged["w"], array)
    assert COLLECTOR.merge_states([{"w": part} for part in parts[:3]])["w"].shape == (5, 3)
    with pytest.raises(CompatibilityError, match=r"w: no rank has part 1 of 4 of shape \(5, 3\)"):
        COLLECTOR.merge_states([{"w": parts[0]}, {"w": parts[2]}])
    with pytest.raises(CompatibilityError, match="parts 1, 2 of 4"):
        COLLECTOR.merge_states([{"w": parts[0]}], check=False)


def test_shards_of_mixed_layouts_are_refused():
    array = np.arange(12.0).reshape(4, 3)
    states = [{"w": Layout.rows(2).shard(array, 0)}, {"w": Layout.flat(2).shard(array, 1)}]
    for check in (True, False):
        with pytest.raises(CompatibilityError, match=r"w: layout Layout\(\[\('flat', 2\)\]\)"):
            COLLECTOR.merge_states(states, check=check)


def test_two_ranks_with_the_same_part_must_have_the_same_elements():
    array = np.arange(12.0).reshape(4, 3)
    layout = Layout.rows(2)
    states = [{"w": layout.shard(array, index)} for index in (0, 1, 1)]
    same_bits(COLLECTOR.merge_states(states)["w"], array)
    states[2] = {"w": layout.shard(array + 1, 1)}
    with pytest.raises(CompatibilityError, match="w: rank 2 differs from rank 1 in 6 of 6"):
        COLLECTOR.merge_states(states)
    same_bits(COLLECTOR.merge_states(states, check=False)["w"], array)


def test_arrays_of_a_shard_may_have_any_shape_and_strides():
    array = np.arange(24.0).reshape(4, 6)
    layout = Layout.axis(1, 2)
    first = Shard(layout.take(array, 0).reshape(-1), layout, 0, shape=(4, 6))
    second = Shard(np.asfortranarray(layout.take(array, 1)), layout, 1, shape=(4, 6))
    same_bits(COLLECTOR.merge_states([{"w": first}, {"w": second}])["w"], array)


@pytest.mark.parametrize("states", [None, 5, {"w": np.ones(1)}, [5]])
def test_states_come_in_a_list(states):
    with pytest.raises(TypeError):
        COLLECTOR.merge_states(states)


def test_no_states_are_merged_into_an_empty_one():
    for check in (True, False):
        merged = COLLECTOR.merge_states([], check=check)
        assert type(merged) is StateDict and not merged


# ---- random layouts, gathered and distributed again ----


@st.composite
def cuts(draw, world):
    """A shape, and a layout whose number of parts is the number of ranks or a divisor of it."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    steps = []
    left = world
    for _ in range(draw(st.integers(0, 2))):
        parts = draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
        if shape:
            steps.append((draw(st.integers(0, len(shape) - 1)), parts))
            left //= parts
    if draw(st.booleans()):
        parts = draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
        steps.append(("flat", parts))
    return shape, Layout(steps)


@settings(deadline=None, max_examples=tries(60))
@given(data=st.data())
def test_any_layout_becomes_the_whole_and_parts_again(data):
    world = data.draw(st.integers(1, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    wholes, layouts = {}, {}
    for number in range(data.draw(st.integers(1, 3))):
        shape, layouts[f"t{number}"] = data.draw(cuts(world))
        dtype = data.draw(st.sampled_from(["f4", "i1", "f8", ">i4", "c16", "?"]))
        wholes[f"t{number}"] = (rng.random(shape) * 100).astype(dtype)
    wholes["plain"] = rng.random(3)
    order = data.draw(st.sampled_from("CF"))
    max_bytes = data.draw(st.sampled_from([1, 7, 64, 1 << 20]))
    root = data.draw(st.integers(0, world - 1))

    def parts(rank, make=lambda array: array):
        state = {"plain": make(wholes["plain"].copy())}
        for name, layout in layouts.items():
            index, replica = rank % layout.parts, rank // layout.parts
            part = np.array(layout.take(wholes[name], index), order=order)
            shape = wholes[name].shape
            state[name] = Shard(make(part), layout, index, shape=shape, replica=replica)
        return state

    def gather_and_send(collector):
        rank = collector.group.rank
        full = collector.gather_full_state(parts(rank), root=root, max_bytes=max_bytes)
        local_state = parts(rank, np.zeros_like)
        collector.broadcast_state(local_state, source=full, root=root, max_bytes=max_bytes)
        return full, local_state

    for rank, (full, local_state) in enumerate(run(gather_and_send, world)):
        assert (full is not None) == (rank == root)
        if full is not None:
            assert set(full) == set(wholes)
            for name, full_array in wholes.items():
                same_bits(full[name].astype(full_array.dtype), full_array)
        for name, value in parts(rank).items():
            elements = local_state[name].array if isinstance(value, Shard) else local_state[name]
            expected = value.array if isinstance(value, Shard) else value
            assert elements.tobytes() == expected.tobytes(), name


# ---- gathering ----


def test_replicas_are_the_roots_own():
    states = [mlstate.OptimizerStateDict({"w.m": np.ones(3)}, step=4) for _ in range(3)]

    def gather(collector):
        return collector.gather_full_state(states[collector.group.rank], root=1)

    results = run(gather, 3)
    assert results[0] is None
    assert results[2] is None
    assert results[1]["w.m"] is states[1]["w.m"]
    assert (type(results[1]), results[1].step) == (mlstate.OptimizerStateDict, 4)


def test_messages_are_bounded_and_only_the_result_is_allocated():
    array = np.arange(300_000, dtype=np.float32).reshape(1000, 300)
    layout = Layout.axis(1, 3)
    largest = [0] * 3

    def gather(collector):
        rank = collector.group.rank
        shard = Shard(layout.take(array, rank), layout, rank, shape=array.shape)
        full = collector.gather_full_state({"w": shard}, max_bytes=10_000)
        largest[rank] = max(collector.group.sizes["all_to_all"])
        return full

    same_bits(run(gather, 3)[0]["w"], array)
    assert max(largest) <= 10_000
    assert largest[0] > 9_000


def test_tied_tensors_stay_one_and_travel_once():
    array = np.arange(1000.0).reshape(5, 200)

    def gather(collector):
        rank = collector.group.rank
        shard = Layout.rows(4).shard(array, rank)  # the part of the last rank is empty
        again = Shard(shard.array, shard.layout, rank, shape=shard.shape)
        other = Shard(shard.array.copy(), shard.layout, rank, shape=shard.shape)
        replicated = np.ones(3)
        state = {"a": shard, "b": again, "c": other, "d": replicated, "e": replicated}
        full = collector.gather_full_state(state, max_bytes=12_800)
        return full, len(collector.group.sizes["all_to_all"]), state

    results = run(gather, 4)
    full = results[0][0]
    assert full["a"] is full["b"]
    assert full["c"] is not full["a"]
    assert full["d"] is full["e"]
    for name in "abc":
        same_bits(full[name], array)
    assert results[0][1] == 1  # two senders, each with at most two rows of two tensors
    merged = COLLECTOR.merge_states([state for _, _, state in results])
    assert merged["a"] is merged["b"]
    same_bits(merged["c"], array)
    broken = [{"a": array, "b": array}, {"a": array.copy(), "b": array + 1}]
    assert [difference.name for difference in COLLECTOR.compare_states(broken)] == ["b"]


def test_names_choose():
    def gather(collector):
        state = {"a.w": np.ones(1), "a.b": np.ones(2), "c": np.full(1, collector.group.rank)}
        return collector.gather_full_state(state, names="a")

    assert list(run(gather)[0]) == ["a.w", "a.b"]

    def unknown(collector):
        return collector.gather_full_state({"bias": np.ones(1)}, names="bais")

    errors = run_all(unknown)
    assert all(isinstance(error, KeyError) for error in errors)
    assert all("; did you mean 'bias'?" in str(error) for error in errors)

    def unlike(collector):
        return collector.gather_full_state({"bias": np.ones(1)}, names="x")

    errors = run_all(unlike)
    assert all(isinstance(error, KeyError) for error in errors)
    assert all("there are 'bias'" in str(error) for error in errors)


def both_raise(function, error, text, world_size=2):
    """All ranks raise the same error, and their group stays usable."""

    def work(collector):
        with pytest.raises(error, match=text) as caught:
            function(collector)
        assert sum(map(len, collector.group.sizes.values())) in (2, 3)
        collector.broadcast_state({"w": np.zeros(1)})
        return [caught.value]

    return [error for (error,) in run(work, world_size)]


def test_replicas_that_differ_are_an_error_everywhere():
    def gather(collector, **keywords):
        state = {"a": np.ones(4), "w": np.zeros(5)}
        state["w"][2] = collector.group.rank == 1
        return collector.gather_full_state(state, **keywords)

    text = "w: the elements on rank 1 differ from those on ranks 0, 2"
    for error in both_raise(gather, CompatibilityError, text, 3):
        assert [difference.ranks for difference in error.differences] == [(1,)]
        assert (error.name, error.rank) == ("w", 1)
        assert "verify_replicas=False" in str(error)
    assert not run(lambda c: gather(c, verify_replicas=False), 3)[0]["w"].any()


def test_other_keys_shapes_and_parts_are_an_error_everywhere():
    array = np.arange(6.0)

    def gather(other):
        def work(collector):
            state = {"w": Layout.rows(2).shard(array, collector.group.rank), "b": np.ones(2)}
            return collector.gather_full_state(other(state) if collector.group.rank else state)

        return work

    for other, text in (
        (lambda state: {"w": state["w"]}, "b: not on rank 1, but on rank 0"),
        (lambda state: state | {"c": np.ones(1)}, "c: not on rank 0, but on rank 1"),
        (lambda state: state | {"b": np.ones(3)}, r"b: shape \(3,\) on rank 1, \(2,\) on rank 0"),
        (lambda state: state | {"b": np.ones(2, int)}, "b: dtype int64 on rank 1, float64 on"),
        (lambda state: state | {"w": Layout.rows(2).shard(array, 0)}, "w: no rank has part 1 of 2"),
        (lambda state: state | {"w": Layout.flat(2).shard(array, 1)}, "w: layout Layout"),
        (lambda state: state | {"w": array}, "w: kind a whole array on rank 1, a Shard on rank 0"),
    ):
        both_raise(gather(other), CompatibilityError, text)


def test_a_rank_that_fails_is_heard_of():
    def gather(collector):
        return collector.gather_full_state(5 if collector.group.rank == 1 else {"w": np.ones(1)})

    rank_1_raises(gather, TypeError, "expected a mapping")


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"root": 2}, ValueError, "root 2 is not a rank"),
        ({"root": "0"}, TypeError, "root must be an int"),
        ({"max_bytes": 0}, ValueError, "max_bytes must be at least 1"),
        ({"max_bytes": []}, TypeError, "max_bytes must be a number of bytes"),
        ({"max_bytes": 0.5}, ValueError, "max_bytes is 0.5: a fraction is not allowed here"),
    ],
)
@pytest.mark.parametrize("name", ["gather_full_state", "broadcast_state"])
def test_wrong_arguments_of_one_rank_are_an_error_everywhere(name, keywords, error, text):
    def work(collector):
        wrong = keywords if collector.group.rank == 1 else {}
        return getattr(collector, name)({"w": np.ones(1)}, **wrong)

    rank_1_raises(work, error, text)


@pytest.mark.parametrize("name", ["gather_full_state", "broadcast_state"])
@pytest.mark.parametrize("argument", ["root", "max_bytes"])
def test_arguments_must_be_the_same_on_every_rank(name, argument):
    def work(collector):
        return getattr(collector, name)(
            {"w": np.ones(1)}, **{argument: min(1, collector.group.rank) + (argument != "root")}
        )

    both = run_all(work, 3)
    assert all(isinstance(error, CollectiveError) for error in both)
    assert all(f"{argument} is" in str(error) and error.rank == 1 for error in both)


def test_ranks_in_different_operations_raise():
    def work(collector):
        name = "broadcast_state" if collector.group.rank else "gather_full_state"
        return getattr(collector, name)({"w": np.ones(1)})

    for error in run_all(work):
        assert isinstance(error, CollectiveError)
        assert "operation is gather_full_state on rank 0 and broadcast_state on rank 1" in str(
            error
        )


def test_arrays_of_objects_are_refused():
    with pytest.raises(TypeError, match="'w'"):
        COLLECTOR.gather_full_state({"w": np.array([None])})


# ---- distributing ----


def test_every_rank_gets_the_roots_elements_in_place():
    def send(collector):
        rank = collector.group.rank
        state = {
            "w": np.full((3, 4), float(rank)),
            "t": np.full((4, 3), rank).T,
            "s": Shard(np.full(2, rank), Layout.rows(2), 0, shape=(4,), replica=rank),
            "e": np.zeros((0, 2)),
            "n": np.array(rank),
        }
        originals = dict(state)
        collector.broadcast_state(state, root=1, max_bytes=32)
        assert all(state[name] is originals[name] for name in originals)
        assert max(collector.group.sizes["broadcast"]) <= 32
        return [state["w"], state["t"], state["s"].array, state["n"]]

    for arrays in run(send, 3):
        assert all((array == 1).all() for array in arrays)


def test_broadcast_loads_into_the_given_object():
    def send(collector):
        model = Model()
        model.w[:] = collector.group.rank + 1
        collector.broadcast_state(model)
        return model

    for model in run(send):
        assert model.w.tolist() == [1, 1, 1]
        assert model.loaded == 1


def test_a_rank_that_cannot_take_over_is_heard_of():
    def send(collector):
        collector.broadcast_state(
            Broken() if collector.group.rank else Model(), source={"w": np.ones(3)}
        )

    rank_1_raises(send, RuntimeError, "full")


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"w": np.ones(3)}, "b: sent by rank 0, not on rank 1"),
        ({"w": np.ones(3), "b": np.ones(1), "c": np.ones(1)}, "c: on rank 1, not sent by rank 0"),
        ({"w": np.ones(2), "b": np.ones(1)}, r"w: shape \(3,\) sent by rank 0, \(2,\) on rank 1"),
        ({"w": np.ones(3, "f4"), "b": np.ones(1)}, "w: dtype float64 sent by rank 0, float32 on"),
    ],
)
def test_mismatched_state_is_not_written(other, text):
    def send(collector):
        local_state = other if collector.group.rank else {"w": np.zeros(3), "b": np.zeros(1)}
        with pytest.raises(CompatibilityError, match=text):
            collector.broadcast_state(local_state)
        return [array.sum() for array in local_state.values()]

    before = [array.sum() for array in other.values()]
    assert run(send) == [[0, 0], before]


class Broken(Model):
    """A model that refuses every state except zeros, after it has taken over a part."""

    def load_state_dict(self, state):
        self.w[0] = state["w"][0]
        if self.w[0]:
            raise RuntimeError("full")
        super().load_state_dict(state)


@pytest.mark.parametrize("kind", ["object", "live object", "mapping"])
def test_all_ranks_keep_their_states_if_one_refuses(kind):
    class Live(Model):
        def get_state_dict(self):
            return StateDict(w=self.w)

    def send(collector):
        model = Broken() if collector.group.rank == 1 else Live() if kind[0] == "l" else Model()
        target = {"w": model.w} if kind == "mapping" and collector.group.rank == 0 else model
        with pytest.raises((CollectiveError, RuntimeError), match="full"):
            collector.broadcast_state(target, source={"w": np.ones(3)})
        return model.w.tolist()

    assert run(send) == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("kind", ["swapped", "shifted", "part of another"])
def test_source_over_the_memory_of_the_target_is_refused(kind):
    data = np.arange(8.0)
    targets = {"a": data[:4], "b": data[4:]}
    source = {
        "swapped": {"a": data[4:], "b": data[:4]},
        "shifted": {"a": data[2:6], "b": np.ones(4)},
        "part of another": {"a": np.ones(4), "b": data.reshape(4, 2)[:, 0]},
    }[kind]
    with pytest.raises(ValueError, match=r"shares memory with '.' of source=; pass a copy"):
        DistributedStateCollector(SingleGroup()).broadcast_state(targets, source=source)
    assert data.tolist() == list(range(8))


def test_source_may_be_the_target_or_have_its_parts():
    data = np.arange(8.0)
    collector = DistributedStateCollector(SingleGroup())
    collector.broadcast_state({"a": data}, source={"a": data})
    part = Layout.rows(2).shard(data, 1)
    collector.broadcast_state({"a": part}, source={"a": data})
    assert data.tolist() == list(range(8))


def test_overlapping_targets_need_a_source_that_overlaps_alike():
    def send(collector, overlaps):
        both = np.full(6, collector.group.rank + 1.0)
        state = {"qkv": both, "q": both[:2] if collector.group.rank in overlaps else np.zeros(2)}
        try:
            collector.broadcast_state(state)
        except CompatibilityError as error:
            return error.differences[0].kind, both[0]
        return both[0]

    assert run(lambda collector: send(collector, [0, 1])) == [1, 1]
    assert run(lambda collector: send(collector, [1])) == [("memory", 1), ("memory", 2)]
    assert run(lambda collector: send(collector, [0])) == [1, 1]


@pytest.mark.parametrize("other", [1.0, 2.0])
def test_tied_targets_need_equal_tensors(other):
    def send(collector):
        array = np.zeros(2)
        state = {"a": array, "b": array if collector.group.rank else np.zeros(2)}
        source = {"b": np.full(2, other), "a": np.ones(2)}
        try:
            collector.broadcast_state(state, source=source if collector.group.rank == 0 else None)
        except CompatibilityError as error:
            assert "rank 1 has one array for it and 'a'" in str(error)
            return 0.0, *state["a"], *state["b"]
        return 1.0, *state["a"], *state["b"]

    expected = (1.0,) * 5 if other == 1 else (0.0,) * 5
    assert run(send) == [expected, expected]


def test_parts_need_a_source_that_has_them():
    array = np.arange(6.0)

    def send(collector):
        shard = Layout.rows(2).shard(np.zeros(6), collector.group.rank)
        with pytest.raises(CompatibilityError, match=r"rank 0 has part 0 of it alone.*source="):
            collector.broadcast_state({"w": shard})
        source = {"w": array} if collector.group.rank == 0 else None
        collector.broadcast_state({"w": shard}, source=source)
        return shard.array.tolist()

    assert run(send) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.broadcast_to(np.ones(1), 3), "read-only"),
        (np.float64(3), "a float64; only NumPy arrays"),
        (np.lib.stride_tricks.as_strided(np.ones(1), (3,), (0,)), "share memory"),
        (np.lib.stride_tricks.as_strided(np.ones(2), (3,), (4,)), "share memory"),
    ],
)
def test_unwritable_targets_are_refused_on_all_ranks(array, text):
    def send(collector):
        collector.broadcast_state({"w": array if collector.group.rank else np.ones(3)})

    rank_1_raises(send, ValueError, text)


ALIASES = {
    "swapped": lambda a, b: {"a": b, "b": a},
    "reversed": lambda a, b: {"a": a[::-1], "b": b},
    "transposed": lambda a, b: {"a": a, "b": b.T},
    "its own": lambda a, b: {"a": a, "b": b},
}


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["sparse", "meta", "lazy"])
def test_tensors_without_plain_memory_are_named(kind):
    torch = pytest.importorskip("torch")
    makers = {
        "sparse": lambda: torch.eye(2).to_sparse(),
        "meta": lambda: torch.ones(2, device="meta"),
        "lazy": torch.nn.parameter.UninitializedParameter,
    }
    state = {"a": np.ones(1), "layer.w": makers[kind]()}
    collector = DistributedStateCollector(SingleGroup())
    for call in (
        lambda: collector.compare_states([state, state]),
        lambda: collector.merge_states([state]),
        lambda: collector.gather_full_state(state),
        lambda: collector.broadcast_state(state),
    ):
        with pytest.raises(UnstorableError, match=r"'layer\.w' is "):
            call()


# ---- optimizers ----


def stage(name, step, **values):
    """The optimizer state of a pipeline stage with one parameter."""
    group = {"params": [name], "lr": 0.1, **values}
    return OptimizerStateDict({f"{name}.m": np.ones(2)}, step=step, param_groups=[group])


def test_merged_optimizers_have_the_groups_of_all_ranks():
    collector = DistributedStateCollector(SingleGroup())
    packed = {"packed_states": {"q": [0]}}
    states = [stage("a", 3, **packed), stage("b", 4, lr=0.2), stage("a", 3, **packed)]
    merged = collector.merge_states(states)
    assert list(merged) == ["a.m", "b.m"] and merged.step == 4
    assert merged.param_groups == (*states[0].param_groups, *states[1].param_groups)
    assert states[2].param_groups == states[0].param_groups and states[0].step == 3
    with pytest.raises(CompatibilityError, match=r"group of 'a' has 'lr' = 0.1 on rank 0, and 0.5"):
        collector.merge_states([stage("a", 3), stage("a", 3, lr=0.5)])
    first = collector.merge_states([stage("a", 3), stage("a", 3, lr=0.5)], check=False)
    assert first.param_groups == stage("a", 3).param_groups
    nameless = OptimizerStateDict({"a.m": np.ones(2)}, param_groups=[{"lr": 1}])
    assert collector.merge_states([nameless, nameless]).param_groups == ({"lr": 1},)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lr": 0.5}, "the group of 'a' has 'lr' = 0.1 on rank 0, and 0.5 on rank 1"),
        ({"lr": np.float64(0.5)}, "the group of 'a' has 'lr' = 0.1 on rank 0, and 0.5 on rank 1"),
        ({"decay": 1}, "the group of 'a' has 'decay' = no value on rank 0, and 1 on rank 1"),
        ({"step": 4}, "the optimizer has step 3 on rank 0, and 4 on rank 1"),
    ],
)
def test_a_gathered_optimizer_has_the_values_of_every_rank(change, text):
    states = [stage("a", 3), stage("a", **{"step": 3, **change})]

    def gather(collector, verify=True):
        state = states[collector.group.rank]
        return collector.gather_full_state(state, root=1, verify_replicas=verify)

    for error in run_all(gather):
        assert isinstance(error, CompatibilityError) and text in str(error)
        assert "verify_replicas=False uses the values of the root" in str(error)
    _, gathered = run(lambda collector: gather(collector, verify=False))
    assert gathered.param_groups == states[1].param_groups and gathered.step == states[1].step


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([{"learning_rate": rate} for rate in (0.1, 0.2)], "has 'learning_rate' = 0.1 on rank 0"),
        ([{"param_groups": [{"lr": rate}]} for rate in (0.1, 0.2)], "of 'group 0' has 'lr' = 0.1"),
        ([{"param_groups": [{"lr": 0.1}]}, {"learning_rate": 0.1}], ""),
    ],
)
def test_optimizers_without_names_of_parameters_are_compared(values, text):
    states = [OptimizerStateDict({"a.m": np.ones(2)}, **each) for each in values]
    results = run_all(lambda collector: collector.gather_full_state(states[collector.group.rank]))
    if text:
        assert all(isinstance(error, CompatibilityError) for error in results)
        assert text in str(results[1])
    else:
        assert results[0].param_groups == states[0].param_groups


def test_equal_values_of_optimizers_are_gathered():
    values = {"betas": (0.9, 0.99), "limit": float("nan"), "rate": np.float32(0.1)}
    states = [stage("a", 3, **values), stage("a", 3, **{**values, "betas": [0.9, 0.99]})]
    states.append(OptimizerStateDict({"a.m": np.ones(2)}, step=3))  # its groups are not known

    def gather(collector):
        return collector.gather_full_state(states[collector.group.rank])

    assert run(gather, 3)[0].param_groups == states[0].param_groups


def test_empty_parts_are_not_tied():
    """Each is a new array without memory, and may have the id of a deleted array."""
    layout = Layout.axis(0, 4)

    class Parts(dict):
        """Shards with a new array at each access, like DTensors."""

        def items(self):
            return ((name, layout.shard(np.zeros((3, 2)), 3)) for name in self)

    described = describe(Parts({f"w{number}": None for number in range(100)}))
    assert [entry.tied for entry in described] == [None] * 100


@pytest.mark.parametrize("shapes", ["overlap", "tied dtypes"])
def test_ranks_may_order_names_of_shared_elements_differently(shapes):
    def work(collector):
        data = np.full(8, collector.group.rank, np.float32)
        views = {"a": data[:6], "b": data[2:], "c": data[4:]}
        if shapes == "tied dtypes":
            views = {"a": data, "b": data.view(np.int32), "c": data[4:]}
        names = sorted(views, reverse=collector.group.rank == 1)
        collector.broadcast_state({name: views[name] for name in names}, root=1)
        return data

    for data in run(work):
        same_bits(data, np.ones(8, np.float32))


def test_a_rank_that_shares_elements_differently_is_named():
    def work(collector):
        data = np.zeros(8)
        begin = 2 + collector.group.rank
        collector.broadcast_state({"a": data[:5], "b": data[begin : begin + 5]})

    for error in run_all(work):
        assert "on rank 1, and differently on rank 0" in str(error)
