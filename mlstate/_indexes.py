"""The indexes of a root, read as far as a load needs them.

One index of each pattern tells which tensors there are and how they are cut; the manifest
tells who has which parts. So a rank reads those indexes that list what it wants, and their
number does not grow with that of the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _core, _folder
from ._manifest import Ranks
from ._names import GLOB

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ._manifest import Manifest


def _patterns_with(manifest: Manifest, names: Sequence[str] | None) -> list[int]:
    """Numbers of the patterns that may have tensors of these names, or below them."""
    patterns = manifest.patterns or ()
    if names is None or any(map(GLOB.search, names)):
        return list(range(len(patterns)))
    import numpy as np

    sought = set()
    for name in names:  # of a tensor or what is above some, or of a state of a tensor
        for part in (name, name.rpartition(".")[0]):
            sought.add(_core.crc32c(part.encode("utf-8", "surrogatepass")))
    listed = np.frombuffer(bytes.fromhex("".join(each.names for each in patterns)), ">u4")
    owner = np.repeat(np.arange(len(patterns)), [len(each.names) // 8 for each in patterns])
    found = np.isin(listed, np.array(list(sought), np.uint32))
    return [int(number) for number in np.unique(owner[found])]


class Indexes:
    """What was read of a root.

    Attributes
    ----------
    catalog : Catalog
        Of the indexes in `ranks`. To begin with it has all tensors that `names` mean; after
        `need`, all that is stored of what was asked for.
    ranks : list of int
        Whose indexes were read.
    """

    def __init__(
        self, folder: str, manifest: Manifest, names: Sequence[str] | None, rank: int | None
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._own = -1 if rank is None else rank
        self._known: tuple[tuple[Any, Any, int], ...] = ()
        self._needed: set[int] = set()
        self._texts: dict[int, bytes] = {}  # those that were read to begin with
        if manifest.patterns is None:
            self.ranks = list(range(manifest.world_size))
        else:
            self.ranks = self._first(_patterns_with(manifest, names))
        self.catalog = self._first_catalog = self._read(self.ranks)
        if len(self.ranks) == manifest.world_size:
            self._texts.clear()  # no more will be read

    def _read(self, ranks: list[int]) -> Any:
        return _folder.load_catalog(self._folder, self._manifest, ranks, self._texts)

    def _first(self, patterns: Iterable[int]) -> list[int]:
        """One rank of each pattern: this one, where it has it, else the first."""
        records = self._manifest.indexes
        assert isinstance(records, Ranks)
        found = [records.of_pattern(number) for number in patterns]
        found = [(ranks, parts) for ranks, parts in found if len(ranks)]
        found.sort(key=lambda pair: int(pair[0][0]))
        self._known = tuple((ranks, parts, parts.shape[1]) for ranks, parts in found)
        return [self._own if self._own in ranks else int(ranks[0]) for ranks, _ in found]

    def read_all(self) -> None:
        """Read the indexes of all ranks."""
        if len(self.ranks) < self._manifest.world_size:
            self.ranks = list(range(self._manifest.world_size))
            self.catalog = self._read(self.ranks)

    def need(self, wanted: Iterable[tuple[int, list[str], Any]]) -> None:
        """Read what lists the parts that are wanted: sections, keys, and how these are cut."""
        if len(self.ranks) == self._manifest.world_size:
            return
        for section, keys, cutting in wanted:
            self._needed.update(
                self._first_catalog.holders(
                    self._folder,
                    section,
                    keys,
                    cutting,
                    self._known,
                    self._own,
                    self._manifest.world_size,
                )
            )
        if self._needed and not self._needed.issubset(self.ranks):
            self.ranks = sorted(self._needed)
            self.catalog = self._read(self.ranks)
