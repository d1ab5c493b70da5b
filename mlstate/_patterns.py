"""What the manifest says of all ranks' indexes, so that nobody has to read all of them.

Most ranks of a job store the same tensors, cut alike: their indexes have one pattern, and
differ in which parts they list. The manifest numbers the patterns, and says of each which
names it has, and of each rank which pattern and which parts it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _core, _folder
from ._manifest import IndexRecord, Manifest, Pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_NAMES = 16 << 20  # characters of all patterns' names: beyond, the manifest has none


def pattern_of(text: bytes) -> dict[str, Any]:
    """What a rank tells of its index: a digest of its pattern, None for none, and its parts."""
    [told] = _folder.patterns_of(_core.Catalog((text,), ("index",)))
    return {"pattern": None, "parts": ()} if told is None else told._asdict()


def _who_has_what(records: Sequence[IndexRecord], patterns: int) -> tuple[Any, ...]:
    """For each pattern its ranks, their parts, and the number of its groups."""
    import numpy as np

    ranks: list[list[int]] = [[] for _ in range(patterns)]
    for rank, record in enumerate(records):
        assert record.pattern is not None
        ranks[record.pattern].append(rank)
    return tuple(
        (
            np.array(each, np.uint64),
            np.array([records[rank].parts for rank in each], np.uint64),
            len(records[each[0]].parts),
        )
        for each in ranks
    )


def with_patterns(
    folder: str, manifest: Manifest, told: Sequence[dict[str, Any]]
) -> tuple[Manifest, Any]:
    """Put into a manifest what ranks told of their indexes; also returns a catalog.

    The catalog has an index of each pattern, and so all tensors: what ranks of one pattern
    say of these is the same. Without patterns it has all indexes.

    Raises
    ------
    FormatError
        The ranks' indexes do not make one checkpoint, or lack a part of a tensor.
    """
    if any(one["pattern"] is None for one in told):
        catalog = _folder.load_catalog(folder, manifest)
        catalog.check_parts(None, manifest.world_size)
        return manifest, catalog
    numbers: dict[str, int] = {}
    first: list[int] = []
    records: list[IndexRecord] = []
    for rank, (record, one) in enumerate(zip(manifest.indexes, told, strict=True)):
        number = numbers.setdefault(one["pattern"], len(numbers))
        if number == len(first):
            first.append(rank)
        records.append(record._replace(pattern=number, parts=tuple(one["parts"])))
    catalog = _folder.load_catalog(folder, manifest, first)
    catalog.check_parts(_who_has_what(records, len(first)), manifest.world_size)
    names = [found.hex() for found in catalog.names()]
    if sum(map(len, names)) > _MOST_NAMES:
        return manifest, catalog
    patterns = tuple(map(Pattern, numbers, names))
    return manifest._replace(indexes=tuple(records), patterns=patterns), catalog
