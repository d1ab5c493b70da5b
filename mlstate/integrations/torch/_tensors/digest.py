"""Digests of tensors on a device by torch's integer operations; csrc/core/state/digest.h defines.

The functions also work on the CPU, where tests compare them with the core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_BLOCK = 1024  # words
_CHUNK = 1 << 22  # elements at a time: each takes 40 bytes of the device's memory
_LANE = 1 << 64


def _signed(number: int) -> int:
    """Return the signed 64-bit number with the bits of an unsigned one."""
    return number - _LANE if number >= _LANE >> 1 else number


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    """Return splitmix64 of each number, as signed integers with the same bits."""
    z = numbers + _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return z ^ (z >> 31 & (1 << 33) - 1)


def _lanes(words: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return both lanes of 32-bit words that begin at byte `offsets` of the tensor.

    Words may be values of fewer bytes, if none of them crosses a multiple of 4 bytes.
    """
    import torch

    numbers = offsets >> 2
    values = words << (offsets & 3) * 8
    keys = _mix(numbers & _BLOCK - 1)
    blocks = (1 << 36) + (numbers >> 10) * 2
    low, high = keys & 0xFFFFFFFF | 1, keys >> 32 & 0xFFFFFFFF | 1
    return torch.stack(
        [(values * key * (_mix(blocks + lane) | 1)).sum() for lane, key in enumerate((low, high))]
    )


def digest_part(
    tensor: torch.Tensor, shape: Sequence[int], starts: Sequence[int]
) -> tuple[int, int]:
    """Return the digest of a box of a tensor of shape `shape`, as `_core.digest_part` does."""
    import torch

    if tensor.is_complex():
        parts = torch.view_as_real(tensor)
        return digest_part(parts, (*shape, 2), (*starts, 0))
    item = tensor.element_size()
    size = min(item, 4)
    bits = tensor.contiguous().view({1: torch.uint8, 2: torch.int16}.get(item, torch.int32))
    bits = bits.reshape(-1, item // size)  # words of each element
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for first in range(0, tensor.numel(), _CHUNK):
        chunk = bits[first : first + _CHUNK].long() & (1 << 8 * size) - 1
        rest = torch.arange(first, first + len(chunk), device=tensor.device)
        offsets, stride = torch.zeros_like(rest), item
        for axis in reversed(range(tensor.dim())):  # from the position in the box to the whole
            length = tensor.shape[axis]
            offsets += (rest % length + starts[axis]) * stride
            rest = rest // length
            stride *= shape[axis]
        for word in range(chunk.shape[1]):
            total += _lanes(chunk[:, word], offsets + 4 * word)
    low, high = (number % _LANE for number in total.tolist())
    return low, high
