"""Values of quantized weights have the bits of transformers' own functions."""

import json

import numpy as np
import pytest

import mlstate
from mlstate.checkpoint import Layout

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")

DTYPES = ["bfloat16", "float16", "float32"]


def write(folder, quantization, tensors):
    folder.mkdir()
    safetensors_torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return folder


def check_parts(folder, name, expected, dtype):
    """Compare the whole, and every part of some layouts, bit for bit."""
    for layout in (Layout(), Layout.rows(2), Layout.axis(1, 3), Layout.axis(1, 8)):
        for rank in range(layout.parts):
            loaded = mlstate.load(folder, cast=dtype, layout=layout, rank=rank).model[name]
            part = layout.take(expected, rank).contiguous()
            assert tuple(loaded.shape) == tuple(part.shape)
            assert loaded.tobytes() == part.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_fp8(tmp_path, dtype):
    torch.manual_seed(0)
    codes = (torch.randn(384, 256) * 20).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = write(tmp_path / "m", config, {"l.weight": codes, "l.weight_scale_inv": scales})
    reference = fp8.Fp8Dequantize(None)
    expected = reference._dequantize_one(codes, scales, getattr(torch, dtype))
    check_parts(folder, "l.weight", expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_mxfp4(tmp_path, dtype):
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (2, 40, 6, 16), dtype=torch.uint8)
    exponents = torch.randint(0, 255, (2, 40, 6), dtype=torch.uint8)  # 255 is NaN, there infinity
    tensors = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": exponents}
    folder = write(tmp_path / "m", {"quant_method": "mxfp4"}, tensors)
    expected = mxfp4.convert_moe_packed_tensors(blocks, exponents, dtype=getattr(torch, dtype))
    check_parts(folder, "experts.down_proj", expected, dtype)


def test_dtype_of_the_model_in_torch(tmp_path):
    codes = torch.ones(2, 3).to(torch.float8_e4m3fn)
    tensors = {"w": codes, "w_scale_inv": torch.tensor([0.5])}
    folder = write(tmp_path / "m", {"quant_method": "fp8"}, tensors)
    loaded = mlstate.load(folder, cast=torch.bfloat16, device="cpu").model["w"]
    assert torch.equal(loaded, torch.full((2, 3), 0.5, dtype=torch.bfloat16))
    assert np.array_equal(mlstate.load(folder, cast="float64").model["w"], np.full((2, 3), 0.5))
