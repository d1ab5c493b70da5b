"""Which tensors `cast=`, `astype`, ``--dtype`` convert to another float dtype, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .arrays import is_torch
from .backend import TensorBackend, backend_of
from .dtypes import FLOAT8S, FLOATS, dtype_name, name_of, numpy_dtype

if TYPE_CHECKING:
    from .._types import NDArray


def float_name(dtype: object, label: str = "dtype") -> str:
    """Return the name of a float dtype to convert to; raise TypeError for any other argument.

    `label`: the parameter's name in the error.
    """
    name = dtype_name(dtype)
    if name not in FLOATS:
        choices = ", ".join(sorted(FLOATS))
        raise TypeError(f"{label} must be one of the dtypes {choices}, got {dtype!r}")
    return name


# Floats of ml_dtypes that no file can hold. float32 has all their values.
SMALL_FLOATS = frozenset(
    {
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float4_e2m1fn",
        "float6_e2m3fn",
        "float6_e3m2fn",
    }
)


def is_converted(stored: str, dtype: str) -> bool:
    """Return whether a tensor of the dtype `stored` must be converted to have `dtype`.

    Only floats are converted; both are names of dtypes.
    """
    is_float = stored in FLOATS or stored in FLOAT8S or stored in SMALL_FLOATS
    return is_float and stored != dtype


def converted(array: Any, dtype: str) -> NDArray:
    """Return a new array of the float dtype named `dtype`, with the values of `array`.

    They are rounded to nearest. `array` has another float dtype, also of 8 bits, and may be of
    another library with ``__dlpack__``.
    """
    if name_of(array.dtype) in SMALL_FLOATS:
        array = array.astype(np.float32)
    # scaled_codes_decode: without scales and skipped codes; state_load: strict, cast, not dry
    name = name_of(array.dtype)
    values = np.empty(array.shape, numpy_dtype(dtype))
    if name in FLOAT8S:
        codes = np.ascontiguousarray(array).view(np.uint8).reshape(1, 1, -1)
        flat = values.reshape(1, 1, -1)
        _core.scaled_codes_decode(flat, codes, None, name, 0, (1, 1), (0, 0))
    else:
        _core.state_load({"": values}, {"": array}, True, True, False)
    return values


def needs_conversion(array: Any, dtype: str) -> bool:
    """Return whether `is_converted` is true for an array or tensor."""
    # other libraries put their own names first, as mlx.core.float32
    return is_converted(name_of(array.dtype).rpartition(".")[2], dtype)


def converted_value(value: Any, dtype: str) -> Any:
    """Return an array, or a tensor on its device, in a float dtype.

    Integers, bool, complex numbers, and values of this dtype are returned without a copy.
    """
    if not needs_conversion(value, dtype):
        return value
    if is_torch(value):
        return value.detach().to(backend_of(value, TensorBackend).dtype_of(dtype))
    is_numpy = isinstance(value, np.ndarray | np.generic)
    return converted(np.asarray(value) if is_numpy else value, dtype)
