"""`GradientAccumulator` with torch tensors: sparse, on a device, bfloat16: copies, sums, norms."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING

from .._tensors.dtypes import torch_dtype
from .._tensors.memory import is_core_readable

if TYPE_CHECKING:
    import numpy as np
    import torch


def readable(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor as plain main memory, or None if only torch can add it.

    A negated or conjugated view is resolved, which copies it.
    """
    return tensor.resolve_neg().resolve_conj() if is_core_readable(tensor) else None


def copy_of(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """Return a detached copy of a gradient to add others to, in C order if it is strided.

    `dtype`: name of the copy's dtype; None: the gradient's.
    """
    import torch

    with torch.no_grad():
        # A lazily negated or conjugated view would stay one in a clone.
        resolved = tensor.detach().resolve_neg().resolve_conj()
        target_dtype = torch_dtype(dtype, resolved)
        if resolved.layout != torch.strided:
            return resolved.to(target_dtype, copy=True)
        return resolved.to(target_dtype, copy=True, memory_format=torch.contiguous_format)


def item_bytes(dtype: str, like: torch.Tensor) -> int:
    """Return the size of an element of a dtype in bytes; `dtype`: its name, `like`: any tensor."""
    size: int = torch_dtype(dtype, like).itemsize
    return size


def tensor_in(memory: np.ndarray, dtype: str, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the bytes `memory` with the shape of `like`; it keeps them alive."""
    import torch

    return torch.from_numpy(memory).view(torch_dtype(dtype, like)).view(like.shape)


def sum_sparse(total: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the sum of both in new memory, or None if both are strided.

    Such a sum needs new memory even in place, and can fail for lack of it.
    """
    import torch

    if total.layout == tensor.layout == torch.strided:
        return None
    with torch.no_grad():
        return total + tensor


def add_gradient(total: torch.Tensor, tensor: torch.Tensor) -> None:
    """Add `tensor` to `total` in place, with torch's operation; both are strided.

    This is for other devices and subclasses, whose memory the core cannot access.
    """
    import torch

    with torch.no_grad():
        total.add_(tensor)


def norm_partial(tensor: torch.Tensor) -> tuple[float, int]:
    """Return the sum of squares (in float64) and the number of non-finite elements.

    Waits for the device. A meta tensor has no elements; its sum is NaN.
    """
    import torch

    if tensor.device.type == "meta":
        return nan, 0
    with torch.no_grad():
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        wide = values.abs().double()
        squares = float((wide * wide).sum())
        return squares, int((~torch.isfinite(values)).sum())
