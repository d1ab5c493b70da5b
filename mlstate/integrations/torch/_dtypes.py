"""torch's dtypes and NumPy's, each by the other's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


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
        found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        from ...errors import CompatibilityError

        raise CompatibilityError(f"torch has no dtype '{dtype.name}'")
    return found


def name_of(dtype: torch.dtype) -> str:
    """Return the name that NumPy, ml_dtypes and the core know a dtype by."""
    return str(dtype).removeprefix("torch.")
