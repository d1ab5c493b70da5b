"""Tasks of other threads run on the CUDA stream of their caller; here with a stand-in for CUDA."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from mlstate._common.streams import on_current_stream
from mlstate.collectives import LocalGroup

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def entered(monkeypatch):
    """Streams that were entered, with the thread's name; each thread begins with stream 0."""
    entered = []
    local = threading.local()

    @contextmanager
    def stream(each):
        entered.append((each, threading.current_thread().name))
        before, local.stream = getattr(local, "stream", 0), each
        yield
        local.stream = before

    fake = SimpleNamespace(
        is_initialized=lambda: True,
        is_available=lambda: True,
        stream=stream,
        current_stream=lambda device=None: getattr(local, "stream", 0),
    )
    monkeypatch.setattr(torch, "cuda", fake)
    return entered


def test_a_task_runs_on_the_stream_of_its_caller(entered):
    with torch.cuda.stream(7):
        task = on_current_stream(lambda: torch.cuda.current_stream() + 1)
    assert torch.cuda.current_stream() == 0
    assert task() == 8


def test_asynchronous_operations_run_on_the_stream_of_their_caller(entered):
    (group,) = LocalGroup.threads(1)
    with group, torch.cuda.stream(5):
        del entered[:]
        work = group.all_reduce(np.ones(3), async_op=True)
        assert work.wait(60).tolist() == [1, 1, 1]
    ((stream, thread),) = entered
    assert stream == 5 and thread.startswith("mlstate-local-group")


def test_without_cuda_a_task_is_returned_itself():
    def task():
        return 1

    assert torch.cuda.is_initialized() or on_current_stream(task) is task
