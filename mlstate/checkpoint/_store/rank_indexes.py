"""The indexes of a root, read as far as a load needs them.

One index of each pattern tells which tensors exist and how they are cut. The manifest tells
which ranks store which parts. So a rank reads the indexes that list what it wants, and their
number does not grow with the number of ranks.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from . import folder as _folder
from .index_patterns import owners_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .manifest import Manifest


class Indexes:
    """The indexes of a root that were read.

    Attributes
    ----------
    catalog : Catalog
        Of the indexes in `ranks`. To begin with it has all tensors; after `need`, all that is
        stored of the wanted parts.
    ranks : list of int
        Ranks whose indexes were read.
    """

    def __init__(self, folder: str, manifest: Manifest, rank: int | None) -> None:
        self._folder = folder
        self._manifest = manifest
        self._own = rank
        self._patterns = [pattern for pattern in manifest.patterns or () if pattern.ranks]
        self._needed: set[int] = set()
        self._owners: dict[bytes, dict[int, list[int]]] = {}  # by the places of a tensor
        self._texts: dict[int, bytes] = {}  # those that were read to begin with
        if manifest.patterns is None:
            self.ranks = list(range(manifest.world_size))
        else:
            self.ranks = [self._choose(pattern.ranks) for pattern in self._patterns]
        self._first = self.ranks
        self.catalog = self._first_catalog = self._read(self.ranks)
        if len(self.ranks) == manifest.world_size:
            self._texts.clear()  # no more will be read

    def _choose(self, ranks: list[int]) -> int:
        """Return this rank if it is one of `ranks`, else the lowest."""
        return self._own if self._own is not None and self._own in ranks else min(ranks)

    def _read(self, ranks: list[int]) -> Any:
        return _folder.load_catalog(self._folder, self._manifest, ranks, self._texts)

    def read_all(self) -> None:
        """Read the indexes of all ranks."""
        if len(self.ranks) < self._manifest.world_size:
            self.ranks = list(range(self._manifest.world_size))
            self.catalog = self._read(self.ranks)

    def _owners_of(self, places: bytes, parts: set[int]) -> set[int]:
        """Return ranks that store the parts of a tensor; for no part, one that lists it."""
        if places not in self._owners:
            self._owners[places] = owners_of(places, self._patterns)
        owners = self._owners[places]
        found = {self._choose(owners[part]) for part in parts if part in owners}
        return found or {self._first[int.from_bytes(places[:4], sys.byteorder)]}

    def need(self, wanted: Iterable[tuple[int, list[str], Any]]) -> None:
        """Read what lists the parts that are wanted: sections, keys, and how these are cut."""
        if len(self.ranks) == self._manifest.world_size:
            return
        # a tensor of more parts than that is not complete
        most = sum(len(pattern.ranks) * len(pattern.parts) for pattern in self._patterns) + 1
        for section, keys, cutting in wanted:
            found = self._first_catalog.wanted_parts(self._folder, section, keys, cutting, most)
            for places, parts in found.items():
                self._needed |= self._owners_of(places, parts)
        if self._needed and not self._needed.issubset(self.ranks):
            self.ranks = sorted(self._needed)
            self.catalog = self._read(self.ranks)
