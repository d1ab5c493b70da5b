"""Hugging Face folders written in the background: their bytes, failures and interrupts."""

import errno
import os
import threading
import weakref

import child
import numpy as np
import pytest
from rank_threads import outcomes

import mlstate
from mlstate import _core
from mlstate.checkpoint import (
    Layout,
    Staging,
    export_huggingface,
    export_huggingface_async,
)
from mlstate.checkpoint._huggingface import export as export_module
from mlstate.checkpoint._save import job as save_job
from mlstate.checkpoint._save import shards as save_shards
from mlstate.collectives import SingleGroup
from mlstate.testing import run_ranks

SECONDS = 20
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m"


@pytest.fixture
def write_gate(monkeypatch):
    """Exports in the background write no part until this is set."""
    go = threading.Event()
    write = _core.parts_write

    def write_later(*arguments):
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(SECONDS)
        write(*arguments)

    monkeypatch.setattr(_core, "parts_write", write_later)
    yield go
    go.set()


def state_of():
    rng = np.random.default_rng(1)
    tied = rng.random((50, 8))
    return {
        "embed": tied,
        "head": tied,
        "columns": rng.random((600, 100), np.float32).T,
        "big": rng.random(300_000).astype(">f8"),
        "none": np.zeros((0, 3)),
        "position": np.array(9),
    }


def bytes_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def spoil(state):
    for array in state.values():
        array[...] = 7


# ---- content ----


@pytest.mark.parametrize("staging", [None, 1 << 20, 1000, 0])
def test_the_folder_has_the_values_of_the_call(tmp_path, path, staging):
    options = {"max_shard_bytes": 1_000_000, "rename": {"big": "large"}, "files_from": tmp_path}
    (tmp_path / "config.json").write_text("{}")
    export_huggingface(tmp_path / "expected", state_of(), **options)
    memory = None if staging is None else Staging(staging)
    for name in ("m", "again"):
        state = state_of()
        handle = export_huggingface_async(tmp_path / name, state, staging=memory, **options)
        spoil(state)
        saved = handle.wait(SECONDS)
        assert bytes_in(tmp_path / name) == bytes_in(tmp_path / "expected")
        assert handle.done()
        assert handle.wait() is saved
        assert set(saved.load().model) == {"embed", "columns", "large", "none", "position"}
        nbytes = sum(array.nbytes for name, array in state.items() if name != "head")
        assert handle.progress() == (nbytes, nbytes)


def test_it_returns_before_the_folder_is_written(path, write_gate):
    state = state_of()
    handle = export_huggingface_async(path, state)
    handle.staged(0)
    assert not handle.done()
    assert not path.exists()
    with pytest.raises(TimeoutError, match=r"not ended after 0\.01 seconds"):
        handle.wait(0.01)
    spoil(state)
    write_gate.set()
    np.testing.assert_array_equal(handle.wait(SECONDS).load().model["big"], state_of()["big"])
    assert mlstate.verify(path)


def test_ranks_write_the_copies_of_the_call(tmp_path, path, write_gate):
    arrays = {f"w{i}": np.random.default_rng(i).random((60, 30 + i)) for i in range(5)}
    export_huggingface(tmp_path / "one", arrays, max_shard_bytes=30_000)
    spoiled = threading.Barrier(2, timeout=SECONDS)

    def save(group):
        state = {name: Layout.rows(2).shard(array.copy(), group.rank)
                 for name, array in arrays.items()}  # fmt: skip
        state["w0"] = arrays["w0"].copy()  # both ranks hold all of it
        handle = export_huggingface_async(path, state, group=group, max_shard_bytes=30_000)
        spoil({name: getattr(value, "array", value) for name, value in state.items()})
        spoiled.wait()
        write_gate.set()
        return handle.wait(SECONDS).load().model.keys()

    assert run_ranks(2, save) == [arrays.keys()] * 2
    assert bytes_in(path) == bytes_in(tmp_path / "one")


@pytest.mark.torch
def test_a_torch_module(path, write_gate):
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(30, 40)
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    handle = export_huggingface_async(path, module)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.zero_()
    write_gate.set()
    handle.wait(SECONDS)
    other = torch.nn.Linear(30, 40)
    mlstate.load(path, into={"model": other})
    assert all(torch.equal(other.state_dict()[name], expected[name]) for name in expected)


@pytest.mark.torch
def test_tensors_as_on_a_device(path, write_gate, monkeypatch):
    """The code path for device copies, with tensors that are in fact on the host."""
    torch = pytest.importorskip("torch")
    for module in (save_shards, save_job):
        monkeypatch.setattr(module, "is_on_device", lambda value: isinstance(value, torch.Tensor))
    monkeypatch.setattr(save_job, "_event", lambda device: None)
    tensor = torch.arange(6000.0).reshape(60, 100)
    state = {"a": tensor, "b": tensor.to(torch.int16).T, "host": np.arange(10.0)}
    expected = {name: np.array(np.asarray(value)) for name, value in state.items()}
    handle = export_huggingface_async(path, state)
    spoil(state)
    write_gate.set()
    model = handle.wait(SECONDS).load().model
    for name, array in expected.items():
        np.testing.assert_array_equal(model[name], array)
    handle = export_huggingface_async(path.parent / "n", state, staging=Staging(1000))
    with pytest.raises(ValueError, match="must be staged"):
        handle.wait(SECONDS)


# ---- failures ----


def test_invalid_arguments_raise_before_writing(tmp_path, path):
    good = {"w": np.ones(3)}
    for text, keywords in (
        ("must be a Staging, got int", {"staging": 5}),
        ("ProcessGroup", {"group": 5}),
    ):
        with pytest.raises(TypeError, match=text):
            export_huggingface_async(path, good, **keywords)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept(tmp_path, path):
    mlstate.save(path, {"w": np.zeros(3)})
    handle = export_huggingface_async(path, {"w": np.ones(3)})
    for _ in range(2):
        with pytest.raises(mlstate.StoreError, match="exists already"):
            handle.wait(SECONDS)
    assert mlstate.load(path).model["w"].sum() == 0
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_of_one_rank_is_raised_by_all(tmp_path, path, monkeypatch):
    write = export_module._write_parts

    def fail(folder, plan, shards, sync, progress):
        if sync:  # on rank 1
            raise OSError(5, "Input/output error")
        return write(folder, plan, shards, sync, progress)

    monkeypatch.setattr(export_module, "_write_parts", fail)

    def save(group):
        shard = Layout.rows(2).shard(np.ones((4, 2)), group.rank)
        handle = export_huggingface_async(path, {"w": shard}, group=group)
        with pytest.raises(
            (OSError, mlstate.CollectiveError), match="Input/output error"
        ) as caught:
            handle.wait(SECONDS)
        return type(caught.value)

    kinds = run_ranks(2, save)
    assert kinds == [mlstate.CollectiveError, OSError]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", ["state", "copies"])
def test_a_rank_that_fails_before_it_writes_stops_all(tmp_path, path, monkeypatch, stage):
    copy = _core.shards_stage

    def fail(shards, memory, used):
        if memory.nbytes == 99:
            raise MemoryError("no memory")
        return copy(shards, memory, used)

    monkeypatch.setattr(_core, "shards_stage", fail)

    def save(group):
        state = {"w": Layout.rows(2).shard(np.ones((40, 2)), group.rank)}
        staging = Staging(1000)
        if group.rank == 1:
            state, staging = ({"w": [1]}, staging) if stage == "state" else (state, Staging(99))
        handle = export_huggingface_async(path, state, group=group, staging=staging)
        array = weakref.ref(getattr(state["w"], "array", group))
        del state
        try:
            handle.wait(SECONDS)
        finally:
            assert group.rank == 1 or array() is None  # the handle holds no arrays

    first, second = outcomes(2, save)
    assert isinstance(first, mlstate.CollectiveError)
    assert first.rank == 1
    assert isinstance(second, TypeError if stage == "state" else MemoryError)
    assert list(tmp_path.iterdir()) == []


def test_staging_and_group_serve_one_save_at_a_time(tmp_path, path, write_gate):
    memory = Staging(1000)
    first = export_huggingface_async(path, {"w": np.ones(3)}, staging=memory)
    with pytest.raises(ValueError, match="in use by another save"):
        export_huggingface_async(tmp_path / "n", {"w": np.ones(3)}, staging=memory)
    write_gate.set()
    first.wait(SECONDS)
    export_huggingface_async(tmp_path / "n", {"w": np.ones(3)}, staging=memory).wait(SECONDS)

    class DefaultGroup(SingleGroup):
        is_default = True

    with pytest.raises(ValueError, match="torch's default group"):
        export_huggingface_async(path, {"w": np.ones(3)}, group=DefaultGroup())


def test_cancelling_leaves_no_folder(tmp_path, path, write_gate):
    handle = export_huggingface_async(path, state_of())
    with pytest.raises(TimeoutError):
        handle.cancel(0.01)
    write_gate.set()
    assert handle.cancel()
    with pytest.raises(mlstate.StoreError) as caught:
        handle.wait()
    assert caught.value.errno == errno.ECANCELED
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_the_call_cancels_the_export(tmp_path, path, write_gate, monkeypatch):
    reached = save_job.SaveJob.reached

    def interrupt(job, event, timeout=None):
        if event == "staged":
            raise KeyboardInterrupt
        write_gate.set()
        return reached(job, event, timeout)

    memory = Staging(1000)
    with monkeypatch.context() as patch:
        patch.setattr(save_job.SaveJob, "reached", interrupt)
        with pytest.raises(KeyboardInterrupt):
            export_huggingface_async(path, {"w": np.ones(3)}, staging=memory)
    assert list(tmp_path.iterdir()) == []
    export_huggingface_async(path, {"w": np.ones(3)}, staging=memory).wait(SECONDS)


BEGIN = """
import numpy as np
from mlstate.checkpoint import export_huggingface_async
state = {f"w{i}": np.full(1 << 20, i, np.float32) for i in range(4)}
"""


@pytest.mark.skipif(os.name != "posix", reason="checkpoints need POSIX")
def test_interpreter_waits_for_the_export_and_prints_its_error(path):
    code = f"{BEGIN}handle = export_huggingface_async({str(path)!r}, state)"
    child.run(code)
    assert mlstate.load(path).model["w3"][-1] == 3
    assert mlstate.verify(path)
    done = child.attempt(code.replace("state)", "state, overwrite=False)"))
    assert done.returncode == 0
    assert "StoreError" in done.stderr
    assert f"save of {path} failed, and wait() was not called" in done.stderr
