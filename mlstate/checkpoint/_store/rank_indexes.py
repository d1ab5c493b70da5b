"""Which ranks' indexes a load reads: those with the parts that it needs.

One index of each pattern lists all tensors with their layouts. The manifest records which ranks
store which parts. So a rank reads only the indexes that list its parts, and their number does not
grow with the number of ranks.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .._folder.names import SECTIONS
from .index_patterns import owners_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..._core import MergedIndex
    from ..._sharding.layout import Cuts
    from .checkpoint_files import CheckpointFiles
    from .manifest import Manifest


def keep_nested_whole(merged: MergedIndex, manifest: Manifest) -> None:
    """Let layouts cut no optimizer state of `merged` that is a nested value, stored as bytes.

    The groups of the optimizers in the `manifest` list these states.
    """
    nested = _nested_keys(manifest.optimizer)
    if nested:
        merged.keep_whole(SECTIONS.index("optim_state"), nested)
    named = {
        f"{name}/{key}"
        for name, kind in (manifest.states or {}).items()
        for key in _nested_keys(kind)
    }
    if named:
        merged.keep_whole(SECTIONS.index("states"), named)


def _nested_keys(kind: Mapping[str, Any] | None) -> set[str]:
    """Return the keys of an optimizer's states that are nested values; `kind`: its description."""
    groups = (kind or {}).get("param_groups") or ()
    with suppress(AttributeError, LookupError, TypeError):  # another program may list anything
        return {
            f"{group['params'][position]}.{state}"
            for group in groups
            for state, positions in group.get("packed_states", {}).items()
            for position in positions
        }
    return set()


class Indexes:
    """The indexes of `ranks`, which have been read, as one `merged_index`.

    Initially it lists all tensors; after `need`, it lists all shards of the requested parts.
    """

    def __init__(self, files: CheckpointFiles, manifest: Manifest, rank: int | None) -> None:
        """Read the first indexes: one for each pattern of ranks, or all if no patterns are known.

        `rank`: prefer this rank's index among equal ones; None: the lowest rank's.
        """
        self._files = files
        self._manifest = manifest
        self._rank = rank
        self._patterns = [pattern for pattern in manifest.patterns or () if pattern.ranks]
        self._needed: set[int] = set()
        self._owners: dict[bytes, dict[int, list[int]]] = {}  # by `places` of a tensor
        self._texts: dict[int, bytes] = {}  # texts of the indexes that were read first
        if manifest.patterns is None:
            self.ranks = list(range(manifest.world_size))
        else:
            self.ranks = [self._choose(pattern.ranks) for pattern in self._patterns]
        self._first_ranks = self.ranks  # by pattern, the rank whose index was read
        self.merged_index = self._first_index = self._read(self.ranks)
        if len(self.ranks) == manifest.world_size:
            self._texts.clear()  # all indexes have been read

    def _choose(self, ranks: list[int]) -> int:
        """Return this rank if it is in `ranks`, else the lowest rank."""
        return self._rank if self._rank is not None and self._rank in ranks else min(ranks)

    def _read(self, ranks: list[int]) -> MergedIndex:
        merged = self._files.load_merged_index(self._manifest, ranks, self._texts)
        keep_nested_whole(merged, self._manifest)
        return merged

    def read_all(self) -> None:
        """Read the indexes of all ranks."""
        if len(self.ranks) < self._manifest.world_size:
            self.ranks = list(range(self._manifest.world_size))
            self.merged_index = self._read(self.ranks)

    def _owners_of(self, places: bytes, parts: set[int]) -> set[int]:
        """Return ranks whose indexes list the parts `parts` of a tensor.

        `places`: of the tensor, as for `owners_of`. If no rank stores one of the parts, this is a
        rank that lists the tensor.
        """
        if places not in self._owners:
            self._owners[places] = owners_of(places, self._patterns)
        owners = self._owners[places]
        ranks_found = {self._choose(owners[part]) for part in parts if part in owners}
        # the first number in `places` is of a pattern that lists the tensor
        return ranks_found or {self._first_ranks[int.from_bytes(places[:4], sys.byteorder)]}

    def need(self, requests: Iterable[tuple[int, list[str], Cuts]]) -> None:
        """Read the indexes that list the requested parts; `merged_index` then has these only.

        `requests`: number of the section, keys, and how these are cut. Earlier requests stay in it.
        """
        if len(self.ranks) == self._manifest.world_size:
            return
        # a tensor with more parts than this cannot be complete
        most_parts = sum(len(pattern.ranks) * len(pattern.parts) for pattern in self._patterns) + 1
        for section, keys, cutting in requests:
            parts_by_place = self._first_index.select_parts(
                self._files.path, section, keys, cutting, most_parts
            )
            for places, parts in parts_by_place.items():
                self._needed |= self._owners_of(places, parts)
        if self._needed and not self._needed.issubset(self.ranks):
            self.ranks = sorted(self._needed)
            self.merged_index = self._read(self.ranks)
