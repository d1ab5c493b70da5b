"""Names of dtypes; bfloat16, float8 as labelled integers without ml_dtypes.

NumPy has these dtypes only with ml_dtypes. Without it, their arrays are unsigned integers of the
same size, and the metadata of the integers' dtype names the true dtype. Arrays of packed dtypes,
such as ``float4_e2m1fn_x2`` with two elements in a byte, always are labelled uint8.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import _core

if TYPE_CHECKING:
    from .._types import DType, NumpyDType

LABEL = "mlstate.dtype"  # the key in the metadata; the core reads and writes it too


class DtypeInfo(NamedTuple):
    """A line of the core's table of dtypes."""

    name: str  # of NumPy, ml_dtypes and torch
    file_name: str  # of safetensors
    item_bytes: int
    kind: str  # "float", "int", "uint", "bool", "complex", "float8" or "packed"
    in_numpy: bool  # without ml_dtypes
    element_bits: int  # in a file; fewer than those of an item if the dtype is packed


DTYPES = tuple(DtypeInfo(*row) for row in _core.dtypes())
NAMES = frozenset(info.name for info in DTYPES)
FLOATS, FLOAT8S, INTEGERS, PACKED = (
    frozenset(info.name for info in DTYPES if info.kind in kinds)
    for kinds in (("float",), ("float8",), ("int", "uint"), ("packed",))
)
NARROW_FLOATS = frozenset(
    info.name for info in DTYPES if info.kind in ("float", "float8") and info.item_bytes <= 2
)
# Item sizes of the dtypes that NumPy has only with ml_dtypes.
EXTENSIONS = {info.name: info.item_bytes for info in DTYPES if not info.in_numpy}


def label_of(dtype: Any) -> str:
    """Return the name of the true dtype in the metadata of an unsigned integer's dtype; else "".

    Labels that the core ignores are ignored here too.
    """
    metadata = getattr(dtype, "metadata", None)
    if not metadata or dtype.kind != "u":
        return ""
    label = metadata.get(LABEL)
    is_extension = isinstance(label, str) and EXTENSIONS.get(label) == dtype.itemsize
    return label if is_extension else ""


@lru_cache(maxsize=128)  # NumPy builds the name on each access
def _bare_name(dtype: DType) -> str:
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def name_of(dtype: object) -> str:
    """Return the name of a dtype that NumPy, ml_dtypes, torch and the core share."""
    return label_of(dtype) or _bare_name(dtype)  # equal dtypes may differ in metadata


# names of papers and of safetensors, in lower case
_SHORT_NAMES = {
    "bf16": "bfloat16",
    **{f"{prefix}{bits}": f"float{bits}" for prefix in ("f", "fp") for bits in (16, 32, 64)},
}


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype argument, of NumPy, ml_dtypes or torch; "" for other values.

    A str may also be a short name of a float, such as ``"bf16"`` or ``"F32"``.
    """
    name = label_of(dtype) or str(dtype).removeprefix("torch.")
    name = _SHORT_NAMES.get(name.lower(), name)
    if name in NAMES:
        return name
    if dtype is None:  # NumPy's default is float64
        return ""
    try:
        return name_of(np.dtype(dtype))
    except (TypeError, ValueError):
        return ""


def text_of(dtype: NumpyDType) -> str:
    """Return a text that identifies a NumPy dtype, the same for both byte orders."""
    return label_of(dtype) or str(dtype.newbyteorder("="))


def ml_dtype(name: str) -> NumpyDType:
    """Return the dtype of ml_dtypes with this name; raise ImportError without ml_dtypes.

    Raises TypeError for packed dtypes, whose bytes are not numbers.
    """
    if name in PACKED:
        raise TypeError(f"NumPy cannot compute with {name}: its bytes hold several elements each")
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(
            f"NumPy has no dtype {name}: install ml_dtypes with pip install 'mlstate[dtypes]'",
            name="ml_dtypes",
        ) from None
    dtype: NumpyDType = np.dtype(getattr(ml_dtypes, name))
    return dtype


def stored_dtype(name: str) -> NumpyDType:
    """Return a dtype for moving elements of the dtype `name`, which NumPy lacks.

    It is of ml_dtypes, or without that a labelled unsigned integer. Raises ImportError if ml_dtypes
    is installed but cannot be imported.
    """
    if name not in PACKED:
        try:
            return ml_dtype(name)
        except ImportError as error:
            if name not in EXTENSIONS or not isinstance(error.__context__, ModuleNotFoundError):
                raise  # ml_dtypes is installed but broken
    dtype: NumpyDType = np.dtype(f"u{EXTENSIONS[name]}", metadata={LABEL: name})
    return dtype


def numpy_dtype(name: str) -> NumpyDType:
    """Return the dtype of loaded arrays of the dtype `name`: NumPy's, or that by `stored_dtype`."""
    return stored_dtype(name) if name in EXTENSIONS else np.dtype(name)


def as_numbers(array: Any) -> Any:
    """Return an array to compute with: labelled integers as a view of their true dtype.

    It is a copy if their byte order is not native, as ml_dtypes has no other. Raises as `ml_dtype`.
    """
    label = label_of(array.dtype)
    if not label:
        return array
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array.view(ml_dtype(label))
