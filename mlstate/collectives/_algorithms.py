"""Collective operations built from one exchange of bytes between all pairs of ranks.

A group derives from `ExchangeEngine` and creates a `Link` for each operation. Reductions exchange
the parts and add them in rank order, so that results have the same bits on every engine.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .._common.arrays import is_torch
from ._group_base import Engine, shares

if TYPE_CHECKING:
    from collections.abc import Sequence

# Up to this size, every rank reduces everything, which saves a second exchange.
_SMALL_BYTES = 64 << 10
# From this size on, the root of a broadcast sends each rank a part, which the ranks pass on.
_SHARED_BYTES = 1 << 20
# First message of each rank in `_gather`: a length, and the bytes themselves if they fit.
_SLOT_BYTES = 256
_LENGTH_BYTES = 8


class Link(Protocol):
    """Connection of one operation to the other ranks, with a deadline.

    Memory is a flat NumPy array or torch tensor. Its bytes are a uint8 view of it.
    """

    rank: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def exchange(self, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        """Send ``sends[r]`` to each other rank r and fill ``receives[r]``; wait for both.

        Empty parts are not sent. `sends` may contain the same array several times. This rank's
        own entries are ignored.
        """

    def bytes_of(self, flat: Any) -> Any:
        """Return a byte view of flat memory, which `exchange` can send and fill."""

    def from_bytes(self, data: bytes) -> Any:
        """Return memory that contains `data`, for sending only."""

    def to_bytes(self, memory: Any) -> bytes:
        """Return a copy of received bytes."""

    def reduce(self, parts: Sequence[Any], op: str, out: Any) -> None:
        """Reduce flat memory in list order into `out`, which may be one of the parts."""


class ExchangeEngine(Engine):
    """A group whose operations use exchanges over a `Link`."""

    def _reduce_rows(self, link: Link, source: Any, rows: list[int], op: str, target: Any) -> None:
        sends = split(source, rows)
        lengths = [0 if r == link.rank else len(sends[link.rank]) for r in range(link.world_size)]
        parts = split(new_like(source, sum(lengths)), lengths)
        link.exchange([link.bytes_of(p) for p in sends], [link.bytes_of(p) for p in parts])
        parts[link.rank] = sends[link.rank]
        link.reduce(parts, op, target)

    def _reduce_all(self, link: Link, source: Any, op: str, target: Any) -> None:
        length, world = len(source), link.world_size
        if source.nbytes * world <= _SMALL_BYTES:
            received = new_like(source, length * world)
            self._spread(link, source, [length] * world, received)
            link.reduce(split(received, [length] * world), op, target)
            return
        counts = even_counts(length, world)
        # if `target` is the source, only this rank's part is overwritten before all parts are sent
        mine = split(target, counts)[link.rank]
        self._reduce_rows(link, source, counts, op, mine)
        self._spread(link, mine, counts, target)

    def _spread(self, link: Link, source: Any, rows: list[int], target: Any) -> None:
        mine, parts = link.bytes_of(source), split(link.bytes_of(target), rows)
        if _address(parts[link.rank]) != _address(mine):
            parts[link.rank][...] = mine
        link.exchange([mine] * link.world_size, parts)

    def _trade(
        self, link: Link, source: Any, sent: list[int], target: Any, wanted: list[int]
    ) -> None:
        mine, into = link.bytes_of(source), link.bytes_of(target)
        start, end = _address(mine), _address(into)
        if start < end + len(into) and end < start + len(mine):
            mine = new_like(mine, len(mine))
            mine[...] = link.bytes_of(source)
        sends, receives = split(mine, sent), split(into, wanted)
        receives[link.rank][...] = sends[link.rank]
        link.exchange(sends, receives)

    def _broadcast(self, link: Link, memory: Any, root: int) -> None:
        """Send the bytes of `root`; if they are many, each rank passes on one part."""
        flat, world = link.bytes_of(memory), link.world_size
        nothing, is_root = flat[:0], link.rank == root
        shared = world > 2 and len(flat) >= _SHARED_BYTES
        parts = split(flat, even_counts(len(flat), world)) if shared else [flat] * world
        mine = parts[link.rank]
        from_root = [mine if rank == root else nothing for rank in range(world)]
        link.exchange(parts if is_root else [nothing] * world, from_root)
        if shared:
            to_others = [nothing if rank == root else mine for rank in range(world)]
            link.exchange(to_others, [nothing] * world if is_root else parts)

    def _barrier(self, link: Link) -> None:
        byte, ones = link.from_bytes(b"\0"), [1] * link.world_size
        link.exchange([byte for _ in ones], split(new_like(byte, len(ones)), ones))

    def _gather(self, link: Link, data: bytes, root: int | None) -> list[bytes] | None:
        """Gather bytes; short ones are sent together with their lengths, in one exchange."""
        room, world = _SLOT_BYTES - _LENGTH_BYTES, link.world_size
        head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:room]
        mine = link.from_bytes(head.ljust(_SLOT_BYTES, b"\0"))
        slots = split(new_like(mine, _SLOT_BYTES * world), [_SLOT_BYTES] * world)
        slots[link.rank] = mine
        link.exchange([mine] * world, slots)
        heads = [link.to_bytes(slot) for slot in slots]
        lengths = [int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads]
        texts = [head[_LENGTH_BYTES:][:n] for head, n in zip(heads, lengths, strict=True)]
        rest = [n if n > room else 0 for n in lengths]
        if any(rest):
            ends = range(world) if root is None else [root]
            mine = link.from_bytes(data if rest[link.rank] else b"")
            wanted = [n if link.rank in ends and r != link.rank else 0 for r, n in enumerate(rest)]
            long = split(new_like(mine, sum(wanted)), wanted)
            link.exchange([mine if rank in ends else mine[:0] for rank in range(world)], long)
            for rank in (r for r, n in enumerate(wanted) if n):
                texts[rank] = link.to_bytes(long[rank])
            texts[link.rank] = data
        return texts if root in (None, link.rank) else None


def split(flat: Any, rows: Sequence[int]) -> list[Any]:
    """Return each rank's part of flat memory, divided in proportion to `rows`."""
    ends = accumulate(shares(len(flat), rows), initial=0)
    return [flat[start:end] for start, end in pairwise(ends)]


def even_counts(length: int, world_size: int) -> list[int]:
    """Divide a length among ranks; counts differ by at most one."""
    ends = [length * rank // world_size for rank in range(world_size + 1)]
    return [end - start for start, end in pairwise(ends)]


def new_like(flat: Any, count: int) -> Any:
    """Return new flat memory for `count` elements of the same kind."""
    return flat.new_empty(count) if is_torch(flat) else np.empty(count, flat.dtype)


def _address(flat: Any) -> int:
    return int(flat.data_ptr() if is_torch(flat) else flat.__array_interface__["data"][0])
