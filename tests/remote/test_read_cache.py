"""The local cache of objects: fewer requests, never another byte, never a failed load."""

import errno
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
from checkpoint_model import same

import mlstate
from mlstate.checkpoint import CheckpointManager, inspect
from mlstate.checkpoint._folder._remote import read_cache
from mlstate.errors import ChecksumError

STATE = {"w": np.random.default_rng(0).normal(size=(4000, 50)), "v": np.arange(9)}


@pytest.fixture
def options(store, tmp_path):
    return store.options(cache_folder=tmp_path / "cache")


def entries(options):
    """Return the entries of the cache, the oldest first."""
    paths = [path for path in options["cache_folder"].glob("*/*") if path.is_file()]
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns)


def requested(store, call):
    """Return the names of the objects that a call reads, and its result."""
    store.faults.reset()
    result = call()
    assert {method for method, _ in store.faults.log} <= {"GET"}
    return sorted("/".join(path.split("/")[3:]) for _, path in store.faults.log), result


def load(url, options, **more):
    return mlstate.load(url, storage_options=options, **more).model


def test_a_second_load_requests_only_the_root(url, store, options):
    mlstate.save(url, STATE, storage_options=store.options())
    names, loaded = requested(store, lambda: load(url, options))
    assert same(loaded, STATE)
    assert len(names) > 2
    names, loaded = requested(store, lambda: load(url, options))
    assert names == ["manifest.json"]
    assert same(loaded, STATE)
    for rank in range(4):  # parts of the whole in the cache
        part = {"rank": rank, "world_size": 4, "layout": "rows", "names": "w"}
        names, loaded = requested(store, lambda part=part: load(url, options, **part))
        assert names == ["manifest.json"]
        np.testing.assert_array_equal(loaded["w"], np.array_split(STATE["w"], 4)[rank])
    into = {name: np.zeros_like(array) for name, array in STATE.items()}
    names, _ = requested(store, lambda: load(url, options, into={"model": into}))
    assert names == ["manifest.json"]
    assert same(into, STATE)


def test_separately_read_parts_form_the_full_tensor(url, store, options):
    mlstate.save(url, {"w": STATE["w"]}, storage_options=options)
    for rank in (1, 0):
        load(url, options, rank=rank, world_size=2, layout="rows", verify=False)
    names, loaded = requested(store, lambda: load(url, options, verify=False))
    assert names == ["manifest.json"]
    assert same(loaded, {"w": STATE["w"]})


def test_new_saves_and_other_checkpoints_miss_the_cache(url, store, options):
    for number, names in ((1, "ab"), (2, "a")):
        for name in names:
            state = {"w": np.array([number, ord(name)])}
            mlstate.save(f"{url}/{name}", state, storage_options=store.options())
        for name in names:
            assert load(f"{url}/{name}", options)["w"].tolist() == [number, ord(name)]


def test_a_manager_reads_steps_through_the_cache(url, store, options):
    manager = CheckpointManager(url, storage_options=options)
    for step in (1, 2):
        manager.save(step, {"w": np.full(5, step)})
    manager.restore_latest()
    assert manager.restore(1).model["w"].tolist() == [1] * 5
    other = CheckpointManager(url, storage_options=options)
    names, restored = requested(store, lambda: other.restore_latest())
    assert restored.model["w"].tolist() == [2] * 5
    assert not [name for name in names if name.startswith(("params", "index"))]


@pytest.mark.parametrize(
    ("damage", "verify"),
    [("flip", True), ("flip", False), ("header", False), ("truncate", False), ("swap", False)],
)
def test_a_damaged_entry_is_read_again_from_the_store(url, store, options, damage, verify):
    mlstate.save(url, STATE, storage_options=store.options())
    load(url, options, verify=verify)
    cache_files = entries(options)
    texts = [path.read_bytes() for path in cache_files]
    for path, text, other in zip(cache_files, texts, texts[1:] + texts[:1], strict=True):
        middle = 20 if damage == "header" else len(text) // 2
        flipped = text[:middle] + bytes([text[middle] ^ 1]) + text[middle + 1 :]
        changed = {"truncate": text[:-1], "swap": other}
        path.write_bytes(changed.get(damage, flipped))
    names, loaded = requested(store, lambda: load(url, options, verify=verify))
    assert same(loaded, STATE)
    assert len(names) > 2
    names, loaded = requested(store, lambda: load(url, options, verify=verify))
    assert same(loaded, STATE)
    assert names == ["manifest.json"]


def test_a_damaged_answer_does_not_stay_in_the_cache(url, store, options):
    mlstate.save(url, STATE, storage_options=store.options())

    def flip_once(number, method, path):
        is_first = not flipped and path.endswith(".safetensors")
        flipped.extend([path] if is_first else [])
        return "flipped" if is_first else None

    flipped = []
    store.faults.reset(flip_once)
    assert same(load(url, options), STATE)
    store.faults.reset(lambda number, method, path: "flipped" if ".safetensors" in path else None)
    for path in entries(options):
        path.unlink()
    for _ in range(2):
        with pytest.raises(ChecksumError) as caught:
            load(url, options)
        assert "mlstate-" not in str(caught.value) and caught.value.__context__ is None
    store.faults.reset()
    assert same(load(url, options), STATE)


def test_a_verification_reads_the_store(url, store, options):
    saved = mlstate.save(url, STATE, storage_options=store.options())
    load(url, options)
    for path in (saved.shards()[0].path, saved._manifest.indexes[0].path):
        good = store.get(f"{url}/{path}")
        store.put(f"{url}/{path}", good[:-9] + b"\1" + good[-8:])
        assert not mlstate.verify(url, storage_options=options), path
        assert not saved.verify(), path
        store.put(f"{url}/{path}", good)
    assert mlstate.verify(url, storage_options=options)


@pytest.mark.parametrize("problem", ["file", "full", "free"])
def test_a_cache_that_cannot_be_written_is_one_warning(url, store, options, problem, monkeypatch):
    mlstate.save(url, STATE, storage_options=store.options())

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if problem == "file":  # also if the tests run as root, who may write everywhere
        options["cache_folder"].write_text("not a folder")
    elif problem == "full":
        monkeypatch.setattr(read_cache.os, "replace", fail)
    else:
        monkeypatch.setattr(read_cache, "_LEAST_FREE", 1 << 60)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert same(load(url, options), STATE)
    [text] = [str(warning.message) for warning in caught]
    assert "the cache cannot be written" in text and str(options["cache_folder"]) in text
    assert not entries(options)


def test_a_read_only_cache_is_still_read(url, store, options, monkeypatch):
    def refusing(call):
        def refuse(path, *more, **keywords):
            if str(options["cache_folder"]) in str(path):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return call(path, *more, **keywords)

        return refuse

    mlstate.save(url, STATE, storage_options=store.options())
    load(url, options, names="v")
    before = len(entries(options))
    for name in ("mkdir", "unlink", "utime", "replace"):  # as root may write everywhere
        monkeypatch.setattr(read_cache.os, name, refusing(getattr(os, name)))
    names, _ = requested(store, lambda: load(url, options, names="v"))
    assert names == ["manifest.json"]
    with pytest.warns(UserWarning, match="Permission denied"):
        assert same(load(url, options), STATE)
    monkeypatch.undo()
    assert len([path for path in entries(options) if path.suffix != ".tmp"]) == before


def test_the_entries_of_the_oldest_loads_are_deleted(url, store, options):
    options["cache_bytes"] = 200_000
    for name in "abc":
        mlstate.save(
            f"{url}/{name}", {"w": np.full(9_000, ord(name))}, storage_options=store.options()
        )
    foreign = options["cache_folder"] / "notes.txt"
    foreign.parent.mkdir()
    foreign.write_text("mine")
    for name in "ab":
        load(f"{url}/{name}", options)
    for path in entries(options):  # both are old, and a is used again
        os.utime(path, (1, 1))
    left = options["cache_folder"] / ("0" * 32) / ".mlstate-0123456789abcdef.tmp"
    left.parent.mkdir()
    left.write_bytes(b"of a killed process")
    os.utime(left, (1, 1))
    names, _ = requested(store, lambda: load(f"{url}/a", options))
    assert names == ["a/manifest.json"]
    load(f"{url}/c", options)
    for name, is_kept in (("a", True), ("c", True), ("b", False)):
        names, loaded = requested(store, lambda name=name: load(f"{url}/{name}", options))
        assert (len(names) == 1) == is_kept, name
        assert (loaded["w"] == ord(name)).all()
        assert sum(path.stat().st_size for path in entries(options)) <= 200_000
    assert foreign.read_text() == "mine" and not left.exists()
    options["cache_bytes"] = 0
    assert load(f"{url}/b", options)["w"].all()


def test_full_cache_with_undeletable_entries_is_kept(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    path = "index/0123456789abcdef.0.json"
    monkeypatch.setattr(read_cache, "_LEAST_FREE", 0)
    cache = read_cache.ReadCache(str(tmp_path), 1000, "s3://bucket/run")
    cache.put(path, 0, bytes(800), 2000)
    monkeypatch.setattr(read_cache.os, "unlink", refuse)
    cache.put(path, 800, bytes(800), 2000)
    cache.finish()
    assert cache.problem() is None
    assert cache.get(path, 0, 800) is not None and cache.get(path, 800, 801) is None
    assert not cache.accepts("manifest.json")
    assert not cache.accepts("roots/00000001.0123456789abcdef.json")


def test_names_and_entries_have_no_credentials(url, store, options):
    mlstate.save(url, {"v": np.ones(3)}, storage_options=options)
    load(url, options)
    inspect(url, storage_options=options)
    assert entries(options)
    for path in entries(options):
        assert b"of-tests" not in path.read_bytes() and "of-tests" not in str(path)
        assert path.stat().st_mode & 0o077 == 0 or os.name == "nt"


PUT_AND_GET = """
import sys, time
import numpy as np
from mlstate.checkpoint._folder._remote import read_cache

read_cache._LEAST_FREE = 0
folder, seed, path = sys.argv[1], int(sys.argv[2]), "params/0.0123456789abcdef-0.safetensors"
cache = read_cache.ReadCache(folder, 40_000, "s3://bucket/run")
source, random = np.random.default_rng(0).bytes(20_000), np.random.default_rng(seed)
print("started", flush=True)
end = time.monotonic() + 0.3
while seed == 0 or time.monotonic() < end:
    begin, until = sorted(random.integers(0, 20_001, 2).tolist())
    found = cache.get(path, begin, until)
    if found is None:
        cache.put(path, begin, source[begin:until], 20_000)
    elif begin < until:
        parts, nbytes = found
        assert nbytes == 20_000 and b"".join(view for _, view in parts) == source[begin:until]
    cache.finish()
assert cache.problem() is None
"""


def test_processes_share_a_folder_and_one_is_killed(tmp_path):
    workers = [
        subprocess.Popen([sys.executable, "-c", PUT_AND_GET, tmp_path, str(seed)],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for seed in range(3)
    ]  # fmt: skip
    for worker in workers:
        assert worker.stdout.readline() == "started\n", worker.communicate()
    workers[0].kill()
    done = [worker.communicate(timeout=60) for worker in workers]
    assert [worker.returncode for worker in workers[1:]] == [0, 0], done
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*-*")) <= 60_000
