"""Loads from memory: the answers of a store, here bytes of local files, go to their arrays."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mlstate
from mlstate import _core, checkpoint
from mlstate.checkpoint._folder.local import LocalFolder
from mlstate.checkpoint._folder.object import ObjectFolder
from mlstate.errors import ChecksumError, FormatError

MIB = 1 << 20
WAYS = [{}, {"sparse": True}, {"compress": "zlib"}, {"pack_below_bytes": 0}]


def state_of(seed):
    random = np.random.default_rng(seed)
    state = {f"small.{i}": random.normal(size=(3, i)) for i in range(9)}
    state["large"] = random.integers(0, 9, (3000, 1024)).astype(np.float32)
    state["zeros"] = np.zeros((900, 1024))
    state["zeros"][::90] = 1
    state["scalar"] = np.float32(seed)
    return state


class Store:
    """Answers requests with bytes of local files, and keeps them in `requests`."""

    def __init__(self):
        self.requests, self.length = [], None

    def fetch(self, folder, path, begin, end):
        self.requests.append((path, begin, end))
        data = Path(folder.path, path).read_bytes()[: self.length]
        middle = (begin + end) // 2  # as a cache does, in two answers
        return [
            (path, begin, middle, len(data), data[begin:middle]),
            (path, middle, end, len(data), data[middle:end]),
        ]


@pytest.fixture
def store(monkeypatch):
    """Make all local loads read from memory."""
    store = Store()
    for name in ("load", "load_into", "_fill", "_read_unit"):
        monkeypatch.setattr(LocalFolder, name, getattr(ObjectFolder, name), raising=False)
    options = SimpleNamespace(part_bytes=MIB, max_concurrency=3)
    monkeypatch.setattr(LocalFolder, "_options", options, raising=False)
    fetch = lambda *arguments: store.fetch(*arguments)  # noqa: E731
    monkeypatch.setattr(LocalFolder, "_fetch", fetch, raising=False)
    return store


def assert_same(arrays, state):
    for name, array in state.items():
        np.testing.assert_array_equal(np.asarray(arrays[name]), array, name)


def targets_of(state):
    """Return targets that are packed, strided, or in the other byte order, in turns."""
    targets = {}
    for number, (name, array) in enumerate(state.items()):
        array = np.asarray(array)
        if number % 3 == 0 or not array.ndim:
            targets[name] = np.full_like(array, 7)
        elif number % 3 == 1:
            targets[name] = np.full((array.shape[0], 2 * array.shape[1]), 7, array.dtype)[:, ::2]
        else:
            targets[name] = np.full(array.shape, 7, array.dtype.newbyteorder())
    return targets


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("verify", [True, False])
def test_a_load_from_memory_equals_the_state(tmp_path, store, how, verify):
    state = state_of(1)
    mlstate.save(tmp_path / "a", state, **how)
    seen = []
    loaded = mlstate.load(tmp_path / "a", verify=verify, progress=seen.append)
    assert_same(loaded.model, state)
    assert sum(seen) == sum(np.asarray(array).nbytes for array in state.values())
    assert max(end - begin for _, begin, end in store.requests) <= MIB
    targets = targets_of(state)
    mlstate.load(tmp_path / "a", into={"model": targets}, verify=verify)
    assert_same(targets, state)


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_from_memory_equal_the_arrays(tmp_path, store, how, axis):
    state = {"large": state_of(2)["large"], "zeros": state_of(2)["zeros"]}
    mlstate.save(tmp_path / "a", state, **how)
    checkpoint.reshard(tmp_path / "a", tmp_path / "b", layout="rows", world_size=5)
    for path in (tmp_path / "a", tmp_path / "b"):
        for rank in range(3):
            loaded = mlstate.load(path, rank=rank, layout=checkpoint.Layout([(axis, 3)])).model
            for name, array in state.items():
                step = -(-array.shape[axis] // 3)
                part = range(array.shape[axis])[rank * step : (rank + 1) * step]
                np.testing.assert_array_equal(loaded[name], np.take(array, part, axis))


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_shorter_object_is_refused(tmp_path, store, how):
    mlstate.save(tmp_path / "a", state_of(3), **how)
    for store.length in (0, 100, MIB):
        with pytest.raises(FormatError, match="bytes long"):
            mlstate.load(tmp_path / "a", names="large")


def test_a_damaged_block_is_found(tmp_path, store):
    mlstate.save(tmp_path / "a", state_of(4), pack_below_bytes=0)
    (path,) = {path for path, *_ in reads_of(tmp_path / "a", store, "large")}
    with (tmp_path / "a" / path).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    with pytest.raises(ChecksumError, match="tensor 'large', file"):
        mlstate.load(tmp_path / "a")


def reads_of(path, store, name):
    store.requests.clear()
    mlstate.load(path, names=name)
    return list(store.requests)


def test_an_error_of_a_request_stops_the_load(tmp_path, store):
    mlstate.save(tmp_path / "a", state_of(5))

    def fail(*_):
        raise KeyboardInterrupt

    store.fetch = fail
    with pytest.raises(KeyboardInterrupt):
        mlstate.load(tmp_path / "a")


def test_an_error_of_the_progress_callback_stops_the_load(tmp_path, store):
    mlstate.save(tmp_path / "a", state_of(6))

    def fail(_):
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        mlstate.load(tmp_path / "a", progress=fail)


def test_bytes_that_no_range_holds_are_an_error(tmp_path, store):
    mlstate.save(tmp_path / "a", {"w": np.ones(3 * MIB)})
    complete = store.fetch
    store.fetch = lambda *arguments: complete(*arguments)[:1]
    with pytest.raises(FormatError, match="bytes"):
        mlstate.load(tmp_path / "a")
    store.fetch = lambda *arguments: []
    with pytest.raises(FormatError, match="0 of"):
        mlstate.load(tmp_path / "a")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux for memory")
def test_zeros_that_are_not_stored_use_no_memory(tmp_path, store):
    nbytes = 1 << 30
    mlstate.save(tmp_path / "a", {"w": np.zeros(nbytes, np.uint8)}, sparse=True)
    before = resident()
    loaded = mlstate.load(tmp_path / "a")
    assert resident() - before < nbytes / 4
    assert not loaded.model["w"][:: nbytes // 7].any()


def resident():
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ranges_are_checked():
    index = _core.MergedIndex((), ())
    for ranges in ([], (1,), (("a", 0, 1, 1, "text"),)):
        with pytest.raises(TypeError):
            index.load_into(("url", ranges, False), 0, [], (None, 0, 0), {}, True, None)
    for source in ((), ("url",), ("url", ())):
        with pytest.raises(TypeError):
            index.load_into(source, 0, [], (None, 0, 0), {}, True, None)
