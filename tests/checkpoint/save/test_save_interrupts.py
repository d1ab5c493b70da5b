"""Saves after signals in their clean-up; asynchronous ones also during their start."""

import threading

import numpy as np
import pytest
from interruption import signal_once

import mlstate
from mlstate.checkpoint import CheckpointManager, Staging, reshard, save_async
from mlstate.checkpoint._save import job as save_job
from mlstate.checkpoint._store.checkpoint_files import CheckpointFiles
from mlstate.collectives import SingleGroup

SECONDS = 20
pytestmark = pytest.mark.timeout(120)


def refuse(thread):
    raise RuntimeError("can't start new thread")


@pytest.fixture
def lost_start(monkeypatch):
    """An error stops the start of the next save; a signal arrives in its clean-up."""
    start = save_job.SaveJob.start

    def fail(job):
        monkeypatch.setattr(save_job.SaveJob, "start", start)
        raise MemoryError

    monkeypatch.setattr(save_job.SaveJob, "start", fail)
    signal_once(monkeypatch, save_job.SaveJob, "give_up")


def test_a_manager_saves_after_a_lost_start(path, lost_start):
    with CheckpointManager(path) as manager:
        with pytest.raises(KeyboardInterrupt):
            manager.save_async(1, {"w": np.ones(3)})
        manager.save_async(2, {"w": np.ones(3)})
    assert manager.steps() == [2]


def test_staging_memory_is_free_after_a_lost_start(path, lost_start):
    staging = Staging(24)
    with pytest.raises(KeyboardInterrupt):
        save_async(path, {"w": np.ones(3)}, staging=staging)
    save_async(path, {"w": np.full(3, 2.0)}, staging=staging).wait(SECONDS)
    assert mlstate.load(path).model["w"].sum() == 6


def test_a_group_is_free_after_a_lost_start(path, lost_start):
    group = SingleGroup()
    with pytest.raises(KeyboardInterrupt):
        save_async(path, {"w": np.ones(3)}, group=group)
    save_async(path, {"w": np.full(3, 2.0)}, group=group).wait(SECONDS)
    assert mlstate.load(path).model["w"].sum() == 6


@pytest.mark.parametrize("method", ["reserve", "start"])
def test_a_save_continues_after_a_signal_during_its_start(path, monkeypatch, method):
    signal_once(monkeypatch, save_job.SaveJob, method)
    with CheckpointManager(path, keep=2) as manager:
        with pytest.raises(KeyboardInterrupt):
            manager.save_async(1, {"w": np.ones(3)})
        manager.save_async(2, {"w": np.zeros(3)})
    assert manager.steps() == [1, 2]


def test_a_save_without_a_thread_ends_in_a_storm(path, monkeypatch):
    with CheckpointManager(path) as manager:
        with monkeypatch.context() as context:
            context.setattr(threading.Thread, "start", refuse)
            signal_once(context, save_job.SaveJob, "work")
            signal_once(context, save_job.SaveJob, "end")
            with pytest.raises(KeyboardInterrupt):
                manager.save_async(1, {"w": np.ones(3)})
        manager.save_async(2, {"w": np.ones(3)})
    assert manager.steps() == [2]


def test_a_save_without_a_thread_cannot_wait_for_itself(path, monkeypatch):
    manager = CheckpointManager(path)
    monkeypatch.setattr(threading.Thread, "start", refuse)

    def progress(_):
        manager.save(2, {"w": np.ones(3)})  # as a signal handler would

    handle = manager.save_async(1, {"w": np.ones(3)}, progress=progress)
    with pytest.raises(RuntimeError, match="cannot wait for itself"):
        handle.wait()
    manager.save(2, {"w": np.ones(3)})
    assert manager.steps() == [2]


def refuse_bytes(count):
    raise RuntimeError("enough")


def save_again(path):
    mlstate.save(path, {"w": np.zeros(3)}, progress=refuse_bytes)


def reshard_again(path):
    mlstate.save(path.parent / "source", {"w": np.zeros(3)})
    options = {"layout": "rows", "world_size": 2, "overwrite": True}
    reshard(path.parent / "source", path, **options, progress=refuse_bytes)


def content(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("save", [save_again, reshard_again])
def test_a_signal_waits_until_a_failed_save_has_deleted_its_files(path, monkeypatch, save):
    mlstate.save(path, {"w": np.ones(3)})
    before = content(path)  # also of the lock, which names no save
    signal_once(monkeypatch, CheckpointFiles, "discard")
    with pytest.raises(KeyboardInterrupt):
        save(path)
    assert content(path) == before
