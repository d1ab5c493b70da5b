"""`CachedFolder`: loads from a store through `cache_folder`, a local cache.

Loads, but no verifications, read through the cache of `cache_folder` (read_cache.py).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ... import _core
from ..._common.caller import find_caller
from ...errors import ChecksumError, FormatError
from ._remote.read_cache import ReadCache
from .object import ObjectFolder

if TYPE_CHECKING:
    from ..._common.callback import Progress
    from ._remote.options import StoreOptions
    from .range_load import Answer, LoadCall, Unit


class CachedFolder(ObjectFolder):
    """A checkpoint in an object store whose options name a `cache_folder`."""

    def __init__(self, url: str, options: StoreOptions, file: str = "") -> None:
        """Open the cache of `options` for the folder at `url`; `file` is as for `ObjectFolder`."""
        super().__init__(url, options, file)
        assert options.cache_folder is not None
        self._cache = ReadCache(options.cache_folder, options.cache_bytes, str(self.path))

    def without_cache(self) -> ObjectFolder:
        """Return the same folder without the local cache, and forget the roots in memory."""
        self._roots.clear()
        folder = ObjectFolder(self.path, self._options, self.file)
        folder._store = self._store
        return folder

    def read(self, path: str, *, follow_links: bool = False) -> bytes:
        """Return the bytes of a manifest or an index, from the cache if it has them.

        Only texts whose checksum matches are cached; manifests, which change, never are. The errors
        and `follow_links` are as for `ObjectFolder.read`.
        """
        if not self._cache.accepts(path):
            return super().read(path)
        data = self._cache.get_whole(path)
        if data is None:
            data = super().read(path)
            with suppress(FormatError):
                _core.json_checksum_check(data, path)
                self._cache.put(path, 0, data, len(data))
        return data

    def _fetch(self, path: str, begin: int, end: int) -> list[Answer]:
        """Return bytes `begin` to `end` of an object, from the cache or else from the store.

        Files that other programs may replace, those of `note_files`, are not cached.
        """
        cache = self._cache
        if path in self._tags or not cache.accepts(path):
            return super()._fetch(path, begin, end)
        cached = cache.get(path, begin, end)
        if cached is not None:
            parts, nbytes = cached
            return [(path, at, at + len(view), nbytes, view) for at, view in parts]
        answers = super()._fetch(path, begin, end)
        # A shorter answer means that the object is too small; it is not cached.
        *_, nbytes, data = answers[0]
        if len(data) == end - begin:
            cache.put(path, begin, data, nbytes)
        return answers

    def _fill(self, call: LoadCall, progress: Progress) -> None:
        """Read the call's tensors through the cache; warn once if it cannot be written.

        `progress` is called with numbers of bytes.
        """
        try:
            super()._fill(call, progress)
        finally:
            self._cache.finish()
            problem = self._cache.problem()
            if problem is not None:
                find_caller().warn(problem)

    def _read_unit(self, call: LoadCall, unit: Unit) -> int:
        """Copy a unit's answers into its arrays; if they are damaged, ask the store again.

        The cache then forgets the unit's objects, because it may have kept a damaged answer. A
        second failure raises ChecksumError or FormatError.
        """
        with suppress(ChecksumError, FormatError):
            return super()._read_unit(call, unit)
        for path in {path for path, *_ in unit.ranges}:
            self._cache.discard(path)
        fetch = super()._fetch
        unit.answers[:] = [answer for part in unit.ranges for answer in fetch(*part)]
        return super()._read_unit(call, unit)
