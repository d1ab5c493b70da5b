"""Steps of a run: retention, fallback to older steps, and files shared by steps."""

import copy
import errno
import os
import pickle
import re
import signal
import threading
import time
import warnings
from pathlib import Path

import child
import numpy as np
import pytest
from checkpoint_model import flip_shard, same
from thread_team import run_in_threads

import mlstate
from mlstate._common.store_error import store_error
from mlstate.checkpoint import CheckpointManager, Staging, plan_load, prune, save_async
from mlstate.checkpoint._manager import manager as manager_module
from mlstate.checkpoint._store.open_path import RootPath, open_files
from mlstate.testing import run_ranks


def state(step, large=False):
    arrays = {"frozen": np.arange(1000.0), "w": np.full(10, step, np.float32)}
    if large:
        arrays["big"] = np.full(200_000, step, np.float32)
    return arrays


def save_all(manager, *steps):
    for step in steps:
        manager.save(step, state(step))


@pytest.fixture
def manager(tmp_path):
    return CheckpointManager(tmp_path / "run", keep=3)


@pytest.fixture
def scored(tmp_path):
    """A run whose steps 0 to 2 have losses; step 1 has the lowest, step 0 the highest."""
    with CheckpointManager(tmp_path / "run", keep=None) as manager:
        for step, loss in enumerate([0.5, 0.2, 0.4]):
            manager.save(step, state(step), metadata={"loss": loss})
    return tmp_path / "run"


def flip(manager, step, key="w"):
    shard = next(s for s in manager.checkpoint(step).shards() if s.key == key)
    flip_shard(manager.directory, shard, 2)


def test_the_newest_steps_are_kept_and_each_is_whole(manager):
    for step in range(0, 60, 10):
        manager.save(step, state(step, large=True), {"w.m": np.full(3, step)})
    assert manager.steps() == [30, 40, 50]
    assert manager.latest_step() == 50
    for step in manager.steps():
        loaded = manager.restore(step)
        assert same(state(step, large=True), loaded.model)
        assert loaded.step == step
        assert manager.checkpoint(step).verify()
    assert same(state(50, large=True), mlstate.load(manager.directory).model)
    assert not mlstate.verify(manager.directory).leftover
    for part in ("roots", "index"):
        assert len(list(Path(manager.directory, part).iterdir())) == 3


def test_steps_share_files_of_unchanged_tensors(manager):
    frozen = np.arange(100_000.0)
    for step in range(3):
        manager.save(step, {"frozen": frozen, "w": np.full(5, step)})
    shared = {
        next(s.path for s in manager.checkpoint(step).shards() if s.key == "frozen")
        for step in manager.steps()
    }
    assert len(shared) == 1


def test_keep_none_keeps_all_steps(tmp_path):
    manager = CheckpointManager(tmp_path, keep=None)
    save_all(manager, *range(6))
    save_all(CheckpointManager(tmp_path), 6)
    assert manager.steps() == list(range(7))
    with pytest.raises(ValueError, match="keep must be 1 or more"):
        CheckpointManager(tmp_path, keep=0)


def test_a_step_saved_again_is_replaced(manager):
    save_all(manager, 1, 2, 1)
    manager.save(2, state(7))
    assert manager.steps() == [1, 2]
    assert same(state(7), manager.restore(2).model)


def test_reads_take_the_best_step_by_its_metric(scored):
    for mode, step in (("min", 1), ("max", 0)):
        with CheckpointManager(scored, monitor="loss", mode=mode) as manager:
            assert manager.restore("best").step == manager.checkpoint("best").step == step
            assert manager.best_step() == step


def deleting(monkeypatch, run, calls, step=1):
    """Let a writer delete a step after a number of calls have chosen it; return the choices."""
    others = {file for root in (0, 2) for file in mlstate.inspect(run, step=root).files()}
    own = [file for file in mlstate.inspect(run, step=step).files() if file not in others]
    choices, lock = [], threading.Lock()

    def choose(files, number):
        with lock:
            chosen = read_step(files, number)
            choices.append(chosen[0].path)
            if len(choices) == calls:
                for file in (choices[0], *own):
                    (run / file).unlink()
        while len(choices) < calls:
            time.sleep(0.001)
        return chosen

    read_step = manager_module.read_step
    monkeypatch.setattr(manager_module, "read_step", choose)
    return choices


def test_a_best_step_that_is_deleted_before_it_is_read_gives_way_to_the_new_best(
    scored, monkeypatch
):
    choices = deleting(monkeypatch, scored, 1)
    loaded = CheckpointManager(scored, monitor="loss").restore("best", names=iter(["w"]))
    assert loaded.step == 2 and list(loaded.model) == ["w"]
    assert len(choices) == 2


def test_a_best_step_with_a_missing_file_is_damaged(scored):
    (scored / next(iter(mlstate.inspect(scored, step=1).files()))).unlink()
    with pytest.raises(mlstate.StoreError, match=r"params/segment"):
        CheckpointManager(scored, monitor="loss").restore("best")


@pytest.mark.parametrize("number", [1, 2])
def test_ranks_together_choose_again_if_the_best_step_is_deleted(tmp_path, monkeypatch, number):
    with CheckpointManager(tmp_path / "run", keep=None) as manager:
        for step, loss in enumerate([0.5, 0.2, 0.4]):
            states = {"seen": {"step": step}}
            manager.save(step, state(step), states=states, metadata={"loss": loss})
    deleting(monkeypatch, tmp_path / "run", number)  # this rank chose it, or both did

    def load(group):
        seen = {"step": 0}
        manager = CheckpointManager(tmp_path / "run", monitor="loss")
        loaded = manager.restore("best", group=group, into={"states": {"seen": seen}})
        return loaded.step, seen

    assert run_ranks(2, load) == [(2, {"step": 2})] * 2


def test_integers_beyond_floats_are_metrics(tmp_path):
    with CheckpointManager(tmp_path / "run", keep=1, keep_best=1, monitor="n") as manager:
        for step, number in enumerate([10**400, 5, 10**401, 2.5, -(10**400), 1]):
            manager.save(step, state(step), metadata={"n": number})
        assert manager.best_step() == 4
        assert manager.steps() == [4, 5]


def test_a_wrong_choice_of_the_best_step_shows_the_call(manager):
    save_all(manager, 1)
    for call in (mlstate.load, mlstate.verify, mlstate.inspect, plan_load):
        with pytest.raises(ValueError, match=r"run', monitor='loss'\)\.restore\('best'\)"):
            call(manager.directory, step="best")
        with pytest.raises(ValueError, match="'newest'"):
            call(manager.directory, step="newest")
    with pytest.raises(ValueError, match=r"pass monitor='loss'.*mode='max'"):
        manager.restore("best")
    with pytest.raises(ValueError, match="no step has a number 'loss'"):
        CheckpointManager(manager.directory, monitor="loss").restore("best")
    with pytest.raises(ValueError, match="mode must be 'min' or 'max'"):
        CheckpointManager(manager.directory, monitor="loss", mode="low")
    with pytest.raises(ValueError, match="mode='max' needs monitor="):
        CheckpointManager(manager.directory, mode="max")


def test_the_load_of_a_step_is_planned(tmp_path):
    with CheckpointManager(tmp_path / "run", keep=None) as manager:
        for step in (1, 2):
            manager.save(step, model={"w": np.full(step * 1000, step)}, pack_below_bytes=0)
    sizes = [sum(read.end - read.begin for read in plan_load(manager.directory, step=step).reads)
             for step in (1, 2, "latest")]  # fmt: skip
    assert sizes == [8000, 16000, 16000]
    with pytest.raises(ValueError, match="pass only one"):
        plan_load(manager.directory, step=1, root="roots/x")


def test_a_damaged_step_is_passed_over_with_a_warning(manager):
    save_all(manager, 1, 2, 3)
    flip(manager, 3)
    text = r"^step 3 \(roots/.*\) cannot be restored: .*'w'.*; the step before it is tried next$"
    with pytest.warns(UserWarning, match=text):
        loaded = manager.restore_latest()
    assert loaded.step == 2
    with pytest.warns(UserWarning, match="cannot be restored"):
        loaded = manager.restore_latest(names=iter(["w"]))
    assert loaded.step == 2 and list(loaded.model) == ["w"]
    flip(manager, 2)
    flip(manager, 1)
    with pytest.warns(UserWarning), pytest.raises(mlstate.ChecksumError):
        manager.restore_latest()


@pytest.mark.parametrize("older", ["fewer names", "as many"])
def test_targets_do_not_mix_a_damaged_step_with_an_older_one(tmp_path, older):
    manager = CheckpointManager(tmp_path / "run")
    names = ["a", "b"] if older == "as many" else ["b"]
    manager.save(1, {name: np.full(3000, 1.0) for name in names}, pack_below_bytes=0)
    manager.save(2, {"a": np.full(3000, 2.0), "b": np.full(3000, 2.0)}, pack_below_bytes=0)
    flip(manager, 2, "b")
    target = {"a": np.zeros(3000), "b": np.zeros(3000)}
    options = {"into": {"model": target}, "strict": False}
    with pytest.warns(UserWarning, match="cannot be restored"):
        if older == "as many":
            assert manager.restore_latest(**options).step == 1
            assert all((array == 1).all() for array in target.values())
        else:
            with pytest.raises(
                mlstate.CompatibilityError, match=r"no 'a' of model .* would mix two"
            ):
                manager.restore_latest(**options)


def test_repair_falls_back_to_the_newest_step_that_verifies(manager):
    save_all(manager, 1, 2, 3)
    flip(manager, 3)
    report = mlstate.verify(manager.directory)
    assert not report
    assert [(p.kind, p.name) for p in report.problems] == [("altered", "w")]
    repaired = mlstate.verify(manager.directory, repair=True)
    assert not repaired  # a report with problems is false
    assert repaired.step == 2 and repaired.repaired and repaired.deleted == [3]
    assert "deleted: steps 3" in repr(repaired)
    assert mlstate.verify(manager.directory)
    assert same(state(2), mlstate.load(manager.directory).model)
    assert manager.steps() == [1, 2]
    assert manager.restore_latest().step == 2  # without a warning
    manager.save(4, state(4))
    assert not mlstate.verify(manager.directory).leftover
    assert manager.restore_latest().step == 4


def test_deleting_a_step_deletes_its_unshared_files(manager):
    save_all(manager, 1, 2, 3)
    manager.delete(2)
    assert manager.steps() == [1, 3]
    assert same(state(1), manager.restore(1).model)
    assert not mlstate.verify(manager.directory).leftover
    with pytest.raises(ValueError, match="step 3 is the newest"):
        manager.delete(3)
    with pytest.raises(FileNotFoundError, match="step 2 does not exist \\(steps: 1, 3\\)"):
        manager.delete(2)


def test_no_step_is_a_file_that_is_not_found(manager):
    for call in (manager.restore_latest, lambda: manager.restore(3)):
        with pytest.raises(mlstate.StoreError) as caught:
            call()
        assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_manager_warns_before_it_deletes_steps_of_others(tmp_path, asynchronous):
    with CheckpointManager(tmp_path) as first:
        save_all(first, *range(5))
    with CheckpointManager(tmp_path, keep=2) as again:
        save = again.save_async if asynchronous else again.save
        text = r"keep=2 deletes .* did not save: 0, 1, 2, 3, and 4 with later saves; keep=None"
        with pytest.raises(UserWarning, match=text):  # warnings are errors in these tests
            save(5, state(5))
        assert again.steps() == list(range(5))
        with pytest.warns(UserWarning, match=text) as caught:
            save(5, state(5))
        assert caught[0].filename == __file__
        for step in (6, 7):
            save(step, state(step))  # no second warning
    assert again.steps() == [6, 7]


def test_manager_deletes_steps_it_saved_without_warning(tmp_path):
    with CheckpointManager(tmp_path) as first:
        save_all(first, 1)
    with CheckpointManager(tmp_path, keep=2) as again:
        again.save(1, state(9))  # saved again deliberately
        save_all(again, 2, 3, 4)
        assert again.steps() == [3, 4]


def cut(manager, step):
    """Truncate the files that only this step uses."""
    others = [manager.checkpoint(other).files() for other in manager.steps() if other != step]
    for path in manager.checkpoint(step).files():
        if not any(path in files for files in others):
            os.truncate(Path(manager.directory, path), 100)


def remove_index(manager, step):
    [index] = Path(manager.directory, "index").glob(f"{manager.checkpoint(step).generation}.*")
    index.unlink()


def falsify_index(manager, step):
    [index] = Path(manager.directory, "index").glob(f"{manager.checkpoint(step).generation}.*")
    lie = index.read_bytes().replace(b'"version":"1', b'"version":"2')
    assert lie != index.read_bytes()
    index.write_bytes(lie)


@pytest.mark.parametrize("again", [False, True], ids=["the same", "a new"])
@pytest.mark.parametrize("damage", [cut, remove_index, falsify_index])
def test_damaged_steps_do_not_count_to_keep(tmp_path, damage, again):
    manager = CheckpointManager(tmp_path, keep=2)
    save_all(manager, 1, 2)
    damage(manager, 2)
    if again:
        manager = CheckpointManager(tmp_path, keep=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about steps of another manager and files that are kept
        for step in (3, 4):
            manager.save(step, state(step))
            good = [1, 3] if step == 3 else [3, 4]
            assert [remaining for remaining in manager.steps() if remaining != 2] == good
            for remaining in good:
                assert same(state(remaining), manager.restore(remaining).model)
    assert manager.steps() == [3, 4]
    assert not mlstate.verify(tmp_path).leftover


def test_warning_omits_steps_kept_because_of_damage(tmp_path):
    first = CheckpointManager(tmp_path)
    save_all(first, 1, 2, 3)
    cut(first, 3)
    again = CheckpointManager(tmp_path, keep=3)
    again.save(4, state(4))  # without a warning
    assert again.steps() == [1, 2, 3, 4]
    with pytest.warns(UserWarning, match="did not save: 1, and 2, 3 with later saves"):
        again.save(5, state(5))
    assert again.steps() == [2, 3, 4, 5]


def test_prune_counts_no_damaged_step(tmp_path):
    manager = CheckpointManager(tmp_path)
    save_all(manager, 1, 2, 3)
    cut(manager, 2)
    report = prune(tmp_path, keep=2)
    assert (report.steps, report.kept) == ([], [1, 2, 3])


def test_a_root_in_the_place_of_another_is_damaged(tmp_path):
    manager = CheckpointManager(tmp_path)
    save_all(manager, 1, 2, 3)
    roots = sorted((tmp_path / "roots").iterdir())
    roots[1].write_bytes(roots[0].read_bytes())
    assert manager.steps() == [1, 3]
    roots[1].unlink()
    roots[2].write_bytes(roots[0].read_bytes())
    text = f"{roots[2].name}: the content .* step 1, whose name would be roots/{roots[0].name}"
    with pytest.raises(mlstate.FormatError, match=text) as caught:
        mlstate.checkpoint.Checkpoint(RootPath(open_files(tmp_path), f"roots/{roots[2].name}"))
    assert caught.value.path == str(roots[2])
    with pytest.warns(UserWarning, match=text):
        assert manager.restore_latest().step == 1
    report = mlstate.checkpoint.Checkpoint(tmp_path)
    assert report.sequence == 3
    manager.save(4, state(4))
    assert manager.checkpoint(4).sequence == 4
    assert manager.steps() == [1, 4]
    assert mlstate.verify(tmp_path)


def test_roots_with_swapped_names_are_damaged(tmp_path):
    manager = CheckpointManager(tmp_path)
    save_all(manager, 1, 2)
    old, new = sorted((tmp_path / "roots").iterdir())
    old_bytes, new_bytes = old.read_bytes(), new.read_bytes()
    old.write_bytes(new_bytes)
    new.write_bytes(old_bytes)
    assert manager.steps() == []
    with (
        pytest.warns(UserWarning, match="the content does not match the file name"),
        pytest.raises(mlstate.FormatError, match="the content does not match the file name"),
    ):
        manager.restore_latest()
    assert mlstate.load(tmp_path).step == 2


def test_deletions_repairs_and_damage_are_logged(tmp_path, caplog):
    caplog.set_level("DEBUG", logger="mlstate")
    manager = CheckpointManager(tmp_path, keep=2)
    save_all(manager, 1, 2, 3)
    [deleted] = [entry.getMessage() for entry in caplog.records if entry.levelname == "INFO"]
    assert deleted.startswith(f"{tmp_path}: deleted step 1 (roots/00000001.")
    assert any("deleted the file index/" in entry.getMessage() for entry in caplog.records)
    caplog.clear()
    flip(manager, 3)
    with pytest.warns(UserWarning, match="cannot be restored"):
        assert manager.restore_latest().step == 2
    assert not mlstate.verify(tmp_path, repair=True)
    assert manager.steps() == [2]
    texts = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert any("cannot be restored: " in text for text in texts)
    assert any(": step 3: params/" in text for text in texts)
    assert any(": repaired: step 2, generation " in text for text in texts)
    assert any("deleted step 3 (roots/" in entry.getMessage() for entry in caplog.records)
    caplog.clear()
    max((tmp_path / "roots").iterdir()).write_bytes(b"{")
    assert manager.steps() == []
    assert "a step is damaged: " in caplog.text
    assert {record.name for record in caplog.records} == {"mlstate"}


def test_logging_is_imported_only_if_used(tmp_path):
    code = """
import glob, sys
import numpy
from mlstate.checkpoint import CheckpointManager, prune
manager = CheckpointManager(sys.argv[1], keep=1)
for step in (1, 2):
    manager.save(step, {"w": numpy.full(3, step)})
print("logging" in sys.modules)
import logging
[root] = glob.glob(sys.argv[1] + "/roots/*")
open(root, "wb").close()
print(manager.steps(), [type(h).__name__ for h in logging.getLogger("mlstate").handlers])
"""
    done = child.attempt(code, tmp_path / "run")
    assert done.stdout == "False\n[] ['NullHandler']\n"
    assert done.stderr == ""


@pytest.mark.parametrize("save", [mlstate.save, mlstate.checkpoint.save_async])
def test_save_into_a_managers_folder_is_refused(manager, save):
    save_all(manager, 1, 2)
    with pytest.raises(mlstate.StoreError, match="holds the steps of a CheckpointManager") as info:
        save(manager.directory, {"other": np.ones(3)})
    assert info.value.errno == errno.EEXIST
    assert manager.steps() == [1, 2]
    assert manager.restore_latest().step == mlstate.load(manager.directory).step == 2
    assert mlstate.verify(manager.directory)
    assert not mlstate.verify(manager.directory).leftover
    for root in Path(manager.directory, "roots").iterdir():
        root.write_bytes(b"{")  # damaged steps still count as steps
    with pytest.raises(mlstate.StoreError, match="holds the steps of a CheckpointManager"):
        save(manager.directory, {"other": np.ones(3)})


def test_steps_found_under_the_lock_refuse_the_save(manager, tmp_path):
    from mlstate.checkpoint._options import SAVE_DEFAULTS
    from mlstate.checkpoint._save.commit import write_and_commit
    from mlstate.checkpoint._save.content import take_content
    from mlstate.checkpoint._save.shards import gather_shards
    from mlstate.checkpoint._save.target import check_target

    target = check_target(manager.directory, SAVE_DEFAULTS)
    late = gather_shards(
        target, take_content(target, {"other": np.ones(3)}, None, None, SAVE_DEFAULTS)
    )
    manager.save(1, state(1))
    with pytest.raises(mlstate.StoreError, match="holds the steps of a CheckpointManager"):
        write_and_commit(target, late, None)
    assert mlstate.load(manager.directory).step == 1
    manager.save(2, state(2))  # the lock is free


@pytest.mark.parametrize("name", ["00000001.0123456789abcdef.json", "00000001.json"])
def test_stray_file_under_roots_is_ignored(tmp_path, name):
    mlstate.save(tmp_path, {"w": np.ones(3)})
    (tmp_path / "roots" / name).touch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlstate.save(tmp_path, {"w": np.zeros(3)})
    assert same({"w": np.zeros(3)}, mlstate.load(tmp_path).model)


def test_manager_does_not_replace_a_checkpoint_without_steps(manager):
    mlstate.save(manager.directory, state(4), step=4)
    words = "holds a checkpoint of mlstate.save, which is not a step"
    for save in (manager.save, manager.save_async):
        with pytest.raises(mlstate.StoreError, match=f"cannot save the step: .*{words}") as info:
            save(5, state(5))
        assert info.value.errno == errno.EEXIST
    for restore in (manager.restore_latest, lambda: manager.restore(4)):
        with pytest.raises(FileNotFoundError, match=words):
            restore()
    assert manager.steps() == []
    assert same(state(4), mlstate.load(manager.directory).model)


def test_a_step_that_cannot_be_read_raises(manager, monkeypatch):
    for step in (1, 2):
        manager.save(step, {"w": np.full(2, step)})
    folder = type(manager._checkpoints.folder)
    read = folder.read

    def failing_read(self, name, *rest):
        if name.startswith("roots/00000001."):
            raise store_error(OSError(errno.EIO, "input/output error"), "cannot read", name)
        return read(self, name, *rest)

    monkeypatch.setattr(folder, "read", failing_read)
    for call in (manager.steps, manager.latest_step):
        with pytest.raises(mlstate.StoreError) as caught:
            call()
        assert caught.value.errno == errno.EIO
    assert manager.restore_latest().model["w"].tolist() == [2, 2]


def test_unreadable_index_stops_deletion_but_not_saves(manager, tmp_path):
    save_all(manager, 1, 2)
    index = tmp_path / "run" / "index" / f"{manager.checkpoint(1).generation}.0.json"
    index.write_bytes(b"{")
    before = set((tmp_path / "run" / "params").iterdir())
    with pytest.warns(UserWarning, match="were not deleted"):
        manager.save(3, state(3))
    assert before <= set((tmp_path / "run" / "params").iterdir())
    assert same(state(3), mlstate.load(manager.directory).model)


@pytest.mark.parametrize("damage", ["gone", "cut short"])
def test_a_lost_file_is_reported_with_the_tensors_in_it(manager, damage):
    manager.save(1, {**{f"small{i}": np.ones(5) for i in range(5)}, "big": np.ones(50_000)})
    files = {s.key: Path(manager.directory, s.path) for s in manager.checkpoint(1).shards()}
    for path in {files["big"], files["small0"]}:
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:4000])
    problems = {p.path: p for p in mlstate.verify(manager.directory).problems}
    assert len(problems) == 2
    big = problems[files["big"].relative_to(manager.directory).as_posix()]
    assert (big.name, big.part) == ("big", 0)
    small = problems[files["small0"].relative_to(manager.directory).as_posix()]
    assert small.name is None
    assert small.text.endswith("; it holds 'small0', 'small1', 'small2' and 2 more")


def test_non_integer_steps_and_keep_are_refused(manager):
    manager.save(2, state(2))
    with pytest.raises(TypeError, match="step must be an int, 'latest' or 'best', got str: '2'"):
        manager.restore("2")
    for step in (np.array(2.7), np.array([2])):
        with pytest.raises(TypeError, match="step must be an int, 'latest' or 'best', got ndarray"):
            manager.checkpoint(step)
    with pytest.raises(TypeError, match="keep must be an int, or None for all, got str"):
        CheckpointManager(manager.directory, keep="3")
    with pytest.raises(
        FileNotFoundError, match=r"cannot find the step: step 9 does not exist \(steps: 2\)"
    ):
        manager.delete(9)


# ---- threads ----


def test_threads_save_one_after_the_other(tmp_path):
    def work(number):
        for step in range(number, 40, 8):
            state = {"w": np.full(2000, step)}
            if (step // 8 + number) % 2:
                manager.save(step, state)
            else:
                manager.save_async(step, state).wait()

    with CheckpointManager(tmp_path / "run") as manager:
        run_in_threads(work, 8)
        assert sorted(manager.steps()) == list(range(40))
        for step in range(40):
            assert (manager.restore(step).model["w"] == step).all()


def test_threads_share_neither_staging_memory_nor_a_group(tmp_path, monkeypatch):
    staging = Staging(8000)
    real = mlstate._core.shards_write

    def slow(*arguments):
        time.sleep(0.2)
        return real(*arguments)

    def work(number):
        try:
            handle = save_async(tmp_path / f"{number}", {"w": np.ones(1000)}, staging=staging)
            return handle.wait()
        except ValueError as error:
            return str(error)

    monkeypatch.setattr(mlstate._core, "shards_write", slow)
    refused = [outcome for outcome in run_in_threads(work, 8) if isinstance(outcome, str)]
    assert 1 <= len(refused) <= 7
    assert all("in use by another save" in text for text in refused)


@pytest.mark.parametrize("call", ["save", "close", "wait"])
def test_a_save_that_waits_for_itself_is_an_error(tmp_path, call):
    manager, begun, handles = CheckpointManager(tmp_path / "run"), threading.Event(), []
    calls = {
        "save": lambda: manager.save(2, {"w": np.ones(2)}),
        "close": manager.close,
        "wait": lambda: handles[0].wait(),
    }

    def progress(_):
        assert begun.wait(20)
        calls[call]()

    handles.append(manager.save_async(1, {"w": np.ones(200_000)}, progress=progress))
    begun.set()
    with pytest.raises(RuntimeError, match="cannot wait for itself"):
        handles[0].wait(20)


@pytest.fixture
def finish(manager, blocking_callback):
    """A thread saves step 1 until this is called."""
    arguments = (1, {"w": np.ones(2000)})
    thread = threading.Thread(
        target=manager.save, args=arguments, kwargs={"progress": blocking_callback}
    )
    thread.start()
    assert blocking_callback.called.wait(20)

    def finish():
        blocking_callback.go.set()
        thread.join(20)

    yield finish
    finish()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_forked_during_a_save_can_save(manager, finish):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        manager.close()  # the child does not hold the parent's lock
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    finish()
    assert manager.steps() == [1]


def test_an_interrupt_ends_the_waiting_for_another_thread(manager, finish):
    main = threading.main_thread().ident
    threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        manager.save_async(2, {"w": np.ones(2000)})
    finish()
    manager.save(3, {"w": np.zeros(2000)})
    assert manager.steps() == [1, 3]


def test_a_manager_can_be_pickled(tmp_path):
    manager = pickle.loads(pickle.dumps(CheckpointManager(tmp_path / "run", keep=2)))
    manager.save(1, {"w": np.ones(2)})
    assert (manager.steps(), manager.keep) == ([1], 2)


def test_a_manager_with_a_running_save_can_be_pickled_and_copied(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        handle = manager.save_async(1, {"w": np.ones(2)})
        others = pickle.loads(pickle.dumps(manager)), copy.deepcopy(manager)
        handle.wait()
        assert len(pickle.dumps(manager)) < 2000
        for step, other in enumerate(others, 2):
            other.save(step, {"w": np.full(2, step)})
        assert manager.steps() == [1, 2, 3]


@pytest.mark.parametrize("damaged", ["manifest.json", "roots"])
def test_interrupted_save_next_to_a_damaged_root_leaves_no_file(manager, damaged):
    save_all(manager, 1, 2)
    root = Path(manager.directory, damaged)
    root = min(root.iterdir()) if root.is_dir() else root
    root.write_bytes(root.read_bytes()[:-20])
    before = set(Path(manager.directory).rglob("*"))

    def interrupt(count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager.save(3, state(3), progress=interrupt)
    assert set(Path(manager.directory).rglob("*")) == before


def test_manager_moves_to_an_assigned_directory(manager, tmp_path):
    save_all(manager, 1)
    manager.directory = str(tmp_path / "other")
    save_all(manager, 10, 11, 12, 13)
    assert manager.steps() == CheckpointManager(tmp_path / "other").steps() == [11, 12, 13]
    assert pickle.loads(pickle.dumps(manager)).directory == str(tmp_path / "other")


@pytest.mark.parametrize("name", ["memory_budget", "max_memory", "max_buffer_bytes"])
def test_keywords_of_other_libraries_are_explained(tmp_path, name):
    manager = CheckpointManager(tmp_path / "run")
    with pytest.raises(TypeError, match="did you mean 'max_staging_bytes'"):
        manager.save_async(1, state(1), **{name: "200MB"})
    with pytest.raises(TypeError, match="did you mean 'max_staging_bytes'"):
        save_async(tmp_path / "new", state(1), **{name: "200MB"})


@pytest.mark.parametrize(
    ("function", "name", "remedy"),
    [
        (mlstate.load, "dtype", "did you mean 'cast'?"),
        (mlstate.load, "map_location", "device= is where the tensors go, and into= has tensors"),
        (mlstate.load, "weights_only", "nothing is unpickled, so leave it out"),
        (mlstate.load, "ignore_missing", "pass strict=False"),
        (mlstate.load, "template", "into= has the tensors to fill"),
        (mlstate.save, "epoch", "pass metadata={'epoch': 3}"),
        (mlstate.save, "val_loss", "pass metadata={'loss': 0.25}"),
        (mlstate.save, "lr_scheduler", "pass states={'scheduler': scheduler}"),
    ],
)
def test_keywords_of_other_libraries_have_a_remedy(function, name, remedy, tmp_path):
    with pytest.raises(TypeError, match=re.escape(f"argument {name!r}; {remedy}")):
        function(tmp_path / "run", **{name: 3})
