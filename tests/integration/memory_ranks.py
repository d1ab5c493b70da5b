"""What each rank does in test_local_memory.py: arrays that all ranks of a host can read."""

import gc
import os
import signal
import sys
from pathlib import Path

import numpy as np
from group_model import dtype_of, inputs, raises, reduced, same_bits

from mlstate import CollectiveError
from mlstate.collectives import LocalGroup
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit

LONG = 60.0  # seconds that nobody waits for
KINDS = ["float32", "bfloat16", "float64", "int8", "complex64"]


def shared_kilobytes():
    """Shared memory of this process that is there."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0])


def mapped_blocks():
    """Parts of groups' memory that this process has mapped."""
    if sys.platform != "linux":
        return 0
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("mlstate-group" in line for line in maps)


def place(group, array, shared):
    """Copy an array into memory of the group, or leave it where it is."""
    if not shared:
        return array
    found = group.empty(array.shape, array.dtype)
    found[...] = array
    return found


def sums_are_those_of_arrays_that_travel(group, whose):
    """Any lengths, counts and dtypes; `whose` ranks have their arrays in shared memory."""
    world, rank = group.world_size, group.rank
    blocks = mapped_blocks()
    for seed, kind in enumerate(KINDS):
        for rows in (0, 1, 7 * world, 300_001):
            everyones = inputs(world, rows, kind, seed)
            counts = [rows // world] * world
            counts[-1] += rows - sum(counts)
            for op in ("sum", "mean") if dtype_of(kind).kind in "fc" else ("sum", "max"):
                total = reduced(everyones, op)
                mine = place(group, everyones[rank].copy(), rank in whose)
                start = sum(counts[:rank])
                found = group.reduce_scatter(mine, op=op, counts=counts)
                same_bits(found, total[start : start + counts[rank]])
                same_bits(np.array(mine), everyones[rank])
    if world > 1 and set(whose) >= set(range(world)) and sys.platform == "linux":
        assert mapped_blocks() > blocks + 1  # this rank's own, and what it read of others


def results_may_lie_in_their_array(group):
    """The last rank gets all of it, in its own array."""
    world, rank = group.world_size, group.rank
    everyones = inputs(world, 500_000, "float32")
    mine = place(group, everyones[rank], True)
    counts = [0] * (world - 1) + [500_000]
    if rank == world - 1:
        assert group.reduce_scatter(mine, counts=counts, out=mine) is mine
        same_bits(mine, reduced(everyones, "sum"))
    else:
        assert group.reduce_scatter(mine, counts=counts).size == 0
        same_bits(mine, everyones[rank])


def an_array_may_change_as_soon_as_it_was_reduced(group):
    """No rank goes on before the slowest has read."""
    mine = group.empty(1_200_000 * group.world_size, np.float32)
    for round_ in range(6):
        mine.fill(round_ + group.rank)
        found = group.reduce_scatter(mine)
        assert (found == sum(round_ + r for r in range(group.world_size))).all()


def gradients_of_hooks_are_reduced(group, hook):
    """Some parameters in shared memory, then all of them: the same local gradients."""
    shapes = {"wte": (6000, 64), "bias": (7,), "head": (1, 64), "empty": (0, 3)}
    everyones = {
        name: inputs(group.world_size, int(np.prod(shape)), "float32", seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    found = []
    for shared in ([], ["wte"], list(shapes)):
        units = {
            name: FSDPShardingUnit(name, shape, "float32", group.rank)
            for name, shape in shapes.items()
        }
        gradients = {
            name: place(group, everyones[name][group.rank].reshape(shape), name in shared)
            for name, shape in shapes.items()
        }
        with FSDPBackwardHook(FSDP(group)) as backward:
            if hook:
                backward.use_units(units)
                for name, gradient in gradients.items():
                    backward.add_gradient(name, gradient)
                backward.finish()
            else:
                backward.scatter_multiple(units, gradients)
        found.append({name: unit.local_gradient.tobytes() for name, unit in units.items()})
    assert found[0] == found[1] == found[2]
    return found[0]


def memory_is_given_back(group, count=32_000_000):
    """When the array is gone, though views of it lived longer; others' maps do not hold it."""
    before = shared_kilobytes()
    mine = group.empty(count, np.uint8)
    mine.fill(3)
    group.reduce_scatter(mine.view(np.int8))
    assert shared_kilobytes() - before > 0.9 * count / 1024
    view = mine[5:]
    del mine
    gc.collect()
    assert view[0] == 3
    del view
    gc.collect()
    group.barrier()
    assert shared_kilobytes() - before < 0.2 * count / 1024
    for _ in range(40):  # the place is used again: nothing adds up
        group.empty(count, np.uint8)[:100] = 1
    assert mapped_blocks() < 10


def arrays_outlive_the_group(group):
    mine = group.empty((3, 4))
    mine[...] = 1.5
    group.close()
    raises(CollectiveError, "was closed", group.empty, 3)
    assert mine.sum() == 18
    mine[0] = 2
    return mine


def shapes_and_dtypes_are_those_of_numpy(group):
    for shape in (5, (5,), [2, 3], (), (0, 4), np.int64(3)):
        like = np.empty(shape)
        found = group.empty(shape)
        assert (found.shape, found.dtype) == (like.shape, like.dtype)
        assert found.flags.c_contiguous
        assert found.flags.writeable
    assert group.empty(2, "<f2").dtype == np.float16
    assert group.empty(2, ">i4").dtype == np.dtype(">i4")
    record = np.dtype([("a", "f4"), ("b", "i8")])
    assert group.empty(2, record).dtype == record
    raises(TypeError, "objects", group.empty, 2, object)
    raises(TypeError, "", group.empty, 2.5)
    raises(ValueError, "negative", group.empty, (3, -1))
    raises(MemoryError, "", group.empty, 1 << 50, np.uint8)
    raises((MemoryError, ValueError), "", group.empty, (1 << 40, 1 << 40))
    assert group.empty(3).shape == (3,)  # nothing was lost


def a_forked_child_shares_and_frees_nothing(group):
    mine = group.empty(100_000, np.float32)
    mine.fill(2)
    process = os.fork()
    if process == 0:
        good = float(mine[7]) == 2
        mine[7] = 3
        del mine
        gc.collect()
        os._exit(0 if good else 1)
    assert os.waitpid(process, 0)[1] == 0
    assert float(mine[7]) == 3
    assert float(mine.sum()) == 200_001
    group.barrier()
    assert group.reduce_scatter(mine)[7] in (2.0 * group.world_size, 3.0 * group.world_size)


def who_cannot_map_is_sent_to(group):
    """Rank 1 has no addresses left for what the others offer; then it has."""
    import resource

    mine = group.empty(3_000_000 * group.world_size, np.float32)
    mine.fill(group.rank + 1)
    total = sum(range(1, group.world_size + 1))
    out = np.empty(3_000_000, np.float32)
    before = resource.getrlimit(resource.RLIMIT_AS)
    blocks = mapped_blocks()
    for limited in (True, False):
        out.fill(0)
        if limited and group.rank == 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            least = pages * resource.getpagesize() + (2 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (least, before[1]))
        group.reduce_scatter(mine, out=out)
        resource.setrlimit(resource.RLIMIT_AS, before)
        assert (out == total).all()
        assert (mapped_blocks() == blocks) == (limited and group.rank == 1)


def be_killed(group, folder, who=1):
    """One rank ends while the others read its memory, over and over."""
    mine = group.empty(3_000_000, np.float32)
    mine.fill(1)
    group.barrier()
    if group.rank == who:
        for _ in range(3):
            group.reduce_scatter(mine)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            group.reduce_scatter(mine, timeout=LONG)
    except CollectiveError as error:
        Path(folder, f"rank{group.rank}").write_text(str(error))
    assert float(mine[-1]) == 1


def tensors_are_of_torch(group):
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        mine = group.empty((4, 6), dtype)
        assert (mine.shape, mine.dtype, mine.device.type) == ((4, 6), dtype, "cpu")
        mine.fill_(group.rank + 1)
        total = sum(range(1, group.world_size + 1))
        assert (group.reduce_scatter(mine) == total).all()
    assert group.empty((0, 3), torch.float16).shape == (0, 3)
    assert isinstance(group.empty(3, "float32"), np.ndarray)


def of_threads(group):
    """Ordinary memory, with the same results."""
    assert isinstance(group, LocalGroup)
    mine = group.empty(1200)
    mine.fill(group.rank)
    return float(group.reduce_scatter(mine)[0])
