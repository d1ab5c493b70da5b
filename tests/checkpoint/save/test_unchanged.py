"""A save keeps only files that verify: it rewrites damaged shards, even unchanged ones."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoint_model import flip

import mlstate
from mlstate.checkpoint import Shard


def shard_files(folder):
    return sorted(Path(folder, "params").iterdir())


def flip_bit(path, bit):
    flip(path, bit // 8, 1 << bit % 8)


def header_bits(path):
    return 8 * (8 + int.from_bytes(path.read_bytes()[:8], "little"))


def check_saved(folder, state, **options):
    """Save an unchanged state, and check that all of it verifies and loads."""
    mlstate.save(folder, state, **options)
    assert not mlstate.verify(folder).problems
    loaded = mlstate.load(folder).model
    for name, value in state.items():
        array = value.array if isinstance(value, Shard) else value
        assert np.array_equal(loaded[name], array)


@pytest.fixture
def state():
    """A tensor with its own file, and small ones that share a segment."""
    arrays = {"large": np.arange(100_000, dtype=np.float32)}
    return arrays | {f"small.{n}": np.full(50, n, np.int16) for n in range(5)}


def test_a_file_with_a_damaged_header_is_not_reused(tmp_path, state):
    mlstate.save(tmp_path / "good", state)
    chosen = random.Random(22)
    for number in range(40):
        folder = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "good", folder)
        path = chosen.choice(shard_files(folder))
        flip_bit(path, chosen.randrange(header_bits(path)))
        check_saved(folder, state)


def test_a_stated_version_does_not_keep_a_damaged_header(tmp_path):
    shard = Shard(np.arange(100_000, dtype=np.float32), version=3)
    mlstate.save(tmp_path / "ckpt", {"w": shard})
    [path] = shard_files(tmp_path / "ckpt")
    flip_bit(path, 900)
    check_saved(tmp_path / "ckpt", {"w": shard})
    assert shard_files(tmp_path / "ckpt") != [path]


@pytest.mark.parametrize("where", ["first", "last", "any"])
def test_coded_bytes_that_are_damaged_are_not_reused(tmp_path, where):
    state = {"w": np.repeat(np.arange(20_000, dtype=np.float32), 20)}
    mlstate.save(tmp_path / "good", state, compress="zlib")
    [path] = shard_files(tmp_path / "good")
    start, end = header_bits(path), 8 * path.stat().st_size
    chosen = random.Random(22)
    ranges = {"first": (start, start + 64), "last": (end - 64, end), "any": (start, end)}
    for number, bit in enumerate(chosen.sample(range(*ranges[where]), 20)):
        folder = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "good", folder)
        flip_bit(folder / "params" / path.name, bit)
        check_saved(folder, state, compress="zlib")


def test_damage_that_is_in_memory_too_is_not_reused(tmp_path, state):
    mlstate.save(tmp_path / "ckpt", state)
    path = max(shard_files(tmp_path / "ckpt"), key=lambda file: file.stat().st_size)
    flip_bit(path, 8 * path.stat().st_size - 3)
    salvaged = dict(mlstate.load(tmp_path / "ckpt", verify=False).model)
    assert not np.array_equal(salvaged["large"], state["large"])
    check_saved(tmp_path / "ckpt", salvaged)


def test_damage_to_hidden_rows_is_not_reused(tmp_path):
    state = {"w": np.ones((4_000, 100), np.float32)}
    mlstate.save(tmp_path / "ckpt", state)
    [path] = shard_files(tmp_path / "ckpt")
    state["w"][:100] = 2
    mlstate.save(tmp_path / "ckpt", state, incremental=True)
    assert len(shard_files(tmp_path / "ckpt")) == 2
    flip_bit(path, header_bits(path) + 8)  # damage in a row that the new layer hides
    assert mlstate.verify(tmp_path / "ckpt").problems
    check_saved(tmp_path / "ckpt", state)


def test_files_that_are_good_stay(tmp_path, state):
    mlstate.save(tmp_path / "ckpt", state)
    before = shard_files(tmp_path / "ckpt")
    check_saved(tmp_path / "ckpt", state)
    assert shard_files(tmp_path / "ckpt") == before


def test_a_converted_shard_with_a_version_is_written_again(tmp_path):
    state = mlstate.StateDict(w=Shard(np.array([0.1, 0.2]), version=1))
    mlstate.save(tmp_path, state)
    rounded = state.astype("float32").astype("float64")
    mlstate.save(tmp_path, rounded)
    assert mlstate.load(tmp_path).model["w"].tolist() == rounded["w"].array.tolist()
