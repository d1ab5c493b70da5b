"""Folders of transformers' save_pretrained, and exports that from_pretrained loads."""

import json

import numpy as np
import pytest
from needs import needs
from small_models import small_models

import mlstate
from mlstate.checkpoint import export_huggingface, reshard
from mlstate.checkpoint import inspect as inspect_checkpoint
from mlstate.cli import main

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200), needs("transformers")]
torch = pytest.importorskip("torch", reason="transformers needs it")
NAMES = ["llama-tied", "t5", "gpt2", "bert", "llama"]
FIRST = [
    pytest.param(name, marks=[] if number == 0 else [pytest.mark.long])
    for number, name in enumerate(NAMES)
]


@pytest.fixture(params=FIRST)
def model(request):
    torch.manual_seed(3)
    return small_models()[request.param]().eval()


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


def same(module, reference):
    actual, expected = module.state_dict(), reference.state_dict()
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
        assert actual[name].dtype == value.dtype


def test_an_export_of_another_dtype_is_loaded_in_it(model, folder, tmp_path):
    state = {
        name: value.bfloat16() for name, value in mlstate.load(folder).model.to_torch().items()
    }
    export_huggingface(tmp_path / "out", state, files_from=folder)
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def fresh(model):
    """A model of the same class with other weights."""
    torch.manual_seed(4)
    module = type(model)(model.config)
    with pytest.raises(AssertionError):
        same(module, model)
    return module


def test_every_command_and_function_reads_the_folder(model, folder, tmp_path, capsys):
    stored = mlstate.load(folder).model
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    for name, array in stored.items():
        np.testing.assert_array_equal(array, arrays[name])
    mapped = mlstate.load(folder, mmap=True).model
    assert all(np.array_equal(mapped[name], array) for name, array in stored.items())
    module = fresh(model)
    mlstate.load(folder, into={"model": module})
    same(module, model)
    first = next(iter(stored))
    assert list(mlstate.load(folder, names=first).model) == [first]
    parts = [mlstate.load(folder, rank=r, world_size=2, layout="rows").model for r in (0, 1)]
    for name, array in stored.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)
    assert mlstate.verify(folder)
    assert {t.key for t in inspect_checkpoint(folder).tensors()} == set(stored)
    reshard(folder, tmp_path / "two", layout="rows", world_size=2)
    for command in (
        ["inspect", folder],
        ["verify", folder],
        ["diff", folder, tmp_path / "two"],
        ["reshard", folder, tmp_path / "four", "--layout", "rows", "--world-size", "4"],
        ["convert", folder, tmp_path / "own"],
        ["convert", folder, tmp_path / "w.safetensors"],
        ["diff", tmp_path / "own", tmp_path / "four"],
    ):
        assert main([*map(str, command)]) == 0, capsys.readouterr()


def test_from_pretrained_loads_an_export(model, folder, tmp_path):
    export_huggingface(tmp_path / "out", model, files_from=folder, max_shard_bytes=20_000)
    same(type(model).from_pretrained(tmp_path / "out"), model)
    index = "model.safetensors.index.json"
    listed = [json.loads((path / index).read_text()) for path in (folder, tmp_path / "out")]
    assert listed[0]["weight_map"].keys() == listed[1]["weight_map"].keys()
    totals = [weight_index["metadata"]["total_size"] for weight_index in listed]
    assert totals[0] == totals[1]


def test_from_pretrained_loads_a_converted_checkpoint(model, folder, tmp_path):
    mlstate.save(tmp_path / "own", model)
    command = ["convert", tmp_path / "own", tmp_path / "out", "--to", "huggingface"]
    assert main([*map(str, command), "--files-from", str(folder)]) == 0
    same(type(model).from_pretrained(tmp_path / "out"), model)


@pytest.mark.long
def test_a_bfloat16_model_keeps_its_bits(tmp_path):
    model = small_models()["llama"]().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    module = small_models()["llama"]().to(torch.bfloat16)
    mlstate.load(tmp_path / "model", into={"model": module})
    same(module, model)
    export_huggingface(tmp_path / "out", model, files_from=tmp_path / "model")
    same(type(model).from_pretrained(tmp_path / "out", dtype=torch.bfloat16), model)
