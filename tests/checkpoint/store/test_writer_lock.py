"""The lock of writers: never two owners, even if the file holds stale text."""

import contextlib
import errno
import fcntl
import gc
import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoint_model import files_of
from thread_team import thread_outcomes

import mlstate
from mlstate._common.atomic_file import Target
from mlstate.checkpoint import CheckpointManager, prune, reshard, save_async
from mlstate.checkpoint._folder import writer_lock as _lock
from mlstate.checkpoint._folder.local import LocalFolder
from mlstate.checkpoint._folder.writer_lock import WriterLock
from mlstate.cli import main

pytestmark = pytest.mark.skipif(_lock.os.name == "nt", reason="checkpoints need POSIX")


def _dead_text(folder, **changed):
    """The text of an owner that died before the last boot of this machine."""
    text = {**_lock._me(), "boot": "another", "generation": None, **changed}
    (folder / "lock").write_text(json.dumps(text))


@contextlib.contextmanager
def _dead_owner(folder):
    """The lock of an owner that died, and whose child keeps the descriptor."""
    _dead_text(folder)
    with (folder / "lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def test_lock_being_acquired_is_not_taken_over(tmp_path, monkeypatch):
    _dead_text(tmp_path)
    locked, go_on = threading.Event(), threading.Event()
    write = WriterLock._write

    def slow(self, generation):
        if not locked.is_set():
            locked.set()  # locked, while the old text is still in the file
            assert go_on.wait(20)
        write(self, generation)

    monkeypatch.setattr(WriterLock, "_write", slow)
    first, second = (LocalFolder(str(tmp_path)).claim() for _ in range(2))
    taking = threading.Thread(target=first.acquire)
    taking.start()
    assert locked.wait(20)
    threading.Timer(0.2, go_on.set).start()
    with pytest.raises(mlstate.StoreError) as caught:
        second.acquire()
    taking.join(20)
    assert caught.value.errno == errno.EBUSY
    first.release()
    second.acquire()
    second.release()


def test_one_of_several_takes_over_a_dead_owners_lock(tmp_path):
    with _dead_owner(tmp_path):
        locks = [LocalFolder(str(tmp_path)).claim() for _ in range(8)]
        outcomes = thread_outcomes(lambda number: locks[number].acquire(), len(locks))
    refused = [error.errno for error in outcomes if isinstance(error, mlstate.StoreError)]
    assert refused == [errno.EBUSY] * 7
    for lock in locks:
        lock.release()


def test_a_lock_that_another_writer_took_over_first_is_busy(tmp_path, monkeypatch):
    monkeypatch.setattr(_lock, "_lock_folder", lambda folder: True)  # as on NFS
    write_content, first = Target.write_content, LocalFolder(str(tmp_path)).claim()

    def late(target, write):
        monkeypatch.setattr(Target, "write_content", write_content)
        first.acquire()
        target.write_content(write)

    monkeypatch.setattr(Target, "write_content", late)
    with (
        _dead_owner(tmp_path),
        pytest.raises(mlstate.StoreError, match="is writing it") as caught,
    ):
        LocalFolder(str(tmp_path)).claim().acquire()
    assert caught.value.errno == errno.EBUSY
    first.release()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_owner_in_another_container_counts_as_alive(tmp_path):
    with LocalFolder(str(tmp_path)).claim():
        text = {**_lock._me(), "pid_space": "pid:[1]", "pid": 1 << 30, "generation": None}
        (tmp_path / "lock").write_text(json.dumps(text))
        with pytest.raises(mlstate.StoreError, match="is writing it"):
            LocalFolder(str(tmp_path)).claim().acquire()


@pytest.mark.parametrize("unknown", ["_boot_id", "_start_time", "_pid_space"])
def test_an_owner_of_whom_something_is_unknown_counts_as_alive(tmp_path, monkeypatch, unknown):
    with LocalFolder(str(tmp_path)).claim():
        monkeypatch.setattr(_lock, unknown, lambda *pid: "")
        with pytest.raises(mlstate.StoreError, match="is writing it") as caught:
            LocalFolder(str(tmp_path)).claim().acquire()
    assert caught.value.errno == errno.EBUSY


def test_an_owner_of_another_boot_or_of_a_reused_process_id_is_dead():
    me = _lock._me()
    assert _lock._alive(me)
    for name in ("boot", "start"):
        assert not _lock._alive({**me, name: "another"})


def test_lock_is_released_if_its_text_cannot_be_written(tmp_path, monkeypatch):
    def full(self, generation):
        raise OSError(errno.ENOSPC, "no space left")

    lock = LocalFolder(str(tmp_path)).claim()
    with monkeypatch.context() as patch:
        patch.setattr(WriterLock, "_write", full)
        with pytest.raises(mlstate.StoreError, match="cannot lock"):
            lock.acquire()
    with LocalFolder(str(tmp_path)).claim():
        pass


@pytest.mark.parametrize("wrong", [-1, float("nan"), "1", True])
def test_a_lock_timeout_is_a_number_of_seconds(tmp_path, wrong):
    with pytest.raises((TypeError, ValueError), match="lock_timeout must be"):
        mlstate.save(tmp_path / "ckpt", {"w": np.ones(2)}, lock_timeout=wrong)
    assert not (tmp_path / "ckpt").exists()


def test_a_reshard_that_was_interrupted_keeps_no_lock(tmp_path, monkeypatch):
    mlstate.save(tmp_path / "a", {"w": np.ones(4)})

    lock_folder = _lock._lock_folder

    def interrupted(folder):
        assert lock_folder(folder)  # this frame holds the lock
        raise KeyboardInterrupt(folder)

    def cut():
        reshard(tmp_path / "a", tmp_path / "b", layout="rows", world_size=2, overwrite=True)

    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(_lock, "_lock_folder", interrupted)
            with contextlib.suppress(KeyboardInterrupt):
                cut()
        cut()
    finally:
        gc.enable()


# ---- files of others in the folder ----


def _take_over(folder):
    """Take the lock of a dead owner, whose child still has the lock's file."""
    with _dead_owner(folder), LocalFolder(str(folder)).claim():
        assert json.loads((folder / "lock").read_text())["pid"] == os.getpid()


@pytest.fixture
def linked(tmp_path):
    """A function that plants links to a file of another program, which stays as it is."""
    victim, folder = tmp_path / "victim", tmp_path / "ckpt"
    victim.write_text("precious")
    victim.chmod(0o640)
    folder.mkdir()

    def plant(*names):
        for name in names:
            (folder / name).symlink_to(victim)
        return folder

    yield plant
    assert victim.read_text() == "precious" and victim.stat().st_mode & 0o777 == 0o640


def test_a_lock_taken_over_follows_no_link(linked):
    pids = os.getpid(), os.getppid()
    links = {name for pid in pids for name in (f"lock.{pid}", f".mlstate-{pid}.tmp")}
    folder = linked(*links)
    _take_over(folder)
    assert {path.name for path in folder.iterdir()} == links | {"lock"}


def test_a_guessed_name_of_a_temporary_file_is_not_followed(linked, monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda count: bytes(count))
    with pytest.raises(mlstate.StoreError, match="cannot lock"):
        _take_over(linked(f".mlstate-{bytes(8).hex()}.tmp"))


def test_a_lock_that_is_a_link_is_refused(linked):
    with pytest.raises(mlstate.StoreError, match="cannot lock"):
        mlstate.save(linked("lock"), {"w": np.ones(2)})


def test_a_lock_taken_over_keeps_its_mode(tmp_path):
    (tmp_path / "lock").touch()
    (tmp_path / "lock").chmod(0o600)
    _take_over(tmp_path)
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_interrupts_of_the_clean_up_leave_no_lock(tmp_path, monkeypatch):
    """Also while the caller keeps the exception, whose traceback refers to all frames."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    manager = CheckpointManager(tmp_path / "run", warn_unchanged=False)
    for step in (1, 2):
        manager.save(step, {"w": np.ones(2)})
    calls = [
        lambda: mlstate.save(tmp_path / "ckpt", {"w": np.ones(2)}),
        lambda: manager.save(3, {"w": np.ones(2)}),
        lambda: manager.delete(1),
        lambda: prune(tmp_path / "run"),
        lambda: reshard(tmp_path / "run", tmp_path / "cut", layout="rows", world_size=2),
    ]
    locks = []
    for call in calls:
        with monkeypatch.context() as patch:
            for name in ("note", "release", "commit"):
                patch.setattr(WriterLock, name, interrupted)
            patch.setattr(_lock.os, "unlink", interrupted)
            try:
                call()
            except KeyboardInterrupt as error:
                locks.append(error)
    assert len(locks) >= 4
    for folder in ("ckpt", "run", "cut"):
        with LocalFolder(str(tmp_path / folder)).claim():
            pass


# ---- file systems without permissions ----


def _refuse_modes(monkeypatch):
    """Let every change of a mode fail, as on FAT and CIFS."""

    def refused(number, mode):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chmod", refused)
    monkeypatch.setattr(os, "fchmod", refused)


def test_a_file_system_without_permissions_can_be_locked(tmp_path, monkeypatch):
    _refuse_modes(monkeypatch)
    _take_over(tmp_path)
    mlstate.save(tmp_path / "ckpt", {"w": np.ones(2)})
    # FAT gives every file the bits for execution
    (tmp_path / "fat").mkdir()
    (tmp_path / "fat" / "lock").touch(0o755)
    mlstate.save(tmp_path / "fat", {"w": np.ones(2)})


def test_a_lock_that_others_could_read_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "ckpt").mkdir(mode=0o700)
    _refuse_modes(monkeypatch)
    with pytest.raises(mlstate.StoreError, match="cannot lock"):
        mlstate.save(tmp_path / "ckpt", {"w": np.ones(2)})


# ---- another process holds the lock ----

HOLDER = """
import sys
from mlstate.checkpoint._folder.local import LocalFolder
for line in sys.stdin:
    locks = [LocalFolder(folder).claim() for folder in line.split()]
    held = [lock.acquire() for lock in locks]
    print("held", flush=True)
    sys.stdin.readline()
    for lock in locks:
        lock.release()
    print("released", flush=True)
"""
NEW = {"w": np.ones(8)}


@pytest.fixture(scope="module")
def holder():
    """A process that locks the folders named in a line, until it reads the next line."""
    paths = os.pathsep.join([str(Path(mlstate.__file__).parents[1]), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env={**os.environ, "PYTHONPATH": paths},
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def locked_checkpoint(holder, tmp_path, monkeypatch):
    """Lock the checkpoint ``plain`` and the steps in ``run``; return the function to unlock."""
    monkeypatch.chdir(tmp_path)
    mlstate.save("plain", {"w": np.zeros(8)})
    manager = CheckpointManager("run")
    for step in (1, 2):
        manager.save(step, {"w": np.full(8, step)})
    released = []

    def release():
        if not released:
            released.append(True)
            holder.stdin.write("release\n")
            assert holder.stdout.readline() == "released\n"

    holder.stdin.write(f"{tmp_path / 'plain'} {tmp_path / 'run'}\n")
    assert holder.stdout.readline() == "held\n"
    yield release
    release()


def command(*words):
    """A function that runs a command and raises the error that it prints."""

    def run(seconds):
        errors = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            status = main([*words, "--lock-timeout", str(seconds)])
        if status:
            assert status == 2
            raise mlstate.StoreError(errno.EBUSY, errors.getvalue())

    return run


def cut(seconds):
    reshard("run", "plain", layout="rows", world_size=2, overwrite=True, lock_timeout=seconds)


WRITERS = {
    "save": lambda s: mlstate.save("plain", NEW, lock_timeout=s),
    "save_async": lambda s: save_async("plain", NEW, lock_timeout=s).wait(60),
    "manager.save": lambda s: CheckpointManager("run").save(3, NEW, lock_timeout=s),
    "manager.save_async": lambda s: (
        CheckpointManager("run").save_async(3, NEW, lock_timeout=s).wait(60)
    ),
    "manager.delete": lambda s: CheckpointManager("run").delete(1, lock_timeout=s),
    "prune": lambda s: prune("run", keep=1, lock_timeout=s),
    "reshard": cut,
    "mlstate prune": command("prune", "run", "--keep", "1"),
    "mlstate reshard": command("reshard", "run", "plain", "--layout", "rows=2", "--overwrite"),
}


def contents():
    """The bytes of all files except the locks."""
    return {name: data for name, data in files_of(".").items() if not name.endswith("/lock")}


@pytest.mark.parametrize("name", WRITERS)
def test_every_writer_waits_for_another_process(locked_checkpoint, name):
    before, timer = contents(), threading.Timer(0.2, locked_checkpoint)
    timer.start()
    start = time.monotonic()
    WRITERS[name](20)
    assert 0.15 < time.monotonic() - start < 15
    timer.join()
    assert contents() != before
    assert mlstate.verify("plain") and mlstate.verify("run")


@pytest.mark.parametrize("seconds", [0, 0.1])
@pytest.mark.parametrize("name", WRITERS)
def test_every_writer_gives_up_after_its_time(locked_checkpoint, holder, name, seconds):
    before, start = contents(), time.monotonic()
    option = "--lock-timeout" if name.startswith("mlstate ") else "lock_timeout="
    text = (
        rf"cannot lock the checkpoint: process {holder.pid} on \S+ is writing it: "
        rf"waited {seconds} s; to wait longer, pass {option} in seconds"
    )
    with pytest.raises(mlstate.StoreError, match=text) as e:
        WRITERS[name](seconds)
    assert e.value.errno == errno.EBUSY
    assert seconds <= time.monotonic() - start < 10
    assert contents() == before
