"""torch's dtypes and NumPy's, each by the other's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...._common.dtypes import name_of

if TYPE_CHECKING:
    import torch

# What both call by the same name and take from each other as it is.
INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "float32", "float64", "complex64", "complex128"]
SHARED = frozenset(["bool", *INTEGERS, *FLOATS])
# What NumPy has from ml_dtypes: taken over as the integers that torch and NumPy both have.
VIEWED = {
    "bfloat16": "int16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float8_e8m0fnu": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2fnuz": "uint8",
}
# What torch pickles as the integers of the same size: it cannot read these from a pickle.
PICKLED = {name: "uint8" for name in VIEWED if name != "bfloat16"} | {
    f"uint{bits}": f"int{bits}" for bits in (16, 32, 64)
}


def torch_dtype(dtype: Any, source: torch.Tensor) -> torch.dtype:
    """Return the torch dtype that `dtype` means: a torch dtype, a name, a NumPy dtype."""
    import torch

    if dtype is None:
        return source.dtype
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype):
        import numpy as np

        dtype = np.dtype(dtype)  # TypeError where this is no dtype of NumPy's either
        found = getattr(torch, name_of(dtype), None)
    if not isinstance(found, torch.dtype):
        from ....errors import CompatibilityError

        raise CompatibilityError(f"torch has no dtype '{name_of(dtype)}'")
    return found


def torch_has(name: str) -> bool:
    """Whether this torch has a dtype that means what NumPy or ml_dtypes calls by the name."""
    import torch

    return (name in SHARED or name in VIEWED) and hasattr(torch, name)
