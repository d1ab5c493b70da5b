"""export_huggingface(dtype=): the bits of StateDict.astype, converted while they are written."""

import json

import ml_dtypes
import numpy as np
import pytest

import mlstate
from mlstate import StateDict
from mlstate.checkpoint import Layout, export_huggingface, export_huggingface_async
from mlstate.checkpoint._convert import convert as convert_module
from mlstate.cli import main
from mlstate.errors import CompatibilityError
from mlstate.testing import run_ranks

FLOATS = ["float16", "bfloat16", "float32", "float64"]


def state_of():
    rng = np.random.default_rng(1)
    wide = rng.normal(0, 9, (300, 1001))
    state = {name: wide.astype(getattr(ml_dtypes, name, name)) for name in FLOATS}
    state |= {f"{name}.columns": array.T[::-1, ::3] for name, array in state.items()}
    eight = rng.integers(0, 256, (700, 900), np.uint8)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        state[name] = eight.view(getattr(ml_dtypes, name))
        state[f"{name}.columns"] = state[name].T[1:, ::2]
    return state | {
        "swapped": wide.astype(">f8"),
        "empty": np.zeros((0, 3)),
        "point": np.float64(0.1),
        "step": np.int64(9),
        "mask": np.ones(5, bool),
        "wave": np.ones(3, np.complex64),
        "bytes": eight,
    }


def assert_same(folder, expected):
    model = mlstate.load(folder).model
    assert set(model) == set(expected)
    for name, array in expected.items():
        assert model[name].dtype == array.dtype.newbyteorder("="), name
        assert model[name].shape == array.shape
        wide = array.astype(np.complex128)
        assert np.array_equal(model[name].astype(np.complex128), wide, equal_nan=True), name
    assert mlstate.verify(folder)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.filterwarnings("ignore:invalid", "ignore:overflow")
def test_all_floats_are_written_in_the_dtype(tmp_path, dtype):
    state = state_of()
    expected = StateDict(state).astype(dtype)
    export_huggingface(tmp_path / "m", state, dtype=dtype, max_shard_bytes=1 << 20)
    assert_same(tmp_path / "m", expected)
    handle = export_huggingface_async(tmp_path / "later", state, dtype=dtype)
    handle.wait()
    assert_same(tmp_path / "later", expected)


@pytest.mark.parametrize("layout", [Layout.rows(3), Layout.axis(1, 3), Layout.flat(3)])
def test_parts_of_several_ranks(tmp_path, layout):
    w = np.random.default_rng(2).random((900, 1100), np.float32)
    codes = (w * 40).astype(ml_dtypes.float8_e4m3fn)

    def export(group):
        parts = {"w": layout.shard(w, group.rank), "codes": layout.shard(codes, group.rank)}
        parts["same"] = w[0]
        export_huggingface(tmp_path / "m", parts, group=group, dtype="bfloat16")

    run_ranks(3, export)
    assert_same(tmp_path / "m", StateDict(w=w, codes=codes, same=w[0]).astype("bfloat16"))


def test_tensors_and_ties(tmp_path):
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    module[1].weight = module[0].weight
    export_huggingface(tmp_path / "m", module, dtype=torch.bfloat16)
    model = mlstate.load(tmp_path / "m").model
    assert list(model) == ["0.bias", "0.weight", "1.bias"]
    expected = module[0].weight.detach().bfloat16().view(torch.int16).numpy()
    assert np.array_equal(model["0.weight"].view(np.int16), expected)


def test_memory_does_not_grow_with_the_model(tmp_path, peak_memory):
    state = {"w": np.ones((64, 1 << 18), np.float32)}  # 64 MiB
    before = peak_memory()
    export_huggingface(tmp_path / "m", state, dtype="bfloat16")
    assert peak_memory() - before < 8 << 20


def quantized_folder(folder, layers, shape):
    """Write a folder of block FP8, whose values are its codes times their scales."""
    folder.mkdir()
    random = np.random.default_rng(3)
    grid = tuple(-(-length // 128) for length in shape)
    tensors = {"norm": random.random(7, np.float32)}
    for layer in range(layers):
        codes = random.integers(0, 120, shape, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
        tensors |= {f"l.{layer}.w": codes, f"l.{layer}.w_scale_inv": random.random(grid, "f4")}
    mlstate.save_file(tensors, folder / "model.safetensors")
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    text = json.dumps({"dtype": "float32", "quantization_config": config})
    (folder / "config.json").write_text(text)
    return folder


def test_values_of_a_quantized_folder_are_converted_in_bounded_memory(
    tmp_path, monkeypatch, peak_memory
):
    source = quantized_folder(tmp_path / "fp8", 24, (1024, 2048))  # 96 MiB as bfloat16
    monkeypatch.setattr(convert_module, "_BATCH_BYTES", 4 << 20)
    words = ["convert", str(source), str(tmp_path / "m"), "--to", "huggingface"]
    before = peak_memory()
    assert main([*words, "--dtype", "bfloat16", "--max-shard-bytes", "10MB"]) == 0
    assert peak_memory() - before < 24 << 20
    assert mlstate.verify(tmp_path / "m")
    assert len(list((tmp_path / "m").glob("model-*.safetensors"))) > 8


@pytest.mark.parametrize("most", ["5GB", "200KB"])
def test_the_conversion_of_a_quantized_folder_equals_the_export_of_its_load(
    tmp_path, monkeypatch, most
):
    source = quantized_folder(tmp_path / "fp8", 5, (200, 300))
    monkeypatch.setattr(convert_module, "_BATCH_BYTES", 250_000)
    words = ["convert", str(source), str(tmp_path / "a"), "--to", "huggingface"]
    options = ["--dtype", "bf16", "--names", "x.[0-3].*", "--names", "norm", "--rename", "l.=x."]
    assert main([*words, *options, "--max-shard-bytes", most]) == 0
    names = ["x.[0-3].*", "norm"]
    model = mlstate.load(source, cast="bfloat16", names=names, rename={"l.": "x."}).model
    export_huggingface(
        tmp_path / "b", model, files_from=source, max_shard_bytes=most, dtype="bfloat16"
    )
    assert len(model) == 5
    contents = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab"
    ]
    assert contents[0] == contents[1]


def test_damage_in_a_quantized_folder_leaves_no_converted_one(tmp_path, capsys):
    source = quantized_folder(tmp_path / "fp8", 2, (200, 300))
    data = bytearray((source / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (source / "model.safetensors").write_bytes(data)
    words = ["convert", str(source), str(tmp_path / "m"), "--to", "huggingface"]
    assert main([*words, "--dtype", "bfloat16"]) == 2
    assert "checksum" in capsys.readouterr().err.lower()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8"]


@pytest.fixture()
def peak_memory():
    from pathlib import Path

    def peak():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

    Path("/proc/self/clear_refs").write_text("5")
    return peak


def test_the_config_follows(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    config = {"dtype": "float32", "quantization_config": {"quant_method": "fp8"}, "size": 3}
    (source / "config.json").write_text(json.dumps(config))
    state = {"w": np.ones(3), "n": np.arange(3)}
    export_huggingface(tmp_path / "m", state, dtype="bfloat16", files_from=source)
    copied = json.loads((tmp_path / "m" / "config.json").read_text())
    assert copied == {"dtype": "bfloat16", "size": 3}


def test_quantized_weights_are_refused_before_a_write(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    config = {"quantization_config": {"quant_method": "fp8"}}
    (source / "config.json").write_text(json.dumps(config))
    codes = np.ones((4, 4), ml_dtypes.float8_e4m3fn)
    state = {"w": codes, "w_scale_inv": np.ones(1, np.float32), "n": np.ones(3)}
    with pytest.raises(CompatibilityError, match=r"'w' is quantized.*cast=") as caught:
        export_huggingface(tmp_path / "m", state, dtype="bfloat16", files_from=source)
    assert caught.value.name == "w"
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    export_huggingface(tmp_path / "m", state, files_from=source)


def test_other_dtypes_are_refused(tmp_path):
    with pytest.raises(TypeError, match="dtype must be one of the dtypes"):
        export_huggingface(tmp_path / "m", {"w": np.ones(3)}, dtype="int8")
    assert list(tmp_path.iterdir()) == []
