"""Layouts of quantized weights as programs write them, and their values by NumPy."""

import json

import ml_dtypes
import numpy as np

import mlstate

E4M3, E8M0, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16
F4 = np.dtype("u1", metadata={"mlstate.dtype": "float4_e2m1fn_x2"})
FOUR = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def eight(rng, shape):
    """Return finite codes of 8 bits."""
    codes = rng.integers(0, 255, shape, dtype=np.uint8)
    codes[(codes & 127) == 127] = 1
    return codes.view(E4M3)


def four(rng, shape):
    """Return packed codes of 4 bits, and their numbers."""
    packed = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    return packed, FOUR[np.stack([packed & 15, packed >> 4], -1)].reshape(shape)


def spread(scale, shape, block):
    """Return the scale of each element of a matrix."""
    return scale.repeat(block[0], -2).repeat(block[1], -1)[..., : shape[-2], : shape[-1]]


def powers(exponents):
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)


def _exponents(rng, shape):
    return rng.integers(110, 140, shape, dtype=np.uint8)


def _scales(rng, shape=()):
    return (rng.random(shape, np.float32) + np.float32(0.1)).astype(np.float32)


def _fp8(rng, shape, *, name, grid, block, dtype=np.float32):
    codes, scale = eight(rng, shape), _scales(rng, grid).astype(dtype)
    wide = scale.astype(np.float32)
    values = codes.astype(np.float32) * (
        wide
        if wide.size == 1
        else spread(
            wide.reshape(*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1])),
            shape,
            block,
        )
    )
    return {"l.weight": codes, name: scale}, values


def _blocks(rng, shape, size, name="l.weight_scale_inv"):
    grid = (-(-shape[-2] // size[0]), -(-shape[-1] // size[1]))
    return _fp8(rng, shape, name=name, grid=grid, block=size)


def _group(**weights):
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8} | weights}},
    }


def deepseek_v3(rng, shape):
    arrays, values = _blocks(rng, shape, (128, 128))
    return arrays, values, {"quant_method": "fp8", "weight_block_size": [128, 128]}


def deepseek_v4(rng, shape):
    codes = eight(rng, shape)
    grid = (-(-shape[0] // 128), -(-shape[1] // 128))
    exponents = _exponents(rng, grid)
    values = codes.astype(np.float32) * spread(powers(exponents), shape, (128, 128))
    arrays = {"l.weight": codes, "l.scale": exponents.view(E8M0)}
    return arrays, values, {"quant_method": "fp8", "weight_block_size": [128, 128]}


def deepseek_v4_experts(rng, shape):
    packed, numbers = four(rng, shape)
    exponents = _exponents(rng, (*shape[:-1], shape[-1] // 32))
    values = numbers * spread(powers(exponents), shape, (1, 32))
    arrays = {"l.weight": packed.view(np.int8), "l.scale": exponents.view(E8M0)}
    return arrays, values, {"quant_method": "fp8", "weight_block_size": [128, 128]}


def four_bits_by_dtype(rng, shape):
    arrays, values, config = deepseek_v4_experts(rng, shape)
    return arrays | {"l.weight": arrays["l.weight"].view(F4)}, values, config


def autofp8(rng, shape):
    arrays, values = _fp8(rng, shape, name="l.weight_scale", grid=(), block=shape)
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    return arrays | {"l.input_scale": _scales(rng)}, values, config


def fbgemm(rng, shape):
    grid = (shape[0], 1)
    arrays, values = _fp8(rng, shape, name="l.weight_scale", grid=grid, block=(1, shape[1]))
    return arrays, values, {"quant_method": "fbgemm_fp8"}


def modelopt_fp8(rng, shape):
    arrays, values, _ = autofp8(rng, shape)
    return arrays, values, {"quant_method": "modelopt", "quant_algo": "FP8"}


def modelopt_nvfp4(rng, shape):
    packed, numbers = four(rng, shape)
    scale, second = eight(rng, (shape[0], shape[1] // 16)), _scales(rng)
    wide = scale.astype(np.float32) * second
    arrays = {"l.weight": packed, "l.weight_scale": scale, "l.weight_scale_2": second}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return arrays, numbers * spread(wide, shape, (1, 16)), config


def mistral(rng, shape):
    arrays, values = _fp8(rng, shape, name="l.qscale_weight", grid=(), block=shape)
    config = {"quant_method": "fp8", "qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    return arrays | {"l.qscale_act": _scales(rng)}, values, config


def comfyui(rng, shape):
    arrays, values = _fp8(rng, shape, name="l.scale_weight", grid=(), block=shape)
    marks = {"scaled_fp8": np.zeros(2, E4M3), "l.scale_input": _scales(rng)}
    return arrays | marks, values, None


def diffusers(rng, shape):
    arrays, values = _fp8(rng, shape, name="l.weight_scale", grid=(1,), block=shape)
    return arrays, values, None


def packed_tensor(rng, shape):
    arrays, values = _fp8(rng, shape, name="l.weight_scale", grid=(1,), block=shape)
    return arrays, values, _group(strategy="tensor")


def packed_rows(rng, shape):
    grid = (shape[0], 1)
    codes, scale = eight(rng, shape), _scales(rng, grid).astype(BF16)
    values = (codes.astype(np.float32) * scale.astype(np.float32)).astype(BF16)
    arrays = {"l.weight": codes, "l.weight_scale": scale}
    return arrays, values.astype(np.float32), _group(strategy="channel")


def packed_blocks(rng, shape):
    arrays, values = _blocks(rng, shape, (64, 32), "l.weight_scale")
    return arrays, values, _group(strategy="block", block_structure=[64, 32])


def packed_mxfp8(rng, shape):
    codes, exponents = eight(rng, shape), _exponents(rng, (shape[0], shape[1] // 32))
    values = codes.astype(np.float32) * spread(powers(exponents), shape, (1, 32))
    return {"l.weight": codes, "l.weight_scale": exponents}, values, _group(group_size=32)


def packed_mxfp4(rng, shape):
    packed, numbers = four(rng, shape)
    exponents = _exponents(rng, (shape[0], shape[1] // 32))
    values = (numbers * spread(powers(exponents), shape, (1, 32))).astype(BF16)
    arrays = {"l.weight_packed": packed, "l.weight_scale": exponents}
    return arrays, values.astype(np.float32), _group(num_bits=4, group_size=32)


def packed_nvfp4(rng, shape):
    packed, numbers = four(rng, shape)
    scale, second = eight(rng, (shape[0], shape[1] // 16)), _scales(rng, (1,))
    wide = scale.astype(np.float32) / second
    values = (numbers * spread(wide, shape, (1, 16))).astype(BF16)
    arrays = {"l.weight_packed": packed, "l.weight_scale": scale}
    arrays |= {"l.weight_global_scale": second}
    return arrays, values.astype(np.float32), _group(num_bits=4, group_size=16)


def packed_int8(rng, shape):
    codes, scale = rng.integers(-128, 128, shape, dtype=np.int8), _scales(rng, (shape[0], 1))
    arrays = {"l.weight": codes, "l.weight_scale": scale}
    return arrays, codes.astype(np.float32) * scale, _group(type="int", strategy="channel")


def mxfp4(rng, shape):
    rows, columns = shape
    packed, numbers = four(rng, (2, rows, columns))
    exponents = _exponents(rng, (2, rows, columns // 32))
    values = numbers * spread(powers(exponents), (2, rows, columns), (1, 32))
    arrays = {"l.weight_blocks": packed.reshape(2, rows, -1, 16), "l.weight_scales": exponents}
    return arrays, values.transpose(0, 2, 1), {"quant_method": "mxfp4"}


LAYOUTS = (
    deepseek_v3, deepseek_v4, deepseek_v4_experts, four_bits_by_dtype, autofp8, fbgemm,
    modelopt_fp8, modelopt_nvfp4, mistral, comfyui, diffusers, packed_tensor, packed_rows,
    packed_blocks, packed_mxfp8, packed_mxfp4, packed_nvfp4, packed_int8, mxfp4,
)  # fmt: skip
PLACES = ("top", "text_config", "llm_config", "compression_config", "deep", "file", "none")


def config_files(config, place):
    """Return the JSON files of a folder whose ``quantization_config`` is in this place."""
    if config is None or place == "none":
        return {} if place == "none" else {"config.json": {"dtype": "bfloat16"}}
    if place == "file" and config["quant_method"] == "modelopt":
        entry = {name: value for name, value in config.items() if name != "quant_method"}
        return {"config.json": {}, "hf_quant_config.json": {"quantization": entry}}
    if place == "file" and "qformat_weight" in config:
        return {"params.json": {"dim": 8, "quantization": config}}
    entry = {"quantization_config": config}
    nested = {
        "text_config": {"text_config": entry},
        "llm_config": {"llm_config": entry},
        "compression_config": {"compression_config": config},
        "deep": {"thinker_config": {"text_config": entry}},
    }
    return {"config.json": nested.get(place, entry) | {"dtype": "bfloat16"}}


def write_folder(folder, arrays, files):
    """Write tensors and JSON files as a folder of Hugging Face."""
    folder.mkdir()
    mlstate.save_file(arrays, folder / "model.safetensors")
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    return folder
