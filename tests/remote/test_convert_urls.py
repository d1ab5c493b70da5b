"""Conversion from and to checkpoints in an object store."""

import errno
import json

import numpy as np
import pytest
from any_format import read_any, write_any
from checkpoint_model import same

import mlstate
from mlstate.checkpoint import CheckpointManager, export_huggingface
from mlstate.checkpoint._convert.formats import format_of
from mlstate.cli import main
from mlstate.errors import StoreError, StoreNotFoundError

MODEL = {"w": np.arange(600.0).reshape(30, 20), "b": np.ones(3, np.float32)}
MOMENTS = {"w.m": np.full((30, 20), 2.0)}


def sources(folder):
    """Write the model in some local formats; return the paths."""
    paths = {name: str(folder / name) for name in ("checkpoint", "huggingface")}
    paths["safetensors"] = str(folder / "model.safetensors")
    mlstate.save(paths["checkpoint"], MODEL)
    export_huggingface(paths["huggingface"], MODEL)
    write_any(paths["safetensors"], MODEL)
    return paths


def test_the_command_converts_local_paths_to_a_url_and_back(url, environment, tmp_path, capsys):
    for name, path in sources(tmp_path).items():
        assert main(["convert", path, url, "--overwrite", "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert (data["target"], data["target_format"]) == (url, "mlstate")
        assert data["model"] == {"tensors": 2, "bytes": 4812}
        assert same(mlstate.load(url).model, MODEL)
        back = f"{path}-back" if name == "checkpoint" else str(tmp_path / f"back.{name}")
        if name == "huggingface":
            assert main(["convert", url, back, "--to", name]) == 0
            assert same(mlstate.load(back).model, MODEL)
        else:
            assert main(["convert", url, back]) == 0
            assert same(read_any(back)[0], MODEL)
        capsys.readouterr()
    assert mlstate.verify(url)
    assert main(["convert", url, f"{url}/copy"]) == 0
    assert same(mlstate.load(f"{url}/copy").model, MODEL)


def test_both_states_and_the_metadata_pass_through_a_url(url, options):
    write_any(url, MODEL, MOMENTS, {"run": [1, None]}, storage_options=options)
    model, optimizer, metadata, *_ = read_any(url, storage_options=options)
    assert same(model, MODEL)
    assert same(optimizer, MOMENTS)
    assert metadata == {"run": [1, None]}
    with pytest.raises(StoreError, match="overwrite=True") as caught:
        write_any(url, MODEL, storage_options=options)
    assert caught.value.errno == errno.EEXIST and url in str(caught.value)


def test_a_step_at_a_url_is_converted(url, environment, tmp_path):
    manager = CheckpointManager(url)
    for step in (1, 2):
        manager.save(step, {"w": np.full(3, step)})
    assert main(["convert", url, str(tmp_path / "one.npz"), "--step", "1"]) == 0
    assert read_any(tmp_path / "one.npz")[0]["w"].tolist() == [1, 1, 1]


def test_the_folder_of_a_file_is_another_target_than_the_file(url, environment, capsys):
    mlstate.save(url, {"w": np.ones(2)})
    assert main(["convert", f"{url}/x.safetensors", url]) == 2
    error = capsys.readouterr().err
    assert "x.safetensors" in error and "another path" not in error


def test_invalid_urls_are_refused_before_any_request(url, store, environment, capsys):
    file_url = f"{url}/model.npz"
    for arguments, text in (
        (["convert", url, url], "another path than the source"),
        (["convert", url, file_url], "the format npz is not possible in an object store"),
        (["convert", url, f"{url}/hf", "--to", "huggingface"], "the format huggingface"),
    ):
        assert main(arguments) == 2
        assert text in capsys.readouterr().err
    assert store.faults.requests == 0
    with pytest.raises(ValueError, match="storage_options are for URLs"):
        read_any("a.npz", storage_options={})
    assert format_of(url) == format_of(f"{url}/v1.5") == "mlstate"


def test_a_missing_source_at_a_url_is_one_error(url, options):
    with pytest.raises(StoreNotFoundError, match="manifest"):
        read_any(url, storage_options=options)
