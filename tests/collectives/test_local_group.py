"""Local groups whose ranks are threads: results of every operation, and errors."""

import gc
import threading
import time
import weakref

import group_scenarios
import numpy as np
import pytest
from group_model import (
    OPERATIONS,
    dtype_of,
    inputs,
    raises,
    reduced,
    same_bits,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_threads import outcomes
from thread_team import num_threads
from traced_memory import traced
from tries import tries

from mlstate import CollectiveError, CompatibilityError, FormatError
from mlstate._common.dtypes import PACKED, name_of, stored_dtype
from mlstate.collectives import LocalGroup, ProcessGroup, SingleGroup
from mlstate.collectives._consensus import agree
from mlstate.testing import run_ranks

pytestmark = pytest.mark.timeout(120)

SECONDS = 30.0  # for calls that must succeed: much longer than a busy machine needs
RING_BYTES = 4 << 20  # larger than the memory that the ranks share


def divided(length, world, seed):
    """Counts for each rank, some of them 0, whose sum is `length`."""
    cuts = np.sort(np.random.default_rng(seed).integers(0, length + 1, world - 1)).tolist()
    return [end - start for start, end in zip([0, *cuts], [*cuts, length], strict=True)]


def part(array, counts, rank):
    start = sum(counts[:rank])
    return array[start : start + counts[rank]]


# ---- operations ----


@pytest.mark.parametrize("length", [1000, RING_BYTES])
def test_broadcast_does_not_write_at_the_root(length, tmp_path):
    np.save(tmp_path / "array.npy", np.arange(length, dtype=np.float32))

    def work(group):
        if group.rank == 1:  # a mapping that the system protects: writing ends the process
            group.broadcast(np.load(tmp_path / "array.npy", mmap_mode="r"), root=1)
            return None
        return group.broadcast(np.empty(length, np.float32), root=1)

    received = run_ranks(2, work)[0]
    assert np.array_equal(received, np.arange(length, dtype=np.float32))


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("name", group_scenarios.SCENARIOS)
def test_scenarios_of_every_engine(name, world):
    pytest.importorskip("ml_dtypes", reason="NumPy has no bfloat16 by itself")
    if name == "tensors_stay_tensors":
        pytest.importorskip("torch", reason="tensors are torch's")
    run_ranks(world, group_scenarios.SCENARIOS[name])


def test_sums_that_the_core_does_not_round_are_refused_by_all():
    pytest.importorskip("ml_dtypes", reason="NumPy has no such dtype by itself")

    def work(group):
        contribution = np.ones(9, dtype_of("float8_e5m2"))
        caught = raises(CompatibilityError, "float32", group.all_reduce, contribution)
        assert (
            group.all_gather(contribution).tolist() == [1.0] * 18
        )  # data of any dtype travel as bytes
        if np.dtype(np.longdouble).itemsize > 8:
            text = "arithmetic is not supported for dtype"
            raises(CompatibilityError, text, group.all_reduce, np.zeros(2, "g"))
        return str(caught)

    assert len(set(run_ranks(2, work))) == 1


@pytest.mark.parametrize("dtype", sorted(PACKED))
def test_packed_floats_travel_but_have_no_sum(dtype):
    def work(group):
        array = (np.arange(6, dtype=np.uint8) + group.rank).view(stored_dtype(dtype))
        rows = group.all_gather(array)
        assert name_of(rows.dtype) == dtype and rows.tolist() == [*range(6), *range(1, 7)]
        for op in ("sum", "mean", "max"):
            raises(
                CompatibilityError, f"not defined for dtype {dtype}", group.all_reduce, array, op=op
            )

    run_ranks(2, work)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sums_are_bit_reproducible(dtype):
    world, length = 4, 100_003
    everyones = inputs(world, length, dtype)
    expected = reduced(everyones, "sum")

    def whole(group):
        return group.all_reduce(everyones[group.rank])

    def pieces(group):
        generator = np.random.default_rng(3)
        out, at = np.empty(length, dtype), 0
        while at < length:
            end = min(length, at + int(generator.integers(1, 20_000)))
            out[at:end] = group.all_reduce(everyones[group.rank][at:end])
            at = end
        return out

    def scattered(group):
        counts = divided(length, world, 8)
        share = group.reduce_scatter(everyones[group.rank], counts=counts)
        return group.all_gather(share, counts=counts)

    def from_a_thread(group):
        return group.all_reduce(everyones[group.rank], async_op=True).wait(SECONDS)

    for count in (1, 3):
        with num_threads(count):
            for way in (whole, pieces, scattered, from_a_thread):
                for total in run_ranks(world, way):
                    same_bits(total, expected)


# ---- any call, against NumPy ----


def expected_of(call, arrays, rank, world):
    """The expected result of a rank; `arrays` are the inputs of all ranks."""
    name = call["name"]
    if name == "all_reduce":
        return reduced(arrays, call["op"])
    if name == "reduce_scatter":
        return part(reduced(arrays, call["op"]), call["counts"], rank)
    if name == "all_gather":
        return np.concatenate(arrays).astype(arrays[0].dtype)  # in the input's byte order
    if name == "broadcast":
        return arrays[call["root"]]
    sent = call["matrix"]  # the numbers of rows that each rank sends to each
    rows = np.concatenate([part(arrays[r], sent[r], rank) for r in range(world)])
    return rows.astype(arrays[0].dtype)


def arrays_of(call, world):
    """The input of each rank, in the memory layout that the call requests."""
    kinds = {"S3": "int32", ">f4": "float32", "M8[s]": "int64"}
    rows = {
        "all_gather": call["counts"],
        "all_to_all": [sum(row) for row in call["matrix"]],
    }.get(call["name"], [sum(call["counts"])] * world)
    width = call["width"]
    arrays = []
    for rank in range(world):
        drawn = inputs(1, rows[rank] * width, kinds.get(call["dtype"], call["dtype"]), rank)[0]
        array = drawn.astype(dtype_of(call["dtype"])).reshape(rows[rank], width)
        if call["form"] == "every other row":
            wide = np.zeros((2 * rows[rank], width), array.dtype)
            wide[::2] = array
            array = wide[::2]
        elif call["form"] == "backwards":
            array = array[::-1, ::-1]
        elif call["form"] == "by columns":
            array = np.asfortranarray(array)
        arrays.append(array)
    return arrays


def perform(group, call, array):
    name = call["name"]
    keywords = {key: call[key] for key in ("op", "root") if key in call}
    if name in ("reduce_scatter", "all_gather"):
        keywords["counts"] = call["counts"]
    if name == "all_to_all":
        matrix = call["matrix"]
        keywords["counts"] = matrix[group.rank]
        keywords["out_counts"] = [row[group.rank] for row in matrix]
    keywords["async_op"] = call["async_op"]
    if name == "broadcast":  # in place, in any layout
        array = array.copy(order="K") if array.flags.forc else array
        done = group.broadcast(array, **keywords)
        return done.wait(SECONDS) if call["async_op"] else done
    if call["out"]:
        shape = expected_of(call, arrays_of(call, group.world_size), group.rank, group.world_size)
        keywords["out"] = np.empty((*shape.shape, 2), array.dtype)[..., 1]
    done = getattr(group, name)(array, **keywords)
    result = done.wait(SECONDS) if call["async_op"] else done
    assert "out" not in keywords or result is keywords["out"]
    return result


REDUCED = st.sampled_from(["float32", "float64", "float16", "int32", "uint8"])
MOVED = st.sampled_from(["float32", "bool", "complex128", "S3", ">f4", "M8[s]", "int8"])


@st.composite
def a_call(draw, world):
    name = draw(
        st.sampled_from(["reduce_scatter", "all_gather", "all_reduce", "all_to_all", "broadcast"])
    )
    row = st.integers(0, draw(st.sampled_from([0, 3, 50, 3000])))
    lists = st.lists(row, min_size=world, max_size=world)
    call = {
        "name": name,
        "dtype": draw(REDUCED if "reduce" in name else MOVED),
        "counts": draw(lists),
        "matrix": draw(st.lists(lists, min_size=world, max_size=world)),
        "width": draw(st.integers(0, 4)),
        "form": draw(st.sampled_from(["packed", "every other row", "backwards", "by columns"])),
        "out": draw(st.booleans()),
        "async_op": draw(st.booleans()),
    }
    if "reduce" in name:
        call["op"] = draw(st.sampled_from(["sum", "min", "max"]))
    if name == "broadcast":
        call["root"] = draw(st.integers(0, world - 1))
    return call


CALLS = st.integers(1, 5).flatmap(
    lambda world: st.tuples(st.just(world), st.lists(a_call(world), min_size=1, max_size=6))
)


@settings(max_examples=tries(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(CALLS)
def test_random_call_series_match_numpy(drawn):
    world, calls = drawn

    def work(group):
        for call in calls:
            arrays = arrays_of(call, world)
            contribution = arrays[group.rank]
            before = contribution.copy()
            output = perform(group, call, contribution)
            expected = expected_of(call, arrays_of(call, world), group.rank, world)
            same_bits(np.ascontiguousarray(output), np.ascontiguousarray(expected))
            if call["name"] != "broadcast":
                same_bits(contribution.copy(), before)

    run_ranks(world, work)


@pytest.mark.parametrize("world", [2, 3])
def test_arrays_may_be_larger_than_the_memory_that_ranks_share(world):
    n = RING_BYTES // 4

    def work(group):
        contribution = np.arange(n, dtype=np.float32) + group.rank
        total = np.float32(world) * np.arange(n, dtype=np.float64) + sum(range(world))
        assert group.all_reduce(contribution).tobytes() == total.astype("f4").tobytes()
        gathered = group.all_gather(contribution[: n // 2])
        for rank in range(world):
            same_bits(
                gathered[rank * (n // 2) : (rank + 1) * (n // 2)],
                contribution[: n // 2] - group.rank + rank,
            )
        text = bytes([group.rank]) * RING_BYTES
        assert group.gather_bytes(text) == [bytes([r]) * RING_BYTES for r in range(world)]

    run_ranks(world, work)


def test_packed_arrays_are_not_copied():
    size = 1 << 22
    arrays = [np.zeros(size, np.uint8) for _ in range(2)]
    outs = [np.empty(2 * size, np.uint8) for _ in range(2)]
    for array in arrays:
        array.flags.writeable = False

    def work(group):
        group.all_gather(arrays[group.rank], out=outs[group.rank])
        group.broadcast(outs[group.rank])
        group.all_reduce(outs[group.rank], op="max", out=outs[group.rank])

    with traced() as trace:
        run_ranks(2, work)
    assert trace.peak < size // 2


# ---- new arrays ----


@pytest.mark.parametrize("shape", [5, (5,), [2, 3], (), (0, 4), np.int64(3)])
@pytest.mark.parametrize("dtype", ["float64", "<f2", ">i4", [("a", "f4"), ("b", "i8")]])
def test_empty_makes_arrays_as_numpy_does(shape, dtype):
    (group,) = LocalGroup.threads(1)
    like, array = np.empty(shape, dtype), group.empty(shape, np.dtype(dtype))
    group.close()
    assert (array.shape, array.dtype) == (like.shape, like.dtype)
    assert array.flags.c_contiguous
    assert array.flags.owndata
    array[...] = 0  # the result outlives the group


def test_empty_refuses_invalid_arguments():
    (group,) = LocalGroup.threads(1)
    assert group.empty(3).dtype == np.float64
    raises(TypeError, "objects", group.empty, 2, object)
    raises(TypeError, "", group.empty, 2.5)
    raises(ValueError, "empty: the shape (3, -1) has a negative length", group.empty, (3, -1))
    raises(MemoryError, "", group.empty, 1 << 60, np.uint8)
    raises(MemoryError, "bytes for the shape", group.empty, (1 << 40, 1 << 40))
    group.close()
    raises(CollectiveError, "was closed", group.empty, 3)


@pytest.mark.torch
def test_empty_makes_tensors_for_dtypes_of_torch(torch):
    (group,) = LocalGroup.threads(1)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = group.empty((4, 6), dtype)
        assert (tensor.shape, tensor.dtype, tensor.device.type) == ((4, 6), dtype, "cpu")
    assert group.empty((0, 3), torch.float16).shape == (0, 3)
    assert isinstance(group.empty(3, "float32"), np.ndarray)
    raises(MemoryError, "bytes for the shape", group.empty, 1 << 60, torch.uint8)
    raises(MemoryError, "bytes for the shape", group.empty, (1 << 40, 1 << 40), torch.uint8)
    group.close()


# ---- asynchronous operations ----


@pytest.mark.torch
def test_an_out_that_cannot_be_written_is_refused_by_the_call(torch):
    (group,) = LocalGroup.threads(1)
    source = torch.tensor([1 + 2j, 3 - 4j])
    for operation in (group.all_gather, group.all_reduce, group.all_to_all):
        text = "out: the tensor is a view that is conjugated"
        raises(TypeError, text, operation, source, out=source.conj(), async_op=True)
    out = torch.zeros(2, dtype=torch.complex64)
    assert SingleGroup().all_gather(source, out=out.conj()).tolist() == source.tolist()
    assert out.tolist() == source.conj().tolist()
    group.close()


def test_arrays_of_async_operations_are_let_go():
    def work(group):
        array = np.zeros(1000)
        array_ref = weakref.ref(array)
        done = group.all_reduce(array, async_op=True)
        del array
        done.wait(SECONDS)
        for _ in range(100):  # without the GIL, other threads' objects are freed a moment later
            gc.collect()
            if array_ref() is None:
                return True
            time.sleep(0.01)
        return False

    assert run_ranks(2, work) == [True, True]


# ---- arguments ----


def test_group_exposes_rank_and_world_size():
    groups = LocalGroup.threads(2)
    for rank, group in enumerate(groups):
        assert isinstance(group, ProcessGroup)
        assert (group.rank, group.world_size) == (rank, 2)
        assert repr(group) == f"LocalGroup(rank {rank} of 2)"
        group.close()
        assert repr(group) == f"LocalGroup(rank {rank} of 2, closed)"


@pytest.mark.parametrize("world", [0, -1, 65, 10**20])
def test_impossible_numbers_of_ranks_are_refused(world):
    for make in (
        LocalGroup.threads,
        lambda n: LocalGroup.join("impossible", 0, n),
        lambda n: LocalGroup.run(print, n),
    ):
        with pytest.raises((ValueError, OverflowError)):
            make(world)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_impossible_timeouts_are_refused(timeout):
    with pytest.raises(ValueError, match="timeout must be above 0"):
        LocalGroup.threads(1, timeout=timeout)


def test_the_class_is_not_called():
    with pytest.raises(
        TypeError, match=r"create a LocalGroup by LocalGroup\.threads, run, from_env or join"
    ):
        LocalGroup(None, 0, 1, 1.0)


def test_maximum_number_of_ranks():
    sums = run_ranks(64, lambda group: int(group.all_reduce(np.array(group.rank))))
    assert sums == [sum(range(64))] * 64


# ---- calls that differ between ranks ----

DIFFERENT = {
    "other operation": (
        lambda group: group.barrier(),
        lambda group: group.gather_bytes(b""),
        ["barrier", "gather_bytes"],
    ),
    "other shape": (
        lambda group: group.all_reduce(np.zeros(3)),
        lambda group: group.all_reduce(np.zeros(4)),
        ["sum of (3,) float64", "sum of (4,) float64"],
    ),
    "same size, other shape": (
        lambda group: group.all_reduce(np.zeros((2, 3))),
        lambda group: group.all_reduce(np.zeros((3, 2))),
        ["sum of (2, 3) float64", "sum of (3, 2) float64"],
    ),
    "other dtype": (
        lambda group: group.all_reduce(np.zeros(3)),
        lambda group: group.all_reduce(np.zeros(3, "i8")),
        ["float64", "int64"],
    ),
    "other op": (
        lambda group: group.all_reduce(np.zeros(3), op="min"),
        lambda group: group.all_reduce(np.zeros(3), op="max"),
        ["min of (3,)", "max of (3,)"],
    ),
    "other counts": (
        lambda group: group.reduce_scatter(np.zeros(6)),
        lambda group: group.reduce_scatter(np.zeros(6), counts=[6] + [0] * (group.world_size - 1)),
        ["rows [2, 2, 2]", "rows [6, 0, 0]"],
    ),
    "other rows": (
        lambda group: group.all_gather(np.zeros(3)),
        lambda group: group.all_gather(np.zeros(4)),
        ["rows [3, 3, 3]", "rows [4, 4, 4]"],
    ),
    "other root": (
        lambda group: group.broadcast(np.zeros(3), root=0),
        lambda group: group.broadcast(np.zeros(3), root=1),
        ["from 0", "from 1"],
    ),
    "nobody to gather for": (
        lambda group: group.gather_bytes(b"", root=0),
        lambda group: group.gather_bytes(b""),
        ["to 0", "to None"],
    ),
    "other rows than are sent": (
        lambda group: group.all_to_all(np.zeros(3), counts=[1, 1, 1], out_counts=[1, 1, 1]),
        lambda group: group.all_to_all(np.zeros(4), counts=[2, 1, 1], out_counts=[1, 1, 1]),
        ["rank 2 sends 16 bytes to rank 0, which expects 8"],
    ),
}


@pytest.mark.parametrize(
    ("name", "odd"),
    [(name, odd) for name in DIFFERENT for odd in (0, 2) if odd == 2 or "sent" not in name],
)
def test_calls_that_do_not_go_together_are_named_and_the_group_lives_on(name, odd):
    usual, other, texts = DIFFERENT[name]

    def work(group):
        caught = raises(CollectiveError, "", other if group.rank == odd else usual, group)
        alive = group.all_reduce(np.full(3, group.rank)).tolist()
        return str(caught), caught.rank, alive

    for rank, (text, blamed, alive) in enumerate(run_ranks(3, work)):
        assert alive == [3, 3, 3]
        assert blamed == rank
        assert f"on rank {rank}" in text
        assert all(rank_text in text for rank_text in texts), text


def test_failed_call_keeps_input_and_output():
    def work(group):
        contribution, out = np.full(1000, 1.0), np.full(1000, 7.0)
        op = "sum" if group.rank else "max"
        raises(CollectiveError, "max of (1000,)", group.all_reduce, contribution, op=op, out=out)
        return set(contribution.tolist()), set(out.tolist())

    assert run_ranks(2, work) == [({1.0}, {7.0})] * 2


# ---- groups that end ----


def test_missing_rank_is_named_by_the_timeout():
    ready = threading.Event()

    def work(group):
        group.barrier()
        if group.rank == 2:
            ready.wait(SECONDS)
            return str(raises(CollectiveError, "on rank 2", group.barrier))
        began = time.monotonic()
        caught = raises(CollectiveError, "rank 2", group.all_reduce, np.zeros(9), timeout=1.0)
        took = time.monotonic() - began
        ready.set()
        assert took < 10
        raises(CollectiveError, "is unusable", group.barrier)
        assert "gave up waiting for rank 2 in all_reduce" in repr(group)
        assert (caught.name, caught.rank) == ("all_reduce", group.rank)
        return str(caught)

    *texts, last = run_ranks(3, work)
    why = (
        "not done after 1 s: rank 2 has not called all_reduce (its last operation was number 1, "
        "barrier; this is number 2)"
    )
    # the other rank may already know of the failure
    assert any(why in text for text in texts), texts
    assert "gave up waiting for rank 2 in all_reduce" in last


def test_group_timeout_is_the_default():
    first, second = LocalGroup.threads(2, timeout=0.2)
    raises(CollectiveError, "not done after 0.2 s", first.barrier)
    raises(CollectiveError, "rank 0 gave up waiting for rank 1 in barrier", second.barrier)
    first.close()
    second.close()


def test_an_async_operation_times_out_too():
    first, second = LocalGroup.threads(2)
    work = first.gather_bytes(b"x", async_op=True, timeout=0.3)
    behind = first.barrier(async_op=True)
    raises(CollectiveError, "gather_bytes on rank 0: not done after 0.01 s", work.wait, 0.01)
    caught = raises(CollectiveError, "not done after 0.3 s: rank 1 has not", work.wait, SECONDS)
    assert (caught.name, caught.rank) == ("gather_bytes", 0)
    raises(CollectiveError, "gave up waiting for rank 1", behind.wait, SECONDS)
    first.close()
    second.close()


@pytest.mark.parametrize("name", OPERATIONS)
def test_closed_groups_raise(name):
    first, second = LocalGroup.threads(2)
    first.close()
    first.close()
    caught = raises(
        CollectiveError, "this group was closed; make a new one", OPERATIONS[name], first
    )
    assert (caught.name, caught.rank) == (name, 0)
    raises(
        CollectiveError, "rank 0 closed the group, and rank 1 needed it", OPERATIONS[name], second
    )
    assert "rank 0 closed the group" in repr(second)
    second.close()


@pytest.mark.parametrize("name", OPERATIONS)
def test_abort_ends_waiting_operations(name):
    groups = LocalGroup.threads(3)
    works = [OPERATIONS[name](group, async_op=True, timeout=SECONDS) for group in groups[:2]]
    groups[2].abort()
    for group, work in zip(groups, works, strict=False):
        caught = raises(CollectiveError, "rank 2 aborted the group", work.wait, SECONDS)
        assert (caught.name, caught.rank) == (name, group.rank)
    for group in groups:
        raises(CollectiveError, "rank 2 aborted the group", OPERATIONS[name], group)
        assert repr(group).endswith("rank 2 aborted the group)")
        group.abort()
        group.close()


def test_close_waits_for_running_operations():
    first, second = LocalGroup.threads(2)
    works = [first.all_reduce(np.full(10, n), async_op=True) for n in range(5)]
    closer = threading.Thread(target=first.close, daemon=True)
    closer.start()
    for number in range(5):
        assert second.all_reduce(np.full(10, number)).tolist() == [2 * number] * 10
    closer.join(SECONDS)
    assert not closer.is_alive()
    assert [work.wait(1.0)[0] for work in works] == [0, 2, 4, 6, 8]
    second.close()


def test_a_rank_that_fails_ends_the_others_at_once():
    def work(group):
        if group.rank == 1:
            raise RuntimeError("of the user")
        began = time.monotonic()
        caught = raises(CollectiveError, "rank 1 closed the group", group.barrier)
        assert time.monotonic() - began < 10
        return caught

    errors = outcomes(3, work)
    kinds = [type(error) for error in errors]
    assert kinds == [CollectiveError, RuntimeError, CollectiveError]


def test_groups_leave_no_thread_and_no_memory():
    before = threading.active_count()
    for _ in range(50):
        groups = LocalGroup.threads(4)
        works = [group.all_reduce(np.zeros(10), async_op=True) for group in groups]
        for work in works:
            work.wait(SECONDS)
        for group in groups:
            group.close()
    group_ref = weakref.ref(groups[0])
    del groups, group, works, work
    gc.collect()
    assert group_ref() is None
    assert threading.active_count() == before


@pytest.mark.parametrize("text", ["", "damaged"])
def test_an_error_of_one_rank_is_raised_by_all_even_without_a_text(text):
    def work(group):
        agree(group, "the same", FormatError(text) if group.rank == 0 else None)

    errors = outcomes(2, work)
    assert [type(error) for error in errors] == [FormatError, FormatError]
