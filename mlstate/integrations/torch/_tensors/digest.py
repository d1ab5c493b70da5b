"""Digests of tensors on a device by torch's integer operations; csrc/core/state/digest.h defines.

The functions also work on the CPU, where tests compare them with the core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_BLOCK = 1024  # words
_CHUNK = 1 << 22  # elements at a time: each takes about 60 bytes of the device's memory
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


def _lanes(words: torch.Tensor, offsets: torch.Tensor, keys: Sequence[torch.Tensor]) -> list[int]:
    """Return both lanes of 32-bit words that begin at byte `offsets` of the tensor.

    Words may be values of fewer bytes, if none of them crosses a multiple of 4 bytes. `keys`: of
    the words of a block, for each lane.
    """
    import torch

    numbers = offsets >> 2
    values = words << (offsets & 3) * 8
    blocks = numbers >> 10
    first, last = (int(block) for block in blocks.aminmax())
    starts = (1 << 36) + torch.arange(first, last + 1, device=words.device) * 2
    lanes = []
    for lane, of_word in enumerate(keys):
        sums = torch.zeros_like(starts)
        sums.index_add_(0, blocks - first, values * of_word[numbers & _BLOCK - 1])
        lanes.append(int((sums * (_mix(starts + lane) | 1)).sum()) % _LANE)
    return lanes


def digest_part(
    tensor: torch.Tensor, shape: Sequence[int], starts: Sequence[int]
) -> tuple[int, int]:
    """Return the digest of a box of a tensor of shape `shape`, as `_core.digest_part` does."""
    import torch

    if tensor.is_complex():
        return digest_part(torch.view_as_real(tensor), (*shape, 2), (*starts, 0))
    mixed = _mix(torch.arange(_BLOCK, device=tensor.device))
    keys = [mixed & 0xFFFFFFFF | 1, mixed >> 32 & 0xFFFFFFFF | 1]
    item = tensor.element_size()
    size = min(item, 4)
    bits = tensor.contiguous().view({1: torch.uint8, 2: torch.int16}.get(item, torch.int32))
    bits = bits.reshape(-1, item // size)  # words of each element
    total = [0, 0]
    for first in range(0, tensor.numel(), _CHUNK):
        chunk = bits[first : first + _CHUNK].long() & (1 << 8 * size) - 1
        rest = torch.arange(first, first + len(chunk), device=tensor.device)
        offsets, stride = torch.zeros_like(rest), item
        for axis in reversed(range(tensor.dim())):  # from the position in the box to the tensor
            length = tensor.shape[axis]
            offsets += (rest % length + starts[axis]) * stride
            rest = rest // length
            stride *= shape[axis]
        for word in range(chunk.shape[1]):
            lanes = _lanes(chunk[:, word], offsets + 4 * word, keys)
            total = [(a + b) % _LANE for a, b in zip(total, lanes, strict=True)]
    return total[0], total[1]
