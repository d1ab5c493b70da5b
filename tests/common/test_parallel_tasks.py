"""Tasks in threads."""

import os
import signal
import threading
import time

import pytest

from mlstate.checkpoint._folder._remote.parallel_tasks import run_tasks


@pytest.mark.parametrize("most", [0, 1, 2])
def test_tasks_run_in_the_threads_that_the_system_has(monkeypatch, most):
    start, started, finished = threading.Thread.start, [], []

    def start_if_left(thread):
        if len(started) == most:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    def task():
        time.sleep(0.01)
        finished.append(threading.current_thread())

    monkeypatch.setattr(threading.Thread, "start", start_if_left)
    if most == 0:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            run_tasks([task] * 5, 4)
        assert not finished
    else:
        run_tasks([task] * 5, 4)
        assert len(finished) == 5 and set(finished) == set(started)


@pytest.mark.timeout(20)
def test_no_task_runs_after_an_interrupt_has_ended_the_call():
    ended = []

    def task():
        time.sleep(0.1)
        ended.append(True)

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tasks([task] * 3, 2, interrupt)
    count = len(ended)
    time.sleep(0.2)
    assert len(ended) == count == 2


@pytest.mark.timeout(20)
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("delay", [0, 0.1])
def test_an_interrupted_call_waits_for_running_tasks(delay):
    ended = []

    def task():
        time.sleep(delay)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.3)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_tasks([task], 1)
    assert ended
