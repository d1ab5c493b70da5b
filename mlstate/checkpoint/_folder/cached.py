"""The folder of a checkpoint in an object store, read through a local cache of its objects.

Loads, but no verifications, read through the cache of `cache_folder` (read_cache.py).
"""

from __future__ import annotations

import shutil
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ... import _core
from ...errors import CheckpointWarning, ChecksumError, FormatError
from .._remote.read_cache import ReadCache
from .object import ObjectFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .._remote.options import StoreOptions
    from .object import _Range


class CachedFolder(ObjectFolder):
    """A checkpoint in an object store whose options name a `cache_folder`."""

    def __init__(self, url: str, options: StoreOptions, file: str = "") -> None:
        super().__init__(url, options, file)
        assert options.cache_folder is not None
        self._cache = ReadCache(options.cache_folder, options.cache_bytes, str(self.path))

    def without_cache(self) -> ObjectFolder:
        """Return the same folder, with nothing in memory and without the local cache."""
        self._roots.clear()
        folder = ObjectFolder(self.path, self._options, self.file)
        folder._store = self._store
        return folder

    def read(self, path: str, *, follow_links: bool = False) -> bytes:
        """Return a manifest or an index; an index from the cache, if it has it."""
        if not self._cache.accepts(path):
            return super().read(path)
        data = self._cache.get_whole(path)
        if data is None:
            data = super().read(path)
            with suppress(FormatError):
                _core.json_checksum_check(data, path)
                self._cache.put(path, 0, data, len(data))
        return data

    def _copy_loaded(self, local: str, path: str, begin: int, end: int) -> None:
        """Copy a range from the cache or, if a byte is missing there, from the store."""
        cache = self._cache
        if path in self._tags or not cache.accepts(path):
            self._copy_range(local, path, begin, end)
            return
        cached = cache.get(path, begin, end)
        if cached is not None:
            parts, nbytes = cached
            for at, view in parts:
                self._write_range(local, path, at, view, nbytes)
            return
        data, of_object = self.store.get_range(path, begin, end)
        self._write_range(local, path, begin, data, of_object)
        if of_object is not None and len(data) == end - begin:
            cache.put(path, begin, data, of_object)

    def read_batches(
        self,
        merged: _core.MergedIndex,
        section: int,
        keys: list[str],
        cuts: Any,
        verify: bool,
        read: Callable[[str, list[str], Any], object],
    ) -> None:
        """Read as an `ObjectFolder` does, through the cache; warn once if it cannot be written."""
        try:
            super().read_batches(merged, section, keys, cuts, verify, read)
        finally:
            self._cache.finish()
            problem = self._cache.problem()
            if problem is not None:
                warnings.warn(problem, CheckpointWarning, stacklevel=2)

    def _read_batch(self, local: str, ranges: Sequence[_Range], read: Callable[[], object]) -> None:
        """Call `read` with local copies; if they are damaged, copy them from the store again.

        The cache then forgets the objects, because it may have kept a damaged answer.
        """
        with suppress(ChecksumError, FormatError):
            read()
            return
        for path in {path for path, *_ in ranges}:
            self._cache.discard(path)
        shutil.rmtree(local, ignore_errors=True)
        with self._start_copies(local, ranges) as copies:
            copies.wait()
        read()
