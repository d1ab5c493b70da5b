"""Checkpoints of several ranks, run as threads: all ranks agree on results and errors."""

import errno
import os
import threading

import numpy as np
import pytest
from checkpoint_model import files_of, flip
from rank_threads import outcomes

import mlstate
from mlstate import _core
from mlstate._common.store_error import store_error
from mlstate.checkpoint import CheckpointManager, Layout, Shard
from mlstate.checkpoint._folder import writer_lock as _lock
from mlstate.checkpoint._folder.names import MANIFEST
from mlstate.checkpoint._manager import step_roots
from mlstate.checkpoint._store.checkpoint_files import CheckpointFiles
from mlstate.checkpoint._store.open_path import open_files
from mlstate.testing import run_ranks

pytestmark = pytest.mark.skipif(os.name == "nt", reason="checkpoints need POSIX")


def damage(path):
    """Damage the shards of the newest checkpoint."""
    root = mlstate.checkpoint.Checkpoint(path)
    for file in path.glob(f"params/*{root.generation}*"):
        flip(file, -1)


@pytest.mark.parametrize("other", ["dtype", "layout", "shape"])
def test_shards_that_make_no_tensor_do_not_replace_a_checkpoint(path, other):
    mlstate.save(path, {"w": np.arange(4.0)})
    before = set(files_of(path))

    def save(group):
        array, layout, shape = np.ones(2), Layout.rows(2), (4,)
        if group.rank == 1:
            array = array.astype("f4") if other == "dtype" else array
            layout = Layout.flat(2) if other == "layout" else layout
            shape = (3,) if other == "shape" else shape
            array = array[:1] if other == "shape" else array
        shard = Shard(array, layout, group.rank, shape=shape)
        return mlstate.save(path, {"w": shard}, group=group, overwrite=True)

    first, second = outcomes(2, save)
    assert isinstance(first, mlstate.FormatError)
    assert "a shard of rank 0 and one of rank 1" in str(first)
    assert isinstance(second, mlstate.CollectiveError)
    assert second.rank == 0
    assert set(files_of(path)) == before
    np.testing.assert_array_equal(mlstate.load(path).model["w"], np.arange(4.0))


ROWS = np.arange(10.0).reshape(5, 2)


def _part_of_both(group):
    return {"w": Shard(ROWS[:3], Layout.rows(2), 0, shape=(5, 2))}


def _many_groups(group):
    """So many groups of shards that an index has no pattern."""
    cuts = {f"a{i}": Layout.rows(i + 4).shard(np.ones(99), group.rank) for i in range(40)}
    return cuts | _part_of_both(group)


INCOMPLETE = {
    "a forgotten Shard": (
        lambda group: {"w": ROWS[:3] if group.rank == 0 else ROWS[3:]},
        r"params 'w' is float64 \(3, 2\) on rank 0, and float64 \(2, 2\) on rank 1",
    ),
    "another dtype": (
        lambda group: {"w": ROWS.astype("f4") if group.rank == 2 else ROWS},
        r"params 'w' is float64 \(5, 2\) on rank 0, and float32 \(5, 2\) on rank 2",
    ),
    "one part twice": (
        _part_of_both,
        "'w': part 1 of 2 is missing: no rank gives it as replica 0; ranks 0 and 1 both give "
        "part 0",
    ),
    "one part, and a copy of it": (
        lambda group: {
            "w": Shard(ROWS[:3], Layout.rows(2), 0, shape=(5, 2), replica=group.rank),
            "v": np.ones(2),
        },
        "'w': part 1 of 2 is missing: no rank gives it",
    ),
    "indexes without patterns": (_many_groups, r"'a\d+': part \d+ of \d+ is missing"),
    "copies of nothing": (
        lambda group: {"v": np.ones(2), "w": Shard(ROWS, replica=group.rank + 1)},
        "params 'w' on rank 0 is a Shard with replica= above 0, but no rank passes replica 0",
    ),
    "copies of nothing on one rank": (
        lambda group: {"v": np.ones(2)} | ({"u": Shard(ROWS, replica=1)} if group.rank else {}),
        "params 'u' on rank 1 is a Shard with replica= above 0, but no rank passes replica 0",
    ),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_ranks_that_lack_a_part_of_a_tensor_replace_no_checkpoint(path, case):
    mlstate.save(path, {"w": ROWS})
    before = set(files_of(path))
    state, text = INCOMPLETE[case]
    for error in outcomes(
        3, lambda group: mlstate.save(path, state(group), group=group, overwrite=True)
    ):
        with pytest.raises((ValueError, mlstate.CollectiveError), match=text):
            raise error
    assert set(files_of(path)) == before
    np.testing.assert_array_equal(mlstate.load(path).model["w"], ROWS)


def test_parts_without_elements_and_copies_are_not_missed(path):
    layout = Layout.rows(3)

    def save(group):
        part = group.rank
        state = {"short": Shard(ROWS[:2][part : part + 1], layout, part, shape=(2, 2))}
        if part == 2:
            del state["short"]  # its part would have no elements
        state["copied"] = Shard(ROWS, replica=part)
        return mlstate.save(path, state, group=group)

    assert run_ranks(3, save)[2].world_size == 3
    model = mlstate.load(path).model
    np.testing.assert_array_equal(model["short"], ROWS[:2])
    np.testing.assert_array_equal(model["copied"], ROWS)


DIFFERENT = {
    "metadata": (
        lambda rank: {"model": {"w": ROWS}, "metadata": {"a": {1}} if rank else {}},
        ["rank 1: TypeError: metadata", "^metadata"],
    ),
    "step": (
        lambda rank: {"model": {"w": ROWS}, "step": rank + 3},
        ["ranks pass different steps, 3 and 4: pass the same"] * 2,
    ),
    "step of optimizers": (
        lambda rank: {"optimizer": mlstate.OptimizerStateDict({"w.m": ROWS}, step=rank + 3)},
        ["ranks pass different steps, 3 and 4: pass the same"] * 2,
    ),
    "value": (
        lambda rank: {"model": {"w": 3 if rank else ROWS}},
        ["rank 1: TypeError: params 'w' must be a NumPy array", "^params 'w' must be"],
    ),
    "layout": (
        lambda rank: {"model": {"w": ROWS}, "layout": "rows" if rank else "flat"},
        [r"layout= cuts by Layout\(.*flat.* on rank 0, and by Layout\(.*0, 2.* on rank 1"] * 2,
    ),
    "no layout": (
        lambda rank: {"model": {"w": ROWS}, "layout": "rows" if rank else None},
        [r"layout= cuts by None on rank 0, and by Layout\(.* on rank 1"] * 2,
    ),
    "unknown layout": (
        lambda rank: {"model": {"w": ROWS}, "layout": "cols" if rank else None},
        ["rank 1: ValueError: layout must be", "^layout must be"],
    ),
    "optimizer": (
        lambda rank: {"model": {"w": ROWS}, "optimizer": {"w.m": ROWS} if rank else None},
        ["ranks 0 and 1 do not save the same: rank 1 gives optimizer=, and rank 0 does not"] * 2,
    ),
}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_of_one_rank_overrides_the_steps_of_optimizers(path, rank):
    def save(group):
        optimizer = mlstate.OptimizerStateDict({"w.m": ROWS}, step=group.rank)
        step = {"step": 7} if group.rank == rank else {}
        return mlstate.save(path, {"w": ROWS}, optimizer, group=group, **step).step

    assert run_ranks(2, save) == [7, 7]
    assert mlstate.load(path).step == 7


def test_a_step_that_only_another_rank_passes_is_stored(path):
    def save(group):
        return mlstate.save(path, {"w": ROWS}, group=group, step=5 if group.rank else None)

    run_ranks(2, save)
    assert mlstate.load(path).step == 5


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("case", DIFFERENT)
def test_rank_mismatch_names_the_difference(path, case, asynchronous):
    arguments, texts = DIFFERENT[case]
    mlstate.save(path, {"w": ROWS + 1})
    before = set(files_of(path))

    def save(group):
        if asynchronous:
            return mlstate.checkpoint.save_async(path, **arguments(group.rank), group=group).wait()
        return mlstate.save(path, **arguments(group.rank), group=group)

    first, second = outcomes(2, save)
    if case in ("metadata", "value"):
        assert isinstance(first, mlstate.CollectiveError)
        assert first.rank == 1
        assert isinstance(second, TypeError)
    for error, text in zip((first, second), texts, strict=True):
        with pytest.raises((TypeError, ValueError, mlstate.CollectiveError), match=text):
            raise error
    assert set(files_of(path)) == before
    np.testing.assert_array_equal(mlstate.load(path).model["w"], ROWS + 1)


def full(name, *_):  # the text is longer than a message between ranks
    raise mlstate.StoreError(errno.ENOSPC, "no room " * 999, name)


def test_failed_first_commit_leaves_no_files(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(_core, "file_replace", full)
        with pytest.raises(mlstate.StoreError, match="no room"):
            mlstate.save(path, {"w": np.ones(3)})
        results = outcomes(2, lambda group: mlstate.save(path, {"w": np.ones(3)}, group=group))
    assert [type(error) for error in results] == [mlstate.StoreError, mlstate.CollectiveError]
    assert set(files_of(path)) == {"lock"}


def test_next_save_removes_files_of_a_failed_abort(path, monkeypatch):
    def stuck(*unused):
        raise mlstate.StoreError(errno.EIO, "stuck", "x")

    with monkeypatch.context() as patch:
        patch.setattr(_core, "file_replace", full)
        patch.setattr(CheckpointFiles, "discard", stuck)
        with pytest.raises(mlstate.StoreError, match="no room"):  # the first error
            mlstate.save(path, {"w": np.ones(3)})
    assert len(files_of(path)) > 1
    mlstate.save(path, {"w": np.zeros(3)})
    report = mlstate.verify(path)
    assert report
    assert not report.leftover


# ---- restoring ----


@pytest.fixture
def manager(path):
    manager = CheckpointManager(path, keep=None)
    for step in (1, 2, 3):
        manager.save(step, model={"w": np.full(4, float(step))})
    return manager


def test_ranks_that_see_other_steps_restore_the_same_one(manager, monkeypatch):
    list_roots = CheckpointFiles.list_roots
    late = threading.local()

    def listed(files):  # the second rank has not seen the newest step
        roots = list_roots(files)
        return roots[:-1] if getattr(late, "is_set", False) else roots

    def restore(group):
        late.is_set = group.rank == 1
        return manager.restore_latest(group=group).step

    monkeypatch.setattr(CheckpointFiles, "list_roots", listed)
    assert run_ranks(2, restore) == [3, 3]


def test_invalid_restore_on_one_rank_fails_all(manager):
    def restore(group):
        target = np.zeros(4 - group.rank)
        return manager.restore_latest(group=group, into={"model": {"w": target}})

    first, second = outcomes(2, restore)
    assert isinstance(second, mlstate.CompatibilityError)
    assert isinstance(first, mlstate.CompatibilityError) and first.rank == 1


@pytest.mark.filterwarnings("ignore:keep=1 deletes")
def test_restore_retries_if_steps_are_pruned(manager, monkeypatch):
    load = step_roots.load
    pending = [4]

    def late(*arguments, **keywords):
        if pending:  # a writer commits before this reader reads
            newer = CheckpointManager(manager.directory, keep=1)
            newer.save(pending.pop(), model={"w": np.full(4, 4.0)})
        return load(*arguments, **keywords)

    monkeypatch.setattr(step_roots, "load", late)
    assert manager.restore_latest().step == 4


def test_damaged_steps_of_several_ranks_do_not_count_to_keep(path):
    def save(group, step):
        manager = managers[group.rank]
        half = np.full(3, step) + group.rank
        shard = Shard(half, Layout.rows(2), group.rank, shape=(6,))
        manager.save(step, model={"w": shard}, group=group)

    managers = [CheckpointManager(path, keep=2) for _ in range(2)]
    for step in (1, 2):
        run_ranks(2, lambda group, step=step: save(group, step))
    [lost] = path.glob(f"params/*{managers[0].checkpoint(2).generation}-1.safetensors")
    lost.unlink()
    run_ranks(2, lambda group: save(group, 3))
    assert managers[0].steps() == [1, 2, 3]
    np.testing.assert_array_equal(managers[1].restore(1).model["w"], [1, 1, 1, 2, 2, 2])
    run_ranks(2, lambda group: save(group, 4))
    assert managers[0].steps() == [3, 4]
    assert not mlstate.verify(path).leftover


# ---- parts stored by another rank ----


def test_states_are_cut_with_parameters_that_another_rank_stores(path):
    rng = np.random.default_rng(5)
    model = {"w": rng.random((4, 6))}
    optimizer = {"w.col": rng.random(6), "w.row": rng.random(4), "w.m": rng.random((4, 6))}
    run_ranks(3, lambda group: mlstate.save(path, model, optimizer, group=group))
    part = mlstate.load(path, rank=1, world_size=2, layout="rows").optimizer
    np.testing.assert_array_equal(part["w.col"], optimizer["w.col"])
    np.testing.assert_array_equal(part["w.row"], optimizer["w.row"][2:])
    np.testing.assert_array_equal(part["w.m"], optimizer["w.m"][2:])


def test_shards_of_states_know_a_parameter_that_only_the_first_rank_stores(path):
    def save(group):
        model = {"w": Shard(np.ones((4, 6)), Layout.whole(), 0, replica=group.rank)}
        half = np.arange(3.0) + 3 * group.rank
        optimizer = {"w.col": Shard(half, Layout.rows(2), group.rank, shape=(6,))}
        return mlstate.save(path, model, optimizer, group=group)

    run_ranks(2, save)
    part = mlstate.load(path, rank=1, world_size=2, layout=Layout.axis(1, 2)).optimizer
    np.testing.assert_array_equal(part["w.col"], [3.0, 4.0, 5.0])
    part = mlstate.load(path, rank=1, world_size=2, layout="rows").optimizer
    np.testing.assert_array_equal(part["w.col"], np.arange(6.0))


# ---- repairing ----


def test_repair_keeps_a_concurrently_replaced_checkpoint(path, monkeypatch):
    manager = CheckpointManager(path)
    manager.save(1, model={"w": np.full(4, 1.0)})
    manager.save(2, model={"w": np.full(4, 2.0)})
    acquire = _lock.WriterLock.acquire
    damage(path)

    def late(lock):
        monkeypatch.undo()
        manager.save(3, model={"w": np.full(4, 3.0)})  # another writer commits first
        return acquire(lock)

    monkeypatch.setattr(_lock.WriterLock, "acquire", late)
    report = mlstate.verify(path, repair=True)
    assert report
    assert report.repaired is None
    np.testing.assert_array_equal(mlstate.load(path).model["w"], np.full(4, 3.0))


def test_repair_keeps_unreadable_steps(manager, monkeypatch):
    read_manifest = CheckpointFiles.read_manifest
    newest = open_files(manager.directory).list_roots()[-1].path

    def failing(files, name=MANIFEST):
        if name in (newest, MANIFEST):
            raise store_error(OSError(errno.EIO, "input/output error"), "no", name)
        return read_manifest(files, name)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFiles, "read_manifest", failing)
        report = mlstate.verify(manager.directory, repair=True)
    assert report.problems[0].kind == "unreadable"
    assert report.repaired
    assert manager.steps() == [1, 2, 3]
