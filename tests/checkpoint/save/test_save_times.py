"""The times that asynchronous saves report for their phases."""

import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlstate import StoreError
from mlstate.checkpoint import CheckpointManager, save_async
from mlstate.checkpoint._save.job import add_wait
from mlstate.checkpoint.records import SaveTimes

SECONDS = 20


def test_times_are_known_when_it_is_so(tmp_path, blocking_callback):
    before = time.perf_counter()
    handle = save_async(tmp_path / "ckpt", {"w": np.ones(9)}, progress=blocking_callback)
    assert blocking_callback.called.wait(SECONDS)
    began, staged, ended, waits = handle.times()
    assert before <= began <= staged <= time.perf_counter()
    assert ended is None and len(waits) == 1 and waits[0][0] == began
    blocking_callback.go.set()
    handle.wait()
    times = handle.times()
    assert times[:2] == (began, staged)
    assert staged <= times.ended <= time.perf_counter()


def test_a_wait_is_counted_for_as_long_as_it_takes(tmp_path, blocking_callback):
    handle = save_async(tmp_path / "ckpt", {"w": np.ones(9)}, progress=blocking_callback)
    handle.staged(SECONDS)
    blocked = handle.times().blocked_seconds
    time.sleep(0.02)  # time spent training does not count as waiting for the save
    start = time.perf_counter()
    with pytest.raises(TimeoutError):
        handle.wait(0.05)
    seconds = time.perf_counter() - start
    assert 0.05 <= handle.times().blocked_seconds - blocked <= seconds
    blocking_callback.go.set()
    handle.wait()
    after = handle.times()
    handle.wait(), handle.staged(), handle.done(), handle.progress()
    assert handle.times() == after  # a finished save is not waited for


def test_the_managers_next_save_waits_for_the_one_before(tmp_path, blocking_callback):
    with CheckpointManager(tmp_path / "run") as manager:
        first = manager.save_async(1, {"w": np.ones(9)}, progress=blocking_callback)
        assert blocking_callback.called.wait(SECONDS)
        first.staged()
        blocked = first.times().blocked_seconds
        threading.Timer(0.05, blocking_callback.go.set).start()
        second = manager.save_async(2, {"w": np.zeros(9)})
        assert first.times().blocked_seconds - blocked > 0.03
        assert first.times().ended <= second.times().began


def test_a_save_that_failed_has_ended(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "params").write_bytes(b"")
    handle = save_async(tmp_path / "c", {"w": np.ones(9)})
    with pytest.raises(StoreError):
        handle.wait()
    began, staged, ended, _ = handle.times()
    assert began <= staged <= ended


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5)), max_size=20))
def test_waits_of_several_threads_become_one_timeline(spans):
    spans = sorted(((start, start + length) for start, length in spans), key=lambda span: span[1])
    waits = []
    for start, end in spans:
        add_wait(waits, start, end)
    assert all(first[1] + 1e-3 <= second[0] for first, second in pairwise(waits))
    for start, end in spans:
        assert any(a <= start and end <= b for a, b in waits)
    edges = {at for span in spans for at in span}
    assert all(a in edges and b in edges for a, b in waits)
    assert SaveTimes(0.0, None, None, waits).blocked_seconds == sum(b - a for a, b in waits)


def test_polling_does_not_fill_memory(tmp_path, blocking_callback):
    handle = save_async(tmp_path / "ckpt", {"w": np.ones(9)}, progress=blocking_callback)
    assert blocking_callback.called.wait(SECONDS)
    for _ in range(300):
        with pytest.raises(TimeoutError):
            handle.wait(0)
    assert len(handle.times().waits) < 150
