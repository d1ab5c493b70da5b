"""order="tree": sums and norms with the same bits on any number of ranks; refusals."""

import hashlib
import re
import tracemalloc
from contextlib import nullcontext
from itertools import pairwise
from math import ceil, log2

import mpi_jobs
import numpy as np
import pytest
from gradient_model import NARROW, gradient_of, units_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tries import tries

from mlstate import CollectiveError, CompatibilityError, _core
from mlstate.collectives import SingleGroup
from mlstate.fsdp import (
    FSDP,
    FSDPBackwardHook,
    FSDPShardingUnit,
    GradientAccumulator,
    ReduceScatterOperation,
    clip_grad_norm,
)
from mlstate.fsdp._leaf_exchange import SumOrder, _join
from mlstate.fsdp._leaf_order import LeafSums, squares_root, subtrees
from mlstate.testing import run_ranks

pytestmark = pytest.mark.timeout(120)

WORLDS = [1, 2, 3, 4, 5, 8]
SHAPES = {"a": (7, 3), "b": (5,), "c": (), "d": (0, 2)}


def tree(leaves):
    """The sum of `leaves` in a binary tree over their indices; None adds nothing."""

    def node(level, position):
        if level == 0:
            return leaves[position] if position < len(leaves) else None
        left, right = node(level - 1, 2 * position), node(level - 1, 2 * position + 1)
        return right if left is None else left if right is None else left + right

    return node(max(len(leaves) - 1, 0).bit_length(), 0)


def wide(gradient):
    return gradient.astype(np.float32) if str(gradient.dtype) in NARROW else gradient


# ---- one rank ----


@given(start=st.integers(0, 200), count=st.integers(0, 200))
def test_subtrees_cover_a_range_once_and_are_few(start, count):
    nodes = list(subtrees(start, start + count))
    leaves = [leaf for level, p in nodes for leaf in range(p << level, (p + 1) << level)]
    assert leaves == list(range(start, start + count))
    assert len(nodes) <= max(1, 2 * log2(max(count, 1)))


@settings(max_examples=tries(60), deadline=None)
@given(
    data=st.data(),
    count=st.integers(1, 19),
    first=st.sampled_from([0, 4, 6]),
    dtype=st.sampled_from(["float32", "float16", "float64", "int32", "complex64"]),
    donate=st.booleans(),
)
def test_an_accumulator_adds_up_leaves_of_any_order_in_one_tree(data, count, first, dtype, donate):
    indices = data.draw(st.permutations(range(first, first + count)))
    has_gradient = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    leaves = [None] * first + [
        gradient_of([i, count], (3, 2), "float32").astype(dtype) if has else None
        for i, has in enumerate(has_gradient)
    ]
    accumulator = GradientAccumulator(order="tree", max_pending=64)
    for _ in range(2):  # the second round in the memory of the first
        for index in indices:
            gradient = leaves[index]
            batch = {"always": np.ones(1, np.float32)}
            if gradient is not None:
                batch["w"] = gradient.copy()
            accumulator.add_gradients(batch, index=index, donate=donate)
        sums = accumulator.get_and_clear_gradients()
        assert sums["always"].tolist() == [count]
        expected = tree([None if leaf is None else wide(leaf) for leaf in leaves])
        assert ("w" in sums) == (expected is not None)
        if expected is not None:
            assert sums["w"].tobytes() == expected.astype(dtype).tobytes()


def test_an_accumulator_counts_without_indices_and_has_the_norm_so_far():
    accumulator = GradientAccumulator(3, order="tree", dtype="float32")
    for value in (3, 1, np.inf):
        accumulator.add_gradients({"w": np.full(4, value, np.float16)})
        assert accumulator.nonfinite == ({"w": 4} if value == np.inf else {})
    assert accumulator.is_complete
    assert accumulator.counts == {"w": 3}
    accumulator.reset()
    accumulator.add_gradients({"w": np.full(4, 3, np.float16)})
    accumulator.add_gradients({"w": np.full(4, 1, np.float16)})
    assert accumulator.norm == 8.0
    assert accumulator.get_and_clear_gradients()["w"].dtype == np.float32
    accumulator.add_gradients({"w": np.ones((2, 2), np.float64)})  # another shape and dtype
    assert accumulator.get_and_clear_gradients()["w"].tolist() == [[1, 1], [1, 1]]


def test_an_accumulator_does_not_change_the_gradients_or_earlier_sums():
    accumulator = GradientAccumulator(order="tree")
    gradients = [np.full(3, value, np.float32) for value in (1, 2, 4)]
    results = []
    for _ in range(2):
        for gradient in gradients:
            accumulator.add_gradients({"w": gradient})
        results.append(accumulator.get_and_clear_gradients()["w"])
    assert [gradient.tolist() for gradient in gradients] == [[1] * 3, [2] * 3, [4] * 3]
    assert [result.tolist() for result in results] == [[7] * 3] * 2


def test_donated_gradients_are_summed_in_their_memory():
    accumulator = GradientAccumulator(order="tree")
    narrow, column = np.full(2, 3, np.float16), np.ones((2, 2), np.float32)[:, 0]
    fixed = np.full(2, 5, np.int32)
    fixed.flags.writeable = False
    tracemalloc.start()
    try:
        for _ in range(3):  # memory of an earlier round would add up
            leaves = [np.full(1 << 18, value, np.float32) for value in range(1, 9)]
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            for leaf in leaves:
                others = {"narrow": narrow, "column": column, "fixed": fixed}
                accumulator.add_gradients({"w": leaf} | others, donate=True)
            sums = accumulator.get_and_clear_gradients()
            assert tracemalloc.get_traced_memory()[1] - before < leaves[0].nbytes // 4
            assert np.shares_memory(sums["w"], leaves[0])
            assert set(sums["w"].tolist()) == {36}
    finally:
        tracemalloc.stop()
    assert [sums[name].tolist() for name in ("narrow", "column", "fixed")] == [
        [24] * 2,
        [8] * 2,
        [40] * 2,
    ]
    assert [narrow.tolist(), column.tolist(), fixed.tolist()] == [[3] * 2, [1] * 2, [5] * 2]


def test_leaves_in_order_hold_log2_sums():
    sums = LeafSums()
    for leaf in range(100):
        sums.add((0, leaf), {"w": np.ones(1, np.float32)})
        assert len(sums.nodes) <= ceil(log2(leaf + 2))


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([0, 1, 0], "leaf 0 was added before; every micro-batch of a step has another index"),
        ([0, 2, 4, 6], "leaf 6 comes while 3 sums wait for their neighbours, as many as"),
    ],
)
def test_an_accumulator_is_unchanged_by_a_refused_index(indices, text):
    accumulator = GradientAccumulator(order="tree", max_pending=3)
    *good, bad = indices
    for index in good:
        accumulator.add_gradients({"w": np.ones(2, np.float32)}, index=index)
    with pytest.raises(ValueError, match=re.escape(text)):
        accumulator.add_gradients({"w": np.ones(2, np.float32)}, index=bad)
    assert accumulator.counts == {"w": len(good)}


def test_an_accumulator_refuses_other_shapes_dtypes_and_gaps():
    accumulator = GradientAccumulator(order="tree")
    accumulator.add_gradients({"w": np.ones(2, np.float32)}, index=1)
    with pytest.raises(CompatibilityError, match=r"'w': the gradient's shape is \(3,\)"):
        accumulator.add_gradients({"v": np.ones(1), "w": np.ones(3, np.float32)}, index=2)
    with pytest.raises(CompatibilityError, match="'v': gradients of dtype bool cannot be added"):
        accumulator.add_gradients({"v": np.ones(1, bool)}, index=2)
    with pytest.raises(ValueError, match="index must be 0 or more"):
        accumulator.add_gradients({"w": np.ones(2, np.float32)}, index=-1)
    accumulator.add_gradients({"w": np.ones(2, np.float32)}, index=4)
    with pytest.raises(ValueError, match="leaf 2 is missing, and all to 3, and micro-batches to 4"):
        accumulator.get_and_clear_gradients()
    assert accumulator.counts == {"w": 2}
    with pytest.raises(ValueError, match="index needs GradientAccumulator"):
        GradientAccumulator().add_gradients({"w": np.ones(2)}, index=0)
    with pytest.raises(ValueError, match="donate needs GradientAccumulator"):
        GradientAccumulator().add_gradients({"w": np.ones(2)}, donate=True)
    with pytest.raises(ValueError, match="order must be 'arrival' or 'tree', got 'rank'"):
        GradientAccumulator(order="rank")


# ---- several ranks ----


def gradients_at(step, leaf, weights, dtype):
    """Gradients of a micro-batch; they depend on the weights. In leaf 2, "b" has none."""
    return {
        name: (gradient_of([step, leaf, i], weight.shape, "float32") * (1 + weight)).astype(dtype)
        for i, (name, weight) in enumerate(weights.items())
        if (name, leaf) != ("b", 2)
    }


def leaves_of(group, count, way):
    """The leaves of a rank, in the order of its passes, and a context for each."""
    rank, world = group.rank, group.world_size
    if way == "leaf by leaf":
        return [(leaf, False) for leaf in range(rank, count, world)]
    chunk = ceil(count / world)
    own_leaves = list(range(min(rank * chunk, count), min((rank + 1) * chunk, count)))
    if way == "in reverse":
        return [(leaf, False) for leaf in reversed(own_leaves)]
    return [(leaf, way == "held" or leaf != own_leaves[-1]) for leaf in own_leaves]


def train(group, way, *, count=8, dtype="float32", layout="flat", steps=3, **settings):
    """The SHA-256 of the weights after some steps."""
    weights = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    units = units_of(group.rank, SHAPES, dtype, layout)
    how = {"op": "mean", "reduce_dtype": "float32", "allow_unused": True} | settings
    hook = FSDPBackwardHook(FSDP(group, order="tree", **how))
    hook.use_units(units)
    for step in range(steps):
        for leaf, is_held in leaves_of(group, count, way):
            index_context = nullcontext() if way == "leaf by leaf" else hook.leaf(leaf)
            with hook.no_sync() if is_held else nullcontext(), index_context:
                gradients = gradients_at(step, leaf, weights, dtype)
                for name in reversed(gradients):
                    hook.add_gradient(name, gradients[name])
                hook.finish()
        assert hook.finish_step() == count
        clip_grad_norm(units, 1.0, group, order="tree")
        for name, unit in units.items():
            part = unit.layout.take(weights[name], group.rank) - unit.local_gradient
            gathered = group.all_gather(part.reshape(-1), counts=unit.counts)
            weights[name] = gathered.reshape(SHAPES[name])
    return hashlib.sha256(b"".join(weight.tobytes() for weight in weights.values())).hexdigest()


def expected_weights(dtype, count=8, steps=3):
    """The SHA-256 of `train`, computed by plain trees."""
    weights = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    for step in range(steps):
        batches = [gradients_at(step, leaf, weights, dtype) for leaf in range(count)]
        sums = {
            name: np.asarray(tree([None if name not in b else wide(b[name]) for b in batches]))
            / np.float32(count)
            for name in weights
        }
        squares = 0.0
        for name in sorted(sums):
            squares += tree([float(x) ** 2 for x in sums[name].reshape(-1)] or [0.0])
        factor = np.float32(1.0 / (np.sqrt(squares) + 1e-6))
        weights = {name: weights[name] - sums[name] * factor for name in weights}
    return hashlib.sha256(b"".join(weight.tobytes() for weight in weights.values())).hexdigest()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("way", ["leaf by leaf", "in reverse", "held", "held but the last"])
def test_weights_have_one_digest_on_any_number_of_ranks(way, dtype):
    expected = expected_weights(dtype)
    for world in WORLDS:
        assert run_ranks(world, lambda group: train(group, way, dtype=dtype)) == [expected] * world


@pytest.mark.parametrize(
    "settings",
    [{"layout": "rows"}, {"bucket_bytes": 0}, {"bucket_bytes": 60, "nonfinite": "allow"}],
    ids=str,
)
def test_layouts_and_buckets_do_not_change_the_digest(settings):
    expected = expected_weights("float32")
    shapes_with_rows = run_ranks(3, lambda group: train(group, "leaf by leaf", **settings))
    assert shapes_with_rows == [expected] * 3


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_fewer_leaves_than_ranks_and_odd_numbers(count):
    expected = expected_weights("float32", count)
    for way, world in [("leaf by leaf", 4), ("held", 4), ("held", 3)]:
        assert run_ranks(world, lambda g, way=way: train(g, way, count=count)) == [expected] * world


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("world", [1, 2, 3, 7, 64, 600])
def test_the_core_adds_leaves_of_ranks_in_the_plain_tree(world, dtype):
    """Rank 0 of many has all elements; some leaves have no gradient."""
    size, sums, leaves = 2056, LeafSums(1000), []
    random = np.random.default_rng(world)
    for number in range(3):
        sent = random.standard_normal((world, size), np.float32).astype(dtype)
        lacks = random.random(world) < 0.2
        lacks[0] = False
        leaves += [None if lack else wide(leaf) for leaf, lack in zip(sent, lacks, strict=True)]
        joined = _join(sums, [((0, number * world + rank), rank) for rank in range(world)], 0)
        absent = {*np.flatnonzero(lacks).tolist(), *(n for n, a in sums.nodes.items() if not a)}
        order = SumOrder(joined, frozenset(absent), world, is_wide=dtype == "float32")
        memories = [np.empty(size, np.float32) if n is None else n for n in order.memories]
        memories = tuple(sums.nodes[m]["w"] if isinstance(m, tuple) else m for m in memories)
        segment = sent[0], (size, *[0] * (world - 1)), memories, order.codes
        _core.bucket_reduce(
            _core.bucket([segment], world, 0, "sum", 1.0), sent[1:].reshape(-1).view(np.uint8)
        )
        sums.nodes = {
            node: sums.nodes[node] if node == operand else {} for node, operand in joined.items()
        }
        for node, index in order.results.items():
            sums.nodes[node]["w"] = memories[index]
    assert sums.take_total()[0]["w"].tobytes() == tree(leaves).tobytes()


def test_shared_steps_of_a_hook_end_without_leaves():
    def step(group):
        unit = FSDPShardingUnit("w", (3,), "float32", group.rank)
        hook = FSDPBackwardHook(FSDP(group, order="tree"))
        hook.use_units({"w": unit})
        hook.add_gradient("w", np.ones(3, np.float32))
        hook.finish()
        assert unit.local_gradient is None  # until the step ends
        counts = [hook.finish_step()]
        parts = unit.local_gradient.tolist()
        return [*counts, parts, hook.finish_step(), unit.local_gradient]

    assert run_ranks(2, step) == [[2, [2, 2], 0, None], [2, [2], 0, None]]
    assert FSDPBackwardHook(FSDP(SingleGroup(), order="tree")).finish_step() == 0  # no parameters


def test_sums_divide_and_round_once():
    def step(group):
        unit = FSDPShardingUnit("w", (1,), "float16", group.rank)
        hook = FSDPBackwardHook(FSDP(group, order="tree", gradient_divide_factor=4))
        hook.use_units({"w": unit})
        for value in (2048, 1, 1):
            hook.add_gradient("w", np.full(1, value, np.float16))
            hook.finish()
        hook.finish_step()
        return unit.local_gradient

    (result,) = run_ranks(1, step)
    assert (result.dtype, result.tolist()) == (np.float16, [512.5])


# ---- errors, the same on every rank ----


def error_of(group, change, **settings):
    """The error of a rank in a step with an error, after which a step works again."""
    unit = FSDPShardingUnit("w", (6,), "float32", group.rank)
    fsdp = FSDP(group, order="tree", **settings)
    hook = FSDPBackwardHook(fsdp)
    hook.use_units({"w": unit})

    def leaf(index, value=1.0):
        with hook.leaf(index):
            hook.add_gradient("w", np.full(6, value, np.float32))
            hook.finish()

    with pytest.raises(CollectiveError) as caught:
        change(hook, leaf, group.rank)
        hook.finish_step()
    assert unit.local_gradient is None
    leaf(group.rank)
    assert hook.finish_step() == group.world_size
    assert set(unit.local_gradient) <= {float(group.world_size)}
    return str(caught.value).replace(f"rank {group.rank}: ", "here: ", 1)


def errors_of(change, world=3, **settings):
    texts = set(run_ranks(world, lambda group: error_of(group, change, **settings), timeout=20))
    assert len(texts) == 1, texts
    return texts.pop()


def test_an_error_says_how_the_step_goes_on():
    def change(hook, leaf, rank):
        with hook.leaf(rank):
            if rank != 1:
                hook.add_gradient("w", np.ones(6, np.float32))
            hook.finish()

    assert "not reduced, and the step begins again: 'w': " in errors_of(change)


def add_leaf_1_twice(hook, leaf, rank):
    leaf(min(rank, 1))


def leave_leaf_2_out(hook, leaf, rank):
    leaf(rank + 3 * (rank == 2))


def add_not_a_number(hook, leaf, rank):
    leaf(rank, np.nan if rank == 1 else 1)


def test_an_index_that_comes_twice_is_named():
    assert errors_of(add_leaf_1_twice) == (
        "backward pass on here: rank 2: leaf 1 was added before; every micro-batch of a step has "
        "another index"
    )


def test_an_index_that_comes_twice_in_no_sync_is_named():
    def twice(hook, leaf, rank):
        with hook.no_sync():
            leaf(rank)
            leaf(2)

    assert "leaf 2 was added before" in errors_of(twice)


def test_a_missing_index_is_named():
    text = errors_of(leave_leaf_2_out)
    assert text == "finish_step on here: leaf 2 is missing, and all to 4, and leaf 5 was added"


def test_indices_that_hold_too_many_sums_are_refused():
    def apart(hook, leaf, rank):
        for number in range(3):
            leaf(2 * (3 * number + rank))

    assert "comes while 4 sums wait" in errors_of(apart, max_pending=4)

    def apart_in_no_sync(hook, leaf, rank):
        with hook.no_sync():
            apart(hook, leaf, rank)

    text = errors_of(apart_in_no_sync, max_pending=2)
    assert "'w': rank 0: ValueError: leaf 12 comes while 2 sums wait" in text


def test_elements_that_are_not_finite_are_named():
    text = errors_of(add_not_a_number)
    assert "'w': NaN or infinite elements (rank 1: 6)" in text

    def overflow(hook, leaf, rank):
        leaf(rank, 3e38 if rank != 1 else 0)

    assert "the sum is not finite, all gradients are" in errors_of(overflow)


def test_a_missing_gradient_is_named_unless_it_is_allowed():
    def forgotten(hook, leaf, rank):
        if rank == 1:
            hook.finish()
        else:
            leaf(rank)

    assert "'w': rank 1: the backward pass gave no gradient" in errors_of(forgotten)


def error_of_another_order(group):
    """The error of ranks 0 to 2 if rank 1 adds in another order."""
    hook = FSDPBackwardHook(FSDP(group, order="rank" if group.rank == 1 else "tree"))
    hook.use_units({"w": FSDPShardingUnit("w", (2,), "float32", group.rank)})
    hook.add_gradient("w", np.ones(2, np.float32))
    with pytest.raises(CollectiveError, match="settings of FSDP differ between ranks") as caught:
        hook.finish()
    return str(caught.value)


def test_a_rank_with_another_order_is_named():
    for text in run_ranks(3, error_of_another_order):
        assert "(ranks 0, 2: order=tree; rank 1: order=rank)" in text


def results_of(group):
    """Digests and errors."""
    faults = [add_leaf_1_twice, leave_leaf_2_out, add_not_a_number]
    return [
        *[train(group, way) for way in ("leaf by leaf", "in reverse", "held")],
        *[error_of(group, fault) for fault in faults],
        error_of_another_order(group),
    ]


@pytest.mark.parametrize(
    "engine",
    [*mpi_jobs.ENGINES, pytest.param("gloo", marks=pytest.mark.long)],  # it imports torch anew
)
def test_processes_have_the_digests_and_errors_of_threads(engine, monkeypatch):
    if engine == "gloo":
        pytest.importorskip("torch", reason="connects the ranks")
    else:
        mpi_jobs.put_in_path(monkeypatch, engine)
        engine = "mpi"
    assert run_ranks(3, results_of, engine, timeout=100) == run_ranks(3, results_of)


def test_calls_that_reduce_at_once_are_refused():
    unit = FSDPShardingUnit("w", (2,), "float32", 0)
    hook = FSDPBackwardHook(FSDP(SingleGroup(), order="tree"))
    gradient = np.ones(2, np.float32)
    for call in (
        lambda: hook.scatter_gradient(unit, gradient),
        lambda: hook.scatter_multiple({"w": unit}, {"w": gradient}),
        lambda: hook.verify_gradients({"w": unit}, unreduced={"w": gradient}),
    ):
        with pytest.raises(ValueError, match="add_gradient and finish for each micro-batch"):
            call()
    with pytest.raises(ValueError, match="adds up all micro-batches until finish_step"):
        hook.use_units({"w": unit}, accumulate=True)
    hook.use_units({"w": unit})
    with hook.no_sync(), pytest.raises(ValueError, match="needs the index of each micro-batch"):
        hook.add_gradient("w", gradient)
    for call in (lambda h: h.finish_step(), lambda h: h.leaf(0).__enter__()):
        with pytest.raises(ValueError, match=r"needs FSDP\(group, order='tree'\)"):
            call(FSDPBackwardHook(FSDP(SingleGroup())))
    for how, text in [
        ({"order": "ring"}, "order must be 'rank' or 'tree', got 'ring'"),
        ({"order": "tree", "op": "max"}, "order='tree' needs op='sum' or 'mean', got 'max'"),
        ({"max_pending": 0}, "max_pending must be 1 or more"),
    ]:
        with pytest.raises(ValueError, match=re.escape(text)):
            FSDP(SingleGroup(), **how)
    assert ReduceScatterOperation(SingleGroup(), (2,), "float32", 0).reduce_scatter(gradient)[0]


# ---- norms ----


@settings(max_examples=tries(40), deadline=None)
@given(
    data=st.data(),
    count=st.integers(0, 3000),
    dtype=st.sampled_from(["float32", "float16", "float64", "complex64"]),
)
def test_squares_equal_the_plain_tree_for_any_parts_of_the_array(data, count, dtype):
    array = gradient_of([count], (count,), "float32").astype(dtype)
    cuts = data.draw(st.lists(st.integers(0, count), max_size=4).map(sorted))
    ranges = list(pairwise([0, *cuts, count]))
    counts = [end - start for start, end in ranges]
    sums = [_core.tree_squares(array[start:end], start) for start, end in ranges]
    squares = [float(x.real) ** 2 + float(x.imag) ** 2 for x in array]
    assert squares_root(counts, list(map(iter, sums))) == (tree(squares) or 0.0)
    assert all(
        len(each) <= max(1, 2 * log2(max(n, 1))) for n, each in zip(counts, sums, strict=True)
    )


def clipped(group, layout):
    """The norm, and the digest of all clipped gradients."""
    units = units_of(group.rank, SHAPES | {"e": (301, 2)}, layout=layout)
    for number, (name, unit) in enumerate(units.items()):
        unit.bind(group.world_size)
        full = gradient_of([number], unit.shape, "float32")
        unit.local_gradient = unit.layout.take(full, group.rank).copy()
        if name == "b":
            unit.local_gradient = None
    norm = clip_grad_norm(units, 0.5, group, order="tree")
    parts = [u.local_gradient.reshape(-1) for n, u in units.items() if n != "b"]
    counts = [u.counts for n, u in units.items() if n != "b"]
    wholes = [group.all_gather(p, counts=c) for p, c in zip(parts, counts, strict=True)]
    return norm.hex(), hashlib.sha256(b"".join(w.tobytes() for w in wholes)).hexdigest()


def test_norms_and_clipped_gradients_are_equal_for_flat_parts_and_rows_on_1_to_8_ranks():
    results = {
        result
        for layout in ("flat", "rows")
        for world in range(1, 9)
        for result in run_ranks(world, lambda group, layout=layout: clipped(group, layout))
    }
    assert len(results) == 1
    with pytest.raises(ValueError, match="layout must be 'flat' or 'rows', got 'columns'"):
        FSDPShardingUnit("w", (2, 2), "float32", 0, layout="columns")


@pytest.mark.parametrize(
    ("order", "shape", "layout", "text"),
    [
        ("rank", (4,), "flat", "has order='rank', not 'tree'"),
        ("tree", (5,), "flat", "rank 1 has other parameters, shapes or layouts than rank 0"),
        ("tree", (4,), "rows", "rank 1 has other parameters, shapes or layouts than rank 0"),
    ],
)
def test_ranks_that_clip_otherwise_are_named(order, shape, layout, text):
    def clip(group):
        how = (order, shape, layout) if group.rank == 1 else ("tree", (4,), "flat")
        unit = FSDPShardingUnit("w", how[1], "float32", group.rank, world_size=2, layout=how[2])
        unit.local_gradient = np.ones(unit.local_shape, np.float32)
        with pytest.raises(CollectiveError) as caught:
            clip_grad_norm({"w": unit}, 1.0, group, order=how[0])
        assert set(unit.local_gradient) == {1.0}
        return str(caught.value)

    texts = run_ranks(2, clip)
    assert text in texts[0]


def test_gradients_that_have_no_tree_are_refused_on_every_rank():
    def clip(group):
        unit = FSDPShardingUnit("w", (4,), "float32", group.rank)
        unit.local_gradient = np.ones(2 + group.rank, np.float32)
        with pytest.raises((CollectiveError, CompatibilityError)) as caught:
            clip_grad_norm({"w": unit}, 1.0, group, order="tree")
        return str(caught.value)

    needed = "'w': order='tree' needs a gradient of shape (2,) in main memory, got (3,), NumPy"
    other_rank, own = run_ranks(2, clip)
    assert own == needed
    assert f"gradients of rank 1 cannot be clipped: CompatibilityError: {needed}" in other_rank
    with pytest.raises(CompatibilityError, match="int32 has no squares in a tree"):
        _core.tree_squares(np.ones(2, np.int32), 0)
