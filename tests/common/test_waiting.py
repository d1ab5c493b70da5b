"""Threads and waits that interrupts do not lock."""

import contextlib
import os
import shutil
import signal
import threading
import time

import pytest
from interruption import signal_once, split_condition

from mlstate._common.waiting import Monitor, Waiters, join_thread, remove_folder, start_thread
from mlstate.collectives import Work, _engine
from mlstate.prompts import PutHandle

SECONDS = 20
pytestmark = pytest.mark.timeout(SECONDS)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_thread_starts_although_its_start_is_interrupted(monkeypatch):
    start, has_run = threading.Thread.start, threading.Event()

    def interrupt_and_start(thread):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.05)  # the main thread raises
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupt_and_start)
    with pytest.raises(KeyboardInterrupt):
        start_thread(threading.Thread(target=has_run.set))
    assert has_run.wait(SECONDS)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_storm_ends_waits_for_a_thread_and_not_the_thread():
    ends, interrupts = threading.Event(), 0
    thread = threading.Thread(target=ends.wait, args=[SECONDS])
    thread.start()
    assert not join_thread(thread, 0) and not join_thread(thread, 0.01)
    for _ in range(3):
        timer = threading.Timer(
            0.02, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]
        )
        timer.start()
        try:
            join_thread(thread)
        except KeyboardInterrupt:
            interrupts += 1
        assert thread.is_alive()
        timer.join()
    ends.set()
    assert join_thread(thread, SECONDS) and interrupts == 3


@pytest.mark.parametrize("complete", ["result", "error", "cancel"])
def test_a_waiting_thread_sees_a_change_that_a_signal_interrupts(monkeypatch, complete):
    work = Work("operation", 0) if complete != "cancel" else PutHandle()
    thread = threading.Thread(target=work._waiters.wait_for, args=[work.done])
    thread.start()
    signal_once(monkeypatch, Waiters, "wake")
    with pytest.raises(KeyboardInterrupt):
        if complete == "cancel":
            work.cancel()
        else:
            getattr(work, f"set_{complete}")(MemoryError())
    thread.join(5)
    assert not thread.is_alive() and work.done()


@pytest.mark.parametrize("timeout", [1e300, float("inf")])
def test_a_wait_takes_any_timeout(timeout):
    waiters, changed = Waiters(), []
    timer = threading.Timer(0.01, lambda: (changed.append(1), waiters.wake()))
    timer.start()
    assert waiters.wait_for(lambda: bool(changed), timeout)
    timer.join()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), 0.001])
def test_polls_keep_no_locks(timeout):
    waiters = Waiters()
    for _ in range(3):
        assert not waiters.wait_for(lambda: False, timeout)
    answers = iter([False, True])
    assert waiters.wait_for(lambda: next(answers))
    assert not waiters._locks


def test_a_wait_in_a_signal_handler_releases_the_lock_of_the_interrupted_code():
    monitor, changed = Monitor(), []

    def change():
        with monitor:
            changed.append(True)
            monitor.wake()

    thread = threading.Thread(target=change)
    with monitor:
        thread.start()
        with monitor:  # as in a signal handler
            monitor.wait_for(lambda: bool(changed))
        assert monitor._is_owned()
    assert not monitor._is_owned()
    thread.join()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_folder_is_deleted_although_its_deletion_is_interrupted(tmp_path, monkeypatch):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    delete, has_ended = shutil.rmtree, threading.Event()

    def interrupt_and_delete(path, **options):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.05)
        delete(path, **options)
        has_ended.set()

    monkeypatch.setattr(shutil, "rmtree", interrupt_and_delete)
    with pytest.raises(KeyboardInterrupt):
        remove_folder(tmp_path / "folder")
    assert has_ended.wait(SECONDS) and not list(tmp_path.iterdir())


def test_operations_run_after_an_interrupted_wait(monkeypatch):
    queue, begins = _engine.OperationQueue("queue", 0), threading.Event()
    work = queue.run("first", lambda: begins.wait(SECONDS), async_op=True)
    timer = threading.Timer(0.05, begins.set)
    timer.start()
    with split_condition(monkeypatch):
        work.wait()
    begins.set()
    assert queue.run("second", lambda: 2, async_op=True).wait(5) == 2
    queue.join()
    timer.join()


def test_an_operation_without_a_thread_does_not_run_later(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    queue, results = _engine.OperationQueue("queue", 0), []
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
        patch.setattr(threading.Thread, "start", refuse)
        queue.run("first", lambda: results.append(1), async_op=True)
    assert queue.run("second", lambda: 2, async_op=True).wait(5) == 2
    queue.join()
    assert not results


@pytest.mark.parametrize("ends_by", ["operation", "join"])
def test_operations_run_after_a_signal_at_the_start_of_the_thread(monkeypatch, ends_by):
    queue, results = _engine.OperationQueue("queue", 0), []
    signal_once(monkeypatch, _engine, "start_thread")
    with pytest.raises(KeyboardInterrupt):
        queue.run("first", lambda: results.append(1), async_op=True)
    if ends_by == "operation":
        queue.run("second", lambda: results.append(2), async_op=True).wait(5)
    queue.join()
    assert results == ([1, 2] if ends_by == "operation" else [1])


def test_operations_in_quick_succession_share_a_thread_that_ends_when_idle():
    queue = _engine.OperationQueue("queue", 0)
    threads = [queue.run("next", threading.current_thread, async_op=True).wait(5) for _ in "ab"]
    assert threads[0] is threads[1] is not threading.current_thread()
    threads[0].join(5)
    assert not threads[0].is_alive()
    assert queue.run("last", lambda: 3, async_op=True).wait(5) == 3


def test_join_ends_an_idle_thread_at_once(monkeypatch):
    monkeypatch.setattr(_engine, "_IDLE_SECONDS", 10 * SECONDS)
    queue = _engine.OperationQueue("queue", 0)
    thread = queue.run("first", threading.current_thread, async_op=True).wait(5)
    queue.join()
    assert not thread.is_alive()
    assert queue.run("second", lambda: 2, async_op=True).wait(5) == 2
    queue.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_operations_run_in_a_child_that_is_forked_while_the_thread_is_idle(monkeypatch):
    monkeypatch.setattr(_engine, "_IDLE_SECONDS", SECONDS)
    queue = _engine.OperationQueue("queue", 0)
    queue.run("first", lambda: None, async_op=True).wait(5)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os._exit(queue.run("in the child", lambda: 3, async_op=True).wait(5))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    queue.join()
