"""NumPy arrays and tensors as flat memory in this process, which MPI can read and write.

A flat array is of the caller's kind, NumPy or torch. Its bytes are a NumPy array over the same
memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._common.arrays import is_torch
from ...collectives._arguments import check_plain


def flat_of(operation: str, array: Any, *, native: bool = False) -> Any:
    """Return the elements as a flat array: the array's own memory if contiguous and on the CPU.

    With `native`, the result is in native byte order, as arithmetic requires.
    """
    check_plain(operation, array)
    if is_torch(array):
        return array.contiguous().reshape(-1).cpu()
    flat = np.require(array, requirements=["C", "A"]).reshape(-1)
    return flat.astype(flat.dtype.newbyteorder("="), copy=False) if native else flat


def target_for(operation: str, place: Any, *, native: bool = False) -> Any:
    """Return flat memory for a result: the memory of `place` if it is flat, else new memory."""
    check_plain(operation, place)
    if is_torch(place):
        if place.device.type == "cpu" and place.is_contiguous():
            return place.reshape(-1)
        return place.new_empty(place.numel(), device="cpu")
    flags = place.flags
    if flags.c_contiguous and flags.aligned and (place.dtype.isnative or not native):
        return place.reshape(-1)
    return np.empty(place.size, place.dtype.newbyteorder("=") if native else place.dtype)


def put(flat: Any, place: Any) -> None:
    """Copy a result to `place`, unless it is the same memory."""
    if is_torch(place):
        if flat.data_ptr() != place.data_ptr() or not place.is_contiguous():
            place.copy_(flat.view(place.shape))
        elif not place.is_inference():
            from ..torch._tensors.memory import (
                note_written,  # MPI wrote to it, which torch cannot know
            )

            note_written([place])
    elif not np.shares_memory(flat, place):
        place[...] = flat.reshape(place.shape)


def bytes_of(flat: Any) -> Any:
    """Return a NumPy uint8 view of a flat array."""
    if is_torch(flat):
        import torch

        return flat.view(torch.uint8).numpy()
    return flat.view(np.uint8) if flat.size else np.empty(0, np.uint8)


def wide_like(flat: Any) -> Any:
    """Return new flat float32 memory with as many elements."""
    if is_torch(flat):
        import torch

        return flat.new_empty(len(flat), dtype=torch.float32)
    return np.empty(len(flat), np.float32)


def reals_of(flat: Any) -> Any:
    """Return a float64 view of flat complex128: alternating real and imaginary parts."""
    if is_torch(flat):
        import torch

        return flat.view(torch.float64)
    return flat.view(np.float64)
