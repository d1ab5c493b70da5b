"""The ranks of test_torch_group.py; MPI jobs run some of the scenarios too."""

import os
import sys
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from group_model import (
    FLOATS,
    INTEGERS,
    LENGTHS,
    as_tensor,
    dtype_of,
    inputs,
    raises,
    reduced,
    remove_folder,
    same_bits,
    shared_folder,
)
from thread_team import run_in_threads
from torch_processes import SCENARIOS, main, scenario, tell

from mlstate import CollectiveError, CompatibilityError
from mlstate.collectives import ProcessGroup, Work
from mlstate.integrations.torch import TorchGroup

# ---- operations ----


@scenario
def it_is_a_group(group):
    assert isinstance(group, ProcessGroup)
    assert (group.rank, group.world_size) == (dist.get_rank(), dist.get_world_size())
    assert repr(group) == f"TorchGroup(rank {group.rank} of {group.world_size})"


@scenario
def reductions_have_the_bits_of_sums_in_the_order_of_ranks(group):
    for dtype in [*FLOATS, *INTEGERS, "complex64", "complex128", "bool", "float8_e5m2"]:
        if dtype == "bool":
            ops = ["min", "max"]
        elif dtype in INTEGERS:
            ops = ["sum", "min", "max"]
        else:
            ops = ["sum", "mean"] if "complex" in dtype else ["sum", "mean", "min", "max"]
        for length in LENGTHS if dtype in ("bfloat16", "float32", "uint32") else [7, 5000]:
            everyones = inputs(group.world_size, length, dtype)
            mine = everyones[group.rank]
            for op in ops:
                expected = reduced(everyones, op)
                same_bits(group.all_reduce(mine, op=op), expected)
            counts = [length // group.world_size] * group.world_size
            counts[-1] += length - sum(counts)
            start = sum(counts[: group.rank])
            found = group.reduce_scatter(mine, op=op, counts=counts)
            same_bits(found, expected[start : start + counts[group.rank]])


@scenario
def nan_wins(group):
    mine = np.array([group.rank, np.nan if group.rank == 1 else 0.0])
    for op in ("min", "max", "sum", "mean"):
        assert np.isnan(group.all_reduce(mine, op=op)).tolist() == [False, True]


@scenario
def rows_are_scattered_and_gathered(group):
    world, rank = group.world_size, group.rank
    array = np.arange(world * 6.0).reshape(world * 2, 3) + rank
    mine = group.reduce_scatter(array)
    assert mine.shape == (2, 3)
    total = sum(np.arange(world * 6.0).reshape(world * 2, 3) + r for r in range(world))
    same_bits(mine, total[rank * 2 : rank * 2 + 2])
    same_bits(group.all_gather(mine), total)
    counts = [0, *range(3, 3 + world - 1)]  # rank 0 has no elements
    rows = np.full((counts[rank], 2), rank, np.int16)
    expected = np.repeat(np.arange(world, dtype=np.int16), counts)[:, None] * [[1, 1]]
    same_bits(group.all_gather(rows, counts=counts), expected.astype(np.int16))


@scenario
def any_bytes_travel(group):
    world, rank = group.world_size, group.rank
    for dtype in ["bool", "S3", "M8[s]", ">f4", "complex64", "bfloat16", "i1,f8"]:
        whole = np.arange(world * 4).astype("i8").astype(dtype_of(dtype))
        mine = whole[rank * 4 : rank * 4 + 4]
        same_bits(group.all_gather(mine), whole)
        backwards = whole.reshape(world, 4)[:, ::-1].reshape(-1)
        same_bits(group.all_gather(mine[::-1]), backwards)
        copy = whole.copy() if rank == 1 else np.zeros_like(whole)
        assert group.broadcast(copy, root=1) is copy
        same_bits(copy, whole)


@scenario
def a_broadcast_may_have_any_length(group):
    for size in [0, 1, (64 << 10) // group.world_size, 70_001, 1 << 20]:
        for root in range(group.world_size):
            whole = np.random.default_rng(size).integers(0, 255, size, np.uint8)
            copy = whole.copy() if group.rank == root else np.zeros_like(whole)
            same_bits(group.broadcast(copy, root=root), whole)


@scenario
def rows_go_to_each_rank(group):
    world, rank = group.world_size, group.rank
    array = np.arange(world * 2) + 100 * rank
    found = group.all_to_all(array)
    assert found.tolist() == [100 * r + 2 * rank + i for r in range(world) for i in (0, 1)]
    assert group.all_to_all(array, out=array) is array
    assert array.tolist() == found.tolist()
    # rank r sends r rows to each rank, and receives s rows from rank s
    rows = np.full((rank * world, 2), rank, np.float32)
    found = group.all_to_all(rows, counts=[rank] * world, out_counts=range(world))
    same_bits(
        found, np.repeat(np.arange(world), range(world)).astype("f4")[:, None] + np.zeros(2, "f4")
    )


@scenario
def tensors_stay_tensors(group):
    world, rank = group.world_size, group.rank
    for dtype in [*FLOATS, "int64", "uint16", "complex64"]:
        everyones = inputs(world, 12, dtype)
        tensor = as_tensor(everyones[rank].copy())
        found = group.all_reduce(tensor)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, as_tensor(reduced(everyones, "sum")))
        gathered = group.all_gather(tensor.reshape(4, 3).mT[:, :2])
        assert gathered.shape == (3 * world, 2)
        expected = torch.cat([as_tensor(a.copy()).reshape(4, 3).mT[:, :2] for a in everyones])
        assert torch.equal(gathered, expected)
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    assert group.broadcast(parameter, root=1) is parameter
    assert parameter.tolist() == [1.0] * 3
    assert not group.all_reduce(parameter).requires_grad


@scenario
def out_is_filled_where_it_lies(group):
    world, rank = group.world_size, group.rank
    everyones = inputs(world, 10_000 * world, "float32")
    mine, total = everyones[rank].copy(), reduced(everyones, "sum")
    expected = total[rank * 10_000 : (rank + 1) * 10_000]
    for out in (np.empty(10_000, "f4"), np.empty(20_000, "f4")[::2], np.empty(10_000, "f4")[::-1]):
        assert group.reduce_scatter(mine, out=out) is out
        same_bits(out.copy(), expected)
        whole = np.empty((world * 10_000, 2), "f4")[:, 0]
        assert group.all_gather(out, out=whole) is whole
        same_bits(whole.copy(), total)
    swapped = mine.astype(">f4")
    same_bits(group.all_reduce(swapped), total.astype(">f4"))
    assert group.all_reduce(swapped[:0]).shape == group.reduce_scatter(swapped[:0]).shape == (0,)
    odd = np.empty(world * 40_000 + 1, np.uint8)[1:].view("f4")  # at an unaligned address
    odd[...] = mine
    assert group.all_reduce(odd, out=odd) is odd
    same_bits(odd.copy(), total)
    tensor = torch.empty(world * 10_000, 2)[:, 1]
    assert group.all_reduce(as_tensor(mine), out=tensor) is tensor
    same_bits(tensor.numpy().copy(), total)
    assert group.all_reduce(mine, out=mine) is mine
    same_bits(mine, total)


@scenario
def nothing_is_copied_on_the_way(group):
    import tracemalloc

    array = np.zeros(1 << 20, np.uint8)
    array.flags.writeable = False
    out = np.empty(group.world_size << 20, np.uint8)
    tracemalloc.start()
    group.all_gather(array, out=out)
    group.broadcast(out)
    group.all_reduce(out, op="max", out=out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 19, peak  # of memory that NumPy allocates


@scenario
def bytes_of_any_length_are_gathered(group):
    world, rank = group.world_size, group.rank
    for lengths in (
        [0] * world,
        range(world),
        range(248, 248 + world),
        [0, 1_000_000, 3, 249][:world],
    ):
        expected = [bytes([r + 1]) * n for r, n in enumerate(lengths)]
        found = group.gather_bytes(expected[rank])
        assert found == expected
        assert {type(part) for part in found} == {bytes}
        for root in range(world):
            found = group.gather_bytes(memoryview(expected[rank]), root=root)
            assert found == (expected if rank == root else None)


@scenario
def async_operations_keep_their_order(group):
    world, rank = group.world_size, group.rank
    everyones = inputs(world, 50_000, "float32")
    works = []
    for number in range(5):
        works.append(group.all_reduce(everyones[rank] * number, async_op=True, timeout=30))
        works.append(group.gather_bytes(b"%d" % (rank * number), async_op=True))
    plain = group.all_gather(np.array([rank]))  # after them
    assert plain.tolist() == list(range(world))
    assert all(isinstance(work, Work) for work in works)
    for number in reversed(range(5)):
        expected = reduced([array * number for array in everyones], "sum")
        same_bits(works[2 * number].wait(), expected)
        assert works[2 * number + 1].wait(10) == [b"%d" % (r * number) for r in range(world)]
        assert works[2 * number].done()
    assert group.barrier(async_op=True).wait() is None


@scenario
def several_threads_use_one_group(group):
    """Operations do not mix. Their order depends on the ranks, so all are alike."""

    def work(number):
        return [group.all_reduce(np.full(100, group.rank, np.int64))[0] for _ in range(10)]

    assert run_in_threads(work, 4) == [[sum(range(group.world_size))] * 10] * 4


@scenario
def wrong_arguments_fail_before_anything_is_sent(group):
    world = group.world_size
    raises(CompatibilityError, "a multiple of", group.reduce_scatter, np.zeros(world + 1))
    raises(CompatibilityError, "out has shape", group.all_gather, np.zeros(2), out=np.zeros(2))
    raises(
        ValueError, f"counts has 1 entries for {world}", group.all_gather, np.zeros(2), counts=[2]
    )
    wrong = [3] * world
    caught = raises(
        CompatibilityError, "is 2, expected 3", group.all_gather, np.zeros(2), counts=wrong
    )
    assert caught.rank == group.rank
    raises(ValueError, "both counts", group.all_to_all, np.zeros(world), counts=[1] * world)
    raises(ValueError, f"pass 0 to {world - 1}", group.broadcast, np.zeros(2), root=world)
    raises(ValueError, "timeout must be", group.barrier, timeout=0)
    raises(TypeError, "takes bytes", group.gather_bytes, "text")
    raises(TypeError, "got list", group.all_reduce, [1.0])
    raises(TypeError, "sparse", group.all_reduce, torch.eye(2).to_sparse())
    raises(TypeError, "sparse", group.broadcast, torch.eye(2).to_sparse())
    raises(CompatibilityError, "op 'mean'", group.all_reduce, np.arange(2), op="mean")
    if isinstance(group, TorchGroup) and np.dtype(np.longdouble).itemsize > 8:
        raises(
            CompatibilityError, "torch has no dtype", group.all_reduce, np.zeros(2, np.longdouble)
        )
    if group.rank != 1:
        frozen = np.frombuffer(bytes(8))
        raises(ValueError, "is read-only", group.broadcast, frozen, root=1)
    group.barrier()


@scenario
def a_checked_group_tells_calls_that_do_not_go_together(group):
    world, rank = group.world_size, group.rank
    checked = TorchGroup(check=True)
    for name in (
        "rows_are_scattered_and_gathered", "rows_go_to_each_rank", "any_bytes_travel",
        "bytes_of_any_length_are_gathered", "async_operations_keep_their_order",
    ):  # fmt: skip
        SCENARIOS[name](checked)
    last = rank == world - 1
    wrong = {
        f"this rank called 'all_gather float64 () in rows {[3] * world}', rank": lambda: (
            checked.all_gather(np.zeros(4 if last else 3))
        ),
        "'all_reduce max of (3,) float64 ()'": lambda: checked.all_reduce(
            np.zeros(3), op="max" if last else "min"
        ),
        "all_reduce sum of (2,) int32 ()": lambda: checked.all_reduce(
            torch.zeros(2, dtype=torch.int32 if last else torch.int64)
        ),
        "barrier": lambda: checked.barrier() if last else checked.gather_bytes(b""),
        "from 1": lambda: checked.broadcast(np.zeros(2), root=last),
        f"rank {world - 1} sends 2 rows to rank 0, which expects 1": lambda: checked.all_to_all(
            np.zeros(world + 1) if last else np.zeros(world),
            counts=[2] + [1] * (world - 1) if last else [1] * world,
            out_counts=[1] * world,
        ),
    }
    for text, call in wrong.items():
        caught = raises(CollectiveError, "", call)
        if last and "rows" in text and "sends" not in text:
            assert "called 'all_gather float64 () in rows [4" in str(caught)
        else:
            assert text in str(caught), (text, str(caught))
        assert caught.rank == rank
    checked.barrier()  # nothing was sent: the group stays usable


@scenario
def checkpoints_are_saved_and_loaded_by_all(group):
    from mlstate import load, save
    from mlstate.checkpoint import Layout

    world, rank = group.world_size, group.rank
    folder = shared_folder(group)
    whole = np.arange(7.0 * 3).reshape(7, 3)
    path = folder / "checkpoint"
    save(path, {"w": Layout.rows(world).shard(whole, rank), "b": np.ones(2)}, group=group)
    same_bits(load(path).model["w"], whole)
    mine = load(path, group=group, layout="rows").model["w"]
    same_bits(mine, Layout.rows(world).take(whole, rank))
    remove_folder(group, folder)


@scenario
def a_closed_group_says_so(group):
    with type(group)() as other:
        work = other.barrier(async_op=True)
    assert work.done()
    caught = raises(CollectiveError, "this group was closed", other.barrier)
    assert (caught.name, caught.rank) == ("barrier", group.rank)
    assert repr(other).endswith(", closed)")
    other.close()
    group.barrier()  # the group of torch, or the communicator, still exists


@scenario
def a_part_of_the_ranks_is_a_group(group):
    part = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    if group.rank < 2:
        with TorchGroup(part) as pair:
            assert (pair.rank, pair.world_size) == (group.rank, 2)
            assert pair.gather_bytes(b"%d" % group.rank) == [b"0", b"1"]
            array = np.full(2, pair.rank)
            assert pair.broadcast(array, root=1).tolist() == [1, 1]
    else:
        raises(ValueError, "not a member", TorchGroup, part)
    group.barrier()


# ---- failures: each in new processes ----


@scenario
def a_rank_that_does_not_come_is_a_timeout(group):
    calls = {
        "all_reduce": lambda g: g.all_reduce(np.zeros(9), timeout=0.5),
        "barrier": lambda g: g.barrier(timeout=0.5),
        "broadcast": lambda g: g.broadcast(np.zeros(1 << 20), root=1, timeout=0.5),
    }
    groups = [TorchGroup(dist.new_group()) for _ in calls]
    if group.rank == 1:
        sys.stdin.readline()  # until rank 0 has finished
        return
    for (name, call), other in zip(calls.items(), groups, strict=True):
        began = time.monotonic()
        text = f"{name} on rank 0: not done after 0.5 s: rank 1 did not call it"
        caught = raises(CollectiveError, text, call, other)
        assert time.monotonic() - began < 10
        assert (caught.name, caught.rank) == (name, 0)
        raises(CollectiveError, f"broken by {name}, which failed", other.barrier)


@scenario
def an_async_operation_times_out_too(group):
    if group.rank == 0:
        work = group.gather_bytes(b"x", async_op=True, timeout=0.5)
        behind = group.barrier(async_op=True)
        raises(CollectiveError, "gather_bytes on rank 0: not done after 0.01 s", work.wait, 0.01)
        raises(CollectiveError, "not done after 0.5 s: rank 1 did not", work.wait, 20)
        raises(CollectiveError, "broken by gather_bytes", behind.wait, 20)
    else:
        sys.stdin.readline()


@scenario
def a_rank_that_dies_is_seen(group):
    calls = {
        "barrier on rank 0: rank 1 is gone": lambda g: g.barrier(timeout=15),
        "broadcast on rank 0: rank 1 is gone": lambda g: g.broadcast(
            np.zeros(3), root=1, timeout=15
        ),
        "on rank 0: ": lambda g: [g.all_reduce(np.zeros(9), timeout=15) for _ in range(3)],
    }
    groups = [TorchGroup(dist.new_group()) for _ in calls]
    for other in groups:
        other.barrier()
    if group.rank == 1:
        tell("a_rank_that_dies_is_seen", "ok")
        os._exit(0)
    for (text, call), other in zip(calls.items(), groups, strict=True):
        began = time.monotonic()
        caught = raises(CollectiveError, text, call, other)
        assert "the group is unusable: create a new one" in str(caught)
        assert time.monotonic() - began < 20


@scenario
def what_fails_half_way_breaks_the_group(group):
    """Out of memory, or Ctrl-C: the ranks are out of step."""
    from mlstate.integrations.torch._collectives import exchange as _exchange

    def fail(*_):
        raise MemoryError

    group.barrier()
    if group.rank == 0:
        _exchange.reduce_parts = fail
        raises(MemoryError, "", group.all_reduce, np.zeros(3))
        raises(CollectiveError, "broken by all_reduce, which failed", group.barrier)
    else:
        assert group.all_reduce(np.zeros(3)).tolist() == [0, 0, 0]
        raises(TypeError, "sparse", group.broadcast, torch.eye(2).to_sparse(), root=1)
        assert repr(group) == "TorchGroup(rank 1 of 2)"  # nothing had started


@scenario
def an_abort_ends_what_waits(group):
    if group.rank == 0:
        work = group.all_gather(np.zeros(3), async_op=True, timeout=5)
        group.abort()
        raises(CollectiveError, "aborted", work.wait, 20)
        raises(CollectiveError, "this group was aborted", group.barrier)
    else:
        sys.stdin.readline()


if __name__ == "__main__":
    main(default=True, warn="error", timeout_seconds=20)
