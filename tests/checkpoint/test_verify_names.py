"""Verify chosen tensors only."""

from pathlib import Path

import numpy as np
import pytest
from checkpoint_model import flip_shard
from weight_folder import write_weight_file

import mlstate
from mlstate.cli import main

MODEL = {f"layers.{i}.w": np.full(1000, float(i)) for i in range(3)}


@pytest.fixture
def path(tmp_path):
    saved = mlstate.save(tmp_path / "ckpt", MODEL, {"layers.1.w.m": np.ones(9)}, pack_below_bytes=0)
    flip_shard(tmp_path / "ckpt", next(s for s in saved.shards() if s.key == "layers.1.w"), 2)
    return str(tmp_path / "ckpt")


def test_only_the_chosen_tensors_are_read(path, capsys):
    assert mlstate.verify(path, names="layers.2").bytes == 8000
    assert mlstate.verify(path, names=["layers.0", "layers.2"])
    [problem] = mlstate.verify(path, names="layers.[01].*").problems
    assert (problem.kind, problem.name) == ("altered", "layers.1.w")
    assert problem.path.startswith("params/layers.1.w")
    assert main(["verify", path, "--names", "layers.2", "--names", "layers.0.*"]) == 0
    assert "good" in capsys.readouterr().out
    assert main(["verify", path, "--names", "layers.1"]) == 1
    assert "altered" in capsys.readouterr().out


def test_a_missing_file_is_a_problem(path):
    [file] = Path(path).glob("params/layers.0.w*")
    file.unlink()
    [problem] = mlstate.verify(path, names="layers.0").problems
    assert problem.kind == "missing" and problem.path == f"params/{file.name}"
    assert mlstate.verify(path, names="layers.2")


def test_a_file_of_safetensors(tmp_path, capsys):
    path = str(tmp_path / "w.safetensors")
    mlstate.save_file(MODEL, path)
    assert mlstate.verify(path, names="layers.2").bytes == 8000
    assert main(["verify", path, "--names", "layers.2"]) == 0
    assert "good, 7.81 KiB read" in capsys.readouterr().out


def test_layers_of_sparse_shards_count_as_checksums(tmp_path):
    weights = {"w": np.eye(300), "zeros": np.zeros(3000), "dense": np.ones(3)}
    mlstate.save(tmp_path / "ckpt", weights, sparse=True)
    for name in weights:
        report = mlstate.verify(tmp_path / "ckpt", names=name)
        assert report.checksums and "no checksums" not in repr(report)


@pytest.mark.parametrize("is_folder", [True, False])
def test_tensors_of_another_program_are_compared_with_their_checksums(tmp_path, is_folder):
    file = tmp_path / "model.safetensors"
    write_weight_file(file, {"a": np.ones(900, "f4"), "b": np.ones(3, "f4")})
    path = tmp_path if is_folder else file
    mlstate.checkpoint.checksum(path)
    report = mlstate.verify(path, names="b")
    assert report and report.bytes == 12 and report.checksums and report.compared
    with pytest.raises(mlstate.TensorNotFoundError):
        mlstate.verify(path, names="c")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert mlstate.verify(path, names="a")
    [problem] = mlstate.verify(path, names="b").problems
    assert (problem.kind, problem.name, problem.path) == ("altered", "b", file.name)
    data[20] ^= 1  # of the header
    file.write_bytes(data)
    assert not mlstate.verify(path, names="a")


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_damaged_file_of_checksums_is_a_problem_of_that_file(tmp_path, is_folder):
    file = tmp_path / "model.safetensors"
    write_weight_file(file, {"a": np.ones(3, "f4")})
    path = tmp_path if is_folder else file
    mlstate.checkpoint.checksum(path)
    [record] = tmp_path.glob("*.checksums.json")
    record.write_bytes(record.read_bytes()[:-4])
    for report in (mlstate.verify(path, names="a"), mlstate.verify(path)):
        [problem] = [each for each in report.problems if each.kind == "checksums"]
        assert (problem.path, problem.name) == (record.name, None)
        assert not report.checksums and not report.compared


def test_a_damaged_index_is_a_problem(path):
    [index] = Path(path).glob("index/*")
    index.write_bytes(index.read_bytes()[:-1])
    [problem] = mlstate.verify(path, names="layers.2").problems
    assert (problem.kind, problem.path) == ("index", f"index/{index.name}")


def test_wrong_choices_are_refused(path, tmp_path, capsys):
    with pytest.raises(mlstate.TensorNotFoundError, match=r"did you mean 'layers\.2\.w'"):
        mlstate.verify(path, names="layers.2.v")
    with pytest.raises(ValueError, match="leave out names"):
        mlstate.verify(path, names="layers.2", repair=True)
    np.savez(tmp_path / "a.npz", **MODEL)
    with pytest.raises(ValueError, match="verified as a whole"):
        mlstate.verify(tmp_path / "a.npz", names="layers.2")
    for option in ("--repair", "--all-steps"):
        assert main(["verify", path, "--names", "layers.2", option]) == 2
        assert "--names cannot" in capsys.readouterr().err
