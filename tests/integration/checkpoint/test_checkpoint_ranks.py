"""Checkpoints of two and three processes over gloo, loaded by worlds of other sizes."""

import functools
import os
import signal
import warnings

import gloo_ranks
import numpy as np
import pytest
import torch.distributed as dist
from checkpoint_model import flip_shard
from group_model import raises

import mlstate
from mlstate.checkpoint import CheckpointManager, Layout, Shard, save_async
from mlstate.integrations.torch import TorchGroup

pytestmark = pytest.mark.torch

on_ranks = gloo_ranks.run_on(2, 3, most=3, warn="error")


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


@on_ranks
def test_each_rank_stores_its_shards(group, tmp_path):
    for kind in ("rows", "flat"):
        moments = {f"{n}.m": s for n, s in shards(group, kind, 5).items()}
        saved = mlstate.save(tmp_path, shards(group, kind), moments, group=group, metadata={"a": 1})
        assert saved.world_size == group.world_size
        loaded = mlstate.load(tmp_path)
        same(loaded.model, whole())
        same(loaded.optimizer, {f"{n}.m": a for n, a in whole(5).items()})
        loaded_part = mlstate.load(tmp_path, group=group)
        same(loaded_part.model, {n: getattr(s, "array", s) for n, s in shards(group, kind).items()})
        no_litter(group, tmp_path)


@on_ranks
def test_a_state_may_change_while_it_is_saved(group, tmp_path):
    state = shards(group, "rows")
    with TorchGroup() as default:
        raises(ValueError, "torch's default group", save_async, tmp_path, state, group=default)
    with TorchGroup(dist.new_group(backend="gloo")) as save_group:
        for step, budget in ((1, None), (2, 100_000), (3, 0)):
            state = shards(group, "flat", step)
            handle = save_async(
                tmp_path, state, group=save_group, max_staging_bytes=budget, step=step
            )
            group.all_reduce(np.ones(3))  # training continues, in another group
            handle.staged(20)
            for value in state.values():
                getattr(value, "array", value)[...] = -1
            assert handle.wait(20).step == step
            same(mlstate.load(tmp_path).model, whole(step))
            save_group.barrier()
    no_litter(group, tmp_path)


@on_ranks
def test_replicated_arrays_are_stored_once_by_turns(group, tmp_path):
    state = {f"t{i}": np.full(1000, i) for i in range(10)}
    saved = mlstate.save(tmp_path, state, group=group)
    records = saved.shards()
    assert len(records) == 10
    assert {r.rank for r in records} == set(range(group.world_size))
    same(mlstate.load(tmp_path).model, state)
    no_litter(group, tmp_path)


@on_ranks
def test_arrays_of_a_single_rank_are_stored(group, tmp_path):
    rank_state = {f"stage{group.rank}.w": np.full(3, group.rank), "shared": np.ones(2)}
    mlstate.save(tmp_path, rank_state, group=group)
    expected = {f"stage{r}.w": np.full(3, r) for r in range(group.world_size)}
    same(mlstate.load(tmp_path).model, expected | {"shared": np.ones(2)})
    errors, text = (ValueError, mlstate.CollectiveError), "do not both have 'stage"
    raises(errors, text, mlstate.save, tmp_path, rank_state, group=group, layout="rows")
    same(mlstate.load(tmp_path).model, expected | {"shared": np.ones(2)})
    no_litter(group, tmp_path)


@on_ranks
def test_a_layout_divides_the_work(group, tmp_path):
    saved = mlstate.save(tmp_path, whole(), group=group, layout=Layout.flat(5))
    assert sum(r.key == "big" for r in saved.shards()) == 5
    assert {r.rank for r in saved.shards() if r.key == "big"} == set(range(group.world_size))
    same(mlstate.load(tmp_path).model, whole())
    no_litter(group, tmp_path)


@on_ranks
def test_a_rank_that_fails_leaves_the_old_checkpoint(group, tmp_path):
    mlstate.save(tmp_path, shards(group, "rows", 1), group=group)
    state = shards(group, "rows", 2)
    for bad in range(group.world_size):
        for wrong in (object(), np.array(["text"])):
            rank_state = state | ({"wrong": wrong} if group.rank == bad else {})
            if group.rank == bad:
                errors, text = (TypeError, mlstate.CompatibilityError), ""
            else:
                errors, text = mlstate.CollectiveError, f"rank {bad}"
            error = raises(errors, text, mlstate.save, tmp_path, rank_state, group=group)
            assert group.rank == bad or error.rank == bad, error
            same(mlstate.load(tmp_path).model, whole(1))
            no_litter(group, tmp_path)
    mlstate.save(tmp_path, state, group=group)
    same(mlstate.load(tmp_path).model, whole(2))


@on_ranks
def test_a_writer_elsewhere_stops_all_ranks(group, tmp_path):
    from mlstate.checkpoint._folder.local import LocalFolder

    mlstate.save(tmp_path, shards(group, "rows", 1), group=group)
    group.barrier()
    lock = LocalFolder(tmp_path).claim()
    if group.rank == group.world_size - 1:
        lock.acquire()
    group.barrier()
    state = shards(group, "rows", 2)
    error = raises(mlstate.StoreError, "is writing it", mlstate.save, tmp_path, state, group=group)
    assert error.rank == (0 if group.rank else None)
    group.barrier()
    lock.release()
    group.barrier()
    mlstate.save(tmp_path, state, group=group)
    same(mlstate.load(tmp_path).model, whole(2))


@on_ranks
def test_unchanged_shards_are_not_rewritten(group, tmp_path):
    state = shards(group, "rows")
    mlstate.save(tmp_path, state, group=group)
    again = mlstate.save(tmp_path, state, group=group)
    assert again.written["new_bytes"] == 0, again.written
    changed = whole()
    changed["big"][0, 0] += 1
    layout = Layout.rows(group.world_size)
    state["big"] = layout.shard(changed["big"], group.rank)
    third = mlstate.save(tmp_path, state, group=group)
    assert (third.written["new_shards"] > 0) == (group.rank == 0)
    same(mlstate.load(tmp_path).model, changed)
    no_litter(group, tmp_path)


@on_ranks
def test_steps_are_kept_and_restored_by_all(group, tmp_path):
    with CheckpointManager(tmp_path, keep=2) as manager:
        for step in range(4):
            manager.save(step, model=shards(group, "flat", step), group=group)
        group.barrier()
        assert manager.steps() == [2, 3]
        restored = manager.restore_latest(group=group)
        assert restored.step == 3
        flat = Layout.flat(group.world_size)
        assert np.array_equal(restored.model["big"], flat.take(whole(3)["big"], group.rank))
        no_litter(group, tmp_path)


@on_ranks
def test_step_unreadable_on_one_rank_is_skipped_by_all(group, tmp_path):
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, model=shards(group, "rows", step), group=group)
    group.barrier()

    def damage(step):
        if group.rank == 0:
            last = [s for s in manager.checkpoint(step).shards() if s.key == "big"][-1]
            flip_shard(tmp_path, last, 9)
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


def be_killed_in_a_save(group, folder):
    mlstate.save(folder, shards(group, "rows", 1), group=group)
    group.barrier()
    victim = group.world_size - 1

    def kill(count):
        if group.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    state = shards(group, "rows", 2) | {"more": Shard(np.zeros(1), replica=int(group.rank > 0))}
    options = {"group": group, "overwrite": True, "progress": kill}
    raises(mlstate.CollectiveError, "", mlstate.save, folder, state, **options)
    same(mlstate.load(folder).model, whole(1))
    if group.rank == 0:
        mlstate.save(folder, {"alone": np.ones(2)}, overwrite=True)
        report = mlstate.verify(folder)
        assert report and not report.leftover, report


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_killed_rank_leaves_the_old_checkpoint(world_size, tmp_path):
    with pytest.raises(mlstate.CollectiveError, match="killed by SIGKILL") as caught:
        gloo_ranks.run(world_size, functools.partial(be_killed_in_a_save, folder=tmp_path))
    assert caught.value.rank == world_size - 1
    assert not hasattr(caught.value, "__notes__"), caught.value.__notes__  # the others returned
