"""Common code of today, as plain as possible: the baselines of `bench_kv.py`.

The algorithm of the transitions is that from ``anemll.utils.state_transition``: fill the whole
target, make a converted copy of the tokens, copy it into the target. `growing_inference` is
the algorithm of a client that uses these transitions.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np


def longer(shape: tuple[int, ...], length: int, axis: int = -2) -> tuple[int, ...]:
    """Return the shape of a cache with another sequence length."""
    axis %= len(shape)
    return (*shape[:axis], length, *shape[axis + 1 :])


def numpy_filled(source: Any, length: int, position: int, dtype: Any, how: str = "full") -> Any:
    """Fill, convert, copy; `how` is "zeros" where the algorithm compacts."""
    shape = longer(source.shape, length)
    target = np.full(shape, 0.0, dtype) if how == "full" else np.zeros(shape, dtype)
    target[:, :, :position] = source[:, :, :position].astype(dtype)
    return target


def numpy_zeros(source: Any, length: int, position: int, dtype: Any) -> Any:
    """The way of a careful NumPy user: no fill, no temporary."""
    target = np.zeros(longer(source.shape, length), dtype)
    target[:, :, :position] = source[:, :, :position]
    return target


def numpy_mapped(source: Any, length: int, position: int, *, small_pages: bool = False) -> Any:
    """Copy the tokens into memory mapped for them alone."""
    shape = longer(source.shape, length)
    memory = mmap.mmap(-1, prod(shape) * source.itemsize, flags=mmap.MAP_PRIVATE)
    if small_pages and hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    target = np.frombuffer(memory, source.dtype).reshape(shape)
    target[:, :, :position] = source[:, :, :position]
    return target


def numpy_into(source: Any, position: int, out: Any) -> None:
    """Write into a preallocated target, with NumPy."""
    out[:, :, :position] = source[:, :, :position]
    out[:, :, position:] = 0


def numpy_rotate(keys: Any, shift: int) -> Any:
    """Shift keys with RoPE in float32, with NumPy."""
    half = keys.shape[-1] // 2
    angles = shift * 10000.0 ** (-np.arange(half) / half)
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    x, y = keys[..., :half].astype(np.float32), keys[..., half:].astype(np.float32)
    return np.concatenate((x * cosine - y * sine, y * cosine + x * sine), -1).astype(keys.dtype)


def numpy_quantize(values: Any, group: int) -> tuple[Any, Any, Any]:
    """Quantize groups of the last axis to 8 bits as mlx does, with NumPy."""
    x = values.astype(np.float32).reshape(*values.shape[:-1], -1, group)
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    from_low = np.abs(low) > np.abs(high)
    size = np.maximum((high - low) / np.float32(255), np.float32(1e-7))
    edge, scale = np.where(from_low, low, high), np.where(from_low, size, -size)
    steps = np.rint(edge / scale)
    is_zero = steps == 0
    scale = np.where(is_zero, scale, edge / np.where(is_zero, np.float32(1), steps))
    bias = np.where(is_zero, np.float32(0), edge)
    codes = np.clip(np.rint((x - bias) / scale), 0, 255).astype(np.uint8).reshape(values.shape)
    return (
        codes.view(np.uint32),
        scale[..., 0].astype(values.dtype),
        bias[..., 0].astype(values.dtype),
    )


def numpy_dequantize(codes: Any, scales: Any, biases: Any) -> Any:
    """Compute values from codes of 8 bits, with NumPy."""
    x = codes.view(np.uint8).astype(np.float32).reshape(*scales.shape, -1)
    x *= scales.astype(np.float32)[..., None]
    x += biases.astype(np.float32)[..., None]
    return x.astype(scales.dtype).reshape(*codes.shape[:-1], -1)


def to_torch(values: Any) -> Any:
    """Return a tensor over the array's memory, also for bfloat16."""
    import torch

    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def torch_quantize(values: Any, bits: int, group: int) -> tuple[Any, Any, Any]:
    """Quantize groups of the last axis as mlx does, with torch."""
    import torch

    levels = float(2**bits - 1)
    x = values.float().unflatten(-1, (-1, group))
    low, high = x.aminmax(dim=-1, keepdim=True)
    from_low = low.abs() > high.abs()
    size = ((high - low) / levels).clamp_min_(1e-7)
    edge, scale = torch.where(from_low, low, high), torch.where(from_low, size, -size)
    steps = (edge / scale).round_()
    scale = torch.where(steps != 0, edge / steps, scale)
    bias = torch.where(steps != 0, edge, 0.0)
    codes = ((x - bias) / scale).round_().clamp_(0, levels).to(torch.uint8).flatten(-2)
    return (
        torch_join(codes, bits),
        scale.squeeze(-1).to(values.dtype),
        bias.squeeze(-1).to(values.dtype),
    )


def torch_join(codes: Any, bits: int) -> Any:
    """Join bytes to strings of bits: whole bytes, or 8 codes in an integer of 64 bits."""
    import torch

    if bits == 8:
        return codes.view(torch.int32)
    per_byte = 8 // bits if 8 % bits == 0 else 8
    parts = codes.unflatten(-1, (-1, per_byte))
    wide = parts if per_byte < 8 else parts.long()
    joined = wide[..., 0].clone()
    for i in range(1, per_byte):
        joined |= wide[..., i] << (i * bits)
    if per_byte == 8:
        joined = joined[..., None].view(torch.uint8)[..., :bits].flatten(-2)
    return joined.contiguous().view(torch.int32)


def torch_dequantize(codes: Any, scales: Any, biases: Any, bits: int, group: int) -> Any:
    """Compute values from codes with torch, in float32."""
    import torch

    string = codes.view(torch.uint8)
    if bits < 8:
        per_byte = 8 // bits if 8 % bits == 0 else 8
        if per_byte == 8:
            eights = string.unflatten(-1, (-1, bits))
            parts = torch.nn.functional.pad(eights, (0, 8 - bits)).view(torch.long).squeeze(-1)
        else:
            parts = string
        mask = 2**bits - 1
        split = torch.stack([(parts >> (i * bits)) & mask for i in range(per_byte)], -1)
        string = split.flatten(-2)
    x = string.float().unflatten(-1, (-1, group))
    x.mul_(scales.float()[..., None]).add_(biases.float()[..., None])
    return x.flatten(-2).to(scales.dtype)


def torch_filled(source: Any, length: int, position: int, dtype: Any, how: str = "full") -> Any:
    """Do the same with torch."""
    import torch

    shape = longer(source.shape, length)
    is_full = how == "full"
    target = torch.full(shape, 0.0, dtype=dtype) if is_full else torch.zeros(shape, dtype=dtype)
    target[:, :, :position] = source[:, :, :position].to(dtype)
    return target


def mask_by_rows(length: int, reach: int) -> Any:
    """Make a mask by the formula of the source document, row by row, but in float16."""
    mask = np.full((1, 1, length, length), float("-inf"), np.float16)
    for row in range(length):
        mask[0, 0, row, max(0, row - reach) : row + 1] = 0.0
    return mask


def decode_row(length: int, reach: int, position: int) -> Any:
    """Make the row of one position."""
    row = np.full((1, 1, 1, length), float("-inf"), np.float16)
    row[0, 0, 0, max(0, position - reach) : position + 1] = 0.0
    return row


# ---- a client that grows its context ----

_STATE_NAMES = ("model_model_kv_cache_0", "kv_cache_0", "kv_cache")


def find_state(state: Any) -> tuple[str, tuple[int, ...]]:
    """Find the name and shape of a state by reading it under known names."""
    for name in _STATE_NAMES:
        try:
            return name, state.read_state(name).shape
        except RuntimeError:
            continue
    raise RuntimeError(f"no state has one of the names {', '.join(_STATE_NAMES)}")


def expand_state(source: Any, target: Any, position: int) -> None:
    """Move a state to a larger context."""
    name, _ = find_state(source)
    target_name, shape = find_state(target)
    value = source.read_state(name)
    target.write_state(target_name, numpy_filled(value, shape[-2], position, value.dtype))


def keep_tokens(
    tokens: list[int], context: int, batch: int, reserve_batches: int, prompt: int
) -> list[int]:
    """Choose the tokens that a refill of a full context keeps; `prompt` of them come first."""
    valid = len(tokens)
    token_count = max(1, context // batch - reserve_batches) * batch
    token_count = max(1, min(valid, context, token_count, context - min(batch, context - 1)))
    if prompt == 0:
        return tokens[valid - token_count :]
    prompt = min(prompt, context - 1)
    token_count = max(token_count, prompt)
    return tokens[:prompt] + tokens[prompt:][valid - token_count :]


def growing_inference(
    models: Mapping[int, Sequence[Any]],
    prompt: Sequence[int],
    count: int,
    run: Callable[[Sequence[Any], int, list[int], int, Any], int],
    *,
    overflow: str,
    batch_size: int,
    reserve_batches: int,
    preserve_prompt: bool,
) -> Iterator[int]:
    """Yield up to `count` tokens after a prompt.

    `models` has the chunk models of each context size. ``run(chunks, size, tokens, position,
    state)`` writes tokens into the state and returns the next token.
    """

    def prefill() -> Any:
        state = models[size][0].make_state()
        full_batches = len(tokens) // batch_size * batch_size
        for start in range(0, full_batches, batch_size):
            run(models[size], size, tokens[start : start + batch_size], start, state)
        for position in range(full_batches, len(tokens)):
            run(models[size], size, [tokens[position]], position, state)
        return state

    sizes = sorted(models)
    tokens = list(prompt)
    size = next(context for context in sizes if len(tokens) <= context)
    state = prefill()
    for _ in range(count):
        tokens.append(run(models[size], size, tokens[-1:], len(tokens) - 1, state))
        yield tokens[-1]
        if len(tokens) <= size:
            continue
        if len(tokens) <= sizes[-1]:
            size = next(context for context in sizes if len(tokens) <= context)
            target = models[size][0].make_state()
            expand_state(state, target, len(tokens) - 1)
            state = target
            continue
        if overflow == "stop":
            return
        new_length = keep_tokens(
            tokens, size, batch_size, reserve_batches, len(prompt) if preserve_prompt else 0
        )
        if len(new_length) == len(tokens):
            return
        tokens = new_length
        state = prefill()
