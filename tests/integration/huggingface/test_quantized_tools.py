"""Values of quantized weights have the bits of the decoders of compressed-tensors and torchao."""

import json

import numpy as np
import pytest

import mlstate
from mlstate.checkpoint import Layout

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
DTYPES = ["bfloat16", "float32"]


def write(folder, quantization, tensors):
    folder.mkdir()
    safetensors_torch.save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    config = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def check(folder, name, expected, dtype):
    """Compare the whole and parts with a tensor, bit for bit."""
    expected = expected.to(getattr(torch, dtype))
    for layout in (Layout(), Layout.rows(3), Layout.axis(1, 3)):
        for rank in range(layout.parts):
            loaded = mlstate.load(folder, cast=dtype, layout=layout, rank=rank).model[name]
            part = layout.take(expected, rank).contiguous()
            assert tuple(loaded.shape) == tuple(part.shape)
            assert loaded.tobytes() == part.view(torch.uint8).numpy().tobytes()


# ---- compressed-tensors: what its own writer writes, as its own reader reads it ----

SCHEMES = {
    "float-quantized": [
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 32]},
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 48},
    ],
    "int-quantized": [
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        {"num_bits": 8, "type": "int", "strategy": "tensor"},
    ],
    "mxfp4-pack-quantized": [
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    ],
    "mxfp8-quantized": [
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
    ],
    "nvfp4-pack-quantized": [
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ],
}
CASES = [(name, weights) for name, each in SCHEMES.items() for weights in each]
SHAPE = (128, 96)


def scales_of(name, weights):
    """Return scales of a scheme as its observer computes them: shape and dtype are its own."""
    rows, columns = SHAPE
    block = weights.get("block_structure")
    grids = {
        "tensor": (1,),
        "channel": (rows, 1),
        "block": block and (rows // block[0], columns // block[1]),
        "group": (rows, columns // weights.get("group_size", 1)),
        "tensor_group": (rows, columns // weights.get("group_size", 1)),
    }
    scales = torch.rand(grids[weights["strategy"]]) + 0.1
    if name.startswith("mx"):
        return torch.exp2(torch.floor(torch.log2(scales)))
    return scales if name == "nvfp4-pack-quantized" else scales.to(torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "weights"), CASES)
@pytest.mark.parametrize("has_config", [True, False])
def test_layouts_of_compressed_tensors(tmp_path, name, weights, dtype, has_config):
    base = pytest.importorskip("compressed_tensors.compressors.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    torch.manual_seed(0)
    args = quantization.QuantizationArgs(**weights, symmetric=True)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    compressor = base.BaseCompressor.get_value_from_registry(name)
    state = {"weight": torch.randn(SHAPE, dtype=torch.bfloat16) * 3}
    state["weight_scale"] = scales_of(name, weights)
    if name == "nvfp4-pack-quantized":
        state["weight_global_scale"] = torch.tensor([37.5])
    stored = compressor.compress(state, scheme)
    config = {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    tensors = {f"l.{key}": tensor for key, tensor in stored.items()}
    folder = write(tmp_path / "m", config if has_config else None, tensors)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    if not has_config and weights.get("group_size") == 48:  # two groups may be of 48 or 64
        with pytest.raises(mlstate.FormatError, match="quantization_config with blocks"):
            mlstate.load(folder, cast=dtype)
        return
    check(folder, "l.weight", expected, dtype)


# ---- transformers: DeepSeek-V4 and Mistral ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_experts_of_deepseek_v4(tmp_path, dtype):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    torch.manual_seed(0)
    codes = (torch.randn(256, 384) * 20).to(torch.float8_e4m3fn)
    scales = torch.randint(110, 140, (2, 3), dtype=torch.uint8)
    experts = torch.randint(-128, 128, (96, 64), dtype=torch.int8)
    expert_scales = torch.randint(110, 140, (96, 4), dtype=torch.uint8)
    e8m0 = torch.float8_e8m0fnu
    tensors = {"l.weight": codes, "l.scale": scales.view(e8m0)}
    tensors |= {"e.weight": experts, "e.scale": expert_scales.view(e8m0)}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    folder = write(tmp_path / "m", config, tensors)
    reference = fp8.Fp8Dequantize(None)
    for name in "le":
        pair = tensors[f"{name}.weight"], tensors[f"{name}.scale"]
        expected = reference._dequantize_one(*pair, getattr(torch, dtype))
        check(folder, f"{name}.weight", expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", ["l.qscale_weight", "l.weight_scale", "l.scale_weight"])
def test_one_scale_for_a_weight(tmp_path, dtype, scale):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    torch.manual_seed(0)
    codes, factor = (torch.randn(48, 64) * 20).to(torch.float8_e4m3fn), torch.tensor(0.0173)
    folder = write(tmp_path / "m", None, {"l.weight": codes, scale: factor})
    expected = fp8.Fp8Dequantize(None)._dequantize_one(codes, factor, getattr(torch, dtype))
    check(folder, "l.weight", expected, dtype)


# ---- torchao: NVFP4 in ModelOpt's layout ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_scales_of_nvfp4(tmp_path, dtype):
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    torch.manual_seed(0)
    second = torch.tensor(0.0123)
    weight = nvfp4.NVFP4Tensor.to_nvfp4(torch.randn(96, 64), per_tensor_scale=second)
    scales = weight.scale.view(torch.float8_e4m3fn).reshape(96, 4)
    tensors = {"l.weight": weight.qdata.view(torch.uint8), "l.weight_scale": scales}
    tensors["l.weight_scale_2"] = second
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    folder = write(tmp_path / "m", config, tensors)
    check(folder, "l.weight", weight.dequantize(torch.float32), dtype)


def test_int8_rows_as_numpy_multiplies_them(tmp_path):
    codes, scales = torch.randint(-128, 128, (8, 6), dtype=torch.int8), torch.rand(8, 1)
    folder = write(tmp_path / "m", None, {"l.weight": codes, "l.weight_scale": scales})
    expected = codes.numpy().astype(np.float32) * scales.numpy()
    assert np.array_equal(mlstate.load(folder, cast="float32").model["l.weight"], expected)


# ---- diffusers: single files of Black Forest Labs ----


@pytest.mark.parametrize("kind", ["fp8r", "nvfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_single_files_have_the_values_of_diffusers(tmp_path, kind, dtype):
    bfl = pytest.importorskip("diffusers.quantizers.bfl.utils")
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(3))
    codes, *scales = getattr(bfl, f"quantize_{kind}")(weight)
    names = ["double_blocks.0.proj.weight_scale", "double_blocks.0.proj.weight_scale_2"]
    tensors = {"double_blocks.0.proj.weight": codes, **dict(zip(names, scales, strict=False))}
    if kind == "nvfp4":
        tensors["double_blocks.0.proj.input_scale"] = torch.tensor(0.5)
    folder = write(tmp_path / "m", None, tensors)
    expected = getattr(bfl, f"dequantize_{kind}")(codes, *scales)
    check(folder, "double_blocks.0.proj.weight", expected, dtype)
    file = mlstate.load(folder / "model.safetensors", cast=dtype).model
    assert file["double_blocks.0.proj.weight"].dtype.name == dtype
