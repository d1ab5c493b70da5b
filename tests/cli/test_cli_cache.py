"""``mlstate cache``: prompt cache files of two generations of mlx-lm, shown and converted."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from mlstate import load_file, save_file
from mlstate.checkpoint import load_metadata

GOLDEN = Path(__file__).parents[1] / "golden" / "prompt_caches"
FILES = sorted(GOLDEN.glob("*.safetensors"))


def output_of(run, *arguments):
    """The text that a command prints."""
    status, out, err = run(*arguments)
    assert (status, err) == (0, [])
    return "\n".join(out)


@pytest.fixture
def prompt(run, tmp_path):
    """A file of 0.32 with a ring and full attention."""
    path = tmp_path / "prompt.safetensors"
    run("cache", "convert", GOLDEN / "window_and_full-0.31.3.safetensors", path)
    return path


def test_show_lists_the_layers(run, prompt):
    text = output_of(run, "cache", "show", prompt)
    assert "prompt cache of mlx-lm 0.32 or later, 2 layers, 13 tokens" in text
    assert "with checksums" in text and '"model": "tiny"' in text
    rows = [line.split() for line in text.splitlines()]
    ring = ["0", "RotatingKVCache", "13", "offset", "13,", "keep", "0,", "max_size", "8,", "_idx"]
    assert ring in [row[: len(ring)] for row in rows]
    assert ["1", "KVCache", "13", "offset", "13"] in [row[:5] for row in rows]


def test_show_prints_json(run, prompt):
    data = json.loads(output_of(run, "cache", "show", prompt, "--json"))
    assert (data["mlx_lm"], data["tokens"], data["checksums"]) == ("0.32", 13, True)
    assert data["metadata"]["model"] == "tiny" and data["path"] == str(prompt)
    ring, full = data["layers"]
    assert ring["numbers"] == {"offset": 13, "keep": 0, "max_size": 8, "_idx": 1}
    assert full["arrays"]["keys"] == {"shape": [1, 2, 13, 4], "dtype": "float16", "bytes": 208}
    arrays = [array for layer in (ring, full) for array in layer["arrays"].values()]
    assert data["bytes"] == sum(array["bytes"] for array in arrays)
    old = json.loads(output_of(run, "cache", "show", GOLDEN / "list-0.31.3.safetensors", "--json"))
    assert (old["mlx_lm"], old["checksums"]) == ("0.31", False)
    assert [layer["layer"] for layer in old["layers"]] == ["0", "0.0", "0.1", "0.2"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_0_31_comes_back_from_0_32(run, tmp_path, path):
    """The writer of 0.31 gives the arrays and texts of mlx-lm 0.31.3 itself."""
    new, old = tmp_path / "new.safetensors", tmp_path / "old.safetensors"
    run("cache", "convert", path, new)
    assert load_metadata(new)["2.0"] == ""
    assert output_of(run, "cache", "convert", new, old, "--to", "0.31").endswith("0.31 or earlier")
    arrays, expected = load_file(old), load_file(path)
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name].view(np.uint8), array.view(np.uint8))
    texts = load_metadata(path)
    if texts["2.0"] == "BatchRotatingKVCache" and texts["0.0.3"] == "False":
        texts["0.0.3"] = ""  # which mlx-lm 0.31 reads as false
    assert load_metadata(old) == texts


def test_files_are_shown_and_converted_without_mlx(run, prompt, tmp_path, monkeypatch):
    for name in ("mlx", "mlx_lm"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "2 layers" in output_of(run, "cache", "show", prompt)
    target = tmp_path / "old.safetensors"
    output_of(run, "cache", "convert", prompt, target, "--to", "0.31")
    assert load_metadata(target)["2.1"] == "KVCache"


def test_damaged_arrays_are_not_excused_by_metadata(refused, prompt, tmp_path):
    content = bytearray(prompt.read_bytes())
    content[-3] ^= 1
    prompt.write_bytes(content)
    text = refused("cache", "convert", prompt, tmp_path / "target.safetensors")
    assert "its bytes have changed" in text and "--no-verify" not in text


def test_convert_replaces_other_tensors_only_by_overwrite(run, refused, prompt, tmp_path):
    target = tmp_path / "other.safetensors"
    save_file({"w": np.ones(2)}, target)
    before = target.read_bytes()
    text = refused("cache", "convert", prompt, target)
    assert "exists" in text and target.read_bytes() == before
    data = json.loads(output_of(run, "cache", "convert", prompt, target, "--overwrite", "--json"))
    assert data["source_mlx_lm"] == data["target_mlx_lm"] == "0.32"
    assert data["target"] == str(target) and data["layers"] == 2
    assert load_metadata(target) == load_metadata(prompt)
    assert run("cache", "convert", prompt, target)[0] == 0  # the same again
    target.write_bytes(b"other")
    text = refused("cache", "convert", prompt, target, "--overwrite")
    assert "choose another path" in text and target.read_bytes() == b"other"
    text = refused("cache", "convert", prompt, prompt, "--overwrite")
    assert "the target must be another path than the source" in text


@pytest.mark.parametrize("action", ["show", "convert"])
def test_other_files_are_refused(refused, tmp_path, action):
    path, target = tmp_path / "weights.safetensors", tmp_path / "target.safetensors"
    save_file({"w": np.zeros(3)}, path)
    more = [target] if action == "convert" else []
    text = refused("cache", action, path, *more)
    assert "does not have the class names of a prompt cache of mlx-lm" in text
    path.write_bytes(b"no header")
    assert refused("cache", action, path, *more).startswith(f"mlstate: {path}: ")
    text = refused("cache", action, tmp_path / "absent", *more)
    assert "No such file" in text
    assert not target.exists() and len(list(tmp_path.iterdir())) == 1


def test_texts_of_a_file_cannot_control_the_terminal(run, refused, tmp_path):
    path = tmp_path / "prompt.safetensors"
    texts = {"2.0": "", "1.0": "\x1b[31mred", "0.x": "\x1b]0;title\x07"}
    save_file({}, path, texts)
    text = refused("cache", "show", path)
    assert "\x1b" not in text
    save_file({}, path, {"2.0": "", "0.x": "\x1b]0;title\x07"})
    assert "\x1b" not in output_of(run, "cache", "show", path)


def test_layers_that_0_31_does_not_store_are_refused(refused, tmp_path):
    def scalars(*names):
        return {f"2.{i + 1}.{j}": text for i, n in enumerate(names) for j, text in enumerate(n)}

    none = np.zeros(0, np.float32)
    path, target = tmp_path / "prompt.safetensors", tmp_path / "old.safetensors"
    empty = {"0.0": none, "0.1": none, "0.2": np.int32(0)}
    kinds = scalars(("0.0", "none"), ("0.1", "none"), ("0.2", "scalar"))
    save_file(empty, path, {"2.0": "", "1.0": "KVCache", **kinds})
    text = refused("cache", "convert", path, target, "--to", "0.31")
    assert "mlx-lm 0.31 does not store a layer without tokens" in text
    rows = np.zeros((1, 1, 8, 2), np.float16)
    chunks = {"0.0": rows, "0.1": rows, "0.2": np.int32(9), "0.3": np.int32(4), "0.4": np.int32(5)}
    kinds = scalars(*((f"0.{i}", "scalar") for i in (2, 3, 4)))
    save_file(chunks, path, {"2.0": "", "1.0": "ChunkedKVCache", **kinds}, overwrite=True)
    text = refused("cache", "convert", path, target, "--to", "0.31")
    assert "does not store the number of tokens of a layer that dropped some" in text
    states = {"0.0.0": rows, "0.1": np.zeros(1, np.int32), "0.2": none}
    save_file(
        states, path, {"2.0": "", "1.0": "ArraysCache", **scalars(("0.2", "none"))}, overwrite=True
    )
    text = refused("cache", "convert", path, target, "--to", "0.31")
    assert "does not store left_padding or lengths" in text
    states = {"0.0.0": none, "0.1": none, "0.2": none}
    kinds = scalars(*((name, "none") for name in states))
    save_file(states, path, {"2.0": "", "1.0": "ArraysCache", **kinds}, overwrite=True)
    text = refused("cache", "convert", path, target, "--to", "0.31")
    assert "does not store a state that is None" in text
    assert not target.exists()
