"""The ranks of test_mpi.py: scenarios for MPI alone. Others are in group_scenarios.py."""

import contextlib
import os
import time
import traceback

import numpy as np
from group_model import Scenarios, as_tensor, inputs, raises, reduced, same_bits
from group_scenarios import SCENARIOS
from traced_memory import traced

from mlstate import CollectiveError
from mlstate.collectives import ProcessGroup, Work
from mlstate.integrations.mpi import MPIGroup

if "MPI4PY_LIBMPI" in os.environ:  # in a rank; the test needs only the names of the scenarios
    from mpi4py import MPI

OWN = Scenarios()
scenario = OWN.add
FAILURES = Scenarios()
failure = FAILURES.add
# Hooks of torch models; their gradients are exchanged as messages.
HOOKS = [
    "a_tied_transformer_with_frozen_parameters",
    "a_model_in_bfloat16",
    "unused_parameters_are_named_or_zero",
    "a_gradient_that_is_not_finite_is_named",
    "another_dtype_on_one_rank_is_named",
]


@scenario
def a_communicator_is_a_group(group):
    world = MPI.COMM_WORLD
    assert isinstance(group, ProcessGroup)
    assert (group.rank, group.world_size) == (world.rank, world.size)
    assert repr(group) == f"MPIGroup(rank {group.rank} of {group.world_size})"


@scenario
def messages_of_the_program_do_not_mix_with_the_groups(group):
    world, rank = MPI.COMM_WORLD, group.rank
    right, left = (rank + 1) % world.size, (rank - 1) % world.size
    request = world.isend(f"from {rank}", right, tag=0)
    everyones = inputs(group.world_size, 1000, "float32")
    same_bits(group.all_reduce(everyones[rank]), reduced(everyones, "sum"))
    assert world.recv(source=left, tag=MPI.ANY_TAG) == f"from {left}"
    request.wait()


@scenario
def long_arrays_travel_in_several_messages(group):
    """17 MiB and one byte, from every rank as the root, in place and into another array."""
    length = (17 << 20) + 1
    base = np.arange(length, dtype=np.uint32).astype(np.uint8)
    for root in range(group.world_size):
        array = base + np.uint8(root) if group.rank == root else np.empty(length, np.uint8)
        group.broadcast(array, root=root)
        assert np.array_equal(array, base + np.uint8(root))
    total = group.all_reduce(array, op="sum", out=array)
    assert total is array
    expected = (base + np.uint8(group.world_size - 1)) * np.uint8(group.world_size)
    assert np.array_equal(array, expected)


@scenario
def moving_makes_no_copy_and_reducing_copies_one_part(group):
    array = np.zeros(1 << 20, np.uint8)
    array.flags.writeable = False
    out = np.empty(group.world_size << 20, np.uint8)
    with traced() as moving:
        group.all_gather(array, out=out)
        group.broadcast(out)
    with traced() as reducing:
        group.all_reduce(out, op="max", out=out)
    assert moving.peak < 1 << 19
    assert reducing.peak < (group.world_size + 1) << 20


@scenario
def counts_may_be_empty_and_uneven(group):
    world, rank = group.world_size, group.rank
    for counts in ([0] * (world - 1) + [5], [3] + [0] * (world - 1), [0] * world, range(world)):
        for dtype in ("float32", "bfloat16"):
            everyones = inputs(world, sum(counts), dtype)
            part = group.reduce_scatter(everyones[rank], counts=counts, op="mean")
            start = sum(counts[:rank])
            total = reduced(everyones, "mean")
            same_bits(part, total[start : start + counts[rank]])
            same_bits(group.all_gather(part, counts=counts), total)


@scenario
def a_bucket_is_traded_as_bytes(group):
    """The messages of gradient buckets: short texts, then uneven parts of one buffer."""
    world, rank = group.world_size, group.rank
    sent = [100 * rank + to for to in range(world)]
    receive_counts = [100 * source + rank for source in range(world)]
    send = np.concatenate([np.full(n, 16 * rank + to, np.uint8) for to, n in enumerate(sent)])
    out = np.empty(sum(receive_counts), np.uint8)
    for _ in range(3):
        messages = group.gather_bytes(bytes([rank]) * 248)
        assert messages == [bytes([r]) * 248 for r in range(world)]
        group.all_to_all(send, counts=sent, out_counts=receive_counts, out=out, async_op=True).wait(
            60
        )
        expected = [
            np.full(n, 16 * source + rank, np.uint8) for source, n in enumerate(receive_counts)
        ]
        same_bits(out, np.concatenate(expected))


@scenario
def a_part_of_the_ranks_is_a_group(group):
    part = MPI.COMM_WORLD.Split(0 if group.rank < 2 else MPI.UNDEFINED, group.rank)
    if group.rank < 2:
        with MPIGroup(part) as pair:
            assert (pair.rank, pair.world_size) == (group.rank, 2)
            assert pair.gather_bytes(b"%d" % group.rank) == [b"0", b"1"]
        part.Free()  # borrowed memory
    else:
        raises(ValueError, "not a member", MPIGroup, part)
    with MPIGroup(MPI.COMM_SELF) as alone:
        assert (alone.rank, alone.world_size) == (0, 1)
        assert alone.all_reduce(np.arange(3.0)).tolist() == [0.0, 1.0, 2.0]
        assert alone.broadcast(np.arange(2)).tolist() == [0, 1]
        assert alone.gather_bytes(b"x" * 1000) == [b"x" * 1000]
        alone.barrier()
    raises(TypeError, "must be an mpi4py.MPI.Intracomm, got int", MPIGroup, 3)
    raises(ValueError, "timeout must be", MPIGroup, timeout=-1)
    group.barrier()


@scenario
def tensors_that_were_written_to_have_a_new_version(group):
    import torch

    weight = torch.ones(3, requires_grad=True)
    place = torch.ones(3)
    product = (weight * place).sum()  # its backward pass needs `place` unchanged
    group.all_reduce(as_tensor(np.ones(3, np.float32)), out=place)
    raises(RuntimeError, "modified by an inplace operation", product.backward)


@scenario
def closed_group_raises(group):
    with MPIGroup(timeout=20) as other:
        work = other.barrier(async_op=True)
    assert work.done()
    caught = raises(CollectiveError, "this group was closed", other.barrier)
    assert (caught.name, caught.rank) == ("barrier", group.rank)
    assert repr(other).endswith(", closed)")
    other.close()
    other.abort()
    group.barrier()  # the caller's communicator still exists


# ---- failures: each breaks its own group ----


def await_the_end(group):
    """Let ranks wait for each other without their group."""
    deadline, request = time.monotonic() + 100, MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@failure
def a_rank_that_does_not_come_is_named(group):
    last = group.world_size - 1
    if group.rank != last:
        began = time.monotonic()
        caught = raises(CollectiveError, "", group.all_reduce, np.zeros(9), timeout=0.5)
        text = str(caught)
        assert f"all_reduce on rank {group.rank}: " in text, text
        assert f"not done after 0.5 s: nothing more came from rank {last}" in text or (
            "gave up in all_reduce" in text  # the first one informs the others
        ), text
        assert time.monotonic() - began < 30
        assert (caught.name, caught.rank) == ("all_reduce", group.rank)
        raises(CollectiveError, "broken by all_reduce, which failed", group.barrier)
    await_the_end(group)
    if group.rank == last:  # arrives too late
        twice = (group.all_reduce(np.zeros(9)) for _ in range(2))  # the first one was sent
        raises(CollectiveError, "gave up in all_reduce", list, twice)


@failure
def a_backward_pass_without_a_rank_names_it(group):
    from fsdp_torch_ranks import hooked, layers, square_of

    last = group.world_size - 1
    model = layers()
    units, _ = hooked(group, model, timeout=1.0)
    if group.rank != last:
        text = str(raises(CollectiveError, "", square_of(model, group.rank).backward))
        assert f"nothing more came from rank {last}" in text or "gave up in" in text, text
        assert all(unit.local_gradient is None for unit in units.values())
        raises(CollectiveError, "broken by", group.barrier)
    await_the_end(group)


@failure
def an_async_operation_times_out_too(group):
    if group.rank == 0:
        work = group.gather_bytes(b"x", async_op=True, timeout=0.5)
        behind = group.barrier(async_op=True)
        raises(CollectiveError, "gather_bytes on rank 0: not done after 0.01 s", work.wait, 0.01)
        raises(CollectiveError, "not done after 0.5 s: nothing more came", work.wait, 20)
        raises(CollectiveError, "broken by gather_bytes", behind.wait, 20)
    await_the_end(group)


@failure
def group_timeout_applies_to_its_operations(group):
    impatient = MPIGroup(timeout=0.3)
    if group.rank == 0:
        raises(CollectiveError, "not done after 0.3 s", impatient.barrier)
    await_the_end(group)


@failure
def calls_that_do_not_go_together_fail_on_every_rank(group):
    last = group.rank == group.world_size - 1
    ones = np.ones
    wrong = {
        "called": lambda g: g.barrier() if last else g.gather_bytes(b""),
        "called all_gather with another shape": lambda g: g.all_gather(ones(4 if last else 3)),
        "another shape, dtype, op": lambda g: g.all_reduce(ones(9), op="max" if last else "min"),
        "all_reduce with another": lambda g: g.all_reduce(ones(2, "f4" if last else "i4")),
        "reduce_scatter with": lambda g: g.reduce_scatter(ones((9999 if last else 12) * 12)),
        "bytes": lambda g: g.all_to_all(ones((12 if last else 1) * g.world_size)),
    }
    for text, call in wrong.items():
        other = MPIGroup(timeout=20)
        caught = raises(CollectiveError, "", call, other)
        assert text in str(caught) or "gave up in" in str(caught), (text, str(caught))
        assert caught.rank == group.rank
        assert "broken" in repr(other)
        group.barrier()


@failure
def abort_ends_waiting_operations_everywhere(group):
    if group.rank == 0:
        work = group.all_gather(np.zeros(3), async_op=True)
        group.abort()
        raises(CollectiveError, "this group was aborted", work.wait, 20)
        raises(CollectiveError, "this group was aborted", group.barrier)
    await_the_end(group)
    other = MPIGroup()
    if group.rank == 0:
        other.abort()  # while no operation is in progress
    else:
        caught = raises(CollectiveError, "", other.barrier)
        messages = ("rank 0 aborted the group", "gave up in barrier")
        assert any(text in str(caught) for text in messages), str(caught)
    await_the_end(group)


@failure
def partial_failure_breaks_the_group(group):
    """Out of memory, or Ctrl-C: the ranks are out of step."""
    from mlstate.collectives import _link

    def fail(*_):
        raise KeyboardInterrupt

    group.barrier()
    if group.rank == 0:
        _link.reduce_parts = fail
        raises(KeyboardInterrupt, "", group.all_reduce, np.zeros(3))
        raises(CollectiveError, "broken by all_reduce, which failed", group.barrier)
    else:
        group.all_reduce(np.zeros(3))
        raises(CollectiveError, " gave up in ", group.barrier)  # rank 0, or the first to notice
    await_the_end(group)


@failure
def a_key_that_is_pressed_ends_the_wait(group):
    import signal
    import threading

    if group.rank == 0:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        raises(KeyboardInterrupt, "", group.barrier)
    await_the_end(group)
    if group.rank != 0:
        twice = (group.barrier() for _ in range(2))  # the first one was sent
        raises(CollectiveError, "gave up in barrier", list, twice)
    await_the_end(group)


@failure
def a_group_that_others_do_not_make_is_a_timeout(group):
    alone = MPI.COMM_WORLD.Dup()
    if group.rank == 0:
        raises(CollectiveError, "every rank of the communicator must", MPIGroup, alone, timeout=0.3)
    await_the_end(group)


def with_fewer_threads_operations_are_done_at_once(group):
    """Below MPI_THREAD_MULTIPLE an operation runs in the caller's thread, before it returns."""
    import threading

    work = group.all_gather(np.array([group.rank]), async_op=True)
    assert isinstance(work, Work)
    assert work.done()
    assert work.wait().tolist() == list(range(group.world_size))
    assert not [t for t in threading.enumerate() if t.name == "mlstate-mpi-group"]
    gathered = []

    def elsewhere():
        try:
            gathered.append(group.gather_bytes(b"x"))
        except CollectiveError as error:
            gathered.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    if MPI.Query_thread() == MPI.THREAD_SERIALIZED:
        assert gathered == [[b"x"] * group.world_size]
    else:
        assert "MPI was initialised for one thread" in gathered[0]
    group.barrier()
    if group.rank == 0:  # the failed operation also fails its work
        work = group.barrier(async_op=True, timeout=0.3)
        raises(CollectiveError, "not done after 0.3 s", work.wait)
    await_the_end(group)


def outcomes(world_group, names):
    """Run scenarios as one rank; return "ok" or the error of each. A failure has its own group."""
    functions = {**SCENARIOS, **OWN, **FAILURES}
    if set(names) & set(HOOKS):
        import fsdp_torch_ranks

        functions |= fsdp_torch_ranks.SCENARIOS
    done = {}
    for name in names:
        group = MPIGroup(timeout=100) if name in FAILURES else world_group
        try:
            functions[name](group)
            done[name] = "ok"
        except Exception:
            done[name] = traceback.format_exc()
        if group is not world_group:
            with contextlib.suppress(MPI.Exception):  # MPICH keeps one with unmatched messages
                group.close()
    return done
