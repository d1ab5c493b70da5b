"""The lock of writers: never two owners, whatever an old text in it says."""

import errno
import json
import threading

import pytest

import mlstate
from mlstate import _lock
from mlstate._lock import WriterLock

pytestmark = pytest.mark.skipif(_lock.os.name == "nt", reason="checkpoints need POSIX")


def _dead_text(folder, **changed):
    """The text of an owner that died before this machine was started last."""
    text = {**_lock._me(), "boot": "another", "generation": None, **changed}
    (folder / "lock").write_text(json.dumps(text))


def test_a_lock_that_is_being_taken_is_not_taken_over_for_its_old_text(tmp_path, monkeypatch):
    _dead_text(tmp_path)
    taken, go_on = threading.Event(), threading.Event()
    write = WriterLock._write

    def slow(self, generation):
        if not taken.is_set():
            taken.set()  # locked, and the text is still the old one
            assert go_on.wait(20)
        write(self, generation)

    monkeypatch.setattr(WriterLock, "_write", slow)
    first, second = WriterLock(str(tmp_path)), WriterLock(str(tmp_path))
    taking = threading.Thread(target=first.acquire)
    taking.start()
    assert taken.wait(20)
    threading.Timer(0.2, go_on.set).start()
    with pytest.raises(mlstate.StoreError) as caught:
        second.acquire()
    taking.join(20)
    assert caught.value.errno == errno.EBUSY
    first.release()
    second.acquire()
    second.release()


def test_only_one_of_several_takes_over_what_a_dead_owner_left(tmp_path):
    _dead_text(tmp_path)
    with (tmp_path / "lock").open("rb") as file:  # as a child of the dead owner keeps it
        _lock._lock(file.fileno())
        locks = [WriterLock(str(tmp_path)) for _ in range(8)]
        start = threading.Barrier(len(locks))
        refused = []

        def take(lock):
            start.wait(20)
            try:
                lock.acquire()
            except mlstate.StoreError as error:
                refused.append(error.errno)

        threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert refused == [errno.EBUSY] * 7
    for lock in locks:
        lock.release()


def test_an_owner_of_another_container_may_live_whatever_its_number(tmp_path):
    with WriterLock(str(tmp_path)):
        text = {**_lock._me(), "pid_space": "pid:[1]", "pid": 1 << 30, "generation": None}
        (tmp_path / "lock").write_text(json.dumps(text))
        with pytest.raises(mlstate.StoreError, match="is writing it"):
            WriterLock(str(tmp_path)).acquire()


def test_a_lock_whose_text_cannot_be_written_is_let_go(tmp_path, monkeypatch):
    def full(self, generation):
        raise OSError(errno.ENOSPC, "no space left")

    lock = WriterLock(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(WriterLock, "_write", full)
        with pytest.raises(mlstate.StoreError, match="cannot lock"):
            lock.acquire()
    with WriterLock(str(tmp_path)):
        pass
