"""Steps of a run: retention, falling back, what steps share."""

import errno
from pathlib import Path

import numpy as np
import pytest
from checkpoint_model import same

import mlstate
from mlstate.checkpoint import CheckpointManager


def state(step, large=False):
    made = {"frozen": np.arange(1000.0), "w": np.full(10, step, np.float32)}
    if large:
        made["big"] = np.full(200_000, step, np.float32)
    return made


@pytest.fixture
def manager(tmp_path):
    return CheckpointManager(tmp_path / "run", keep=3)


def flip(manager, step, key="w"):
    shard = next(s for s in manager.checkpoint(step).shards() if s.key == key)
    with Path(manager.directory, shard.path).open("r+b") as file:
        file.seek(shard.offset + 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x10]))


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


def test_what_is_not_kept_is_deleted(manager, tmp_path):
    for step in range(8):
        manager.save(step, {"big": np.full(200_000, step, np.float32)})
    files = list((tmp_path / "run").rglob("*.safetensors"))
    assert len(files) == 3
    assert len(list((tmp_path / "run" / "roots").iterdir())) == 3
    assert len(list((tmp_path / "run" / "index").iterdir())) == 3


def test_steps_share_the_files_of_what_did_not_change(manager):
    frozen = np.arange(100_000.0)
    for step in range(3):
        manager.save(step, {"frozen": frozen, "w": np.full(5, step)})
    shared = {
        next(s.path for s in manager.checkpoint(step).shards() if s.key == "frozen")
        for step in manager.steps()
    }
    assert len(shared) == 1


def test_all_steps_are_kept_where_that_is_asked(tmp_path):
    manager = CheckpointManager(tmp_path, keep=None)
    for step in range(6):
        manager.save(step, state(step))
    assert manager.steps() == list(range(6))
    with pytest.raises(ValueError, match="keep must be 1 or more"):
        CheckpointManager(tmp_path, keep=0)


def test_a_step_saved_again_is_replaced(manager):
    for step in (1, 2, 1):
        manager.save(step, state(step))
    manager.save(2, state(7))
    assert manager.steps() == [1, 2]
    assert same(state(7), manager.restore(2).model)


def test_a_damaged_step_is_passed_over_with_a_warning(manager):
    for step in (1, 2, 3):
        manager.save(step, state(step))
    flip(manager, 3)
    with pytest.warns(UserWarning, match="cannot be restored.*'w'"):
        loaded = manager.restore_latest()
    assert loaded.step == 2
    flip(manager, 2)
    flip(manager, 1)
    with pytest.warns(UserWarning), pytest.raises(mlstate.ChecksumError):
        manager.restore_latest()


def test_repair_falls_back_to_the_newest_step_that_verifies(manager):
    for step in (1, 2, 3):
        manager.save(step, state(step))
    flip(manager, 3)
    report = mlstate.verify(manager.directory)
    assert not report
    assert [(p.kind, p.name) for p in report.problems] == [("altered", "w")]
    repaired = mlstate.verify(manager.directory, repair=True)
    assert not repaired  # what was found
    assert repaired.step == 2 and repaired.repaired
    assert mlstate.verify(manager.directory)
    assert same(state(2), mlstate.load(manager.directory).model)
    assert manager.steps() == [1, 2]
    assert manager.restore_latest().step == 2  # without a warning
    manager.save(4, state(4))
    assert not mlstate.verify(manager.directory).leftover
    assert manager.restore_latest().step == 4


def test_a_step_is_deleted_with_what_only_it_needs(manager):
    for step in (1, 2, 3):
        manager.save(step, state(step))
    manager.delete(2)
    assert manager.steps() == [1, 3]
    assert same(state(1), manager.restore(1).model)
    assert not mlstate.verify(manager.directory).leftover
    with pytest.raises(ValueError, match="step 3 is the newest"):
        manager.delete(3)
    with pytest.raises(FileNotFoundError, match="no step 2 there \\(steps: 1, 3\\)"):
        manager.delete(2)


def test_no_step_is_a_file_that_is_not_found(manager):
    for call in (manager.restore_latest, lambda: manager.restore(3)):
        with pytest.raises(mlstate.StoreError) as caught:
            call()
        assert caught.value.errno == errno.ENOENT


def test_a_plain_save_leaves_the_steps_alone(manager):
    for step in (1, 2):
        manager.save(step, state(step))
    mlstate.save(manager.directory, {"other": np.ones(3)})
    assert manager.steps() == [1, 2]
    assert manager.restore_latest().step == 2
    assert same(state(1), manager.restore(1).model)
    assert same({"other": np.ones(3)}, mlstate.load(manager.directory).model)
    manager.save(3, state(3))
    assert same(state(3), mlstate.load(manager.directory).model)
    assert not mlstate.verify(manager.directory).leftover


def test_a_checkpoint_that_is_no_step_is_not_replaced_by_one(manager):
    mlstate.save(manager.directory, state(4), step=4)
    words = "holds a checkpoint of mlstate.save, which is no step"
    for save in (manager.save, manager.save_async):
        with pytest.raises(mlstate.StoreError, match=f"cannot save the step: .*{words}") as info:
            save(5, state(5))
        assert info.value.errno == errno.EEXIST
    for restore in (manager.restore_latest, lambda: manager.restore(4)):
        with pytest.raises(FileNotFoundError, match=words):
            restore()
    assert manager.steps() == []
    assert same(state(4), mlstate.load(manager.directory).model)


def test_a_root_that_cannot_be_read_stops_deleting_but_not_saving(manager, tmp_path):
    for step in (1, 2):
        manager.save(step, state(step))
    oldest = min((tmp_path / "run" / "roots").iterdir())
    oldest.write_bytes(b"{")
    before = set((tmp_path / "run" / "params").iterdir())
    with pytest.warns(UserWarning, match="were not deleted"):
        mlstate.save(manager.directory, state(3))
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


def test_steps_and_keep_that_are_no_numbers_are_refused(manager):
    manager.save(2, state(2))
    with pytest.raises(TypeError, match="step must be an int, got str: '2'"):
        manager.restore("2")
    with pytest.raises(TypeError, match="keep must be an int, or None for all, got str"):
        CheckpointManager(manager.directory, keep="3")
    with pytest.raises(
        FileNotFoundError, match=r"cannot find the step: no step 9 there \(steps: 2\)"
    ):
        manager.delete(9)
