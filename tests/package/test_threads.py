"""Threads of the core, threads of Python, and processes forked from either."""

import contextlib
import hashlib
import multiprocessing
import sys
import time

import child
import numpy as np
import pytest
from kv_model import assert_same_bits, expand
from thread_team import calling_in_background, num_threads, run_in_threads

import mlstate
from mlstate.kv import compact_kv_state, transition_kv_state
from mlstate.threads import get_num_threads, set_num_threads

# large enough for several threads, and for stores that bypass the cache
SHAPE, LENGTH = (9, 3, 1000, 67), 5000


def source():
    return np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)


@pytest.fixture(autouse=True)
def threads_as_before():
    with num_threads(get_num_threads()):
        yield


def test_the_default_is_the_processors_but_at_most_four():
    code = "import mlstate; print(mlstate.threads.get_num_threads())"
    assert 1 <= int(child.run(code)) <= 4
    if sys.platform == "linux":
        code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " + code
        assert int(child.run(code)) == 1


def test_any_number_gives_the_same_bytes():
    expected = expand(source(), LENGTH, 777, 1.5, np.float16)
    out = np.empty_like(expected)
    for threads in (1, 2, 4, 64, 3, 1, 2):
        set_num_threads(threads)
        assert get_num_threads() == threads
        got = transition_kv_state(source(), LENGTH, 777, 1.5, np.float16)
        assert_same_bits(got, expected)
        out[...] = 9
        assert_same_bits(transition_kv_state(source(), LENGTH, 777, 1.5, out=out), expected)


@pytest.mark.parametrize("threads", [0, -1, 65, 2**31, 2**64, -(2**64)])
def test_invalid_thread_counts_are_refused(threads):
    before = get_num_threads()
    with pytest.raises(ValueError, match=r"choose 1 to 64|64 bits"):
        set_num_threads(threads)
    assert get_num_threads() == before


def test_a_number_is_an_integer():
    for threads in (2.0, "2", None, [2]):
        with pytest.raises(TypeError, match="threads must be an integer"):
            set_num_threads(threads)
    set_num_threads(np.int16(2))
    assert get_num_threads() == 2


@pytest.mark.timeout(120)
def test_eight_threads_share_one_source():
    shared = source()
    expected = expand(shared, LENGTH, 900)
    small = expand(shared, 500, 400, 0, np.float16)
    set_num_threads(2)

    def work(i):
        out = np.empty_like(expected)
        for _ in range(4):
            if i % 2:
                transition_kv_state(shared, LENGTH, 900, out=out)
                assert (out == expected).all()
            else:
                got = compact_kv_state(shared, 500, 400, np.float16)
                assert_same_bits(got, small)
            with pytest.raises(mlstate.CapacityError):
                compact_kv_state(shared, 3, 4)

    run_in_threads(work, 8)
    assert_same_bits(shared, source())


@pytest.mark.timeout(120)
def test_changing_the_number_while_others_work():
    shared = source()
    expected = expand(shared, LENGTH, 900)

    def work(i):
        for n in range(10):
            if i < 2:
                set_num_threads(1 + (n + i) % 5)
            else:
                assert (transition_kv_state(shared, LENGTH, 900) == expected).all()

    run_in_threads(work, 6)


@pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="there is no GIL to release"
)
@pytest.mark.timeout(120)
def test_the_gil_is_released_while_memory_moves():
    """Another thread runs during a move, which is possible only if the move releases the GIL.

    The interpreter's switch interval is set to more than the duration of the test.
    """
    counted = [0]

    def count():
        counted[0] += 1
        time.sleep(0)  # releases the GIL at once

    shared, small = source(), np.ones((1, 1, 4, 4), np.float16)
    out = np.empty((*SHAPE[:2], LENGTH, SHAPE[3]), np.float32)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        with calling_in_background(count):
            before = counted[0]
            for _ in range(1000):
                transition_kv_state(small, 8)
            assert counted[0] == before, "the other thread ran although nothing released the GIL"
            for _ in range(200):
                before = counted[0]
                transition_kv_state(shared, LENGTH, out=out)
                if counted[0] > before:
                    break
            else:
                pytest.fail("200 large moves, and the other thread never ran")
    finally:
        sys.setswitchinterval(interval)


def digest():
    set_num_threads(2)
    moved = transition_kv_state(source(), LENGTH, 777, dtype=np.float16)
    return hashlib.sha256(moved.tobytes()).hexdigest()


def send_digest(pipe):
    pipe.send(digest())
    pipe.close()


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system does not fork"
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_child_works(busy):
    """The parent's threads do not exist in the child, which starts its own."""
    expected = digest()
    fork = multiprocessing.get_context("fork")
    shared = source()
    # the fork happens while another thread works, which holds the pool
    working = calling_in_background(lambda: transition_kv_state(shared, LENGTH))
    with working if busy else contextlib.nullcontext():
        for _ in range(5):
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=send_digest, args=(sender,))
            process.start()
            assert receiver.poll(60), "the child hangs"
            assert receiver.recv() == expected
            process.join(60)
            assert process.exitcode == 0
            assert digest() == expected, "the parent goes on as before"


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system does not fork"
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.timeout(120)
def test_a_child_of_a_child_works():
    code = """
import os, sys
import numpy as np, mlstate
source = np.ones((8, 2, 2000, 64), np.float32)

def move():
    mlstate.set_num_threads(3)
    assert mlstate.transition_kv_state(source, 3000).sum() == source.size

move()
for _ in range(2):  # a child, then its child
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        move()
        sys.exit(os.waitstatus_to_exitcode(status))
    move()
"""
    child.run(code, PYTHONWARNINGS="ignore")


def test_the_interpreter_ends_while_threads_sleep():
    code = """
import numpy as np, mlstate
mlstate.set_num_threads(4)
mlstate.transition_kv_state(np.ones((8, 2, 2000, 64), np.float32), 3000)
print("done")
"""
    assert child.run(code).strip() == "done"
