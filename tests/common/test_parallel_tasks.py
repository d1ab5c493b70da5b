"""Tasks in threads."""

import threading
import time

import pytest

from mlstate.checkpoint._remote.parallel_tasks import run_tasks


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
