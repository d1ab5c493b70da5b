"""``mmap=True``: the bytes that are compared before the arrays are returned, and read."""

import os
from pathlib import Path

import numpy as np
import pytest
from child import STATUS, bytes_read, counts_reads, needs_status
from child import run as run_child
from weight_folder import write_folder

import mlstate
from mlstate.checkpoint import checksum, load_file, save_file
from mlstate.errors import ChecksumError

ROW = 1 << 18  # elements: one block of 1 MiB
WEIGHT = np.arange(6 * ROW, dtype=np.float32).reshape(6, ROW)


def own_folder(path):
    mlstate.save(path, {"w": WEIGHT})
    return path, next((path / "params").iterdir())


def weights_with_checksums(path):
    write_folder(path, {"w": WEIGHT})
    checksum(path)
    return path, path / "model.safetensors"


def own_file(path):
    save_file({"w": WEIGHT}, path)
    return path, path


def file_with_checksums(path):
    return (weights_with_checksums(path)[1],) * 2


MAKERS = [own_folder, weights_with_checksums, own_file, file_with_checksums]


def model_of(path, **options):
    is_file = path.is_file()
    return load_file(path, **options) if is_file else mlstate.load(path, **options).model


def damage(file, row):
    """Change one element of row `row`; the tensor is at the end of the file."""
    with Path(file).open("r+b") as opened:
        opened.seek(-(6 - row) * 4 * ROW + 40, os.SEEK_END)
        opened.write(b"\xff")


@pytest.mark.parametrize("make", MAKERS)
def test_damage_raises_before_mapped_arrays_are_returned(make, tmp_path):
    path, file = make(tmp_path / "x")
    mapped = model_of(path, mmap=True)["w"]
    assert not mapped.flags.owndata
    assert np.array_equal(mapped, WEIGHT)
    damage(file, 2)
    with pytest.raises(ChecksumError) as caught:
        model_of(path, mmap=True)
    with pytest.raises(ChecksumError) as copied:
        model_of(path)
    assert str(caught.value) == str(copied.value)
    assert caught.value.offset == copied.value.offset
    unverified = model_of(path, mmap=True, verify=False)["w"]
    assert np.flatnonzero((unverified != WEIGHT).any(axis=1)).tolist() == [2]


@pytest.mark.parametrize("make", MAKERS[:2])
def test_only_requested_rows_are_compared(make, tmp_path):
    path, file = make(tmp_path / "x")
    damage(file, 2)
    part = {"world_size": 3, "layout": "rows", "mmap": True}
    for rank in (0, 2):
        rows = mlstate.load(path, rank=rank, **part).model["w"]
        assert np.array_equal(rows, WEIGHT[2 * rank : 2 * rank + 2])
    with pytest.raises(ChecksumError):
        mlstate.load(path, rank=1, **part)


@pytest.mark.parametrize("section", ["params", "optim_state", "states"])
def test_every_section_is_compared(section, tmp_path):
    mlstate.save(tmp_path / "c", {"w": WEIGHT}, {"w.m": WEIGHT}, states={"ema": {"w": WEIGHT}})
    damage(next((tmp_path / "c" / section).iterdir()), 5)
    with pytest.raises(ChecksumError):
        mlstate.load(tmp_path / "c", mmap=True)


def test_files_without_checksums_are_only_mapped(tmp_path):
    folder = write_folder(tmp_path / "x", {"w": WEIGHT})
    damage(folder / "model.safetensors", 1)
    assert mlstate.load(folder, mmap=True).model["w"][1, 10] != WEIGHT[1, 10]
    assert load_file(folder / "model.safetensors", mmap=True)["w"][1, 10] != WEIGHT[1, 10]


def test_progress_counts_the_compared_bytes(tmp_path):
    path, _ = own_folder(tmp_path / "x")
    for verify, expected in ((True, WEIGHT.nbytes), (False, 0)):
        counts = []
        mlstate.load(path, mmap=True, verify=verify, progress=counts.append)
        assert sum(counts) == expected


@counts_reads
@pytest.mark.parametrize("make", MAKERS)
def test_verified_bytes_are_read_once(make, tmp_path):
    path, _ = make(tmp_path / "x")
    for verify, most in ((True, WEIGHT.nbytes), (False, 0)):
        before = bytes_read()
        model_of(path, mmap=True, verify=verify)
        assert most <= bytes_read() - before < most + (1 << 18)


@needs_status
@pytest.mark.parametrize("make", [own_folder, own_file])
def test_comparing_takes_no_second_copy(make, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.WEIGHT", np.zeros((6 * 24, ROW), np.float32))
    path, _ = make(tmp_path / "x")
    code = f"""{STATUS}
import sys, mlstate
load = mlstate.load if {path.is_dir()} else mlstate.load_file
before = status("VmRSS")
kept = load(sys.argv[1], mmap=True)
print(status("VmHWM") - before)
"""
    assert int(run_child(code, str(path))) < 32 << 20  # of 144 MiB
