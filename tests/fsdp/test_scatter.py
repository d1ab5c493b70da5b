"""Scattered gradients: the same bits from every public function, for every kind of array."""

import asyncio
import weakref

import numpy as np
import pytest
from gradient_model import (
    ENGINES,
    FLOATS,
    INTEGERS,
    NARROW,
    Model,
    assert_same,
    backward,
    check_parts,
    gradient_of,
    gradients_of,
    hook_of,
    part_of,
    reduced,
    run,
    units_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_model import LAYOUTS
from thread_team import num_threads
from tries import tries

from mlstate import CollectiveError, CompatibilityError
from mlstate.collectives import SingleGroup
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit, _bucket
from mlstate.fsdp._bucket import Entry

pytestmark = pytest.mark.timeout(120)

SHAPES = {"a": (5, 3), "b": (7,), "c": (), "d": (20, 2), "e": (0, 4)}


# ---- ways to scatter gradients ----


def together(fsdp, units, gradients, rng):
    FSDPBackwardHook(fsdp).scatter_multiple(units, gradients)


def paired_by_name(fsdp, units, gradients, rng):
    names = rng.permutation(list(gradients))
    FSDPBackwardHook(fsdp).scatter_multiple(units, {name: gradients[name] for name in names})


def one_by_one(fsdp, units, gradients, rng):
    hook = FSDPBackwardHook(fsdp)
    for name, unit in units.items():
        assert hook.scatter_gradient(unit, gradients[name]) is unit.local_gradient


def in_a_loop(fsdp, units, gradients, rng):
    hook = FSDPBackwardHook(fsdp)
    hook.use_units(units)
    backward(hook, gradients)


def in_any_order(fsdp, units, gradients, rng):
    hook = FSDPBackwardHook(fsdp)
    hook.use_units(units)
    for name in rng.permutation(list(gradients)):  # each rank in another order
        hook.add_gradient(str(name), gradients[name])
    hook.finish()


def by_hooks(fsdp, units, gradients, rng):
    model = Model()
    with FSDPBackwardHook(fsdp) as hook:
        hook.register_hooks(model, units)
        returned = model.backward(gradients)
    assert not model.functions
    assert all(returned[name] is units[name].local_gradient for name in units)


def awaited(fsdp, units, gradients, rng):
    asyncio.run(FSDPBackwardHook(fsdp).scatter_multiple_async(units, gradients))


WAYS = [together, paired_by_name, one_by_one, in_a_loop, in_any_order, by_hooks, awaited]

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
cases = st.fixed_dictionaries(
    {
        "world": st.integers(1, 4),
        "shapes": st.lists(shapes, min_size=1, max_size=5),
        "dtypes": st.lists(st.sampled_from(FLOATS + INTEGERS), min_size=5, max_size=5),
        "layout": st.sampled_from(["flat", "rows"]),
        "op": st.sampled_from(["sum", "mean", "min", "max", "divided"]),
        "reduce_dtype": st.sampled_from([None, "float32"]),
        "bucket_bytes": st.sampled_from([0, 1, 100, 1000, 25 << 20]),
        "way": st.sampled_from(WAYS),
        "engine": st.sampled_from(list(ENGINES)),
        "threads": st.integers(1, 2),
        "seed": st.integers(0, 99),
    }
)


@settings(max_examples=tries(150), deadline=None)
@given(cases)
def test_bits_match_a_sum_in_rank_order(case):
    """For every call, bucket size, engine and number of threads."""
    named = {f"p{i}": shape for i, shape in enumerate(case["shapes"])}
    divided = case["op"] in ("mean", "divided")
    dtypes = {
        name: dtype if dtype in FLOATS or not divided else "float32"
        for name, dtype in zip(named, case["dtypes"], strict=False)
    }
    how = {"op": "sum", "gradient_divide_factor": 2.5} if case["op"] == "divided" else case
    how = {key: how[key] for key in ("op", "gradient_divide_factor") if key in how}
    expected = {"op": how["op"], "divisor": how.get("gradient_divide_factor", 1.0)}

    def work(group):
        fsdp = FSDP(
            group, bucket_bytes=case["bucket_bytes"], reduce_dtype=case["reduce_dtype"], **how
        )
        units = units_of(group.rank, named, dtypes, case["layout"])
        gradients = gradients_of(group.rank, named, dtypes)
        before = {name: gradient.tobytes() for name, gradient in gradients.items()}
        case["way"](fsdp, units, gradients, np.random.default_rng([case["seed"], group.rank]))
        assert before == {name: gradient.tobytes() for name, gradient in gradients.items()}
        check_parts(
            units,
            group.world_size,
            named,
            dtypes,
            case["layout"],
            reduce_dtype=case["reduce_dtype"],
            **expected,
        )

    with num_threads(case["threads"]):
        run(work, case["world"], case["engine"])


@pytest.mark.parametrize("engine", ENGINES)
def test_large_gradients_have_the_same_bits_with_any_number_of_threads(engine):
    named = {"w": (300_001,), "v": (517, 129)}

    def work(group):
        units = units_of(group.rank, named, {"w": "float32", "v": "float16"})
        gradients = gradients_of(group.rank, named, {"w": "float32", "v": "float16"})
        FSDPBackwardHook(FSDP(group)).scatter_multiple(units, gradients)
        return [unit.local_gradient.tobytes() for unit in units.values()]

    bits = []
    for count in (1, 2, 4):
        with num_threads(count):
            bits.append(run(work, 3, engine))
    assert bits[0] == bits[1] == bits[2]


def test_the_order_of_ranks_decides_the_bits():
    """The model's gradients depend on the order, so the tests above would notice another one."""
    each = [gradients_of(rank, SHAPES) for rank in range(3)]
    forward = reduced([g["d"] for g in each])
    back = reduced([g["d"] for g in reversed(each)])
    assert forward.tobytes() != back.tobytes()


# ---- arrays ----


def read_only(gradient):
    gradient.flags.writeable = False
    return gradient


VIEWS = {
    **{name: LAYOUTS[name] for name in ("fortran", "gaps", "backwards", "swapped", "unaligned")},
    "read-only": read_only,
    "broadcast": lambda gradient: np.broadcast_to(gradient[:1], gradient.shape),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [d for d in FLOATS if d != "bfloat16"] + ["int32"])
@pytest.mark.parametrize("view", VIEWS)
def test_strided_and_swapped_gradients_are_reduced(group, view, dtype, engine):
    each = [VIEWS[view](gradient_of(rank, (6, 5), dtype)) for rank in range(2)]
    total = reduced([np.array(g, g.dtype.newbyteorder("=")) for g in each])
    for layout in ("flat", "rows"):
        unit = FSDPShardingUnit("w", (6, 5), dtype, group.rank, layout=layout)
        gradient = each[group.rank]
        before = gradient.tobytes()
        FSDPBackwardHook(FSDP(group)).scatter_gradient(unit, gradient)
        assert_same(unit.local_gradient, part_of(total, layout, group.rank, 2))
        assert gradient.tobytes() == before


@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_ranks_beyond_the_rows_get_empty_parts(world, engine, layout):
    named = {"one": (1, 4), "two": (2,), "six": (6, 2), "none": (0,), "all": (world, 1)}

    def work(group):
        units = units_of(group.rank, named, layout=layout)
        FSDPBackwardHook(FSDP(group)).scatter_multiple(units, gradients_of(group.rank, named))
        check_parts(units, world, named, layout=layout)
        return {name: unit.local_gradient.shape[0] for name, unit in units.items()}

    sizes = run(work, world, engine)
    assert sum(lengths["two"] for lengths in sizes) == 2
    assert [lengths["none"] for lengths in sizes] == [0] * world
    if world == 5:
        assert [lengths["two"] for lengths in sizes] == [1, 1, 0, 0, 0]
        assert [lengths["six"] for lengths in sizes] == ([2, 2, 2, 0, 0] if layout == "rows" else [
            3, 3, 3, 3, 0
        ])  # fmt: skip


@pytest.mark.parametrize("dtype", NARROW)
def test_float32_accumulation_of_narrow_gradients(dtype):
    if dtype not in FLOATS:
        pytest.skip("ml_dtypes has bfloat16")

    def work(group):
        values = [2048, 1, 0.5][group.rank]
        unit = units_of(group.rank, {"w": (6,)}, dtype)["w"]
        gradient = np.full(6, values).astype(gradient_of(0, (1,), dtype).dtype)
        hook = FSDPBackwardHook(FSDP(group, reduce_dtype="float32"))
        hook.scatter_gradient(unit, gradient)
        assert unit.local_gradient.dtype == np.float32
        assert unit.local_gradient.tolist() == [2049.5] * 2
        hook = FSDPBackwardHook(FSDP(group))
        hook.scatter_gradient(unit, gradient)
        assert unit.local_gradient.dtype == gradient.dtype
        assert unit.local_gradient.astype(float).tolist() == [2050.0 if dtype == "float16" else
                                                              2048.0] * 2  # fmt: skip

    run(work, 3)


def test_reduce_dtype_leaves_wide_gradients_alone(group):
    dtypes = {"a": "float64", "b": "int8", "c": "float32", "d": "float16", "e": "float64"}
    units = units_of(group.rank, SHAPES, dtypes)
    gradients = gradients_of(group.rank, SHAPES, dtypes)
    FSDPBackwardHook(FSDP(group, reduce_dtype="float32")).scatter_multiple(units, gradients)
    check_parts(units, 2, SHAPES, dtypes, reduce_dtype="float32")


def test_complex_gradients_have_sums_and_means(group):
    unit = FSDPShardingUnit("w", (4,), "complex64", group.rank)
    gradient = np.array([1 + 2j, 3, 4j, -1], np.complex64) * (group.rank + 1)
    FSDPBackwardHook(FSDP(group)).scatter_gradient(unit, gradient)
    assert unit.local_gradient.tolist() == [[3 + 6j, 9], [12j, -3]][group.rank]


@pytest.mark.parametrize(
    ("dtype", "op", "text"),
    [
        ("int32", "mean", "divided"),
        ("bool", "sum", "bool"),
        ("complex64", "max", "complex64"),
    ],
)
def test_reductions_that_a_dtype_does_not_have_fail_alone_and_on_all_ranks(group, dtype, op, text):
    units = units_of(group.rank, {"a": (4,), "bad": (4,), "c": (2,)}, {
        "a": "float32", "bad": dtype, "c": "float32"
    })  # fmt: skip
    gradients = {name: np.ones(unit.shape, unit.dtype) for name, unit in units.items()}
    with pytest.raises(CollectiveError, match=text) as caught:
        FSDPBackwardHook(FSDP(group, op=op)).scatter_multiple(units, gradients)
    assert caught.value.name == "bad"
    assert units["bad"].local_gradient is None
    assert len(units["a"].local_gradient) == 2
    assert len(units["c"].local_gradient) == 1


# ---- memory ----


@pytest.mark.parametrize("engine", ENGINES)
def test_the_next_pass_writes_into_the_same_memory(group, engine):
    units = units_of(group.rank, SHAPES)
    hook = hook_of(group, units)
    before = {}
    for step in range(3):
        backward(hook, gradients_of(group.rank, SHAPES))
        check_parts(units, 2, SHAPES)
        if step:
            assert all(units[name].local_gradient is before[name] for name in units)
        before = {name: unit.local_gradient for name, unit in units.items()}
        for unit in units.values():
            unit.local_gradient[...] = 99  # as an optimizer may do


def test_preallocated_results_need_no_memory_lookup(monkeypatch):
    looked_at = []
    find = Entry.find_memory

    def counted(self, terms):
        looked_at.append(self.unit.parameter_name)
        find(self, terms)

    monkeypatch.setattr(Entry, "find_memory", counted)
    shapes = {"a": (5, 3), "b": (7,), "e": (0, 4)}
    units = units_of(0, shapes)
    hook = FSDPBackwardHook(FSDP(SingleGroup()))
    for step, expected in enumerate([["a", "b", "e"], [], ["a", "b", "e"], []]):
        hook.scatter_multiple(units, gradients_of(0, shapes))
        check_parts(units, 1, shapes)
        assert sorted(looked_at) == expected
        looked_at.clear()
        if step == 1:
            units["b"].local_gradient = None


@pytest.mark.parametrize(
    "previous",
    [
        None,
        np.zeros(4, np.float64),
        np.zeros(5, np.float32),
        np.zeros((2, 2), np.float32),
        np.zeros(8, np.float32)[::2],
        np.zeros(4, ">f4"),
        np.broadcast_to(np.float32(0), (4,)),
    ],
    ids=["none", "dtype", "length", "shape", "strides", "byte order", "read-only"],
)
def test_memory_that_does_not_fit_is_left_alone(previous):
    """Memory of another gradient in the same bucket, which fits, is used."""

    def work(group):
        units = units_of(group.rank, {"v": (8,), "w": (8,)})
        fits = units["v"].local_gradient = np.zeros(4, np.float32)
        units["w"].local_gradient = previous
        gradients = {name: np.ones(8, np.float32) for name in units}
        FSDPBackwardHook(FSDP(group)).scatter_multiple(units, gradients)
        assert units["v"].local_gradient is fits
        for unit in units.values():
            assert_same(unit.local_gradient, np.full(4, 2, np.float32))

    run(work)
    assert previous is None or not previous.any()


def test_local_gradients_are_never_the_full_gradients_memory():
    """Also on one rank: the backward pass overwrites the full gradient's memory."""
    full = np.ones((2, 2), np.float32)
    unit = FSDPShardingUnit("w", (2, 2), "float32", 0)
    FSDPBackwardHook(FSDP(SingleGroup())).scatter_gradient(unit, full)
    assert not np.shares_memory(unit.local_gradient, full)


def test_copies_need_at_most_two_buckets(monkeypatch):
    """However many buckets one message names; contiguous gradients are not copied."""
    copies, most = [], []
    pack = _bucket.packed

    def counted(array):
        packed = pack(array)
        copies.append(weakref.ref(packed))
        most.append(sum(copy() is not None for copy in copies))
        return packed

    monkeypatch.setattr(_bucket, "packed", counted)
    shapes = {f"p{i}": (4, 3) for i in range(8)}
    units = units_of(0, shapes)
    gradients = {name: np.ones((3, 4), np.float32).T for name in shapes}
    FSDPBackwardHook(FSDP(SingleGroup(), bucket_bytes=0)).scatter_multiple(units, gradients)
    assert len(copies) == 8
    assert max(most) == 2


# ---- accumulation ----


def sums_of(shapes, world, seeds):
    """The reduced full gradients of several passes, added in order."""
    total = {}
    for seed in seeds:
        for name, shape in shapes.items():
            each = [gradient_of([seed, rank], shape, "float32") for rank in range(world)]
            total[name] = total[name] + reduced(each) if name in total else reduced(each)
    return total


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
@pytest.mark.parametrize("hooks", ["loop", "model"])
def test_passes_add_up_in_the_local_gradients(group, hooks, bucket_bytes):
    units = units_of(group.rank, SHAPES)
    hook = FSDPBackwardHook(FSDP(group, bucket_bytes=bucket_bytes))
    model = Model()
    if hooks == "loop":
        hook.use_units(units, accumulate=True)
    else:
        hook.register_hooks(model, units, accumulate=True)
    for seed in range(3):
        gradients = {
            name: gradient_of([seed, group.rank], shape, "float32")
            for name, shape in SHAPES.items()
        }
        if hooks == "model":
            returned = model.backward(gradients)
            assert all(returned[name] is units[name].local_gradient for name in units)
        else:
            backward(hook, gradients)
    for name, total in sums_of(SHAPES, 2, range(3)).items():
        assert_same(units[name].local_gradient, part_of(total, "flat", group.rank, 2), name)
    hook.clear_gradients(units)
    assert not any(unit.local_gradient.any() for unit in units.values())


def test_narrow_gradients_of_several_passes_add_up_in_float32(group):
    """As reduce_dtype requests: 4096 + 1 is 4096 in float16."""
    unit = FSDPShardingUnit("w", (4,), "float16", group.rank)
    hook = hook_of(group, {"w": unit}, accumulate=True, reduce_dtype="float32")
    for value in (2048, 0.5, 0.5):
        backward(hook, {"w": np.full(4, value, np.float16)})
    assert (unit.local_gradient.dtype.name, unit.local_gradient.tolist()) == (
        "float32",
        [4098.0] * 2,
    )


@pytest.mark.parametrize(
    ("previous", "text"),
    [
        (np.zeros(4, np.float64), "the local gradient to add to has dtype float64"),
        (np.zeros(3, np.float32), r"has shape \(3,\), expected \(4,\)"),
        (np.broadcast_to(np.float32(0), (4,)), "is read-only"),
    ],
)
def test_unaccumulatable_gradient_on_one_rank_fails_on_all(previous, text):
    def work(group):
        unit = FSDPShardingUnit("w", (8,), "float32", group.rank)
        other = FSDPShardingUnit("x", (8,), "float32", group.rank)
        unit.local_gradient = previous if group.rank else np.zeros(4, np.float32)
        hook = hook_of(group, {"w": unit, "x": other}, accumulate=True)
        for name in ("x", "w"):
            hook.add_gradient(name, np.ones(8, np.float32))
        with pytest.raises(CollectiveError, match=f"'w': rank 1: .*{text}"):
            hook.finish()
        assert unit.local_gradient is None
        assert other.local_gradient.tolist() == [2.0] * 4

    run(work)
    assert not previous.any()


@pytest.mark.parametrize("spoil", ["missing", "shape", "not a number"])
def test_a_step_that_lost_a_sum_begins_again(spoil):
    """A pass after an error would begin a sum without the passes before it."""

    def work(group):
        units = units_of(group.rank, {"w": (4,), "x": (4,)})
        hook = hook_of(group, units, accumulate=True)
        good = dict.fromkeys(units, np.ones(4, np.float32))
        bad = {"shape": np.ones(5, np.float32), "not a number": np.full(4, np.nan, np.float32)}
        backward(hook, good)
        with pytest.raises(CollectiveError):
            if group.rank and spoil == "missing":
                backward(hook, {"x": good["x"]})
            else:
                backward(hook, {**good, "w": bad[spoil]} if group.rank else good)
        for _ in range(2):
            with pytest.raises(CollectiveError, match=r"'w': .*an earlier error dropped"):
                backward(hook, good)
            assert units["w"].local_gradient is None
        hook.clear_gradients(units)
        units["x"].local_gradient = None
        for _ in range(2):
            backward(hook, good)
        return [unit.local_gradient.tolist() for unit in units.values()]

    assert run(work) == [[[4.0] * 2] * 2] * 2


def test_strided_and_swapped_sums_are_updated(group):
    units = units_of(group.rank, {"w": (8,), "x": (8,)})
    units["w"].local_gradient = np.ones(8, np.float32)[::2]
    units["x"].local_gradient = np.ones(4, ">f4")
    hook = hook_of(group, units, accumulate=True)
    backward(hook, dict.fromkeys(units, np.ones(8, np.float32)))
    assert [unit.local_gradient.tolist() for unit in units.values()] == [[3.0] * 4] * 2


@pytest.mark.parametrize("hooks", ["loop", "model"])
def test_passes_inside_no_sync_add_up_before_they_travel(group, hooks):
    """One exchange for all of them: each rank adds its own passes first."""
    named = {"w": (9,), "x": (2, 3)}
    units = units_of(group.rank, named)
    hook, model = FSDPBackwardHook(FSDP(group)), Model()
    if hooks == "loop":
        hook.use_units(units)
    else:
        hook.register_hooks(model, units)

    def give(seed):
        for i, (name, shape) in enumerate(reversed(named.items())):
            gradient = gradient_of([seed, group.rank, i], shape, "float32")
            if hooks == "loop":
                hook.add_gradient(name, gradient)
            else:
                model.functions[name](gradient)
            if hooks == "loop" or not hook._is_synced:
                gradient = gradient if seed == 2 else gradient.fill(99)  # it was copied

    with hook.no_sync():
        give(0)
        hook.finish()  # as in a loop that treats all passes alike
        with hook.no_sync():
            give(1)
        assert all(unit.local_gradient is None for unit in units.values())
    assert not group.sizes
    give(2)
    if hooks == "loop":
        hook.finish()
    for i, (name, shape) in enumerate(reversed(named.items())):
        each = [
            sum(
                (gradient_of([seed, rank, i], shape, "float32") for seed in (1, 2)),
                gradient_of([0, rank, i], shape, "float32"),
            )
            for rank in range(2)
        ]
        assert_same(units[name].local_gradient, part_of(reduced(each), "flat", group.rank, 2), name)


def test_no_sync_gradient_is_sent_without_a_new_gradient(group):
    units = units_of(group.rank, {"w": (2,), "x": (2,)})
    hook = hook_of(group, units)
    with hook.no_sync():
        hook.add_gradient("w", np.ones(2, np.float32))
        hook.add_gradient("x", None)  # an unused branch
    hook.add_gradient("x", np.ones(2, np.float32))
    hook.finish()
    assert [unit.local_gradient.tolist() for unit in units.values()] == [[2.0], [2.0]]


def test_gradient_mismatching_the_no_sync_sum_fails_on_all(group):
    units = units_of(group.rank, {"w": (2,), "x": (2,)})
    hook = hook_of(group, units)
    with hook.no_sync():
        hook.add_gradient("w", np.ones(2, np.float32))
    hook.add_gradient("x", np.ones(2, np.float32))
    hook.add_gradient("w", np.ones(3 if group.rank else 2, np.float32))
    with pytest.raises(CollectiveError, match=r"'w': rank 1: .*\(3,\)"):
        hook.finish()
    assert units["w"].local_gradient is None
    assert units["x"].local_gradient.tolist() == [2.0]


OUTPUTS = {
    "one array": lambda a, b, memory: (memory, memory),
    "overlapping": lambda a, b, memory: (memory[:-1], memory[1:]),
    "in the other gradient": lambda a, b, memory: (b[: len(memory)], a[: len(memory)]),
    "in the later gradient": lambda a, b, memory: (b[-len(memory) :], memory),
    "in its own gradient": lambda a, b, memory: (a[: len(memory)], b[: len(memory)]),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("world", [1, 2])
def test_local_gradients_that_share_memory_do_not_mix_sums(group, world, outputs, engine):
    a, b = (gradient_of(seed + group.rank, (8,), "float32") for seed in (1, 5))
    expected = [
        reduced([gradient_of(seed + rank, (8,), "float32") for rank in range(world)])
        for seed in (1, 5)
    ]
    units = units_of(group.rank, {"a": (8,), "b": (8,)})
    parts = OUTPUTS[outputs](a, b, np.zeros(8 // world, np.float32))
    if group.rank == 0:  # on this rank only
        units["a"].local_gradient, units["b"].local_gradient = parts
    with hook_of(group, units) as hook:
        for name, gradient in (("b", b), ("a", a)):
            hook.add_gradient(name, gradient)
        hook.finish()
    for name, total in zip("ab", expected, strict=True):
        assert_same(units[name].local_gradient, part_of(total, "flat", group.rank, world))


def test_accumulate_gradients_adds_local_parts_and_copies_the_first():
    units = {name: FSDPShardingUnit(name, (4,), "float32", 0) for name in "wxy"}
    hook = FSDPBackwardHook(FSDP(SingleGroup()))
    first = {"w": gradient_of(1, (4,), "float32"), "x": np.ones(4, np.float64)}
    hook.accumulate_gradients(units, first)
    assert units["w"].local_gradient is not first["w"]
    second = {"w": gradient_of(2, (4,), "float32"), "unknown": np.ones(9), "x": None}
    hook.accumulate_gradients(units, second)
    assert_same(units["w"].local_gradient, first["w"] + second["w"])
    assert_same(units["x"].local_gradient, first["x"])
    assert units["y"].local_gradient is None
    for empty in (None, {}):
        hook.accumulate_gradients(empty, first)
        hook.accumulate_gradients(units, empty)
        hook.clear_gradients(empty)
    hook.clear_gradients(units)
    assert [u.local_gradient.tolist() for n, u in units.items() if n != "y"] == [[0.0] * 4] * 2
    assert units["y"].local_gradient is None


@pytest.mark.parametrize("bad", [np.ones(3, np.float32), np.ones(4, np.float64)])
def test_mismatched_part_is_not_added(bad):
    """The specification adds as many elements as the shorter array has."""
    units = {name: FSDPShardingUnit(name, (4,), "float32", 0) for name in "wx"}
    hook = FSDPBackwardHook(FSDP(SingleGroup()))
    good = np.ones(4, np.float32)
    hook.accumulate_gradients(units, {"w": good, "x": good})
    with pytest.raises(CompatibilityError, match=r"^x: the new gradient has") as caught:
        hook.accumulate_gradients(units, {"w": good, "x": bad})
    assert caught.value.name == "x"
    assert caught.value.got != caught.value.expected
    assert units["w"].local_gradient.tolist() == [1.0] * 4
    with pytest.raises(CompatibilityError, match=r"^y: the new gradient has shape \(3,\)"):
        hook.accumulate_gradients(
            {"y": FSDPShardingUnit("y", (4,), "float32", 0)}, {"y": np.ones(3, np.float32)}
        )
    with pytest.raises(TypeError, match="y: the new gradient is a list, not an array or tensor"):
        hook.accumulate_gradients({"y": FSDPShardingUnit("y", (4,), "float32", 0)}, {"y": [1.0]})
