"""Which rank stores which part, by groups of ranks with alike indexes; a missing part.

Most ranks of a job store the same tensors with the same layout. Their indexes have the same
pattern and differ only in the parts that they list. The manifest records the ranks of each
pattern, and for each rank its part of each group of shards
(csrc/core/checkpoint/ranks/index_pattern.h).
"""

from __future__ import annotations

import struct
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

from ... import _core
from ...errors import FormatError
from .._folder.names import SECTIONS
from .checkpoint_files import CheckpointFiles, patterns_of
from .manifest import Manifest, Pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

_WHOLE = (None, 0, 0)  # a cutting: all of each tensor


def pattern_of(text: bytes) -> dict[str, Any]:
    """Return the report of a rank's index: digest of its pattern, and its part of each group.

    They are the members "pattern" and "parts". A group is the shards of one layout and part.
    `text`: the bytes of the index. The digest is None, without parts, for an index with too many
    groups.
    """
    [summary] = patterns_of(_core.MergedIndex((text,), ("index",)))
    return {"pattern": None, "parts": ()} if summary is None else summary._asdict()


def owners_of(places: bytes, patterns: Sequence[Pattern]) -> dict[int, list[int]]:
    """Return the ranks that store each part of a tensor, by the number of the part.

    `places`: which patterns list the tensor, as bytes of pairs of C unsigned ints: a number in
    `patterns`, and the tensor's group in it.
    """
    owners: dict[int, list[int]] = {}
    for index, group in struct.iter_unpack("=II", places):
        pattern = patterns[index]
        for part, rank in zip(pattern.parts[group], pattern.ranks, strict=True):
            owners.setdefault(part, []).append(rank)
    return owners


def _all_owners(
    merged: _core.MergedIndex, patterns: Sequence[Pattern] | None
) -> list[dict[int, list[int]]]:
    """Return the owners of each tensor of `merged`: the ranks by part.

    `patterns`: None if the merged index has the indexes of all ranks.
    """
    if patterns is not None:
        owners = lru_cache(None)(partial(owners_of, patterns=patterns))
        return [owners(places) for places in merged.places()]
    stored: dict[tuple[str, str], dict[int, list[int]]] = {}
    for section, key, part, _, rank, *_ in merged.shards():
        stored.setdefault((section, key), {}).setdefault(part, []).append(rank)
    return [stored[section, key] for section, key, *_ in merged.tensors()]


def check_complete(merged: _core.MergedIndex, patterns: Sequence[Pattern] | None) -> None:
    """Raise FormatError if no rank stores some part of a tensor that has elements.

    `patterns`: None if the merged index has the indexes of all ranks.
    """
    every = zip(merged.tensors(), _all_owners(merged, patterns), strict=True)
    for (section, key, name, state, _, _, layout, *_), owners in every:
        parts = prod(count for _, count in layout)
        if len(owners) == parts:
            continue
        # ask for one part more than there are owners: if all of those are owned, none is missing
        number, most = SECTIONS.index(section), len(owners) + 1
        [parts_needed] = merged.select_parts("", number, [key], _WHOLE, most).values()
        if missing := parts_needed - owners.keys():
            label = f"state '{state}': " if state is not None else ""
            text = (
                f"{label}part {min(missing)} of {parts} is missing: no rank gives it as replica 0"
            )
            for part, ranks in sorted(owners.items()):
                if len(ranks) > 1:
                    first, second, *_ = sorted(ranks)
                    text += f"; ranks {first} and {second} both give part {part}"
                    break
            raise FormatError(f"'{name}': {text}", name=name)


def with_patterns(
    files: CheckpointFiles, manifest: Manifest, reports: Sequence[dict[str, Any]]
) -> tuple[Manifest, _core.MergedIndex]:
    """Add the patterns, groups of ranks with alike indexes, to a manifest.

    `reports`: of each rank in order, with the members of `pattern_of`. Returns the manifest, and a
    merged index with one index of each pattern, which lists all tensors. If an index has no
    pattern, the manifest gets none, and the merged index has the indexes of all ranks. Raises
    FormatError if the indexes do not form one checkpoint, or lack a part of a tensor.
    """
    ranks_of: dict[str | None, list[int]] = {}
    for rank, report in enumerate(reports):
        ranks_of.setdefault(report["pattern"], []).append(rank)
    patterns, first = None, None
    if None not in ranks_of:
        first = [ranks[0] for ranks in ranks_of.values()]
        patterns = tuple(
            Pattern(ranks, [*map(list, zip(*(reports[r]["parts"] for r in ranks), strict=True))])
            for ranks in ranks_of.values()
        )
    manifest = manifest._replace(patterns=patterns)
    merged = files.load_merged_index(manifest, first)
    check_complete(merged, patterns)
    return manifest, merged
