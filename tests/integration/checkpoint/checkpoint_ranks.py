"""The ranks of test_checkpoint_ranks.py; each scenario has its own folder."""

import functools
import os
import signal
import sys
import warnings

import numpy as np
import torch.distributed as dist
import torch_processes
from checkpoint_model import flip_shard
from group_model import raises

import mlstate
from mlstate.checkpoint import CheckpointManager, Layout, Shard, save_async
from mlstate.integrations.torch import TorchGroup


def scenario(function):
    """Mark a function that every rank calls with its group and a folder, followed by a barrier."""

    @functools.wraps(function)
    def run(group):
        function(group, f"{sys.argv[1]}-{function.__name__}")
        group.barrier()

    return torch_processes.scenario(run)


def whole(step=0):
    """The full state, which every rank can make; the shards of all ranks together equal it."""
    generator = np.random.default_rng(step)
    return {
        "w": generator.standard_normal((7, 6)).astype(np.float32),
        "b": generator.standard_normal(7),
        "big": generator.standard_normal((513, 300)).astype(np.float32),
        "scalar": np.float32(step),
    }


def shards(group, kind, step=0, names=("w", "b", "big")):
    """This rank's shards of the state; every rank holds the whole scalar."""
    layout = {"rows": Layout.rows, "flat": Layout.flat}[kind](group.world_size)
    state = whole(step)
    parts = {name: layout.shard(state[name], group.rank) for name in names}
    return parts | {"scalar": np.asarray(state["scalar"])}


def same(actual, expected):
    assert sorted(actual) == sorted(expected), sorted(actual)
    for name, array in expected.items():
        assert np.array_equal(actual[name], array), name


def no_litter(group, folder):
    group.barrier()
    report = mlstate.verify(folder)
    assert report, report
    assert not report.leftover, report.leftover
    assert not report.strange, report.strange
    group.barrier()


@scenario
def each_rank_stores_its_shards(group, folder):
    for kind in ("rows", "flat"):
        moments = {f"{n}.m": s for n, s in shards(group, kind, 5).items()}
        saved = mlstate.save(folder, shards(group, kind), moments, group=group, metadata={"a": 1})
        assert saved.world_size == group.world_size
        loaded = mlstate.load(folder)
        same(loaded.model, whole())
        same(loaded.optimizer, {f"{n}.m": a for n, a in whole(5).items()})
        loaded_part = mlstate.load(folder, group=group)
        same(loaded_part.model, {n: getattr(s, "array", s) for n, s in shards(group, kind).items()})
        no_litter(group, folder)


@scenario
def a_state_may_change_while_it_is_saved(group, folder):
    state = shards(group, "rows")
    raises(ValueError, "torch's default group", save_async, folder, state, group=group)
    with TorchGroup(dist.new_group(backend="gloo")) as save_group:
        for step, budget in ((1, None), (2, 100_000), (3, 0)):
            state = shards(group, "flat", step)
            handle = save_async(
                folder, state, group=save_group, max_staging_bytes=budget, step=step
            )
            group.all_reduce(np.ones(3))  # training continues, in another group
            handle.staged(20)
            for value in state.values():
                getattr(value, "array", value)[...] = -1
            assert handle.wait(20).step == step
            same(mlstate.load(folder).model, whole(step))
            save_group.barrier()
    no_litter(group, folder)


@scenario
def replicated_arrays_are_stored_once_by_turns(group, folder):
    state = {f"t{i}": np.full(1000, i) for i in range(10)}
    saved = mlstate.save(folder, state, group=group)
    records = saved.shards()
    assert len(records) == 10
    assert {r.rank for r in records} == set(range(group.world_size))
    same(mlstate.load(folder).model, state)
    no_litter(group, folder)


@scenario
def arrays_of_a_single_rank_are_stored(group, folder):
    rank_state = {f"stage{group.rank}.w": np.full(3, group.rank), "shared": np.ones(2)}
    mlstate.save(folder, rank_state, group=group)
    expected = {f"stage{r}.w": np.full(3, r) for r in range(group.world_size)}
    same(mlstate.load(folder).model, expected | {"shared": np.ones(2)})
    errors, text = (ValueError, mlstate.CollectiveError), "do not both have 'stage"
    raises(errors, text, mlstate.save, folder, rank_state, group=group, layout="rows")
    same(mlstate.load(folder).model, expected | {"shared": np.ones(2)})
    no_litter(group, folder)


@scenario
def a_layout_divides_the_work(group, folder):
    saved = mlstate.save(folder, whole(), group=group, layout=Layout.flat(5))
    assert sum(r.key == "big" for r in saved.shards()) == 5
    assert {r.rank for r in saved.shards() if r.key == "big"} == set(range(group.world_size))
    same(mlstate.load(folder).model, whole())
    no_litter(group, folder)


@scenario
def a_rank_that_fails_leaves_the_old_checkpoint(group, folder):
    mlstate.save(folder, shards(group, "rows", 1), group=group)
    state = shards(group, "rows", 2)
    for bad in range(group.world_size):
        for wrong in (object(), np.array(["text"])):
            rank_state = state | ({"wrong": wrong} if group.rank == bad else {})
            if group.rank == bad:
                errors, text = (TypeError, mlstate.CompatibilityError), ""
            else:
                errors, text = mlstate.CollectiveError, f"rank {bad}"
            error = raises(errors, text, mlstate.save, folder, rank_state, group=group)
            assert group.rank == bad or error.rank == bad, error
            same(mlstate.load(folder).model, whole(1))
            no_litter(group, folder)
    mlstate.save(folder, state, group=group)
    same(mlstate.load(folder).model, whole(2))


@scenario
def a_writer_elsewhere_stops_all_ranks(group, folder):
    from mlstate.checkpoint._folder.local import LocalFolder

    mlstate.save(folder, shards(group, "rows", 1), group=group)
    group.barrier()
    lock = LocalFolder(folder).claim()
    if group.rank == group.world_size - 1:
        lock.acquire()
    group.barrier()
    state = shards(group, "rows", 2)
    error = raises(mlstate.StoreError, "is writing it", mlstate.save, folder, state, group=group)
    assert error.rank == (0 if group.rank else None)
    group.barrier()
    lock.release()
    group.barrier()
    mlstate.save(folder, state, group=group)
    same(mlstate.load(folder).model, whole(2))


@scenario
def unchanged_shards_are_not_rewritten(group, folder):
    state = shards(group, "rows")
    mlstate.save(folder, state, group=group)
    again = mlstate.save(folder, state, group=group)
    assert again.written["new_bytes"] == 0, again.written
    changed = whole()
    changed["big"][0, 0] += 1
    layout = Layout.rows(group.world_size)
    state["big"] = layout.shard(changed["big"], group.rank)
    third = mlstate.save(folder, state, group=group)
    assert (third.written["new_shards"] > 0) == (group.rank == 0)
    same(mlstate.load(folder).model, changed)
    no_litter(group, folder)


@scenario
def steps_are_kept_and_restored_by_all(group, folder):
    with CheckpointManager(folder, keep=2) as manager:
        for step in range(4):
            manager.save(step, model=shards(group, "flat", step), group=group)
        group.barrier()
        assert manager.steps() == [2, 3]
        restored = manager.restore_latest(group=group)
        assert restored.step == 3
        flat = Layout.flat(group.world_size)
        assert np.array_equal(restored.model["big"], flat.take(whole(3)["big"], group.rank))
        no_litter(group, folder)


@scenario
def step_unreadable_on_one_rank_is_skipped_by_all(group, folder):
    manager = CheckpointManager(folder)
    for step in (1, 2):
        manager.save(step, model=shards(group, "rows", step), group=group)
    group.barrier()

    def damage(step):
        if group.rank == 0:
            last = [s for s in manager.checkpoint(step).shards() if s.key == "big"][-1]
            flip_shard(folder, last, 9)
        group.barrier()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        damage(2)
        restored = manager.restore_latest(group=group)
        assert restored.step == 1
        group.barrier()
        damage(1)
        if group.rank == group.world_size - 1:
            error, text = mlstate.ChecksumError, ""
        else:
            error, text = mlstate.CollectiveError, f"rank {group.world_size - 1} cannot read it"
        raises(error, text, manager.restore_latest, group=group)


@scenario
def a_killed_rank_leaves_the_old_checkpoint(group, folder):
    mlstate.save(folder, shards(group, "rows", 1), group=group)
    group.barrier()
    victim = group.world_size - 1

    def kill(count):
        if group.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    state = shards(group, "rows", 2) | {"more": Shard(np.zeros(1), replica=int(group.rank > 0))}
    raises(mlstate.CollectiveError, "", mlstate.save, folder, state, group=group, progress=kill)
    same(mlstate.load(folder).model, whole(1))
    if group.rank == 0:
        mlstate.save(folder, {"alone": np.ones(2)})
        report = mlstate.verify(folder)
        assert report and not report.leftover, report
    torch_processes.print_outcome("a_killed_rank_leaves_the_old_checkpoint", "ok")
    os._exit(0)  # the group cannot be used any more


if __name__ == "__main__":
    torch_processes.main(default=True, warn="error", timeout_seconds=20)
