"""Saving while the state changes: the stored content, memory, and failures."""

import contextlib
import errno
import gc
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import child
import numpy as np
import pytest
from interruption import signal_once
from test_save import every_kind, native, random
from thread_team import num_threads

import mlstate
from mlstate import CollectiveError, CompatibilityError, OptimizerStateDict, StoreError, _core
from mlstate.checkpoint import (
    CheckpointManager,
    Layout,
    SaveHandle,
    Shard,
    Staging,
    inspect,
    save_async,
)
from mlstate.checkpoint._save import job as save_job
from mlstate.checkpoint._save import shards as save_shards
from mlstate.collectives import LocalGroup
from mlstate.testing import run_ranks

SECONDS = 20
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


def bytes_of(state):
    return sum(array.nbytes for array in state.values())


def differ(actual, expected):
    """Names of tensors whose bits differ from the expected ones."""
    return [name for name in expected if actual[name].tobytes() != expected[name].tobytes()]


def spoil(state):
    """Overwrite all arrays that are writable."""
    for array in state.values():
        if array.flags.writeable:
            array.reshape(-1)[...] = 0 if array.dtype == bool else 1
            array[...] = np.frombuffer(b"\1" * array.itemsize, array.dtype)[0]


@pytest.fixture
def paused(monkeypatch):
    """Saves stop once nothing of the state is left to read; `set` lets them go on."""
    go = threading.Event()
    write = _core.shards_write

    def write_later(*arguments):
        *first, freed, mode, temporary = arguments

        def free():
            freed()
            assert go.wait(SECONDS)

        if threading.current_thread() is threading.main_thread():  # a synchronous save
            return write(*arguments)
        if freed is None:
            assert go.wait(SECONDS)
            return write(*arguments)
        return write(*first, free, mode, temporary)

    monkeypatch.setattr(_core, "shards_write", write_later)
    yield go
    go.set()


# ---- content ----


@pytest.mark.parametrize("share", [None, 1, 0.5, 0.25, 0.01, 0])
@pytest.mark.parametrize("pack", [0, 1 << 18])
def test_the_state_may_be_changed_once_it_is_staged(path, paused, share, pack):
    state = every_kind()
    expected = native({name: array.copy() for name, array in state.items()})
    budget = None if share is None else int(share * bytes_of(state))
    handle = save_async(path, state, max_staging_bytes=budget, pack_below_bytes=pack)
    handle.staged(SECONDS)
    spoil(state)
    assert not handle.done()
    with pytest.raises(TimeoutError, match=r"not ended after 0\.01 seconds"):
        handle.wait(0.01)
    paused.set()
    checkpoint = handle.wait(SECONDS)
    model = checkpoint.load().model
    assert {name: array.tobytes() for name, array in model.items()} == {
        name: np.ascontiguousarray(array).tobytes() for name, array in expected.items()
    }
    assert handle.done()
    assert handle.wait() is checkpoint
    assert mlstate.verify(path)


def test_nested_metadata_may_change_at_once(path, paused):
    metadata = {"seen": [1], "run": {"name": "a"}}
    handle = save_async(path, {"w": np.ones(9)}, metadata=metadata)
    metadata["seen"].append(object())
    metadata["run"]["name"] = "b"
    paused.set()
    expected = {"seen": [1], "run": {"name": "a"}}
    assert handle.wait(SECONDS).metadata == mlstate.load(path).metadata == expected


def test_blocked_progress_callback_keeps_the_saved_values(path, blocking_callback):
    state = {f"w{i}": random((1 << 20,), seed=i) for i in range(10)}
    expected = {name: array.copy() for name, array in state.items()}
    with num_threads(1):  # no other thread works meanwhile
        handle = save_async(path, state, max_staging_bytes=1 << 20, progress=blocking_callback)
        blocking_callback.called.wait(SECONDS)
        blocking_callback.go.set()
        handle.staged(SECONDS)
        spoil(state)
        model = handle.wait(SECONDS).load().model
    assert differ(model, expected) == []


def test_async_save_equals_save(tmp_path):
    rng = np.random.default_rng(0)
    model = {f"layer.{i}.w": rng.standard_normal((40, 30 + i)) for i in range(20)}
    adam = OptimizerStateDict({f"{name}.m": array * 2 for name, array in model.items()}, step=9)
    model["versioned"] = Shard(np.ones(7), version=1)
    for turn in range(4):
        for folder, begin in (("a", mlstate.save), ("b", save_async)):
            done = begin(tmp_path / folder, model, adam, metadata={"turn": turn}, layout="rows")
            if folder == "b":
                done.staged()
                done = done.wait()
            done.written = {k: done.written[k] for k in ("new_shards", "new_bytes", "shards")}
            assert done.step == 9
            assert done.metadata == {"turn": turn}
        sync_saved, async_saved = inspect(tmp_path / "a"), inspect(tmp_path / "b")
        assert sync_saved.tensors() == async_saved.tensors()
        assert [s.crc32c for s in sync_saved.shards()] == [s.crc32c for s in async_saved.shards()]
        assert [(s.version, s.nbytes) for s in sync_saved.shards()] == [
            (s.version, s.nbytes) for s in async_saved.shards()
        ]
        model[f"layer.{turn}.w"] += 1
        model["versioned"] = Shard(np.full(7, turn), version=1 + turn // 2)


@pytest.mark.parametrize("share", [1, 0.3])
def test_unchanged_tensors_are_not_rewritten(path, share):
    state = {f"w{i}": random((5000 + i,), seed=i) for i in range(20)}
    budget = int(share * bytes_of(state))
    keywords = {"max_staging_bytes": budget, "pack_below_bytes": 5010 * 4}
    assert save_async(path, state, **keywords).wait().written["new_shards"] == 20
    assert save_async(path, state, **keywords).wait().written["new_shards"] == 0
    state["w3"].view(np.uint32)[0] ^= 1
    state["w19"].view(np.uint32)[-1] ^= 1
    checkpoint = save_async(path, state, **keywords).wait()
    assert checkpoint.written["new_shards"] == 2
    assert {t.key: t.version for t in checkpoint.tensors() if t.version > 1} == {"w3": 2, "w19": 2}


def test_saves_the_entries_at_the_call(path, paused):
    state = {"a": np.zeros(3), "b": np.ones(3)}
    handle = save_async(path, state)
    handle.staged()
    del state["a"]
    state["c"] = np.ones(1)
    paused.set()
    assert sorted(handle.wait().load().model) == ["a", "b"]


def test_an_empty_state(path):
    handle = save_async(path, {})
    handle.staged()
    assert handle.wait().tensors() == []
    assert handle.progress() == (0, 0)


def test_progress_grows_to_the_whole(path):
    state = {f"w{i}": random((1 << 18,), seed=i) for i in range(8)}
    reported = []
    handle = save_async(path, state, progress=reported.append)
    handle.wait()
    assert sum(reported) == bytes_of(state)
    assert handle.progress() == (bytes_of(state), bytes_of(state))
    assert "saved" in repr(handle)


# ---- memory ----


PEAK = """
import sys, threading, time
import numpy as np
import mlstate
from mlstate.checkpoint import Staging, save_async

path, share = sys.argv[1], float(sys.argv[2])
state = {f"w{i}": np.full((1 << 20) + i, i, np.float32) for i in range(8)}
state["strided"] = np.ones((2048, 1024), np.float32)[:, ::2]
size = sum(array.nbytes for array in state.values())
budget = int(share * size)
small = {"w": np.zeros(3)}
save_async(path + "-first", small).wait()  # modules, threads
for kept in (False, True):
    staging = Staging(budget) if kept else None
    for array in state.values():
        array += 1
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here on
    before = status("VmRSS")
    save_async(path, state, max_staging_bytes=budget, staging=staging).wait()
    # memory that was touched beforehand is there already
    print(status("VmHWM") - before, int(kept), budget)
"""


@child.needs_status
@pytest.mark.parametrize(
    "share",
    [1, 0.25, pytest.param(0.5, marks=pytest.mark.long), pytest.param(0, marks=pytest.mark.long)],
)
def test_extra_memory_is_within_the_budget(tmp_path, share):
    for line in child.run(child.STATUS + PEAK, tmp_path / "ckpt", share).splitlines():
        extra, reusable, budget = map(int, line.split())
        # the writer's memory counts against the budget, if the budget is large enough for it
        assert extra <= (budget if budget and not reusable else 16 << 20), line


@pytest.mark.parametrize("share", [1, 0.25, 0])
def test_arrays_are_let_go_when_they_are_staged(path, paused, share):
    class Array(np.ndarray):
        """An array that a weak reference can watch."""

    state = {f"w{i}": np.full(1000 + i, i, np.float32).view(Array) for i in range(9)}
    state["shard"] = Shard(np.ones(2000).view(Array))
    alive = [weakref.ref(getattr(value, "array", value)) for value in state.values()]
    budget = int(share * 9 * 1004 * 4)
    handle = save_async(path, state, max_staging_bytes=budget)
    handle.staged(SECONDS)
    state.clear()
    gc.collect()
    assert [ref() is None for ref in alive] == [True] * 10
    paused.set()
    handle.wait(SECONDS)


def test_staging_memory_serves_one_save_at_a_time(path, paused):
    staging = Staging(100)
    assert (staging.nbytes, repr(staging)) == (100, "Staging(100)")
    first = save_async(path, {"w": np.zeros(3)}, staging=staging)
    first.staged()
    with pytest.raises(ValueError, match="in use by another save"):
        save_async(path, {"w": np.zeros(3)}, staging=staging)
    paused.set()
    first.wait()
    second = save_async(
        path, {"w": np.ones(40)}, staging=staging, overwrite=True
    )  # more than the budget
    assert second.wait().load().model["w"].sum() == 40


def test_memory_is_given_back_without_taking_any(path, paused, monkeypatch):
    """Otherwise a lack of memory would keep the end of the save from being reported."""

    class Short:
        """A NumPy that cannot allocate any array."""

        @staticmethod
        def empty(*_):
            raise MemoryError

    handle = save_async(path, {"w": np.ones(3)})
    handle.staged()
    monkeypatch.setattr("mlstate.checkpoint._save.staging.np", Short)
    paused.set()
    assert handle.wait(SECONDS).load().model["w"].sum() == 3


def test_staging_refuses_invalid_sizes():
    with pytest.raises(ValueError, match=", got -1"):
        Staging(-1)
    with pytest.raises(TypeError, match="must be an int, got str"):
        Staging("1")
    with pytest.raises(MemoryError):
        Staging(1 << 62)


# ---- failures ----


def test_wrong_arguments_are_refused_at_once(path):
    state = {"w": np.zeros(3)}
    for keywords, error, text in [
        ({"max_staging_bytes": -1}, ValueError, "0 or more, got -1"),
        ({"max_staging_bytes": "x"}, ValueError, "max_staging_bytes is 'x': expected a number"),
        ({"staging": 5}, TypeError, "must be a Staging, got int"),
        ({"progress": 5}, TypeError, "must be callable, got int"),
        ({"layout": "odd"}, ValueError, "layout must be"),
        ({"group": 5}, TypeError, "ProcessGroup"),
        ({"step": -1}, ValueError, "step must be"),
        ({"metadata": {1: 2}}, TypeError, "keys must be str"),
    ]:
        with pytest.raises(error, match=text):
            save_async(path, state, **keywords)
    for model, error in [
        (None, ValueError),
        ({"w": [1]}, TypeError),
        ({"w": np.array("x")}, CompatibilityError),
    ]:
        with pytest.raises(error):
            save_async(path, model)
    with pytest.raises(TypeError, match="call save_async"):
        SaveHandle(5)
    assert not path.exists()


@pytest.fixture
def printed_errors(monkeypatch):
    """Errors that were printed because `wait` was never called."""
    errors = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    return errors


def complain(count):
    """Stop a save by its callback."""
    raise KeyError("enough")


def blocked(path):
    """A path at which no checkpoint can be created."""
    path.mkdir()
    (path / "params").write_bytes(b"")
    return path


def test_error_is_raised_by_every_wait(path):
    handle = save_async(blocked(path), {"w": np.zeros(3)})
    for ask in (handle.wait, handle.staged, handle.wait):
        with pytest.raises(StoreError):
            while not handle.done() or ask():
                pass
    assert "failed" in repr(handle)
    assert handle.cancel()


def test_unobserved_error_is_printed(path, printed_errors):
    handle = save_async(blocked(path), {"w": np.zeros(3)})
    while not handle.done():
        time.sleep(0.001)
    assert not printed_errors
    del handle
    gc.collect()
    assert len(printed_errors) == 1
    assert isinstance(printed_errors[0].exc_value, StoreError)
    assert str(path) in printed_errors[0].exc_value.__notes__[0]


def test_error_after_handle_deletion_is_printed(path, paused, printed_errors):
    handle = save_async(path, {"w": np.zeros(3)})
    handle.staged()
    job = handle._job
    job.cancelled = True
    del handle
    gc.collect()
    assert not printed_errors
    paused.set()
    assert job.reached("ended", SECONDS)
    for _ in range(1000):
        if printed_errors:
            break
        time.sleep(0.001)
    assert printed_errors[0].exc_value.errno == errno.ECANCELED


def test_observed_error_is_not_printed(path, printed_errors):
    handle = save_async(blocked(path), {"w": np.zeros(3)})
    with pytest.raises(StoreError):
        handle.wait()
    del handle
    gc.collect()
    assert not printed_errors


def test_cancelling_leaves_the_old_checkpoint(path, paused):
    mlstate.save(path, {"w": np.zeros(3)}, step=1)
    handle = save_async(path, {"w": np.ones(3)}, step=2)
    handle.staged()
    with pytest.raises(TimeoutError):
        handle.cancel(0.01)
    paused.set()
    assert handle.cancel()
    with pytest.raises(StoreError) as caught:
        handle.wait()
    assert caught.value.errno == errno.ECANCELED
    assert inspect(path).step == 1
    assert len(list(path.rglob("*.safetensors"))) == 1
    assert mlstate.save(path, {"w": np.ones(3)}, step=3).step == 3
    handle = save_async(path, {"w": np.ones(3)})
    handle.wait()
    assert not handle.cancel()


@pytest.mark.parametrize("managed", [False, True])
def test_a_warning_of_the_thread_names_the_line_of_the_call(path, managed):
    def save(state):
        return manager.save_async(1, state) if managed else save_async(path, state)

    manager = CheckpointManager(path)
    save({"w": random(10)}).wait()
    manifest = path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"world_size": 1', b'"world_size": 2'))
    with pytest.warns(UserWarning, match="damaged and will be replaced") as warnings_raised:
        save({"w": random(11)}).wait()
    [warning] = warnings_raised
    assert (warning.filename, warning.lineno) == (__file__, save.__code__.co_firstlineno + 1)


def test_a_callback_that_raises_stops_the_save(path):
    mlstate.save(path, {"w": np.zeros(3)}, step=1)
    handle = save_async(path, {"w": np.ones(3)}, progress=complain, step=2)
    with pytest.raises(KeyError, match="enough"):
        handle.wait()
    assert inspect(path).step == 1


def test_second_writer_raises(path, paused):
    first = save_async(path, {"w": np.zeros(3)})
    first.staged()
    second = save_async(path, {"w": np.ones(3)})
    while not path.joinpath("lock").exists():
        time.sleep(0.001)
    paused.set()
    ends = []
    for handle in (first, second):
        try:
            ends.append(handle.wait(SECONDS))
        except StoreError as error:
            assert error.errno == errno.EBUSY
    assert ends  # at least one save succeeds; the other may find the lock paused


def test_without_a_thread_it_is_saved_at_once(path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    handle = save_async(path, {"w": np.ones(3)})
    assert handle.done()
    assert handle.wait().load().model["w"].sum() == 3


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_the_waiting_and_not_the_save(path, paused):
    handle = save_async(path, {"w": np.ones(3)})
    handle.staged()
    timer = threading.Timer(
        0.05, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]
    )
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        handle.wait(SECONDS)
    timer.join()
    assert not handle.done()
    paused.set()
    assert handle.wait().load().model["w"].sum() == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_does_not_wait_for_a_lost_save(path, monkeypatch, paused):
    staging, start, threads = Staging(24), save_job.start_thread, []

    def start_and_note(thread):
        start(thread)
        threads.append(thread)

    monkeypatch.setattr(save_job, "start_thread", start_and_note)
    signal_once(monkeypatch, save_job, "start_thread")
    with pytest.raises(KeyboardInterrupt):
        save_async(path, {"w": np.ones(3)}, staging=staging)
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        try:
            save_async(path, {"w": np.ones(3)}, staging=staging)
        except ValueError as error:
            os._exit("in use by another save" not in str(error))
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    paused.set()
    threads[0].join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_does_not_disturb_the_save(path, paused):
    state = {f"w{i}": random((3000 + i,), seed=i) for i in range(9)}
    handle = save_async(path, state, max_staging_bytes="50 kB")
    handle.staged()
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            refused = 0
            for call in (handle.wait, handle.staged, handle.done, handle.progress, handle.cancel):
                with contextlib.suppress(RuntimeError):
                    call()
                    continue
                refused += 1
            handle._job.abandon()
            spoil(state)
            code = 0 if refused == 5 else 1
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    paused.set()
    model = handle.wait(SECONDS).load().model
    assert differ(model, state) == []


BEGIN = """
import sys
import numpy as np
from mlstate.checkpoint import save_async
"""


def test_the_interpreter_waits_for_the_save(path):
    child.run(
        f"{BEGIN}state = {{f'w{{i}}': np.full(1 << 20, i, np.float32) for i in range(8)}}\n"
        f"save_async({str(path)!r}, state)"
    )
    assert mlstate.load(path).model["w7"][-1] == 7
    assert mlstate.verify(path)


def test_the_interpreter_shows_an_error_at_its_end(path):
    blocked(path)
    done = child.attempt(f"{BEGIN}handle = save_async({str(path)!r}, {{'w': np.ones(3)}})")
    assert done.returncode == 0
    assert "Exception in thread mlstate save ckpt" in done.stderr
    assert "StoreError" in done.stderr
    assert f"save of {path} failed, and wait() was not called" in done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_ends_without_waiting(path):
    out = child.run(
        f"{BEGIN}import os\n"
        "state = {f'w{i}': np.full(1 << 20, i, np.float32) for i in range(8)}\n"
        f"handle = save_async({str(path)!r}, state)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    sys.exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), handle.wait().nbytes)\n"
    )
    assert out.split() == ["7", str(8 << 22)]


# ---- steps ----


def test_manager_reuses_memory_with_one_save_at_a_time(path):
    state = {"w": np.zeros(50_000)}
    with CheckpointManager(path, keep=2, warn_unchanged=False) as manager:
        handles, places = [], set()
        for step in range(5):
            handles.append(manager.save_async(step, state))
            handles[-1].staged()
            places.add(manager._staging._memory.ctypes.data)
            assert manager._staging.nbytes == 400_000
            assert all(handle.done() for handle in handles[:-1])
            state["w"] += 1
        assert len(places) == 1
        bounded = manager.save_async(5, state, max_staging_bytes=1000)
        bounded.wait()
        assert manager._staging.nbytes <= 1000
        manager.save_async(6, state)
        manager.save(7, state)
        assert manager.steps() == [6, 7]
        manager.save_async(8, state)
        manager.delete(7)
        last = manager.save_async(9, state)
    assert last.done()
    assert manager._staging is None
    assert manager.steps() == [8, 9]
    assert [manager.restore(step).model["w"][0] for step in (8, 9)] == [5, 5]


@pytest.mark.parametrize("follow", ["save", "save_async", "close", "delete"])
def test_manager_raises_unobserved_errors(tmp_path, follow):
    manager = CheckpointManager(blocked(tmp_path / "file"))
    state = {"w": np.zeros(3)}
    manager.save_async(1, state)
    call = {
        "save": lambda: manager.save(2, state), "save_async": lambda: manager.save_async(2, state),
        "close": manager.close, "delete": lambda: manager.delete(1),
    }[follow]  # fmt: skip
    with pytest.raises(StoreError):
        call()


def test_manager_does_not_repeat_observed_errors(path):
    manager = CheckpointManager(path)
    handle = manager.save_async(1, {"w": np.zeros(3)}, progress=complain)
    with pytest.raises(KeyError):
        handle.wait()
    manager.save_async(2, {"w": np.zeros(3)}).wait()
    manager.close()
    manager.save_async(3, {"w": np.zeros(3)}, progress=complain)
    with pytest.raises(KeyError), manager:
        pass
    manager.save_async(4, {"w": np.zeros(3)}, progress=complain)
    with pytest.raises(ZeroDivisionError) as caught, manager:  # the block's error propagates
        raise ZeroDivisionError
    (note,) = caught.value.__notes__
    assert note == "a save that was under way has failed, too: KeyError: 'enough'"


# ---- ranks ----


def whole(step):
    return {f"w{i}": random((31 + i, 50), seed=100 * step + i) for i in range(6)}


def shards(group, step):
    rows = Layout.rows(group.world_size)
    state = whole(step)
    return {
        name: rows.shard(array.copy(), group.rank) if name < "w4" else array
        for name, array in state.items()
    }


def save_as_rank(group, path, budget):
    """The work of each rank: two saves, with the state overwritten as soon as that is allowed."""
    for step in (1, 2):
        state = shards(group, step)
        handle = save_async(path, state, step=step, group=group, max_staging_bytes=budget)
        handle.staged(SECONDS)
        for value in state.values():
            getattr(value, "array", value)[...] = -1
        assert handle.wait(SECONDS).step == step
        assert handle.progress()[0] > 0
    return "good"


def check_ranks(path, step=2):
    checkpoint = inspect(path)
    assert (checkpoint.step, checkpoint.world_size) == (step, 2)
    model = checkpoint.load().model
    assert differ(model, whole(step)) == []


@pytest.mark.parametrize("budget", [None, 5000, 0])
def test_ranks_that_are_threads(path, budget):
    assert run_ranks(2, lambda group: save_as_rank(group, path, budget)) == ["good", "good"]
    check_ranks(path)


def test_ranks_that_are_processes(path):
    assert LocalGroup.run(save_as_rank, 2, path, 5000, timeout=60) == ["good", "good"]
    check_ranks(path)


def fail_as_rank(group, path, victim):
    """One rank has a state that cannot be saved, or cancels; no rank hangs."""
    mlstate.save(path, shards(group, 1), step=1, group=group)
    state = shards(group, 2)
    bad = {"progress": complain} if group.rank == 1 else {}
    if victim == "dtype" and group.rank == 1:
        state["more"], bad = np.array("text"), {}
    if victim == "cancelled" and group.rank == 1:  # before the ranks exchange their parts
        check, bad = save_job.SaveJob.check_cancelled, {}
        save_job.SaveJob.check_cancelled = lambda job: (
            setattr(job, "cancelled", True),
            check(job),
        )
    handle = save_async(path, state, step=2, group=group, **bad)
    try:
        handle.wait(SECONDS)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("victim", ["dtype", "progress", "cancelled"])
def test_a_rank_that_fails_is_named_by_the_others(path, victim):
    other_error, own_error = LocalGroup.run(fail_as_rank, 2, path, victim, timeout=60)
    assert other_error[0] == "CollectiveError"
    assert "rank 1" in other_error[1]
    assert own_error[0] != "CollectiveError"
    check_ranks(path, 1)


def die_as_rank(group, path, moment):
    """One rank is killed while it stages, while it writes, or after it has written everything."""
    mlstate.save(path, shards(group, 1), step=1, group=group)
    if group.rank == 1:
        name = "shards_stage" if moment == "staging" else "shards_write"
        real = getattr(_core, name)

        def die(*arguments):
            if moment == "written":
                real(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(_core, name, die)
    handle = save_async(path, shards(group, 2), step=2, group=group)
    try:
        handle.wait(SECONDS)
    except CollectiveError as error:
        Path(f"{path}-told-{group.rank}").write_text(str(error))


@pytest.mark.parametrize("moment", ["staging", "writing", "written"])
@pytest.mark.skipif(sys.platform != "linux", reason="SIGKILL among processes")
def test_a_rank_that_dies_leaves_the_old_checkpoint(path, moment):
    with pytest.raises(CollectiveError):
        LocalGroup.run(die_as_rank, 2, path, moment, timeout=60)
    assert "rank 1" in Path(f"{path}-told-0").read_text()
    check_ranks(path, 1)
    assert LocalGroup.run(save_as_rank, 2, path, None, timeout=60) == ["good", "good"]
    check_ranks(path)
    assert mlstate.verify(path)


def test_a_group_serves_one_save_at_a_time(path, paused):
    groups = LocalGroup.threads(2)
    handles = [save_async(path, shards(group, 1), group=group) for group in groups]
    with pytest.raises(ValueError, match="another save uses this group"):
        save_async(path, shards(groups[0], 1), group=groups[0])
    paused.set()
    for handle in handles:
        handle.wait(SECONDS)
    for group in groups:
        group.close()


# ---- torch ----


@pytest.mark.torch
def test_tensors(path, paused):
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(300, 400)
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    moments = {"weight.m": torch.ones(400, 300, dtype=torch.float16).T}
    handle = save_async(path, module, moments, max_staging_bytes=300_000)
    handle.staged(SECONDS)
    with torch.no_grad():
        for tensor in (*module.parameters(), *moments.values()):
            tensor.zero_()
    paused.set()
    handle.wait(SECONDS)
    other = torch.nn.Linear(300, 400)
    loaded = mlstate.load(path, into={"model": other})
    assert all(torch.equal(other.state_dict()[name], expected[name]) for name in expected)
    assert mlstate.load(path).optimizer["weight.m"].sum(dtype=float) == 120_000
    assert loaded.step is None


def device_state(torch, device):
    tensor = torch.arange(6000, device=device)
    return {
        "a": tensor.to(torch.float32).reshape(60, 100),
        "b": tensor.to(torch.bfloat16)[::3],
        "scalar": torch.tensor(2.5, device=device),
        "empty": torch.zeros(0, 3, device=device),
        "byte": tensor[:7].to(torch.uint8),
        "odd": tensor.to(torch.float64),
        "shard": Layout.rows(2).shard(tensor.reshape(60, 100), 1),
        "host": np.arange(10_000.0),
    }


def check_device_state(torch, path, handle, state):
    expected = {name: np.array(_tensor_of(torch, value)) for name, value in state.items()}
    handle.staged(SECONDS)
    for value in state.values():
        getattr(value, "array", value)[...] = 1
    handle.wait(SECONDS)
    listing = mlstate.load(path).model if "shard" not in state else inspect(path)
    assert {t.key: t.nbytes for t in listing.tensors()} == {
        name: array.nbytes for name, array in expected.items()
    }
    stored = mlstate.load(path, names=[n for n in expected if n != "shard"]).model
    for name, array in stored.items():
        assert np.asarray(array).tobytes() == expected[name].tobytes(), name


def _tensor_of(torch, value):
    value = getattr(value, "array", value)
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu().contiguous()
    return value.view(torch.uint16).numpy() if value.dtype is torch.bfloat16 else value.numpy()


@pytest.mark.torch
def test_tensors_as_on_a_device(path, monkeypatch):
    """The code path for device copies, with tensors that are in fact on the host."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    for module in (save_shards, save_job):
        monkeypatch.setattr(
            module, "is_on_device",
            lambda value: isinstance(getattr(value, "array", value), torch.Tensor),
        )  # fmt: skip
    monkeypatch.setattr(save_job, "_event", lambda device: None)
    for budget in (None, 200_000):
        state = device_state(torch, "cpu")
        check_device_state(torch, path, save_async(path, state, max_staging_bytes=budget), state)
    for budget, text in ((20_000, "20000 bytes"), ("20 KB", r"20 KB \(20000 bytes\)")):
        handle = save_async(path, device_state(torch, "cpu"), max_staging_bytes=budget)
        with pytest.raises(ValueError, match=f"must be staged, .* more than the {text} that max"):
            handle.wait(SECONDS)


@pytest.mark.torch
def test_tensors_on_a_gpu(path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    state = device_state(torch, "cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        state["a"] *= 2  # the copy is not finished when the save begins
        handle = save_async(path, state)
    check_device_state(torch, path, handle, state)
