"""`verify` on safetensors files: it reads headers as the loader does, and checks every bit."""

import itertools

import numpy as np
import pytest

import mlstate
from mlstate._common.dtypes import DTYPES, numpy_dtype
from mlstate.checkpoint._files.safetensors_verify import BLOCK, read_header, verify_file


def test_header_matches_loaded_tensors(tmp_path):
    pytest.importorskip("ml_dtypes", reason="bfloat16 and 8-bit floats")
    state = {i.name: np.zeros((2, 3), numpy_dtype(i.name)) for i in DTYPES} | {
        "none": np.ones((0, 4)),
        "0d": np.ones(()),
    }
    path = tmp_path / "a.safetensors"
    mlstate.save_file(state, path, {"a": "b"})
    header = read_header(str(path))
    assert header.has_checksums
    loaded = mlstate.load_file(path)
    assert {t.key: t.nbytes for t in header.tensors} == {
        key: array.nbytes for key, array in loaded.items()
    }
    with path.open("rb") as file:
        for tensor in header.tensors:
            file.seek(tensor.offset)
            assert file.read(tensor.nbytes) == loaded[tensor.key].tobytes()


def test_every_flipped_byte_is_found(tmp_path):
    path = tmp_path / "a.safetensors"
    mlstate.save_file({"w": np.arange(40, dtype=np.int16), "b": np.ones(3)}, path, {"k": "v"})
    raw = path.read_bytes()
    assert verify_file(path)
    for offset in range(len(raw)):
        path.write_bytes(raw[:offset] + bytes([raw[offset] ^ 1 << offset % 8]) + raw[offset + 1 :])
        report = verify_file(path)
        assert not report, offset


def test_damage_is_reported_per_tensor_and_block(tmp_path):
    path = tmp_path / "a.safetensors"
    mlstate.save_file({"a": np.zeros(4 * BLOCK, np.uint8), "b": np.zeros(100, np.uint8)}, path)
    starts = {t.key: t.offset for t in read_header(str(path)).tensors}
    with path.open("r+b") as file:
        for place in (starts["a"] + 5, starts["a"] + BLOCK, starts["a"] + 4 * BLOCK - 1):
            file.seek(place)
            file.write(b"!")
        file.seek(starts["b"] + 99)
        file.write(b"!")
    report = verify_file(path)
    assert [(p.name, p.offset - starts[p.name], p.length) for p in report.problems] == [
        ("a", 0, 2 * BLOCK),
        ("a", 3 * BLOCK, BLOCK),
        ("b", 0, 100),
    ]
    assert {(p.kind, p.path) for p in report.problems} == {("altered", path.name)}


def test_progress_counts_every_byte(tmp_path):
    path = tmp_path / "a.safetensors"
    mlstate.save_file({"a": np.zeros(2 * BLOCK + 7, np.uint8), "b": np.zeros(0)}, path)
    counts = []
    report = verify_file(path, counts.append)
    assert list(itertools.accumulate(counts))[-1] == report.bytes == 2 * BLOCK + 7


def test_a_missing_file_and_a_folder_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError):
        verify_file(tmp_path / "no")
    with pytest.raises(mlstate.MLStateError):
        read_header(str(tmp_path))
