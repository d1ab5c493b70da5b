"""Deleting the files of replaced saves of many ranks, durably."""

import json
import shutil

import numpy as np
import pytest

import mlstate
from mlstate.checkpoint._folder import writer_lock as _lock
from mlstate.checkpoint._store.checkpoint_files import CheckpointFiles
from mlstate.testing import run_ranks

pytestmark = pytest.mark.skipif(_lock.os.name == "nt", reason="checkpoints need POSIX")


def save(path, value):
    """Two ranks save; return the generation."""
    state = {f"layer.{i}": np.full((4, 3), value + i) for i in range(3)}
    run_ranks(2, lambda group: mlstate.save(path, state, layout="rows", group=group))
    return mlstate.checkpoint.inspect(path).generation


def files(path):
    folders = ("index", "params", "optim_state")
    return {p.relative_to(path).as_posix() for part in folders for p in (path / part).glob("*")}


@pytest.mark.parametrize("unfinished", [False, True])
def test_restored_garbage_is_deleted_after_an_unfinished_save(tmp_path, unfinished):
    path, backup = tmp_path / "ckpt", tmp_path / "kept"
    first = save(path, 1)
    shutil.copytree(path, backup)
    second = save(path, 2)
    assert files(path) and not any(first in name for name in files(path))

    for name in files(backup):  # a power failure undid the deletions and the unlocking
        shutil.copy(backup / name, path / name)
    text = {**_lock._me(), "boot": "another", "generation": second if unfinished else None}
    (path / "lock").write_text(json.dumps(text))
    assert (mlstate.load(path).model["layer.1"] == 3).all()

    third = save(path, 3)
    left = {name for name in files(path) if third not in name}
    # without a mark of an unfinished save the folder is not searched, so deletions are synced
    # before the lock is released
    assert left == (set() if unfinished else {name for name in files(backup) if first in name})
    assert (mlstate.load(path).model["layer.1"] == 4).all()


def test_folders_are_synced_before_the_lock_is_let_go(tmp_path, monkeypatch):
    path, done = tmp_path / "ckpt", []
    save(path, 1)
    sync, note = mlstate._core.folder_sync, _lock.WriterLock.note
    monkeypatch.setattr(
        mlstate._core, "folder_sync", lambda folder: (done.append(folder), sync(folder))[1]
    )
    monkeypatch.setattr(
        _lock.WriterLock, "note", lambda lock, text: (done.append(text), note(lock, text))[1]
    )
    second = save(path, 2)
    begin, end = done.index(second), done.index(None)
    synced = done[begin:end]
    assert {str(path / "index"), str(path / "params")} <= set(synced)


def test_unsynced_folder_is_noted_and_scanned_next_time(tmp_path, monkeypatch):
    path, noted = tmp_path / "ckpt", []
    first = save(path, 1)
    delete, note = CheckpointFiles.delete_own_files, _lock.WriterLock.note

    def delete_unsynced(files, rank, *args):
        delete(files, rank, *args)
        if rank == 1:
            raise mlstate.StoreError(f"{files.path}: cannot sync the folder")

    monkeypatch.setattr(
        _lock.WriterLock, "note", lambda lock, text: (noted.append(text), note(lock, text))[1]
    )
    with monkeypatch.context() as patches:
        patches.setattr(CheckpointFiles, "delete_own_files", delete_unsynced)
        with pytest.warns(UserWarning, match="old files .* rank 1: .*cannot sync"):
            second = save(path, 2)
    assert noted == [second]  # the lock still records an unfinished save
    assert not any(first in name for name in files(path))
    assert (mlstate.load(path).model["layer.1"] == 3).all()
    third = save(path, 3)
    assert noted == [second, third, None]
    assert (mlstate.load(path).model["layer.1"] == 4).all()
