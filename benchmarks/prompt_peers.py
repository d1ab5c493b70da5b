"""Other ways to store prompts: raw files, safetensors, prompt caches of mlx-lm.

Each appends the keys and values of 256 tokens, durably, and reads the ones of a longer prompt.
"""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from checkpoint_states import sync

STEP = 1 << 20  # bytes of one system call that reads


def sync_with_name(path: Path) -> None:
    """Make a file and its name durable."""
    sync(path)
    sync(path.parent)


class RawFile:
    """One file; its end receives the arrays."""

    name = "raw file"

    def __init__(self, folder: Path, parts: list[np.ndarray]) -> None:
        self.parts = parts
        self.file = os.open(folder / "raw", os.O_RDWR | os.O_CREAT, 0o666)
        self.end = 0

    def append(self) -> None:
        """Write the bytes with few system calls, and sync."""
        end = self.end
        for start in range(0, len(self.parts), 2):
            end += os.pwritev(self.file, self.parts[start : start + 2], end)
        os.fdatasync(self.file)
        self.end = end

    def read_in_threads(self, targets: list[np.ndarray]) -> None:
        """Read as `read` does, half of the arrays in another thread."""
        half = len(targets) // 2
        offset = sum(target.nbytes for target in targets[:half])
        other = Thread(target=self.read, args=(targets[half:], offset))
        other.start()
        self.read(targets[:half])
        other.join()

    def read(self, targets: list[np.ndarray], offset: int = 0) -> None:
        """Read bytes into existing arrays, in the steps that the system likes."""
        for target in targets:
            view = memoryview(target).cast("B")
            done = 0
            while done < len(view):
                done += os.preadv(self.file, [view[done : done + STEP]], offset + done)
            offset += done


class Safetensors:
    """One file for each 256 tokens."""

    name = "safetensors"

    def __init__(self, folder: Path, parts: list[np.ndarray]) -> None:
        self.folder = folder / "safetensors"
        self.folder.mkdir()
        self.tensors = {f"{i // 2}.{'kv'[i % 2]}": part for i, part in enumerate(parts)}
        self.count = 0

    def append(self) -> None:
        """Save one more file, and sync."""
        from safetensors.numpy import save_file

        path = self.folder / f"{self.count}.safetensors"
        save_file(self.tensors, path)
        sync_with_name(path)
        self.count += 1

    def read(self, cache: list[np.ndarray], blocks: int) -> None:
        """Load files and copy them to their positions of a cache."""
        from safetensors.numpy import load_file

        for block in range(blocks):
            loaded = load_file(self.folder / f"{block}.safetensors")
            for target, name in zip(cache, self.tensors, strict=True):
                tokens = loaded[name].shape[1]
                target[:, block * tokens : (block + 1) * tokens] = loaded[name]


class MlxCache:
    """The file of `save_prompt_cache`, which holds all tokens: it cannot be appended to."""

    name = "mlx-lm"

    def __init__(self, folder: Path, parts: list[np.ndarray], blocks: int) -> None:
        self.folder, self.count = folder, 0
        self.cache = self._cache_of(parts, blocks)

    @staticmethod
    def _cache_of(parts: list[np.ndarray], blocks: int) -> list[Any]:
        import mlx.core as mx
        from mlx_lm.models.cache import KVCache

        cache = []
        for i in range(0, len(parts), 2):
            layer = KVCache()
            keys, values = (
                mx.array(np.concatenate([p] * blocks, 1)[None]) for p in parts[i : i + 2]
            )
            layer.update_and_fetch(keys, values)
            mx.eval(layer.keys, layer.values)
            cache.append(layer)
        return cache

    def save(self) -> None:
        """Save the cache to a new file, and sync."""
        from mlx_lm.models.cache import save_prompt_cache

        self.count += 1
        save_prompt_cache(str(self._path()), self.cache)
        sync_with_name(self._path())

    def _path(self) -> Path:
        return self.folder / f"cache-{self.count}.safetensors"

    def load(self) -> None:
        """Load the cache into new arrays; mlx reads them when they are used."""
        import mlx.core as mx
        from mlx_lm.models.cache import load_prompt_cache

        mx.eval([layer.state for layer in load_prompt_cache(str(self._path()))])
