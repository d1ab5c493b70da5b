"""`mlstate.digest` of paths: every section, damage, bounded memory; ``mlstate digest``."""

import json

import numpy as np
import pytest

import mlstate
from mlstate import ChecksumError
from mlstate.checkpoint import CheckpointManager
from mlstate.checkpoint._compare import digest as reading
from mlstate.cli import main
from mlstate.state import Digest, OptimizerStateDict
from mlstate.testing import run_ranks

RNG = np.random.default_rng(0)
MODEL = {
    "layers.0.w": RNG.normal(size=(40, 30)).astype(np.float32),
    "layers.0.b": np.zeros(40, np.float32),
    "steps": np.array(3),
    "none": np.zeros((0, 4), np.float16),
}
OPTIMIZER = {"layers.0.w.m": RNG.normal(size=(40, 30)), "layers.0.w.v": np.ones((40, 30))}
STATES = {"ema": {"w": MODEL["layers.0.w"] / 3}, "data": {"order": [np.arange(5), 2.5], "n": 3}}
WHOLE = {"model": MODEL, "optimizer": OPTIMIZER, "states": STATES}


@pytest.fixture
def folder(tmp_path):
    mlstate.save(tmp_path / "c", MODEL, OptimizerStateDict(OPTIMIZER), states=STATES)
    return tmp_path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "rows", "world_size": 3},
        {"sparse": True},
        {"compress": "zlib"},
        {"pack_below_bytes": 0},
    ],
    ids=repr,
)
def test_a_checkpoint_has_the_digest_of_its_states(tmp_path, options):
    if "layout" in options:
        mlstate.save(tmp_path / "whole", MODEL, OptimizerStateDict(OPTIMIZER), states=STATES)
        mlstate.reshard(tmp_path / "whole", tmp_path / "c", **options)
    else:
        mlstate.save(tmp_path / "c", MODEL, OptimizerStateDict(OPTIMIZER), states=STATES, **options)
    digest = mlstate.digest(tmp_path / "c")
    assert digest == mlstate.digest(WHOLE) == mlstate.digest(mlstate.load(tmp_path / "c"))
    assert digest["layers.0.w"] == mlstate.digest(MODEL)["layers.0.w"]
    assert {"optimizer.layers.0.w.m", "states.ema.w", "states.data.order.1"} <= digest.keys()


def test_a_tensor_above_the_bound_is_read_in_parts(folder, monkeypatch):
    expected = mlstate.digest(folder / "c")
    read = []
    part_of = reading.part_of
    monkeypatch.setattr(reading, "part_of", lambda a: read.append(a.nbytes) or part_of(a))
    monkeypatch.setattr(reading, "PART_BYTES", 1000)
    mlstate.reshard(folder / "c", folder / "rows", layout="rows", world_size=3)
    for path in (folder / "c", folder / "rows"):
        read.clear()
        assert mlstate.digest(path) == expected
        assert max(read) <= 1000 and len(read) > 20


@pytest.mark.parametrize("name", ["w.safetensors", "w.npz"])
def test_a_file_has_the_digest_of_its_arrays(tmp_path, name):
    path = tmp_path / name
    if name.endswith("npz"):
        np.savez(path, **MODEL)
    else:
        mlstate.save_file(MODEL, path)
    assert mlstate.digest(path) == mlstate.digest(MODEL)


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_file_of_either_byte_order_has_the_same_digest(tmp_path, order):
    arrays = {name: array.astype(array.dtype.newbyteorder(order)) for name, array in MODEL.items()}
    np.savez(tmp_path / "w.npz", **arrays)
    assert mlstate.digest(tmp_path / "w.npz") == mlstate.digest(MODEL)


def test_a_flipped_bit_is_an_error_and_no_digest(folder):
    file = max((folder / "c").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    with pytest.raises(ChecksumError):
        mlstate.digest(folder / "c")


def test_ranks_divide_the_tensors_of_a_path(folder):
    expected = mlstate.digest(folder / "c")
    assert run_ranks(3, lambda group: mlstate.digest(folder / "c", group=group)) == [expected] * 3


def test_the_command_prints_and_compares(folder, capsys):
    mlstate.save_file(MODEL, folder / "m.safetensors")
    (folder / "golden.json").write_text(mlstate.digest(MODEL).to_json())
    mlstate.save(folder / "d", {**MODEL, "steps": np.array(4)})

    assert main(["digest", str(folder / "c")]) == 0
    assert "optimizer.layers.0.w.m" in capsys.readouterr().out
    assert main(["digest", str(folder / "m.safetensors"), str(folder / "golden.json")]) == 0
    assert capsys.readouterr().out == "identical: 4 tensors\n"
    assert main(["digest", str(folder / "m.safetensors"), str(folder / "d")]) == 1
    assert "1 changed, 3 unchanged" in capsys.readouterr().out
    assert main(["digest", str(folder / "m.safetensors"), str(folder / "d"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["changed"][0]["name"] == "steps"
    assert main(["digest", str(folder / "d"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["digest"] == str(mlstate.digest(folder / "d"))
    assert printed["tensors"]["steps"][:2] == ["int64", []]
    assert main(["digest", str(folder / "nothing")]) == 2
    (folder / "other.json").write_text("{}")
    assert main(["digest", str(folder / "other.json")]) == 2
    assert "not the JSON of a digest" in capsys.readouterr().err


def test_the_command_compares_steps_of_a_run(tmp_path, capsys):
    manager = CheckpointManager(tmp_path / "run", keep=2)
    manager.save(1, MODEL)
    manager.save(2, {**MODEL, "steps": np.array(4)})
    run = str(tmp_path / "run")
    assert main(["digest", run, run, "--first-step", "1", "--second-step", "2"]) == 1
    assert "steps" in capsys.readouterr().out
    assert main(["digest", run, run, "--first-step", "2"]) == 0


def test_the_command_names_digests_that_were_recorded(tmp_path, capsys):
    mlstate.save(tmp_path / "recorded", MODEL, digest=True)
    mlstate.save(tmp_path / "read", MODEL)
    for name, is_told in (("recorded", True), ("read", False)):
        assert main(["digest", str(tmp_path / "read"), str(tmp_path / name)]) == 0
        assert ("mlstate verify reads the files" in capsys.readouterr().out) == is_told


def test_json_of_a_checkpoint_is_readable(folder):
    assert Digest.from_json(mlstate.digest(folder / "c").to_json()) == mlstate.digest(WHOLE)
