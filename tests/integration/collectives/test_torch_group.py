"""Groups of torch.distributed: two and three processes over gloo."""

import gc
import time
import weakref
from datetime import timedelta

import child
import gloo_ranks
import group_scenarios
import numpy as np
import pytest
import torch
import torch.distributed as dist
from group_model import raises, shared_folder
from traced_memory import traced

import mlstate
from mlstate import CollectiveError, CompatibilityError, fsdp
from mlstate.checkpoint import (
    CheckpointManager,
    export_huggingface,
    export_huggingface_async,
    save_async,
)
from mlstate.collectives import ProcessGroup, SingleGroup
from mlstate.collectives._arguments import check_group
from mlstate.distributed import DistributedStateCollector
from mlstate.integrations.torch import TorchGroup

pytestmark = pytest.mark.torch

pytest.importorskip("ml_dtypes", reason="ranks compare bfloat16 in NumPy")
on_ranks = gloo_ranks.run_on(2, 3, most=3, warn="error")


@pytest.mark.parametrize("name", group_scenarios.SCENARIOS)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_agree(world, name):
    gloo_ranks.run(world, group_scenarios.SCENARIOS[name], warn="error")


# ---- operations ----


@on_ranks
def test_it_is_a_group(group):
    assert isinstance(group, ProcessGroup)
    assert (group.rank, group.world_size) == (dist.get_rank(), dist.get_world_size())
    assert repr(group) == f"TorchGroup(rank {group.rank} of {group.world_size})"


@on_ranks
def test_empty_tensors_with_strides_of_zero(group):
    empty = torch.zeros(0).as_strided((0,), (0,))
    for operation in (group.all_reduce, group.all_gather, group.all_to_all, group.broadcast):
        assert operation(empty).shape == (0,)
    assert group.reduce_scatter(empty, counts=[0] * group.world_size).shape == (0,)
    assert group.all_reduce(torch.ones(1)).tolist() == [group.world_size]


@on_ranks
def test_torch_groups_are_accepted_wherever_a_group_is(group):
    world, state = dist.group.WORLD, {"w": np.arange(6.0)}
    folder = shared_folder(group)
    mlstate.save(folder / "a", state, group=world)
    assert mlstate.load(folder / "a", group=world, layout="flat").model["w"].size < 6
    target = {"w": np.zeros(6), "other": np.zeros(1)}
    mlstate.load(folder / "a", group=world, into={"model": target}, strict=False)
    assert target["w"].tolist() == state["w"].tolist()
    export_huggingface(folder / "hf", state, group=world)
    manager = CheckpointManager(folder / "run", save_interval_steps=2)
    assert manager.should_save(2, group=world)
    assert not manager.reached_preemption(group=world)
    manager.save(2, state, group=world)
    assert manager.restore_latest(group=world).step == 2
    assert manager.restore(2, group=world).step == 2
    other = dist.new_group()
    manager.save_async(4, state, group=other).wait()
    save_async(folder / "b", state, group=other).wait()
    raises(ValueError, "torch's default group", save_async, folder / "c", state, group=world)
    raises(ValueError, "default group", export_huggingface_async, folder / "c", state, group=world)
    collector = DistributedStateCollector(world)
    collector.broadcast_state({"w": np.arange(6.0)})
    units = fsdp.sharding_units(torch.nn.Linear(2, 2), world)
    assert units["weight"].shard_index == group.rank
    assert fsdp.clip_grad_norm({}, 1.0, world) == 0
    operation = fsdp.ReduceScatterOperation(world, (6,), "float64", group.rank)
    operation.reduce_scatter(state["w"])
    assert collector.group is fsdp.FSDP(world).process_group is check_group(world)
    mesh = dist.init_device_mesh("cpu", (group.world_size,))
    assert check_group(mesh) is check_group(mesh.get_group())
    mesh = dist.init_device_mesh("cpu", (1, group.world_size), mesh_dim_names=("dp", "tp"))
    raises(ValueError, "mesh of 2 dimensions", check_group, mesh)
    assert check_group(mesh["tp"]).world_size == group.world_size
    alone = dist.new_group([0])
    if group.rank == 0:
        check_group(alone)
        group_ref = weakref.ref(check_group(alone))
        dist.destroy_process_group(alone)
        raises(ValueError, "was destroyed", mlstate.save, folder / "d", state, group=alone)
        check_group(world)
        gc.collect()
        assert group_ref() is None
    else:
        raises(TypeError, "process group", mlstate.save, folder / "d", state, group=alone)
    dist.barrier()  # the groups are still open


@on_ranks
def test_small_floats_are_summed(group):
    group_scenarios.check_reductions(group, "float8_e5m2")


@on_ranks
def test_collectives_make_no_copies(group):
    array = np.zeros(1 << 20, np.uint8)
    array.flags.writeable = False
    out = np.empty(group.world_size << 20, np.uint8)
    with traced() as trace:
        group.all_gather(array, out=out)
        group.broadcast(out)
        group.all_reduce(out, op="max", out=out)
    assert trace.peak < 1 << 19, trace.peak  # of memory that NumPy allocates


@on_ranks
def test_checked_group_names_mismatched_calls(group):
    world, rank = group.world_size, group.rank
    checked = TorchGroup(check=True)
    for name in (
        "rows_are_scattered_and_gathered", "rows_go_to_each_rank", "any_bytes_travel",
        "bytes_of_any_length_are_gathered", "async_operations_keep_their_order",
    ):  # fmt: skip
        group_scenarios.SCENARIOS[name](checked)
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
        "from 1": lambda: checked.broadcast(np.zeros(2), root=int(last)),
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


@on_ranks
def test_an_out_that_cannot_be_written_is_refused_before_anything_is_sent(group):
    checked = TorchGroup(check=True)
    source = torch.ones(2 * group.world_size, dtype=torch.complex64)
    rows = torch.zeros(2, dtype=torch.complex64)
    for name, out in (("all_reduce", source.conj()), ("reduce_scatter", rows.conj())):
        raises(
            TypeError,
            "out: the tensor is a view that is conju",
            getattr(checked, name),
            source,
            out=out,
        )
    imaginary = torch.zeros(len(source), dtype=torch.complex64).conj().imag
    raises(
        TypeError,
        "out: the tensor is a view that is nega",
        checked.all_reduce,
        source.real,
        out=imaginary,
    )
    checked.barrier()


@on_ranks
def test_results_of_a_caller_in_inference_mode_are_written(group):
    total, ones = [group.world_size] * 2, torch.ones(2 * group.world_size)
    with torch.inference_mode():
        tensor = torch.ones(4)
        for out in (tensor[:2], tensor[::2]):
            assert group.all_reduce(ones[:2], out=out, async_op=True).wait().tolist() == total
        assert group.reduce_scatter(ones, async_op=True).wait().tolist() == total
        assert group.broadcast(tensor[::2], async_op=True).wait().tolist() == total
    assert group.all_reduce(ones[:2], out=tensor[1:3]).tolist() == total
    group.barrier()


@on_ranks
def test_a_dtype_that_torch_lacks_is_refused(group):
    if np.dtype(np.longdouble).itemsize > 8:
        array = np.zeros(2, np.longdouble)
        raises(CompatibilityError, "torch has no dtype", group.all_reduce, array)
    group.barrier()


@on_ranks
def test_closed_group_raises(group):
    with TorchGroup() as other:
        work = other.barrier(async_op=True)
    assert work.done()
    caught = raises(CollectiveError, "this group was closed", other.barrier)
    assert (caught.name, caught.rank) == ("barrier", group.rank)
    assert repr(other).endswith(", closed)")
    other.close()
    group.barrier()  # torch's group still exists


@on_ranks
def test_a_part_of_the_ranks_is_a_group(group):
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


# ---- without other ranks ----

UNDER_WAY = """
import sys, warnings
warnings.simplefilter("ignore")
import numpy as np, torch.distributed as dist
from mlstate.integrations.torch import TorchGroup
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
group = TorchGroup()
works = [group.all_reduce(np.ones(100_000), async_op=True) for _ in range(20)]
"""


def test_a_process_may_end_with_operations_under_way(tmp_path):
    done = child.attempt(UNDER_WAY, str(tmp_path / "store"))
    assert (done.returncode, done.stderr) == (0, "")


def test_torch_must_be_initialised():
    with pytest.raises(CollectiveError, match="init_process_group first"):
        TorchGroup()


def test_on_a_device_the_backend_moves_the_bytes():
    """A process group that records its calls, with tensors that need no device."""
    from mlstate.integrations.torch._collectives.exchange import Link

    calls = []

    class Backend:
        def rank(self):
            return 1

        def size(self):
            return 3

        def wait(self, *timeout):
            calls.append(timeout[0].total_seconds() if timeout else None)

        def alltoall(self, receives, sends, options):
            calls.append([[part.nbytes for part in parts] for parts in (receives, sends)])
            return self

        def broadcast(self, tensors, options):
            calls.append((options.rootRank, tensors[0].dtype, tensors[0].nbytes))
            return self

        def barrier(self, options):
            calls.append(options.device_ids)
            return self

    device = torch.device("meta")
    link = Link(Backend(), device, None)
    memory = torch.empty(6, dtype=torch.float32, device=device)
    link.all_to_all(memory, torch.empty_like(memory), [1, 2, 3], [2, 2, 2])
    link.broadcast(memory, 2)
    link.barrier()
    assert calls == [[[8, 0, 8], [4, 0, 12]], None, (2, torch.uint8, 24), None, [0], None]
    late = Link(Backend(), device, 0.0)
    late.barrier()
    assert calls[-1] == 0.001 and late.began and not link.overlapped_task


def test_error_of_another_backend_than_gloo_is_passed_on():
    from mlstate.collectives._engine import Call
    from mlstate.integrations.torch._collectives.exchange import Link

    class Backend(dist.ProcessGroup):
        def recv(self, *_):
            raise RuntimeError("odd")

    link = Link(Backend(0, 2), torch.device("cpu"), None)
    with pytest.raises(RuntimeError, match="odd") as caught:
        link.exchange([torch.ones(1)] * 2, [torch.ones(1)] * 2)
    assert link.closed_peers() == []
    group = TorchGroup.__new__(TorchGroup)
    group._rank = 0
    error = group._explain_error(Call("barrier", None, False), link, "", caught.value)
    assert isinstance(error, CollectiveError)
    assert "rank 1 is gone, has failed (perhaps because of another rank)" in str(error)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter"])
def test_single_group_takes_sparse_tensors(operation):
    tensor = torch.eye(3).to_sparse()
    result = getattr(SingleGroup(), operation)(tensor)
    assert torch.equal(result.to_dense(), torch.eye(3))


# ---- failures ----


class Gone(Exception):
    """Raised by a rank that ends while the others need it."""


def run_without(world, function):
    """Call a function on ranks of which some are `Gone`; the others must return."""
    with pytest.raises(Gone) as caught:
        gloo_ranks.run(world, function, warn="error")
    assert all("Gone" in note.splitlines()[-1] for note in caught.value.__notes__)


@gloo_ranks.run_on(2, warn="error")
def test_a_rank_that_does_not_come_is_a_timeout(group):
    calls = {
        "all_reduce": lambda g: g.all_reduce(np.zeros(9), timeout=0.5),
        "barrier": lambda g: g.barrier(timeout=0.5),
        "broadcast": lambda g: g.broadcast(np.zeros(1 << 20), root=1, timeout=0.5),
    }
    groups = [TorchGroup(dist.new_group()) for _ in calls]
    if group.rank == 1:
        return
    for (name, call), other in zip(calls.items(), groups, strict=True):
        began = time.monotonic()
        text = f"{name} on rank 0: not done after 0.5 s: rank 1 did not call it"
        caught = raises(CollectiveError, text, call, other)
        assert time.monotonic() - began < 10
        assert (caught.name, caught.rank) == (name, 0)
        raises(CollectiveError, f"broken by {name}, which failed", other.barrier)


@gloo_ranks.run_on(2, warn="error")
def test_an_async_operation_times_out_too(group):
    if group.rank == 0:
        work = group.gather_bytes(b"x", async_op=True, timeout=0.5)
        behind = group.barrier(async_op=True)
        raises(CollectiveError, "gather_bytes on rank 0: not done after 0.01 s", work.wait, 0.01)
        raises(CollectiveError, "not done after 0.5 s: rank 1 did not", work.wait, 20)
        raises(CollectiveError, "broken by gather_bytes", behind.wait, 20)


def see_a_rank_that_dies(group):
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
        raise Gone
    for (text, call), other in zip(calls.items(), groups, strict=True):
        began = time.monotonic()
        caught = raises(CollectiveError, text, call, other)
        assert "the group is unusable: create a new one" in str(caught)
        assert time.monotonic() - began < 20


def test_a_rank_that_dies_is_seen():
    run_without(2, see_a_rank_that_dies)


def name_all_ranks_that_are_gone(group):
    """Rank 1 ends, rank 2 therefore fails and ends, and rank 0 notices rank 2 first."""
    from mlstate.integrations.torch._collectives.exchange import Link

    link = Link(dist.group.WORLD, torch.device("cpu"), None)
    link.barrier()
    assert link.closed_peers() == []
    link.barrier()  # all ranks have looked
    if group.rank == 1:
        raise Gone
    if group.rank == 2:
        text = "barrier on rank 2: rank 1 is gone, has failed (perhaps because of another rank)"
        raises(CollectiveError, text, group.barrier, timeout=15)
        raise Gone
    began = time.monotonic()
    while link.closed_peers() != [1, 2]:
        assert time.monotonic() - began < 15
        time.sleep(0.01)
    text = "barrier on rank 0: one of rank 1, rank 2 is gone or has failed, the others perhaps"
    raises(CollectiveError, text, group.barrier, timeout=15)


def test_an_error_names_all_ranks_that_are_gone():
    run_without(3, name_all_ranks_that_are_gone)


@gloo_ranks.run_on(2, warn="error")
def test_partial_failure_breaks_the_group(group):
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


@gloo_ranks.run_on(2, warn="error")
def test_abort_ends_waiting_operations(group):
    if group.rank == 0:
        work = group.all_gather(np.zeros(3), async_op=True, timeout=5)
        group.abort()
        raises(CollectiveError, "aborted", work.wait, 20)
        raises(CollectiveError, "this group was aborted", group.barrier)
