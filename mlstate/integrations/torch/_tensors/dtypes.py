"""torch's dtypes and NumPy's, each by the other's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...._common.dtypes import DTYPES, EXTENSIONS, FLOAT8S, name_of

if TYPE_CHECKING:
    import torch

# What both call by the same name and take from each other as it is.
SHARED = frozenset(info.name for info in DTYPES if info.in_numpy) | {"complex128"}
# What NumPy has from ml_dtypes: taken over as the integers that torch and NumPy both have.
VIEWED = {name: "uint8" if size == 1 else f"int{8 * size}" for name, size in EXTENSIONS.items()}
# What torch pickles as the integers of the same size: it cannot read these from a pickle.
PICKLED = dict.fromkeys(FLOAT8S, "uint8") | {f"uint{bits}": f"int{bits}" for bits in (16, 32, 64)}


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
