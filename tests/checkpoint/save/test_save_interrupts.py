"""Asynchronous saves whose start was interrupted, also in the clean-up."""

import contextlib
import threading

import numpy as np
import pytest
from interruption import raise_once

import mlstate
from mlstate.checkpoint import CheckpointManager, Staging, save_async
from mlstate.checkpoint._save import job as save_job
from mlstate.collectives import SingleGroup

SECONDS = 20
pytestmark = pytest.mark.timeout(120)


def interrupt_once(monkeypatch, method):
    """Let the next call of a method of `SaveJob` raise KeyboardInterrupt."""
    raise_once(monkeypatch, save_job.SaveJob, method)


@pytest.fixture(params=["give_up", "end", "cancellation"])
def lost_start(request, monkeypatch):
    """One interrupt stops the start of the next save; the other, its clean-up."""
    interrupt_once(monkeypatch, "start")
    interrupt_once(monkeypatch, request.param)


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


@pytest.mark.parametrize("method", ["end", "give_up"])
def test_a_lost_save_without_a_thread_ends(path, monkeypatch, method):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with CheckpointManager(path) as manager:
        with monkeypatch.context() as context:
            context.setattr(threading.Thread, "start", refuse)
            interrupt_once(context, "work")
            interrupt_once(context, method)
            with contextlib.suppress(KeyboardInterrupt):
                manager.save_async(1, {"w": np.ones(3)})
        with contextlib.suppress(KeyboardInterrupt):  # the interrupt may be the save's error
            manager.save_async(2, {"w": np.ones(3)})
        manager.save_async(2, {"w": np.ones(3)})
    assert manager.steps() == [2]


def test_a_signal_handler_cannot_wait_for_the_save_that_it_interrupts(path, monkeypatch):
    manager = CheckpointManager(path)
    start = save_job.SaveJob.start

    def save_and_start(job):
        monkeypatch.setattr(save_job.SaveJob, "start", start)
        manager.save(2, {"w": np.ones(3)})  # as a handler would
        start(job)

    monkeypatch.setattr(save_job.SaveJob, "start", save_and_start)
    with pytest.raises(RuntimeError, match="cannot wait for itself, while it starts"):
        manager.save_async(1, {"w": np.ones(3)})
    manager.save(2, {"w": np.ones(3)})
    assert manager.steps() == [2]
