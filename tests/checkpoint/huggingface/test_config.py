"""An export's config.json has the dtype of its weights, and other files are kept."""

import json

import ml_dtypes
import numpy as np
import pytest
from weight_folder import write_folder

import mlstate
from mlstate.checkpoint import export_huggingface
from mlstate.cli import main

CONFIG = {
    "model_type": "x",
    "dtype": "bfloat16",
    "text_config": {"torch_dtype": "float16", "dtype": None},
    "name": "é",
}


def exported_config(tmp_path, config, state):
    (tmp_path / "source").mkdir(exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "source" / "config.json").write_text(text)
    export_huggingface(tmp_path / "out", state, files_from=tmp_path / "source")
    return (tmp_path / "out" / "config.json").read_text()


def test_every_dtype_of_the_config_follows_the_weights(tmp_path):
    state = {"w": np.ones((4, 4), np.float32), "n": np.ones(3, np.int64), "b": np.ones(2, np.half)}
    config = json.loads(exported_config(tmp_path, CONFIG, state))
    assert config == CONFIG | {
        "dtype": "float32",
        "text_config": {"torch_dtype": "float32", "dtype": None},
    }


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, ml_dtypes.bfloat16),
        ({"torch_dtype": "torch.float32"}, np.float32),
        ({"dtype": "bfloat16"}, np.int8),
        ({"dtype": "bfloat16"}, ml_dtypes.float8_e4m3fn),
        ({"dtype": "bfloat16", "quantization_config": {}}, ml_dtypes.float8_e4m3fn),
        ({"dtype": {"": "bfloat16"}}, np.float32),
        ({"a": [1]}, np.float32),
        ("[1]", np.float32),
        ("{", np.float32),
        ("[" * 100_000, np.float32),
        ("\ufeff{}", np.float32),
    ],
)
def test_other_configs_keep_their_bytes(tmp_path, config, dtype):
    text = config if isinstance(config, str) else json.dumps(config)
    assert exported_config(tmp_path, config, {"w": np.ones(4, dtype)}) == text


def test_convert_keeps_the_files_of_a_hugging_face_folder(tmp_path, capsys):
    source = write_folder(tmp_path / "m", {"w": np.ones(4, np.float32)}, 1)
    (source / "tokenizer.json").write_text("t")
    out = tmp_path / "out"
    assert main(["convert", str(source), str(out), "--to", "huggingface"]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    (tmp_path / "other").mkdir()
    words = ["convert", str(source), str(out), "--to", "huggingface", "--overwrite"]
    assert main([*words, "--files-from", str(tmp_path / "other")]) == 2
    assert "would lose 'config.json', which --files-from does not copy" in capsys.readouterr().err
    for name in ("config.json", "tokenizer.json"):
        (out / name).unlink()
    assert main([*words, "--files-from", str(tmp_path / "other")]) == 0
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    mlstate.save(tmp_path / "own", {"w": np.ones(4)})
    words = ["convert", str(tmp_path / "own"), str(tmp_path / "new"), "--to", "huggingface"]
    assert main(words) == 0, capsys.readouterr().err
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]


def test_quantized_sections_keep_their_dtype(tmp_path):
    quantized = {"dtype": "bfloat16", "quantization_config": {"dtype": "bfloat16"}}
    config = {"dtype": "bfloat16", "quantization_config": None, "text_config": quantized}
    codes = np.ones((2, 2), ml_dtypes.float8_e4m3fn)
    state = {"w": np.ones(2, np.float32), "c": codes}
    written = json.loads(exported_config(tmp_path, config, state))
    assert written == config | {"dtype": "float32"}


def test_invalid_unicode_of_a_config_is_kept(tmp_path):
    config = {"dtype": "bfloat16", "token": "\ud800"}
    written = json.loads(exported_config(tmp_path, config, {"w": np.ones(2, np.float32)}))
    assert written == config | {"dtype": "float32"}


def test_the_index_of_a_variant_is_not_copied(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "model.safetensors.index.fp16.json").write_text("{}")
    exported_config(tmp_path, {}, {"w": np.ones(2, np.float32)})
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors"}
