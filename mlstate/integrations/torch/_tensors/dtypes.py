"""Which torch dtype has which name and NumPy dtype, such as bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...._common.dtypes import DTYPES, EXTENSIONS, FLOAT8S, PACKED, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

# Dtypes with equal names that torch and NumPy exchange without conversion.
SHARED = frozenset(info.name for info in DTYPES if info.in_numpy) | {"complex128"}
# Dtypes of ml_dtypes: exchanged as integers, which torch and NumPy both have.
VIEWED = {name: "uint8" if size == 1 else f"int{8 * size}" for name, size in EXTENSIONS.items()}
# Dtypes that torch cannot read from a pickle; they are pickled as integers of the same size.
PICKLED = dict.fromkeys(FLOAT8S | PACKED, "uint8") | {
    f"uint{bits}": f"int{bits}" for bits in (16, 32, 64)
}


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of a name; raise ValueError if torch has none."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def size_of(lengths: Iterable[int]) -> torch.Size:
    """Return torch's type of shapes."""
    import torch

    return torch.Size(lengths)


def torch_dtype(dtype: Any, source: torch.Tensor) -> torch.dtype:
    """Return the torch dtype for a torch dtype, a name or a NumPy dtype; None: of `source`.

    Raises TypeError if NumPy does not know it, CompatibilityError if torch lacks it.
    """
    import torch

    if dtype is None:
        return source.dtype
    if isinstance(dtype, torch.dtype):
        return dtype
    attribute = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(attribute, torch.dtype):
        import numpy as np

        dtype = np.dtype(dtype)  # raises TypeError if NumPy has no such dtype either
        attribute = getattr(torch, name_of(dtype), None)
    if not isinstance(attribute, torch.dtype):
        from ....errors import CompatibilityError

        raise CompatibilityError(f"torch has no dtype '{name_of(dtype)}'")
    return attribute


def torch_has(name: str) -> bool:
    """Return whether this torch has the dtype that NumPy or ml_dtypes calls `name`."""
    import torch

    return (name in SHARED or name in VIEWED) and hasattr(torch, name)
