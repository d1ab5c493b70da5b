"""The ``.bin`` files of torch in Hugging Face folders are read by convert, whole and checked."""

import json

import numpy as np
import pytest
from any_format import read_any
from weight_folder import write_folder

import mlstate
from mlstate.checkpoint._convert.formats import format_of
from mlstate.cli import main

torch = pytest.importorskip("torch", reason="it writes the files")
pytestmark = pytest.mark.torch
INDEX = "pytorch_model.bin.index.json"
STATE = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "c": torch.arange(4),
}


def write_torch_folder(folder, stem="pytorch_model", files=2, index=True):
    folder.mkdir()
    if files == 1:
        torch.save(STATE, folder / f"{stem}.bin")
        return folder
    listed = {}
    for number in range(files):
        name = f"{stem}-{number + 1:05d}-of-{files:05d}.bin"
        names = list(STATE)[number::files]
        torch.save({key: STATE[key] for key in names}, folder / name)
        listed |= dict.fromkeys(names, name)
    if index:
        document = {"metadata": {"total_size": 0}, "weight_map": listed}
        (folder / f"{stem}.bin.index.json").write_text(json.dumps(document))
    return folder


def assert_same(state):
    tensors = state.to_torch()
    assert set(tensors) == set(STATE)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in STATE.items())


@pytest.mark.parametrize("stem", ["pytorch_model", "adapter_model", "diffusion_pytorch_model"])
@pytest.mark.parametrize("files", [1, 2])
def test_convert_reads_all_files(tmp_path, capsys, stem, files):
    folder = write_torch_folder(tmp_path / "m", stem, files)
    (folder / "config.json").write_text('{"dtype": "bfloat16"}')
    assert format_of(folder) == "huggingface"
    assert_same(read_any(folder)[0])
    assert main(["convert", str(folder), str(tmp_path / "own")]) == 0
    assert_same(mlstate.load(tmp_path / "own").model)
    words = ["convert", str(folder), str(tmp_path / "hf"), "--to", "huggingface"]
    assert main(words) == 0, capsys.readouterr().err
    assert_same(mlstate.load(tmp_path / "hf").model)
    assert json.loads((tmp_path / "hf/config.json").read_text()) == {"dtype": "float32"}


def test_files_without_an_index_are_read_with_a_warning(tmp_path):
    folder = write_torch_folder(tmp_path / "m", index=False)
    with pytest.warns(UserWarning, match="no index of its 2 files"):
        assert_same(read_any(folder)[0])


def test_load_reads_them(tmp_path):
    assert_same(mlstate.load(write_torch_folder(tmp_path / "m")).model)


def test_safetensors_of_the_folder_are_preferred(tmp_path):
    folder = write_torch_folder(tmp_path / "m")
    write_folder(folder, {"only": np.ones(3, np.float32)})
    assert set(read_any(folder)[0]) == {"only"}


@pytest.mark.filterwarnings("ignore:.*headers are used")
def test_a_wrong_set_is_refused(tmp_path):
    folder = write_torch_folder(tmp_path / "m")
    first, second = sorted(folder.glob("*.bin"))
    torch.save({"b": STATE["b"], "a": STATE["a"]}, second)
    assert_same(read_any(folder)[0])
    torch.save({"b": STATE["b"], "a": STATE["a"] + 1}, second)
    with pytest.raises(
        mlstate.FormatError, match=r"'a' has other bytes than in pytorch_model-00001"
    ):
        read_any(folder)
    second.unlink()
    with pytest.raises(FileNotFoundError, match="pytorch_model-00002-of-00002"):
        read_any(folder)
    torch.save({"model": {"b": STATE["b"]}, "optimizer": {"param_groups": [], "state": {}}}, second)
    with pytest.raises(mlstate.FormatError, match="holds an optimizer"):
        read_any(folder)
    first.unlink()
    first.symlink_to("/dev/zero")
    with pytest.raises(mlstate.FormatError, match="not a regular file"):
        read_any(folder)


@pytest.mark.parametrize(
    "name", ["../x.bin", "/etc/x.bin", "a/b.bin", "x.safetensors", 3, "x\0.bin", "y" * 300 + ".bin"]
)
def test_an_index_that_leaves_the_folder_is_refused(tmp_path, name):
    folder = write_torch_folder(tmp_path / "m")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["a"] = name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(mlstate.FormatError, match=r"the file of 'a'"):
        read_any(folder)


@pytest.mark.parametrize("text", ["", "[]", "[" * 1000, '{"weight_map": 3}', "\xff"])
def test_a_malformed_index_is_refused(tmp_path, text):
    folder = write_torch_folder(tmp_path / "m")
    (folder / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(mlstate.FormatError, match="index"):
        read_any(folder)


def test_warning_lists_entries_that_are_not_weights(tmp_path):
    weights = {name: torch.ones(2) for name in ("w", "v")}
    torch.save({"model": weights, "ema": weights, "note": "x"}, tmp_path / "pytorch_model.bin")
    with pytest.warns(UserWarning, match="left out: 'ema', 'note'"):
        assert set(read_any(tmp_path).model) == {"w", "v"}
