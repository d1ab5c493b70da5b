"""A step that was found damaged does not count for `keep`, also in later processes."""

import os
import subprocess
import sys

import numpy as np
import pytest
from checkpoint_model import flip
from gcs_server import GcsServer

import mlstate
from mlstate.checkpoint import CheckpointManager, prune
from mlstate.checkpoint._folder.names import mark_path
from mlstate.checkpoint._store.open_path import open_files

SUFFIX = ".damaged"


def state_of(step):
    return {"w": np.full(100, float(step)), "shared": np.ones(50)}


def run_of(folder, steps=4, *, damaged):
    """The folder of a run with some steps, of which some are damaged."""
    manager = CheckpointManager(folder, keep=None)
    for step in range(1, steps + 1):
        manager.save(step, state_of(step), metadata={"loss": float(step)}, pack_below_bytes=0)
    for step in damaged:
        change(folder, step)
    return folder


def change(folder, step, key="w"):
    """Change a bit of a tensor of a step; a second call changes it back."""
    shards = CheckpointManager(folder).checkpoint(step).shards()
    [path] = {shard.path for shard in shards if shard.key == key}
    flip(folder / path, -1)


def marked(folder):
    """The steps with a mark."""
    roots = {root.path: root for root in open_files(folder).list_roots()}
    names = [f"roots/{path.name}" for path in (folder / "roots").glob(f"*{SUFFIX}")]
    paths = [name.removesuffix(SUFFIX) + ".json" for name in names]
    assert set(paths) <= set(roots)
    return sorted(open_files(folder).read_manifest(path).step for path in paths)


def verify_all(folder):
    """Verify every step in another process."""
    words = [sys.executable, "-m", "mlstate", "verify", "--all-steps", str(folder)]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(words, env={**os.environ, **path}, capture_output=True, timeout=60)
    assert done.returncode == 1, done


def test_steps_that_another_process_found_damaged_do_not_count(tmp_path):
    folder = run_of(tmp_path / "run", damaged=[3, 4])
    verify_all(folder)
    assert marked(folder) == [3, 4]
    with pytest.warns(UserWarning, match="keep=2 deletes steps"):
        CheckpointManager(folder, keep=2).save(5, state_of(5))
    assert CheckpointManager(folder).steps() == [2, 3, 4, 5]
    CheckpointManager(folder, keep=2, warn_unchanged=False).save(5, state_of(5))
    report = mlstate.verify(folder)
    assert report and not report.strange and not report.leftover


def test_prune_keeps_the_last_good_steps(tmp_path):
    folder = run_of(tmp_path / "run", damaged=[4])
    assert not mlstate.verify(folder)
    assert prune(folder, keep=1, dry_run=True).kept == [3, 4]
    assert prune(folder, keep=1).kept == [3, 4]
    assert CheckpointManager(folder).restore(3).model["w"][0] == 3
    change(folder, 4)
    assert mlstate.verify(folder) and marked(folder) == []
    assert prune(folder, keep=1).kept == [4]
    assert [path.name for path in (folder / "roots").iterdir() if SUFFIX in path.name] == []


@pytest.mark.parametrize(
    ("steps", "rules"),
    [(4, {"keep_best": 1, "monitor": "loss"}), (3, {"keep_time_interval": 3600.0})],
    ids=["the best", "an interval"],
)
def test_a_rule_keeps_the_steps_that_load(tmp_path, steps, rules):
    """The first step would be the best one, and would begin the interval."""
    folder = run_of(tmp_path / "run", steps, damaged=[1])
    verify_all(folder)
    last = steps + 1
    with pytest.warns(UserWarning, match="keep=1 deletes steps"):
        CheckpointManager(folder, keep=1, **rules).save(
            last, state_of(last), metadata={"loss": 9.0}
        )
    assert CheckpointManager(folder).steps() == [2, last]


def test_a_restore_that_finds_damage_is_remembered(tmp_path):
    folder = run_of(tmp_path / "run", damaged=[4])
    with pytest.raises(mlstate.ChecksumError):
        CheckpointManager(folder).restore(4)
    assert marked(folder) == [4]
    change(folder, 3)
    with pytest.warns(UserWarning, match="cannot be restored"):
        assert CheckpointManager(folder).restore_latest().step == 2
    assert marked(folder) == [3, 4]


def test_steps_that_share_a_damaged_file_are_marked(tmp_path):
    folder = run_of(tmp_path / "run", 3, damaged=[])
    change(folder, 3, "shared")
    assert not mlstate.verify(folder)
    assert marked(folder) == [1, 2, 3]
    assert prune(folder, keep=1).kept == [1, 2, 3]


def test_a_damaged_header_is_not_marked(tmp_path):
    folder = run_of(tmp_path / "run", 2, damaged=[])
    [path] = {s.path for s in CheckpointManager(folder).checkpoint(2).shards() if s.key == "w"}
    with (folder / path).open("r+b") as file:
        file.seek(200)
        file.write(b"x")
    report = mlstate.verify(folder)
    assert {problem.kind for problem in report.problems} == {"header"} and marked(folder) == []


def test_a_repair_deletes_the_marks_of_the_deleted_steps(tmp_path):
    folder = run_of(tmp_path / "run", damaged=[3, 4])
    assert mlstate.verify(folder, repair=True).step == 2
    assert marked(folder) == [] and CheckpointManager(folder).steps() == [1, 2]
    report = mlstate.verify(folder)
    assert report and not report.strange


def test_a_mark_without_a_step_is_pruned(tmp_path):
    folder = run_of(tmp_path / "run", 2, damaged=[])
    orphan = folder / "roots" / f"00000009.0123456789abcdef{SUFFIX}"
    orphan.touch()
    other = folder / "roots" / f"notes{SUFFIX}"
    other.touch()
    assert mlstate.verify(folder).strange == [f"roots/notes{SUFFIX}"]
    prune(folder)
    assert not orphan.exists() and other.exists()


def test_a_checkpoint_without_steps_has_no_mark(tmp_path):
    saved = mlstate.save(tmp_path / "ckpt", state_of(1))
    with (tmp_path / "ckpt" / saved.shards()[0].path).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert not mlstate.verify(tmp_path / "ckpt")
    assert not list((tmp_path / "ckpt").rglob(f"*{SUFFIX}"))


def test_a_planted_link_is_not_followed(tmp_path):
    folder = run_of(tmp_path / "run", 2, damaged=[2])
    root = open_files(folder).list_roots()[-1]
    mark = folder / mark_path(root.path)
    mark.symlink_to(tmp_path / "victim")
    assert not mlstate.verify(folder)
    assert not (tmp_path / "victim").exists()
    assert prune(folder, keep=1).kept == [1, 2]  # the name is the mark


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_verified(tmp_path):
    folder = run_of(tmp_path / "run", 2, damaged=[2])
    (folder / "roots").chmod(0o500)
    try:
        assert not mlstate.verify(folder)
    finally:
        (folder / "roots").chmod(0o700)


def test_unwritable_damage_mark_is_ignored(tmp_path, monkeypatch):
    folder = run_of(tmp_path / "run", 2, damaged=[2])
    real = mlstate._core.Descriptor

    def refused(path, flags):
        if str(path).endswith(SUFFIX):
            raise PermissionError(13, "Permission denied")
        return real(path, flags)

    monkeypatch.setattr(mlstate._core, "Descriptor", refused)
    assert not mlstate.verify(folder)
    assert marked(folder) == []


def test_steps_in_a_store_are_marked():
    pytest.importorskip("obstore", reason="needs obstore: mlstate[remote]")
    with GcsServer() as server:
        url, options = "gs://bucket/run", server.options()
        manager = CheckpointManager(url, keep=None, storage_options=options)
        for step in (1, 2, 3):
            manager.save(step, state_of(step), pack_below_bytes=0)
        [path] = {s.path for s in manager.checkpoint(3).shards() if s.key == "w"}
        stored = server.objects[f"run/{path}"]
        data = stored.data[:-1] + bytes([stored.data[-1] ^ 1])
        server.objects[f"run/{path}"] = stored._replace(data=data)
        assert not mlstate.verify(url, storage_options=options)
        marks = [key for key in server.objects if key.endswith(SUFFIX)]
        assert len(marks) == 1
        later = CheckpointManager(url, keep=2, storage_options=options)
        with pytest.warns(UserWarning, match="keep=2 deletes steps"):
            later.save(4, state_of(4))
        assert later.steps() == [2, 3, 4]
        server.objects[f"run/{path}"] = stored
        assert CheckpointManager(url, storage_options=options).restore(3).model["w"][0] == 3
        later.delete(3)
        assert [key for key in server.objects if key.endswith(SUFFIX)] == []
