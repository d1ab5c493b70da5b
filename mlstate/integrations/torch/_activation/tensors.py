"""Tensors in nested values: found, detached, their storages, bytes and versions."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


def tensors_in(values: object) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists, dicts and other registered containers."""
    import torch
    from torch.utils import _pytree

    if isinstance(values, torch.Tensor):
        return [values]
    return [leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def detach_all(values: object) -> Any:
    """Return nested values with detached tensors, which require gradients as before.

    The tensors share their memory with the original ones.
    """
    import torch
    from torch.utils import _pytree

    def detach(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().requires_grad_(leaf.requires_grad)

    return _pytree.tree_map(detach, values)


class Geometry(NamedTuple):
    """How a strided tensor reads its storage; `view_of` makes a tensor of it."""

    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements
    is_conj: bool
    is_neg: bool


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Return how a strided tensor reads its storage, with lazy conjugation and negation."""
    return Geometry(
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def view_of(storage: Any, geometry: Geometry) -> torch.Tensor:
    """Return a tensor over `storage`, an untyped storage of torch."""
    import torch

    empty = torch.empty(0, dtype=geometry.dtype, device=storage.device)
    view = empty.set_(storage, geometry.offset, geometry.shape, geometry.stride)
    view = view.conj() if geometry.is_conj else view
    return torch._neg_view(view) if geometry.is_neg else view


def storage_id(tensor: torch.Tensor) -> int | None:
    """Return the identity of a tensor's storage; None if it is not strided, as sparse ones."""
    import torch

    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of writes to a tensor; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def storage_bytes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the sizes in bytes of the tensors' storages by identity, each storage once.

    Tensors that are not strided are left out.
    """
    strided = [(storage_id(t), t) for t in tensors]
    return {key: t.untyped_storage().nbytes() for key, t in strided if key is not None}


def time_after_work(device: torch.device) -> float:
    """Wait until a device has done its work, and return the time in seconds."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
