"""Arrays of a group as flat memory, results copied back, received parts summed in rank order.

A flat array is of the caller's kind, NumPy or torch, in main memory. Its bytes are a NumPy array
over the same memory.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._common.arrays import is_torch
from .._common.backend import TensorBackend, backend_of
from .._common.dtypes import FLOAT8S, as_numbers
from ._arguments import check_supported_tensor, dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager


# Dtypes that the core cannot compute with.
_ONLY_IN_NUMPY = (np.dtype(np.longdouble).name, np.dtype(np.clongdouble).name)


def flat_of(operation: str, array: Any, *, native: bool = False) -> Any:
    """Return an array's elements in C order as a flat array in main memory.

    It is the array's own memory if that is contiguous and in main memory, else a copy. With
    `native`, the result is in native byte order, as arithmetic requires. `operation`: its name, for
    the TypeError about a tensor that is not plain memory.
    """
    check_supported_tensor(operation, array)
    if is_torch(array):
        return array.contiguous().reshape(-1).cpu()
    if not (array.flags.c_contiguous and array.flags.aligned):
        array = np.require(array, requirements=["C", "A"])
    if native and not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array.reshape(-1)


def target_for(operation: str, place: Any, *, native: bool = False) -> Any:
    """Return flat memory for the elements of the result `place`, in main memory.

    It is the memory of `place` if that can be used as it is, else new memory, which `copy_back`
    copies to `place`. `native` and `operation` are as for `flat_of`.
    """
    check_supported_tensor(operation, place)
    if is_torch(place):
        if place.device.type == "cpu" and place.is_contiguous():
            return place.reshape(-1)
        return place.new_empty(place.numel(), device="cpu")
    flags = place.flags
    if flags.c_contiguous and flags.aligned and (place.dtype.isnative or not native):
        return np.asarray(place).reshape(-1)
    return np.empty(place.size, place.dtype.newbyteorder("=") if native else place.dtype)


def copy_back(flat: Any, place: Any) -> None:
    """Copy a flat result to the caller's array `place`, unless it is the same memory.

    Autograd is notified of a write into a tensor's memory.
    """
    if not is_torch(place):
        if not np.may_share_memory(flat, place):
            place[...] = flat.reshape(place.shape)
    elif flat.data_ptr() != place.data_ptr() or not place.is_contiguous():
        place.copy_(flat.view(place.shape))
    else:
        backend_of(place, TensorBackend).note_written([place])  # torch cannot know of it


def inference_mode_of(place: Any) -> AbstractContextManager[Any]:
    """Return the context in which torch writes into `place`: inference mode for its tensors.

    The thread of asynchronous operations is not in the caller's inference mode.
    """
    if not (is_torch(place) and place.is_inference()):
        return nullcontext()
    import torch

    return torch.inference_mode()


def bytes_of(flat: Any) -> Any:
    """Return a NumPy uint8 view of a flat array or tensor in main memory."""
    if is_torch(flat):
        import torch

        return flat.view(torch.uint8).numpy()
    return flat.view(np.uint8) if flat.size else np.empty(0, np.uint8)


def reals_of(flat: Any) -> Any:
    """Return a flat complex128 array as a float64 view, others unchanged.

    The view alternates real and imaginary parts: the core has no complex128, and sums treat both
    parts alike.
    """
    if dtype_name(flat) != "complex128":
        return flat
    if is_torch(flat):
        import torch

        return flat.view(torch.float64)
    return flat.view(np.float64)


def core_reduction(op: str, world_size: int) -> tuple[str, float]:
    """Return the core's name of the reduction `op`, and the divisor of its result.

    The core has no mean: it is a sum that is divided by the number of ranks.
    """
    return ("sum", float(world_size)) if op == "mean" else (op, 1.0)


def reduce_parts(parts: Sequence[Any], op: str, out: Any) -> None:
    """Reduce flat arrays of one dtype and length in list order into `out`.

    `out` may be one of them. `op`: "sum", "mean", "min" or "max".
    """
    name = dtype_name(out)
    if name in _ONLY_IN_NUMPY:
        _reduce_in_numpy(parts, op, out)
        return
    kind, divisor = core_reduction(op, len(parts))
    parts, out = [reals_of(part) for part in parts], reals_of(out)
    if name not in FLOAT8S:
        _core.reduce(parts, out, kind, divisor)
        return
    wide = _float32_like(out)  # the core does not round to 8 bits
    _core.reduce(parts, wide, kind, divisor)
    if is_torch(out):
        out[:] = wide
    else:
        numbers = as_numbers(out)
        numbers[:] = wide.astype(numbers.dtype)


def _float32_like(flat: Any) -> Any:
    """Return new flat float32 memory of the kind of `flat`, with as many elements."""
    if is_torch(flat):
        import torch

        return flat.new_empty(len(flat), dtype=torch.float32)
    return np.empty(len(flat), np.float32)


def _reduce_in_numpy(parts: Sequence[Any], op: str, out: Any) -> None:
    """Reduce flat arrays in list order into `out`, as `reduce_parts`, for `_ONLY_IN_NUMPY`."""
    operators: dict[str, Any] = {"min": np.minimum, "max": np.maximum}
    total = parts[0].copy()  # `out` may be one of the parts
    for part in parts[1:]:
        operators.get(op, np.add)(total, part, out=total)
    if op == "mean":
        total.view(np.longdouble)[...] /= len(parts)  # divides real and imaginary parts
    out[...] = total
