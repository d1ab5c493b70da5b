"""Quantized weights: cast= computes their values, and wrong scales are refused by name."""

import json

import ml_dtypes
import numpy as np
import pytest

import mlstate
from mlstate import FormatError, save_file
from mlstate.checkpoint import Layout
from mlstate.errors import CompatibilityError

EIGHT = ml_dtypes.float8_e4m3fn
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
FOUR_BITS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
pytestmark = pytest.mark.filterwarnings("ignore:overflow")
rng = np.random.default_rng(8)


def packed(**weights):
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8} | weights}},
    }


def write(folder, quantization, **arrays):
    folder.mkdir(exist_ok=True)
    config = quantization if isinstance(quantization, bytes) else None
    text = config or json.dumps({"quantization_config": quantization}).encode()
    (folder / "config.json").write_bytes(text)
    save_file(
        {name.replace("__", "."): a for name, a in arrays.items()}, folder / "model.safetensors"
    )
    return folder


def eight_bits(*shape):
    return rng.normal(0, 20, shape).astype(np.float32).astype(EIGHT)


def scales(*shape):
    return rng.random(shape, np.float32) + np.float32(0.1)


def spread(scale, block, shape):
    """Return the scale of each element."""
    wide = scale.repeat(block[0], -2).repeat(block[1], -1)
    return wide[..., : shape[-2], : shape[-1]]


def expected_of(codes, scale, block):
    return codes.astype(np.float32) * spread(scale, block, codes.shape)


def groups(*shape):
    """Return blocks, exponents and values of MXFP4."""
    experts, rows, count = shape
    blocks = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
    exponents = rng.integers(100, 150, shape, dtype=np.uint8)
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*shape, 32)
    numbers = np.where(codes & 8, -1, 1).astype(np.float32) * FOUR_BITS[codes & 7]
    values = np.ldexp(numbers, exponents[..., None].astype(np.int32) - 127)
    return blocks, exponents, values.reshape(experts, rows, 32 * count).transpose(0, 2, 1)


# ---- values ----


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(256, 384), (200, 130), (1, 5), (2, 130, 200)])
def test_blocks_of_fp8_are_multiplied_by_their_scale(tmp_path, shape, dtype):
    codes = eight_bits(*shape)
    scale = scales(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    arrays = {"l__weight": codes, "l__weight_scale_inv": scale, "l__activation_scale": scales(1)}
    folder = write(tmp_path / "m", FP8, norm=np.ones(3, np.float32), **arrays)
    model = mlstate.load(folder, cast=dtype).model
    assert list(model) == ["l.weight", "norm"]
    expected = expected_of(codes, scale, (128, 128)).astype(model["l.weight"].dtype)
    assert model["l.weight"].tobytes() == expected.tobytes()
    assert str(model["norm"].dtype) == dtype
    stored = mlstate.load(folder).model
    assert stored["l.weight"].tobytes() == codes.tobytes()
    assert "l.weight_scale_inv" in stored


@pytest.mark.parametrize(
    ("weights", "shape", "block"),
    [
        ({"strategy": "tensor"}, (1,), (256, 384)),
        ({"strategy": "tensor"}, (), (256, 384)),
        ({"strategy": "channel"}, (256, 1), (1, 384)),
        ({"strategy": "block", "block_structure": [128, 64]}, (2, 6), (128, 64)),
        ({"strategy": "group", "group_size": 96}, (256, 4), (1, 96)),
    ],
)
def test_scales_of_compressed_tensors(tmp_path, weights, shape, block):
    codes, scale = eight_bits(256, 384), scales(*shape)
    arrays = {"l__weight": codes, "l__weight_scale": scale, "l__input_scale": scales(1)}
    folder = write(tmp_path / "m", packed(**weights), **arrays)
    model = mlstate.load(folder, cast="float32").model
    assert list(model) == ["l.weight"]
    grid = scale.reshape(1, 1) if scale.size == 1 else scale
    assert np.array_equal(model["l.weight"], expected_of(codes, grid, block))


def test_scales_that_fit_blocks_of_two_groups_are_refused(tmp_path):
    blocks = [[64, 64], [80, 80]]
    groups = [packed(block_structure=each)["config_groups"]["group_0"] for each in blocks]
    config = packed() | {"config_groups": dict(zip("ab", groups, strict=True))}
    arrays = {"a": eight_bits(100, 100), "a_scale": scales(2, 2)}
    arrays |= {"b": eight_bits(160, 160), "b_scale": scales(3, 3)}
    arrays |= {"c": eight_bits(64, 50), "c_scale": scales(1, 1)}
    folder = write(tmp_path / "m", config, **arrays)
    with pytest.raises(FormatError, match=r"'a'.*fits blocks of \(64, 64\) and \(80, 80\)"):
        mlstate.load(folder, cast="float32")
    loaded = mlstate.load(folder, cast="float32", names=["b", "c"]).model
    for name, block in {"b": (64, 64), "c": (64, 50)}.items():
        expected = expected_of(arrays[name], arrays[f"{name}_scale"], block)
        assert np.array_equal(loaded[name], expected)


def test_compressed_tensors_rounds_to_the_dtype_of_the_scale(tmp_path):
    codes, scale = eight_bits(64, 64), scales(64, 1).astype(ml_dtypes.bfloat16)
    folder = write(tmp_path / "m", packed(), l__weight=codes, l__weight_scale=scale)
    expected = expected_of(codes, scale.astype(np.float32), (1, 64)).astype(ml_dtypes.bfloat16)
    for dtype in ("float32", "bfloat16"):
        values = mlstate.load(folder, cast=dtype).model["l.weight"]
        assert np.array_equal(values, expected.astype(values.dtype))


@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.float8_e8m0fnu])
def test_scales_of_exponents_are_powers_of_two(tmp_path, dtype):
    codes = np.ones((2, 256), EIGHT)
    exponents = np.array([[0, 127], [254, 255]], np.uint8).view(dtype)
    folder = write(
        tmp_path / "m", FP8 | {"weight_block_size": [1, 128]}, w=codes, w_scale_inv=exponents
    )
    values = mlstate.load(folder, cast="float32").model["w"][:, ::128]
    assert np.array_equal(values, [[2.0**-127, 1], [2.0**127, np.nan]], equal_nan=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_groups_of_mxfp4_become_transposed_weights(tmp_path, dtype):
    blocks, exponents, values = groups(3, 40, 5)
    arrays = {
        "x__proj_blocks": blocks,
        "x__proj_scales": exponents,
        "x__proj_bias": np.ones((3, 40)),
    }
    folder = write(tmp_path / "m", MXFP4, **arrays)
    model = mlstate.load(folder, cast=dtype).model
    assert list(model) == ["x.proj_bias", "x.proj"]
    assert model["x.proj"].tobytes() == values.astype(model["x.proj"].dtype).tobytes()
    renamed = mlstate.load(folder, cast=dtype, rename={"x.": "y."}, names="y.proj").model
    assert list(renamed) == ["y.proj"]
    assert renamed["y.proj"].tobytes() == model["x.proj"].tobytes()


LAYOUTS = [
    Layout.rows(2),
    Layout.rows(3),
    Layout.axis(1, 5),
    Layout.axis(1, 7),
    Layout.axis(1, 3) * Layout.rows(2),
    Layout.flat(7),
    Layout.axis(1, 2) * Layout.flat(3),
]


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout.axis(2, 3), Layout.axis(2, 7) * LAYOUTS[2]])
def test_any_part_is_the_part_of_the_whole(tmp_path, layout):
    blocks, exponents, _ = groups(3, 40, 5)
    codes = eight_bits(2, 130, 200)
    fp8 = write(tmp_path / "fp8", FP8, w=codes, w_scale_inv=scales(2, 2, 2))
    mxfp4 = write(tmp_path / "mxfp4", MXFP4, w_blocks=blocks, w_scales=exponents)
    for folder in (fp8, mxfp4):
        values = mlstate.load(folder, cast="bfloat16").model["w"]
        for rank in range(layout.parts):
            part = mlstate.load(folder, cast="bfloat16", layout=layout, rank=rank).model["w"]
            expected = layout.take(values, rank)
            assert part.shape == expected.shape
            assert part.tobytes() == expected.tobytes()


# ---- refusals ----


@pytest.mark.parametrize(
    ("quantization", "arrays", "text"),
    [
        (FP8, {"w": eight_bits(256, 256)}, "'w_scale_inv', its scale, is missing"),
        (FP8, {"w_scale_inv": scales(2, 2)}, "the scale of a tensor that is missing"),
        (FP8, {"w": np.ones((4, 4), np.int8), "w_scale_inv": scales(1, 1)}, "int8 has a scale"),
        (
            FP8,
            {"w": eight_bits(256, 256), "w_scale_inv": scales(2, 3)},
            r"\(2, 3\) instead of \(2, 2\)",
        ),
        (FP8, {"w": eight_bits(256, 256), "w_scale_inv": scales(1)}, r"\(1,\) instead of \(2, 2\)"),
        (FP8, {"w": eight_bits(4, 4), "w_scale_inv": np.ones((1, 1), np.int32)}, "scale is int32"),
        (packed(), {"weight": eight_bits(4, 4)}, "'weight_scale', its scale, is missing"),
        (
            packed(),
            {"l__weight": eight_bits(4, 6), "l__weight_scale": scales(6, 1)},
            r"\(6, 1\) instead of \(4, 1\) or \(1, 1\)",
        ),
        (
            packed(),
            {
                "l__weight": eight_bits(4, 4),
                "l__weight_scale": scales(1),
                "l__weight_zero_point": np.ones(1, np.int8),
            },
            "zero points 'l.weight_zero_point'",
        ),
        (
            packed(group_size=2),
            {
                "l__weight": eight_bits(4, 4),
                "l__weight_scale": scales(4, 2),
                "l__weight_g_idx": np.array([0, 1, 0, 1], np.int32),
            },
            "order of groups 'l.weight_g_idx'",
        ),
        (MXFP4, {"w_blocks": groups(1, 2, 3)[0]}, "its scales are missing"),
        (MXFP4, {"w_scales": groups(1, 2, 3)[1]}, "its blocks are missing"),
        (
            MXFP4,
            {"w_blocks": groups(1, 2, 3)[0], "w_scales": groups(1, 3, 2)[1]},
            r"scales have the shape \(1, 3, 2\) instead of \(1, 2, 3\)",
        ),
        (
            MXFP4,
            {"w_blocks": np.ones((2, 16), np.uint8), "w_scales": np.ones(2, np.uint8)},
            "16 bytes",
        ),
        (MXFP4, {"w_blocks": np.ones(2), "w_scales": np.ones(2)}, "instead of uint8"),
        (
            MXFP4,
            dict(zip(("w_blocks", "w_scales", "w"), groups(1, 2, 3), strict=True)),
            "the name of a tensor too",
        ),
    ],
)
def test_weights_and_scales_that_do_not_fit_are_refused_by_name(
    tmp_path, quantization, arrays, text
):
    folder = write(tmp_path / "m", quantization, other=np.ones(2), **arrays)
    with pytest.raises(FormatError, match=text) as caught:
        mlstate.load(folder, cast="float32")
    assert caught.value.name in {"w", "weight", "l.weight"}
    assert repr(caught.value.name) in str(caught.value)
    assert caught.value.path == str(folder)
    assert list(mlstate.load(folder, cast="float32", names="other").model) == ["other"]
    mlstate.load(folder)


@pytest.mark.parametrize(
    ("quantization", "error", "text"),
    [
        ({"quant_method": "gptq"}, CompatibilityError, "quant_method 'gptq'"),
        ({}, CompatibilityError, "quant_method None"),
        (packed(num_bits=4, type="int"), CompatibilityError, "type 'int' with num_bits 4"),
        (packed(symmetric=False), CompatibilityError, "type 'float' with num_bits 8"),
        (packed(group_size=0), FormatError, r"the block \[1, 0\]"),
        (packed(block_structure=[128]), FormatError, r"the block \[128\]"),
        (packed() | {"config_groups": []}, FormatError, "no config_groups"),
        (packed() | {"config_groups": {"g": 3}}, FormatError, "a group of layers without weights"),
        (FP8 | {"weight_block_size": [128, True]}, FormatError, r"the block \[128, True\]"),
        (FP8 | {"weight_block_size": [1 << 40, 1]}, FormatError, "the block"),
        (FP8 | {"weight_block_size": "x" * 10_000}, FormatError, "the block 'xxx"),
        ([3], FormatError, "not a JSON object"),
        (b"{", FormatError, "not valid JSON"),
        (b"[" * 100_000, FormatError, "not valid JSON"),
        (b"\xff\xfe", FormatError, "not valid JSON"),
    ],
)
def test_unusable_configs_are_refused(tmp_path, quantization, error, text):
    folder = write(tmp_path / "m", quantization, w=np.ones(2))
    with pytest.raises(error, match=text) as caught:
        mlstate.load(folder, cast="float32")
    assert len(str(caught.value)) < 600
    mlstate.load(folder)


@pytest.mark.parametrize("config", [b"{}", b"[1]", b'{"quantization_config": null}'])
def test_folders_without_quantization_are_decoded_by_their_tensors(tmp_path, config):
    codes = eight_bits(4, 4)
    folder = write(tmp_path / "m", config, w=codes, w_scale_inv=np.full((1, 1), 0.5, np.float32))
    for _ in range(2):
        model = mlstate.load(folder, cast="float32").model
        assert list(model) == ["w"]
        assert np.array_equal(model["w"], codes.astype(np.float32) / 2)
        (folder / "config.json").unlink(missing_ok=True)


@pytest.mark.parametrize("missing", ["skip", "zeros", "error"])
def test_a_folder_without_an_optimizer_lacks_no_states(tmp_path, missing):
    codes = np.ones((4, 4), ml_dtypes.float8_e4m3fn)
    scales = np.full((1, 1), 0.5, np.float32)
    mlstate.save_file({"l.w": codes, "l.w_scale_inv": scales}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = mlstate.load(tmp_path, cast="float32", missing=missing)
    assert loaded.optimizer is None and loaded.model["l.w"].tolist() == [[0.5] * 4] * 4


def test_a_fifo_as_config_is_refused(tmp_path):
    import os

    folder = write(tmp_path / "m", FP8, w=np.ones(2))
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(mlstate.MLStateError):
        mlstate.load(folder, cast="float32")


def test_files_of_torch_are_decoded_and_integers_stay(tmp_path):
    torch = pytest.importorskip("torch")
    folder = write(tmp_path / "m", FP8)
    (folder / "model.safetensors").unlink()
    tensors = {"w": torch.ones(4, 4).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(1, 1) / 2}
    torch.save(tensors, folder / "pytorch_model.bin")
    model = mlstate.load(folder, cast="bfloat16").model
    assert list(model) == ["w"] and model["w"].tolist() == [[0.5] * 4] * 4
    torch.save({"v": torch.ones(2), "n": torch.arange(3)}, folder / "pytorch_model.bin")
    model = mlstate.load(folder, cast="bfloat16").model
    assert {name: str(each.dtype) for name, each in model.items()} == {
        "v": "bfloat16",
        "n": "int64",
    }
