"""Offloading of a block's saved tensors to main memory or files, and copies back."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .tensors import Geometry, geometry_of, view_of

if TYPE_CHECKING:
    import torch


class Offloaded(NamedTuple):
    """An offloaded tensor: the index of its copy in a `Host`, and how it reads that copy."""

    copy: int
    geometry: Geometry


class Host:
    """Copies of the memory of one block's saved tensors; tensors of one storage share a copy.

    Copies are in unnamed files in a folder, or in main memory, which is pinned for accelerators.
    """

    def __init__(self, folder: str | None) -> None:
        """Start without copies; `folder`: of the files, or None for main memory."""
        self.outputs: list[Offloaded] = []  # the block's output, if it is needed again
        self._folder = folder
        # bytes of each storage, and the device of the original
        self._copies: list[tuple[torch.Tensor, torch.device]] = []
        self._index: dict[int, int] = {}  # index in `_copies`, by identity of the storage
        self._returned: dict[int, torch.Tensor] = {}  # bytes on the device again, by the same index

    def put(self, tensor: torch.Tensor) -> Offloaded:
        """Copy a tensor's storage to the host, unless it was copied; return what `get` needs.

        Other tensors of the storage share this copy.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._index:
            self._index[key] = len(self._copies)
            self._copies.append((self._copy_to_host(_bytes_of(tensor)), tensor.device))
        return Offloaded(self._index[key], geometry_of(tensor))

    def get(self, offloaded: Offloaded) -> torch.Tensor:
        """Return a tensor that was offloaded, on its original device, with its geometry.

        `offloaded`: a result of `put`. Tensors that shared memory share it again.
        """
        import torch

        raw = self._returned.get(offloaded.copy)
        if raw is None:
            host, device = self._copies[offloaded.copy]
            raw = torch.empty(host.numel(), dtype=torch.uint8, device=device)
            raw.copy_(host)
            self._returned[offloaded.copy] = raw
        return view_of(raw.untyped_storage(), offloaded.geometry)

    def _copy_to_host(self, raw: torch.Tensor) -> torch.Tensor:
        """Return a copy of `raw`, all bytes of a storage.

        It is in memory, pinned for CUDA, or in a file of the folder.
        """
        import torch

        if self._folder is None:
            pinned = raw.device.type == "cuda"
            host = torch.empty(raw.numel(), dtype=torch.uint8, pin_memory=pinned)
        else:
            host = _file_memory(self._folder, raw.numel())
        host.copy_(raw)
        return host


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a tensor's storage."""
    import torch

    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage())


def _file_memory(folder: str, count: int) -> torch.Tensor:
    """Return a tensor of `count` bytes in a new file of `folder` that has no name.

    The system deletes the file with the tensor, also if the process is killed.
    """
    import torch

    if not count:
        return torch.empty(0, dtype=torch.uint8)
    handle, path = tempfile.mkstemp(prefix="mlstate-", suffix=".saved", dir=folder)
    try:
        os.truncate(handle, count)
        return torch.frombuffer(mmap.mmap(handle, count), dtype=torch.uint8)
    finally:
        os.close(handle)
        Path(path).unlink()
