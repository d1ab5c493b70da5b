"""Operations that every engine's group supports; its ranks are processes or threads."""

import itertools

import numpy as np
from gradient_model import check_parts, gradients_of, units_of
from group_model import (
    FLOATS,
    INTEGERS,
    LENGTHS,
    Scenarios,
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

from mlstate import CompatibilityError
from mlstate.checkpoint import Layout, Shard
from mlstate.collectives import Work
from mlstate.distributed import DistributedStateCollector
from mlstate.fsdp import FSDP, FSDPBackwardHook

SCENARIOS = Scenarios()
scenario = SCENARIOS.add


def check_reductions(group, dtype):
    """Reductions of a dtype are equal to the model's, also if ranks get no rows."""
    ops = ["sum", "mean", "min", "max"]
    if dtype == "bool" or dtype in INTEGERS:
        ops = ["min", "max"] if dtype == "bool" else ["sum", "min", "max"]
    elif "complex" in dtype:
        ops = ["sum", "mean"]
    for length in LENGTHS if dtype in ("bfloat16", "float32", "uint32") else [7, 5000]:
        everyones = inputs(group.world_size, length, dtype)
        contribution = everyones[group.rank]
        cuts = np.random.default_rng(length).integers(0, length + 1, group.world_size - 1)
        ends = [0, *np.sort(cuts).tolist(), length]
        start, end = ends[group.rank : group.rank + 2]
        for op in ops:
            expected = reduced(everyones, op)
            same_bits(group.all_reduce(contribution, op=op), expected)
            part = group.reduce_scatter(contribution, op=op, counts=np.diff(ends))
            same_bits(part, expected[start:end])


@scenario
def reductions_have_the_bits_of_sums_in_the_order_of_ranks(group):
    for dtype in [*FLOATS, *INTEGERS, "complex64", "complex128", "bool"]:
        check_reductions(group, dtype)


@scenario
def nan_wins(group):
    contribution = np.array([group.rank, np.nan if group.rank == group.world_size - 1 else 0.0])
    for op in ("min", "max", "sum", "mean"):
        assert np.isnan(group.all_reduce(contribution, op=op)).tolist() == [False, True]


@scenario
def rows_are_scattered_and_gathered(group):
    world, rank = group.world_size, group.rank
    array = np.arange(world * 6.0).reshape(world * 2, 3) + rank
    scattered = group.reduce_scatter(array)
    assert scattered.shape == (2, 3)
    total = sum(np.arange(world * 6.0).reshape(world * 2, 3) + r for r in range(world))
    same_bits(scattered, total[rank * 2 : rank * 2 + 2])
    same_bits(group.all_gather(scattered), total)
    counts = [0, *range(3, 3 + world - 1)]  # rank 0 has no elements
    rows = np.full((counts[rank], 2), rank, np.int16)
    expected = np.repeat(np.arange(world, dtype=np.int16), counts)[:, None] * [[1, 1]]
    same_bits(group.all_gather(rows, counts=counts), expected.astype(np.int16))


@scenario
def any_bytes_travel(group):
    world, rank = group.world_size, group.rank
    for dtype in ["bool", "S3", "M8[s]", ">f4", "complex64", "bfloat16", "i1,f8"]:
        gathered = np.arange(world * 4).astype("i8").astype(dtype_of(dtype))
        part = gathered[rank * 4 : rank * 4 + 4]
        same_bits(group.all_gather(part), gathered)
        backwards = gathered.reshape(world, 4)[:, ::-1].reshape(-1)
        same_bits(group.all_gather(part[::-1]), backwards)
        copy = gathered.copy() if rank == 1 else np.zeros_like(gathered)
        assert group.broadcast(copy, root=1) is copy
        same_bits(copy, gathered)


@scenario
def a_broadcast_may_have_any_length(group):
    for size in [0, 1, (64 << 10) // group.world_size, 70_001, 1 << 20]:
        for root in range(group.world_size):
            message = np.random.default_rng(size).integers(0, 255, size, np.uint8)
            copy = message.copy() if group.rank == root else np.zeros_like(message)
            same_bits(group.broadcast(copy, root=root), message)


@scenario
def rows_go_to_each_rank(group):
    world, rank = group.world_size, group.rank
    array = np.arange(world * 2) + 100 * rank
    received = group.all_to_all(array)
    assert received.tolist() == [100 * r + 2 * rank + i for r in range(world) for i in (0, 1)]
    assert group.all_to_all(array, out=array) is array
    assert array.tolist() == received.tolist()
    # rank r sends r rows to each rank, and receives s rows from rank s
    rows = np.full((rank * world, 2), rank, np.float32)
    received = group.all_to_all(rows, counts=[rank] * world, out_counts=range(world))
    same_bits(
        received,
        np.repeat(np.arange(world), range(world)).astype("f4")[:, None] + np.zeros(2, "f4"),
    )


@scenario
def tensors_stay_tensors(group):
    import torch

    world, rank = group.world_size, group.rank
    for dtype in [*FLOATS, "int64", "uint16", "complex64"]:
        everyones = inputs(world, 12, dtype)
        tensor = as_tensor(everyones[rank].copy())
        total = group.all_reduce(tensor)
        assert isinstance(total, torch.Tensor)
        assert torch.equal(total, as_tensor(reduced(everyones, "sum")))
        out = torch.zeros(12, 2, dtype=tensor.dtype)[:, 1]
        assert group.all_reduce(tensor, out=out) is out
        assert torch.equal(out, total)
        gathered = group.all_gather(tensor.reshape(4, 3).mT[:, :2])
        assert gathered.shape == (3 * world, 2)
        expected = torch.cat([as_tensor(a.copy()).reshape(4, 3).mT[:, :2] for a in everyones])
        assert torch.equal(gathered, expected)
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    assert group.broadcast(parameter, root=1) is parameter
    assert parameter.tolist() == [1.0] * 3
    assert not group.all_reduce(parameter).requires_grad
    raises(TypeError, "sparse", group.all_reduce, torch.eye(2).to_sparse())


@scenario
def out_is_filled_in_place(group):
    world, rank = group.world_size, group.rank
    everyones = inputs(world, 10_000 * world, "float32")
    contribution, total = everyones[rank].copy(), reduced(everyones, "sum")
    expected = total[rank * 10_000 : (rank + 1) * 10_000]
    for out in (np.empty(10_000, "f4"), np.empty(20_000, "f4")[::2], np.empty(10_000, "f4")[::-1]):
        assert group.reduce_scatter(contribution, out=out) is out
        same_bits(out.copy(), expected)
        gathered = np.empty((world * 10_000, 2), "f4")[:, 0]
        assert group.all_gather(out, out=gathered) is gathered
        same_bits(gathered.copy(), total)
    swapped = contribution.astype(">f4")
    same_bits(group.all_reduce(swapped), total.astype(">f4"))
    assert group.all_reduce(swapped[:0]).shape == group.reduce_scatter(swapped[:0]).shape == (0,)
    odd = np.empty(world * 40_000 + 1, np.uint8)[1:].view("f4")  # at an unaligned address
    odd[...] = contribution
    assert group.all_reduce(odd, out=odd) is odd
    same_bits(odd.copy(), total)
    assert group.all_reduce(contribution, out=contribution) is contribution
    same_bits(contribution, total)


@scenario
def bytes_of_any_length_are_gathered(group):
    world, rank = group.world_size, group.rank
    for lengths in (
        [0] * world,
        range(world),
        range(248, 248 + world),
        [0, 1_000_000, 3, 249, 5][:world],
    ):
        expected = [bytes([r + 1]) * n for r, n in enumerate(lengths)]
        gathered = group.gather_bytes(expected[rank])
        assert gathered == expected
        assert {type(part) for part in gathered} == {bytes}
        for root in range(world):
            gathered = group.gather_bytes(memoryview(expected[rank]), root=root)
            assert gathered == (expected if rank == root else None)


@scenario
def async_operations_keep_their_order(group):
    world, rank = group.world_size, group.rank
    everyones = inputs(world, 50_000, "float32")
    works = []
    for number in range(5):
        works.append(group.all_reduce(everyones[rank] * number, async_op=True, timeout=30))
        works.append(group.gather_bytes(b"%d" % (rank * number), async_op=True))
    last = group.all_gather(np.array([rank]))  # after them
    assert last.tolist() == list(range(world))
    assert all(isinstance(work, Work) and work.done() for work in works)
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
def invalid_arguments_fail_before_sending(group):
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
    raises(CompatibilityError, "op 'mean'", group.all_reduce, np.arange(2), op="mean")
    if group.rank != 1:
        frozen = np.frombuffer(bytes(8))
        raises(ValueError, "is read-only", group.broadcast, frozen, root=1)
    group.barrier()


@scenario
def checkpoints_are_saved_and_loaded_by_all(group):
    from mlstate import load, save

    world, rank = group.world_size, group.rank
    folder = shared_folder(group)
    array = np.arange(7.0 * 3).reshape(7, 3)
    path = folder / "checkpoint"
    save(path, {"w": Layout.rows(world).shard(array, rank), "b": np.ones(2)}, group=group)
    same_bits(load(path).model["w"], array)
    rows = load(path, group=group, layout="rows").model["w"]
    same_bits(rows, Layout.rows(world).take(array, rank))
    remove_folder(group, folder)


@scenario
def states_are_gathered_and_sent_back(group):
    world, rank, root = group.world_size, group.rank, group.world_size - 1
    collector = DistributedStateCollector(group)
    array = np.arange(35_000, dtype=np.float32).reshape(50, 700)
    for layout in (Layout.rows(world), Layout.axis(1, world), Layout.flat(world)):
        state = {"w": layout.shard(array, rank), "b": np.ones(4)}
        full = collector.gather_full_state(state, root=root, max_bytes=10_000)
        assert (full is not None) == (rank == root)
        if full is not None:
            same_bits(full["w"], array)
        part = np.zeros(layout.shape(array.shape, rank), np.float32)
        target = {"w": Shard(part, layout, rank, shape=array.shape), "b": np.zeros(4)}
        collector.broadcast_state(target, source=full, root=root, max_bytes=10_000)
        assert np.array_equal(part, layout.take(array, rank))
        assert target["b"].all()
    differing = {"w": np.full(3, float(rank == root))}
    text = f"w: the elements on rank {root} differ"
    raises(CompatibilityError, text, collector.gather_full_state, differing)


@scenario
def scattered_gradients_are_sums_in_the_order_of_ranks(group):
    # empty, fewer elements than ranks, uneven rows, more than one message
    shapes = {"empty": (0, 4), "scale": (), "bias": (2,), "rows": (7, 5), "large": (70, 301)}
    ways = [{}, {"op": "mean"}, {"reduce_dtype": "float32"}, {"op": "max"}]
    for dtype in ("float32", "bfloat16"):
        gradients = gradients_of(group.rank, shapes, dtype)
        for layout, way in itertools.product(("flat", "rows"), ways):
            units = units_of(group.rank, shapes, dtype, layout)
            bucket_bytes = 4000 if "op" in way else 0 if way else 25 << 20
            FSDPBackwardHook(FSDP(group, bucket_bytes=bucket_bytes, **way)).scatter_multiple(
                units, gradients
            )
            check_parts(units, group.world_size, shapes, dtype, layout, **way)
