"""The memory tracker: process memory as the system reports it, or a user's own source."""

import pickle
import sys
import threading
from pathlib import Path

import child
import numpy as np
import pytest
from thread_team import run_in_threads

from mlstate.activation import MemoryAwareStrategy, MemoryTracker
from mlstate.activation.records import MemoryStats

MEBIBYTE = 1 << 20


def test_the_process_is_measured():
    code = """
import mmap
from mlstate.activation import MemoryTracker
tracker = MemoryTracker()
first = tracker.get_stats()
pages = mmap.mmap(-1, 64 << 20)  # given back at once, where a heap may keep it
for _ in range(64):
    pages.write(b'x' * mmap.PAGESIZE * (2**20 // mmap.PAGESIZE))
second = tracker.get_stats()
pages.close()
third = tracker.get_stats()
mib = 1 << 20
print(first.source, second.current_memory_used - first.current_memory_used >= 60 * mib,
      second.current_memory_used - third.current_memory_used >= 60 * mib,
      third.peak_memory_used >= second.current_memory_used - mib,
      first.total_memory == third.total_memory >= second.current_memory_used)
tracker.reset()
print(second.peak_memory_used - tracker.get_stats().peak_memory_used >= 60 * mib)
"""
    done = child.attempt(code)
    assert (done.stdout, done.stderr) == ("process True True True True\nTrue\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_stats_match_proc_status():
    stats = MemoryTracker("process").get_stats()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    resident = int(fields["VmRSS"].split()[0]) * 1024
    assert abs(stats.current_memory_used - resident) < 32 * MEBIBYTE
    physical = int(Path("/proc/meminfo").read_text(encoding="ascii").split()[1]) * 1024
    assert 0 < stats.total_memory <= physical


def test_custom_source_and_clock():
    used, seconds = iter([5, 9, 7]), iter([0.5, 1.5, 2.5, 3.5])
    tracker = MemoryTracker(lambda: (next(used), 20), clock=lambda: next(seconds))
    stats = [tracker.get_stats() for _ in range(3)]
    assert stats == [
        MemoryStats(5, 5, 20, "custom", 0.5),
        MemoryStats(9, 9, 20, "custom", 1.5),
        MemoryStats(7, 9, 20, "custom", 2.5),
    ]
    assert (stats[2].available, stats[2].pressure) == (13, 0.35)
    assert MemoryStats(9, 9, 5, "custom", 0.0).available == 0


def test_source_without_total_uses_system_memory():
    total = MemoryTracker("process").get_stats().total_memory
    assert MemoryTracker(lambda: np.int64(3)).get_stats()[:3] == (3, 3, total)


def test_reset_forgets_the_peak():
    used = iter([9, 3, 4])
    tracker = MemoryTracker(lambda: next(used))
    assert tracker.get_stats().peak_memory_used == 9
    tracker.reset()
    assert [tracker.get_stats().peak_memory_used for _ in range(2)] == [3, 4]


@pytest.mark.parametrize("source", ["proces", "cuda:", "cuda:x", "cuda:-1", "process:0", ""])
def test_unknown_sources_are_named(source):
    with pytest.raises(ValueError, match=f"process, cuda or cuda:N, got '{source}'"):
        MemoryTracker(source)


def test_settings_are_checked():
    with pytest.raises(TypeError, match="source must be callable or a str, got int"):
        MemoryTracker(5)
    with pytest.raises(TypeError, match="clock must be callable, got int"):
        MemoryTracker(clock=5)


@pytest.mark.parametrize("reading", [None, 1.5, "5", (1, 2, 3), (1, None, 2), (1.0, 5), [1, 2]])
def test_non_numeric_sources_are_refused(reading):
    with pytest.raises(TypeError, match="must return a number of bytes or two, got"):
        MemoryTracker(lambda: reading).get_stats()


@pytest.mark.parametrize("reading", [-1, (-1, 5), (0, 0), (1, -5)])
def test_impossible_readings_are_refused(reading):
    tracker = MemoryTracker(lambda: reading)
    with pytest.raises(ValueError, match="source returned"):
        tracker.get_stats()
    with pytest.raises(ValueError, match="source returned"):
        seconds = iter([0.0, 11.0])
        strategy = MemoryAwareStrategy(tracker=tracker, clock=lambda: next(seconds))
        strategy.should_checkpoint("a", None, 0)


def test_trackers_are_values():
    assert MemoryTracker() == MemoryTracker() != MemoryTracker("process")
    assert hash(MemoryTracker()) == hash(MemoryTracker())
    assert MemoryTracker() != 5
    tracker = MemoryTracker("process")
    tracker.reset()
    tracker.get_stats()
    other = pickle.loads(pickle.dumps(tracker))
    assert other == tracker and other.get_stats().source == "process"
    assert repr(tracker) == "MemoryTracker(source='process')"
    assert repr(MemoryTracker()) == "MemoryTracker()"


def test_threads_share_a_tracker():
    numbers = iter(range(10**6))
    lock = threading.Lock()

    def source():
        with lock:
            return next(numbers)

    tracker = MemoryTracker(source)
    run_in_threads(lambda _: [tracker.get_stats() for _ in range(500)], 8)
    assert tracker.get_stats().peak_memory_used == 4000


@pytest.mark.torch
def test_torch_without_cuda_falls_back_to_process(torch):
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert MemoryTracker().get_stats().source == "process"
    with pytest.raises(RuntimeError, match="torch has no CUDA device here"):
        MemoryTracker("cuda").get_stats()


@pytest.mark.torch
def test_a_gpu_is_measured_once_torch_uses_it(torch):
    if not torch.cuda.is_available():
        pytest.skip("there is no device")
    torch.zeros(1, device="cuda")
    before = MemoryTracker().get_stats()
    buffer = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    after = MemoryTracker().get_stats()
    assert after.source == "cuda:0"
    assert after.current_memory_used - before.current_memory_used == buffer.numel()
    assert after.peak_memory_used >= after.current_memory_used
    assert after.total_memory == torch.cuda.get_device_properties(0).total_memory
    assert MemoryTracker("process").get_stats().source == "process"
    with pytest.raises(RuntimeError, match="torch has"):
        MemoryTracker("cuda:99").get_stats()
