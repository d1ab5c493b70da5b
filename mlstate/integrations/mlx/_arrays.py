"""Arrays of mlx as NumPy arrays over the same memory, and back; bfloat16."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from ..._common.arrays import packed_array
from ..._common.dtypes import EXTENSIONS, name_of, stored_dtype
from ...kv._arguments import incompatible


def view_array(array: Any) -> np.ndarray[Any, Any]:
    """Return an mlx array as a NumPy array over the same memory; an array that is lazy is computed.

    The view refers to a second mlx array. So mlx does not write to the memory: the next
    operation that changes the array of the caller copies it first.
    """
    import mlx.core as mx

    if array.dtype != mx.bfloat16:
        return np.array(copy.copy(array), copy=False)
    memory = memoryview(copy.copy(array))
    if memory.contiguous:
        bits: np.ndarray[Any, Any] = np.ndarray(array.shape, np.uint16, memory)
    else:  # NumPy takes the memory of arrays without gaps only
        bits = np.array(array.view(mx.uint16), copy=False)
    return bits.view(stored_dtype("bfloat16"))


def make_array(array: Any, name: str) -> Any:
    """Return an mlx array with the elements of a NumPy array.

    A view that `view_array` made shares its memory; other arrays are copied. `name`: of the entry,
    for the CompatibilityError if mlx lacks the dtype.
    """
    import mlx.core as mx

    dtype = name_of(array.dtype)
    source = _find_source(array)
    if source is not None:
        return source if source.dtype != mx.uint16 else source.view(getattr(mx, dtype))
    if dtype == "bfloat16":
        return mx.array(packed_array(array).view(np.uint16)).view(mx.bfloat16)
    mlx_dtype = getattr(mx, "bool_" if dtype == "bool" else dtype, None)
    if dtype in EXTENSIONS or mlx_dtype is None:
        raise incompatible(f"{name}: mlx has no dtype {dtype}", name, "a dtype of mlx", dtype)
    return mx.array(packed_array(array), mlx_dtype)


def _find_source(array: Any) -> Any:
    """Return a new mlx array over the memory of a view, or None if mlx does not own it.

    The view must begin at the first element of mlx's array; a shorter one becomes a slice.
    """
    import mlx.core as mx

    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    source = base.obj if isinstance(base, memoryview) else base
    if not isinstance(source, mx.array):
        return None
    root = view_array(source)
    if root.ctypes.data != array.ctypes.data or root.ndim != array.ndim:
        return None
    root_dtype, dtype = name_of(root.dtype), name_of(array.dtype)
    is_bfloat16 = (root_dtype, dtype) == ("uint16", "bfloat16")  # as `view_array` may view it
    if not array.dtype.isnative or not (is_bfloat16 or root_dtype == dtype):
        return None
    axes = zip(array.shape, root.shape, array.strides, root.strides, strict=True)
    if any(part > size or (part > 1 and step != stride) for part, size, step, stride in axes):
        return None
    if root.shape == array.shape:
        return copy.copy(source)
    return source[tuple(slice(size) for size in array.shape)]
