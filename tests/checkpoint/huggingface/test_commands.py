"""The commands read folders of Hugging Face models."""

import json

import numpy as np
import pytest
from weight_folder import write_folder, write_index, write_weight_file

import mlstate
from mlstate.cli import main


def arrays_of():
    return {"b.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "a": np.ones(5, np.int64)}


@pytest.fixture(params=[1, 2])
def folder(request, tmp_path):
    return write_folder(tmp_path / "model", arrays_of(), request.param)


def test_inspect_prints_the_tensors(folder, capsys):
    assert main(["inspect", str(folder), "--shards"]) == 0
    text = capsys.readouterr().out
    assert "Hugging Face folder, 2 tensors, 17 parameters, 88 B in " in text
    assert "b.weight" in text
    assert main(["inspect", str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["format"], data["bytes"], data["steps"]) == ("huggingface", 88, [])
    assert [t["key"] for t in data["tensors"]] == ["a", "b.weight"]


def test_verify_reports_missing_checksums(folder, capsys):
    assert main(["verify", str(folder)]) == 0
    assert "no checksums: only its structure was looked at" in capsys.readouterr().out
    write_weight_file(folder / "other.safetensors", {"x": np.ones(1, np.float32)})
    for path in folder.glob("model*.safetensors"):
        mlstate.save_file(mlstate.load_file(path), path, {"format": "pt"}, overwrite=True)
    assert main(["verify", str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["format"], data["checksums"]) == ("huggingface", True)
    assert data["strange"] == ["other.safetensors"]
    path = next(folder.glob("model*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert main(["verify", str(folder)]) == 1
    assert "altered" in capsys.readouterr().out
    for option in (["--all-steps"], ["--repair"], ["--step", "3"]):
        assert main(["verify", str(folder), *option]) == 2


def test_diff_compares_it_with_a_checkpoint(folder, tmp_path, capsys):
    mlstate.save(tmp_path / "own", arrays_of())
    assert main(["diff", str(folder), str(tmp_path / "own")]) == 0
    mlstate.save(tmp_path / "own", arrays_of() | {"a": np.zeros(5, np.int64)})
    assert main(["diff", str(folder), str(tmp_path / "own"), "--json"]) == 1


def test_reshard_and_convert_write_checkpoints_of_it(folder, tmp_path, capsys):
    two = str(tmp_path / "two")
    assert main(["reshard", str(folder), two, "--layout", "rows", "--world-size", "2"]) == 0
    assert main(["convert", str(folder), str(tmp_path / "own")]) == 0
    assert main(["diff", two, str(tmp_path / "own")]) == 0
    assert main(["diff", two, str(folder)]) == 0


def test_a_missing_path_names_the_download_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in (["inspect"], ["verify"], ["convert"], ["diff"]):
        more = ["out"] if command in (["convert"], ["diff"]) else []
        assert main([*command, "org/name", *more]) == 2
        assert "hf download org/name --local-dir name" in capsys.readouterr().err


def test_a_stale_index_is_one_warning_line_each(tmp_path, capsys):
    folder = write_folder(tmp_path / "m", arrays_of(), 2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["ghost"] = index["weight_map"]["a"]
    write_index(folder, index["weight_map"], 0)
    for words in (["verify"], ["inspect"], ["diff", str(folder)]):
        assert main([words[0], str(folder), *words[1:]]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert len([line for line in lines if "'ghost' is not in 'model-0000" in line]) == 1
        assert len(lines) == len(set(lines))
