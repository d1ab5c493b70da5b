"""Quantized KV caches that are tensors on any device: the core's arithmetic in torch operations.

The functions compute the bits of the core's functions of the same name. No operation is a fused
multiply-add, and no divisor is a Python number: for those torch multiplies by the reciprocal on
CUDA.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from .dtypes import torch_dtype

if TYPE_CHECKING:
    import torch

_NOT_FINITE = (
    "a value is NaN or infinite, or the values of a group are too far apart: such groups have no "
    "scale"
)


def kv_zeros(shape: tuple[int, ...], dtype: str, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of zeros on the device of `like`; `dtype`: a name, such as "uint32"."""
    import torch

    if dtype == "uint32":  # few operations know unsigned integers
        return like.new_zeros(shape, dtype=torch.int32).view(torch.uint32)
    return like.new_zeros(shape, dtype=torch_dtype(dtype, like))


def _grouped(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return a view whose last axis is divided into parts of `size` elements."""
    return tensor.reshape(*tensor.shape[:-1], tensor.shape[-1] // size, size)


def _words_of_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int32 words that hold the codes of the last axis, `bits` bits each, without gaps.

    The number of codes must fill whole words: a multiple of ``32 / gcd(bits, 32)``.
    """
    step = gcd(bits, 32)  # 32 / step codes fill bits / step words
    parts = _grouped(codes, 32 // step)
    words = codes.new_zeros((*parts.shape[:-1], bits // step))
    for i in range(32 // step):
        word, shift = divmod(i * bits, 32)
        words[..., word] |= parts[..., i] << shift
        if shift + bits > 32:
            words[..., word + 1] |= parts[..., i] >> (32 - shift)
    return words.flatten(-2)


def _codes_of_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the int32 codes of `bits` bits that `_words_of_codes` packed into `words`.

    Codes and words are along the last axis.
    """
    step = gcd(bits, 32)  # 32 / step codes fill bits / step words
    parts = _grouped(words, bits // step)
    codes = words.new_empty((*parts.shape[:-1], 32 // step))
    for i in range(32 // step):
        word, shift = divmod(i * bits, 32)
        lower = min(bits, 32 - shift)  # bits of the code in its first word
        codes[..., i] = (parts[..., word] >> shift) & ((1 << lower) - 1)
        if lower < bits:
            upper = parts[..., word + 1] & ((1 << (bits - lower)) - 1)
            codes[..., i] |= upper << lower
    return codes.flatten(-2)


def kv_quantize(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    biases: torch.Tensor,
    bits: int,
    group: int,
) -> None:
    """Quantize `values` to `codes`, `scales` and `biases`, which are overwritten.

    `codes`: words of uint32 with the codes of the last axis. `bits`: of a code. `group`: number of
    neighbouring elements of the last axis that share a scale and a bias; `scales` and `biases` have
    one value for each group. Raises ValueError for NaN and infinity, and for a group whose largest
    minus smallest value overflows; TypeError for meta tensors.
    """
    import torch

    if values.is_meta:
        raise TypeError("a tensor on the meta device has no values to quantize")
    if values.numel() == 0:
        return
    x = _grouped(values.detach().float(), group)
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)  # NaN if a value is
    if not bool(torch.isfinite(high - low).all()):
        raise ValueError(_NOT_FINITE)
    levels = (1 << bits) - 1
    from_low = low.abs() > high.abs()
    # Equal values have a difference of 0, which cannot be a scale.
    size = ((high - low) / torch.full_like(low, levels)).clamp_min(1e-7)
    # The bias is the limit of larger magnitude. It becomes a multiple of the scale, so that 0 is
    # exact too.
    edge, scale = torch.where(from_low, low, high), torch.where(from_low, size, -size)
    steps = (edge / scale).round()
    has_steps = steps.abs() > 0  # otherwise the edge is nearer to 0 than half a step
    scale = torch.where(has_steps, edge / steps, scale)
    bias = torch.where(has_steps, edge, torch.zeros_like(edge))
    numbers = ((x - bias) / scale).clamp_(0, levels).round_().to(torch.int32).flatten(-2)
    codes.view(torch.int32).copy_(_words_of_codes(numbers, bits))
    scales.copy_(scale.squeeze(-1))
    biases.copy_(bias.squeeze(-1))


def _values_of(
    codes: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor, bits: int, group: int
) -> torch.Tensor:
    """Return the values of codes in float32, before they are rounded to another dtype.

    For the arguments, see `kv_quantize`.
    """
    import torch

    numbers = _grouped(_codes_of_words(codes.view(torch.int32), bits).float(), group)
    return numbers.mul_(scales.float()[..., None]).add_(biases.float()[..., None]).flatten(-2)


def kv_dequantize(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    biases: torch.Tensor,
    bits: int,
    group: int,
) -> None:
    """Overwrite `values` with the values of codes, scales and biases; see `kv_quantize`."""
    if values.numel():
        values.copy_(_values_of(codes, scales, biases, bits, group))


def kv_quantization_loss(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    biases: torch.Tensor,
    bits: int,
    group: int,
) -> tuple[float, float, float]:
    """Return the largest difference, and the sums of squares of differences and of values.

    The differences are between `values` and the values of their codes, in the dtype of `values`.
    For the other arguments, see `kv_quantize`. Without values, all three are 0.
    """
    if values.numel() == 0:
        return 0.0, 0.0, 0.0
    stored = _values_of(codes, scales, biases, bits, group).to(values.dtype)
    wide = values.detach().double()
    difference = (stored.double() - wide).abs()
    largest = float(difference.max())
    return largest, float(difference.square().sum()), float(wide.square().sum())
