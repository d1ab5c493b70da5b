"""Which slot of a ring (sliding entry of a `CacheState`) has which token; the slot of the next.

The core copies them in order (``csrc/core/kv/kv_ring.c``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .. import _core
from ._arguments import capacity_error

if TYPE_CHECKING:
    from .._types import NDArray
    from ._cache_spec import CacheEntry


class Ring(NamedTuple):
    """The slots of an array of `size` positions after `length` tokens.

    The first `sinks` tokens stay, and newer tokens replace the oldest others. The token at position
    ``p`` is in slot ``p`` while ``p`` is below `sinks`, and otherwise in slot
    ``sinks + (p - sinks + shift) % (size - sinks)``. A `shift` of 0 is the ring of
    `RollingKVState`.
    """

    size: int
    sinks: int
    length: int  # all tokens so far, also those that were replaced
    shift: int
    unwritten: int = 0  # 1: the next slot, of the oldest token after the sinks, has no token

    @property
    def next_slot(self) -> int:
        """Slot of the next token."""
        if self.length < self.sinks:
            return self.length
        return self.sinks + (self.length - self.sinks + self.shift) % (self.size - self.sinks)

    def positions(self) -> NDArray:
        """Return the position of the token in each slot, or -1 for a slot without a token."""
        positions = _core.kv_ring_positions(self.size, self.sinks, self.length, self.shift)
        if self.unwritten:
            positions[self.next_slot] = -1
        return positions

    def runs(self, most: int | None = None) -> list[range]:
        """Return the slots of the tokens by increasing position, as at most three ranges.

        `most`: number of tokens to return at most; the oldest ones after the sinks are left out.
        None: all that the array has. The sinks are returned even if they exceed `most`.
        """
        size = self.size if most is None else min(most, self.size)
        sink_count = min(self.length, self.sinks)
        others = min(self.length - sink_count, self.size - self.sinks) - self.unwritten
        others = min(others, size - self.sinks)
        if others <= 0:
            return joined([range(sink_count)])
        window = self.size - self.sinks
        # The slot of the oldest of the `others`, whose position is `length - others`.
        start = self.sinks + (self.length - others - self.sinks + self.shift) % window
        wrapped = max(start + others - self.size, 0)  # tokens that continue at the first slot
        return joined(
            [
                range(sink_count),
                range(start, start + others - wrapped),
                range(self.sinks, self.sinks + wrapped),
            ]
        )


def joined(runs: list[range]) -> list[range]:
    """Return `runs` without empty ranges, and with adjacent ranges joined into one."""
    result: list[range] = []
    for run in runs:
        if result and run and result[-1].stop == run.start:
            result[-1] = range(result[-1].start, run.stop)
        elif run:
            result.append(run)
    return result


def ring_of(entry: CacheEntry, length: int, shift: int = 0, unwritten: int = 0) -> Ring:
    """Return the slots of an entry after `length` tokens; `shift`: of its ring, see `Ring`.

    An array without a slot after the sinks, as in a cache that is smaller than the window, gets no
    sinks: it cannot wrap before it is resized.
    """
    size = entry.seq_length or 0
    return Ring(size, entry.sinks if entry.sinks < size else 0, length, shift, unwritten)


def shift_of(entry: CacheEntry, length: int) -> int:
    """Return the shift of a ring of `length` tokens that writes the next one to `entry.next_slot`.

    0 if that is None, or a sink. Raises CapacityError for a slot among the sinks that is not the
    next one.
    """
    ring, slot = ring_of(entry, length), entry.next_slot
    if slot is None:
        return 0
    if slot < ring.sinks and slot != length:
        text = (
            f"{entry.name}: next_slot {slot} is a slot of the {ring.sinks} sinks, and the cache "
            f"has {length} tokens"
        )
        raise capacity_error(text, f"{min(length, ring.sinks)}..{ring.size}", slot, entry.name)
    if slot < ring.sinks:
        return 0
    # While sinks are missing, the slot is for the first token after the sinks.
    return (slot - max(length, ring.sinks)) % (ring.size - ring.sinks)
