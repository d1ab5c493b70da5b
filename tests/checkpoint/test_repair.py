"""Repair fixes all that can be fixed, and deletes no step that loads."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoint_model import flip, same

import mlstate
from mlstate import _core
from mlstate.checkpoint import CheckpointManager, Layout, Shard
from mlstate.checkpoint._store.checkpoint_files import CheckpointFiles
from mlstate.checkpoint._store.open_path import open_files
from mlstate.cli import main

pytestmark = pytest.mark.skipif(os.name == "nt", reason="checkpoints need POSIX")


def state(step):
    arrays = {f"small.{n}": np.full(50, n, np.int16) for n in range(4)}
    return arrays | {"large": np.full(100_000, step, np.float32), "empty": np.ones((0, 3))}


def files_of(manager, step):
    return [Path(manager.directory, name) for name in sorted(manager.checkpoint(step).files())]


@pytest.fixture
def manager(tmp_path):
    return CheckpointManager(tmp_path / "run", keep=None)


@pytest.mark.parametrize("at", [4, 30, 60, 200, 4000])
def test_a_damaged_header_is_written_again(manager, at):
    for step in (1, 2):
        manager.save(step, state(step))
    good = {path: path.read_bytes() for path in files_of(manager, 2)}
    for path in good:
        flip(path, at)
    assert {p.kind for p in mlstate.verify(manager.directory).problems} <= {"header", "foreign"}
    report = mlstate.verify(manager.directory, repair=True)
    assert not report  # a report with problems is false
    assert report.step == 2
    assert report.repaired == manager.checkpoint(2).generation
    assert {path: path.read_bytes() for path in good} == good
    assert mlstate.verify(manager.directory)
    assert manager.steps() == [1, 2]


def test_a_header_that_was_overwritten_is_written_again(manager):
    manager.save(1, state(1))
    for path in files_of(manager, 1):
        data = path.read_bytes()
        path.write_bytes(b"\xff" * 4096 + data[4096:])
    assert mlstate.verify(manager.directory, repair=True).repaired
    assert mlstate.verify(manager.directory)
    assert same(state(1), mlstate.load(manager.directory).model)


STATES = {
    "flat parts": {"w": Layout.flat(3).shard(np.arange(100.0), 1)},
    "states": {"w": Layout.axis(1, 2).shard(np.arange(12.0).reshape(3, 4), 1)},
    "a scalar": {"w": np.float32(3)},
    "names": {'a "quoted"\\\n\x00': np.ones(3), "ä.ß": np.zeros((2, 2), np.float16)},
    "a tier": {"w": Shard(np.ones(4), tier="cold", version=7)},
    "blocks": {"w": np.arange(1 << 19, dtype=np.float64)},
    "zeros": {"w": np.eye(1000, dtype=np.float32)},
    "dtypes": {
        name: np.repeat([[1], [0]], [40, 4000], 0).astype(dtype) + np.zeros((1, 64), dtype)
        for name, dtype in {"a": "i1", "b": "f8", "c": "f2", "d": "f4"}.items()
    },
}


@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"sparse": True, "compress": "zlib"}])
@pytest.mark.parametrize("name", STATES)
def test_rebuilt_headers_equal_written_headers(tmp_path, name, options):
    states = STATES[name], {f"{key}.m": value for key, value in STATES[name].items()}
    saved = mlstate.save(tmp_path, *states, **options)
    manifest = open_files(tmp_path).read_manifest()
    merged = open_files(tmp_path).load_merged_index(manifest)
    assert saved.files()
    for path in saved.files():
        data = (tmp_path / path).read_bytes()
        assert merged.header(path) == data[: 8 + int.from_bytes(data[:8], "little")]
    assert merged.header("params/other.safetensors") is None
    with pytest.raises(TypeError):
        merged.header(3)


def shared_segment(manager):
    """Two steps that share a segment; the second does not use all of it."""
    first = state(1)
    manager.save(1, first)
    manager.save(2, first | {"small.0": np.full(50, 9, np.int16)})
    [segment] = {*files_of(manager, 1)} & {
        path for path in files_of(manager, 2) if "segment" in path.name
    }
    return segment


def test_header_is_rebuilt_from_the_writing_step(manager):
    segment = shared_segment(manager)
    flip(segment, 4000)
    assert mlstate.verify(manager.directory, repair=True).step == 2
    assert mlstate.verify(manager.directory)
    assert manager.steps() == [1, 2]


def test_loadable_step_stays_if_its_header_cannot_be_repaired(manager, capsys):
    segment = shared_segment(manager)
    manager.delete(1)
    data = segment.read_bytes()
    segment.write_bytes(b"\0" * 4096 + data[4096:])
    manifest = Path(manager.directory, "manifest.json").read_bytes()
    report = mlstate.verify(manager.directory, repair=True)
    assert [problem.kind for problem in report.problems] == ["header"]
    assert report.repaired is None
    assert manager.steps() == [2]
    assert Path(manager.directory, "manifest.json").read_bytes() == manifest
    assert main(["verify", manager.directory, "--repair"]) == 1
    assert "every tensor loads, and the next save" in capsys.readouterr().out
    loaded = manager.restore_latest()
    manager.save(3, loaded.model)
    assert mlstate.verify(manager.directory)


def test_an_older_step_that_loads_is_put_in_place_and_stays(manager):
    segment = shared_segment(manager)
    manager.delete(1)
    manager.save(3, state(3) | {"small.0": np.full(50, 9, np.int16)})
    segment.write_bytes(b"\0" * 4096 + segment.read_bytes()[4096:])
    [large] = {*files_of(manager, 3)} - {*files_of(manager, 2)}
    flip(large, 5000)
    assert mlstate.verify(manager.directory, repair=True).step == 2
    assert manager.steps() == [2]
    assert mlstate.load(manager.directory).step == 2


def test_file_with_other_tensors_gets_no_header(manager):
    manager.save(1, state(1))
    manager.save(2, state(2))
    [first] = {*files_of(manager, 1)} - {*files_of(manager, 2)}
    [second] = {*files_of(manager, 2)} - {*files_of(manager, 1)}
    shutil.copy(first, second)
    assert mlstate.verify(manager.directory, repair=True).step == 1
    assert second.read_bytes() == first.read_bytes()
    assert manager.steps() == [1]


def test_a_file_that_cannot_be_written_is_an_error(manager, monkeypatch):
    manager.save(1, state(1))
    path = files_of(manager, 1)[0]
    flip(path, 4000)

    pwrite = os.pwrite

    def refused(descriptor, data, offset):
        if len(data) >= 4096:
            raise OSError(28, "no space left on device")
        return pwrite(descriptor, data, offset)  # a write to the lock

    monkeypatch.setattr(os, "pwrite", refused)
    with pytest.raises(mlstate.StoreError, match=f"cannot write the file.*{path.name}"):
        mlstate.verify(manager.directory, repair=True)
    monkeypatch.undo()
    assert mlstate.verify(manager.directory, repair=True).repaired


@pytest.mark.parametrize("which", ["delete_roots", "file_replace"])
def test_a_repair_that_was_stopped_is_finished_by_the_next(manager, monkeypatch, which):
    for step in (1, 2, 3):
        manager.save(step, state(step))
    [large] = {*files_of(manager, 3)} - {*files_of(manager, 2)}
    flip(large, 5000)
    module = {"delete_roots": CheckpointFiles, "file_replace": _core}[which]
    real = getattr(module, which)

    def stopped(*arguments):
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, which, stopped)
        with pytest.raises(KeyboardInterrupt):
            mlstate.verify(manager.directory, repair=True)
    assert manager.steps() == [1, 2]  # no damaged step remains
    mlstate.verify(manager.directory, repair=True)
    assert mlstate.verify(manager.directory)
    assert mlstate.load(manager.directory).step == 2
    manager.save(4, state(4))
    assert manager.steps() == [1, 2, 4]
    assert not mlstate.verify(manager.directory).leftover
