"""How an operation's bytes reach other ranks, for groups that exchange messages: `ExchangeLink`.

A `Link` has a method for each operation. `ExchangeLink` implements them with one exchange of bytes
between all pairs of ranks. Reductions exchange the parts and add them in rank order, so that
results have the same bits on every engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .._common.arrays import copy_of, is_torch
from ._memory import bytes_of, reduce_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._types import Array

# Up to this size of all ranks' arrays, every rank reduces everything: this saves an exchange.
_SMALL_BYTES = 64 << 10
# From this size on, the root of a broadcast sends each rank a part, which the ranks pass on.
_SHARED_BYTES = 1 << 20
# First message of each rank in `gather_bytes`: a length, and the bytes themselves if they fit.
_SLOT_BYTES = 256
_LENGTH_BYTES = 8


class Link(Protocol):
    """Connection of one operation to the other ranks, with a deadline.

    Sources and targets are memory that the group chose. ``rows[r]`` is the number of rows of rank
    r; memory is divided in proportion.
    """

    def reduce_scatter(self, source: Array, target: Array, rows: list[int], op: str) -> None:
        """Reduce sources by `op` ("sum", "mean", "min", "max"); rank r gets ``rows[r]`` rows."""

    def all_gather(self, source: Array, target: Array, rows: list[int]) -> None:
        """Fill the target with the sources of all ranks, ``rows[r]`` rows from rank r."""

    def all_reduce(self, source: Array, target: Array, op: str) -> None:
        """Reduce sources by `op`; every rank gets the result in `target`."""

    def all_to_all(
        self, source: Array, target: Array, sent: list[int], expected: list[int]
    ) -> None:
        """Send ``sent[r]`` rows to each rank r, and receive ``expected[r]``; memory may overlap."""

    def broadcast(self, memory: Any, root: int) -> None:
        """Overwrite memory on all ranks with the memory of rank `root`."""

    def barrier(self) -> None:
        """Wait until every rank has called this."""

    def gather_bytes(self, data: bytes, root: int | None) -> list[bytes] | None:
        """Return the bytes of all ranks; None if there is a root and this rank is not it."""


class ExchangeLink(ABC):
    """A link whose operations use exchanges of bytes.

    Memory is a flat NumPy array or torch tensor. Its bytes are a uint8 view of it.
    """

    __slots__ = ()

    rank: int
    world_size: int

    @abstractmethod
    def exchange(self, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        """Send ``sends[r]`` to each other rank r and fill ``receives[r]``; wait for both.

        Empty parts are not sent. `sends` may contain the same array several times. This rank's
        own entries are ignored.
        """

    def bytes_of(self, flat: Any) -> Any:
        """Return a byte view of flat memory, which `exchange` can send and fill."""
        return bytes_of(flat)

    def from_bytes(self, data: bytes) -> Any:
        """Return byte memory that contains `data`, for sending only: it may be read-only."""
        return np.frombuffer(data, np.uint8)

    def to_bytes(self, memory: Any) -> bytes:
        """Return a copy of received bytes."""
        copied: bytes = memory.tobytes()
        return copied

    def reduce(self, parts: Sequence[Any], op: str, out: Any) -> None:
        """Reduce flat memory of equal lengths in list order into `out`.

        `out` may be one of the parts.
        """
        reduce_parts(parts, op, out)

    def reduce_scatter(self, source: Array, target: Array, rows: list[int], op: str) -> None:
        """Send each rank its part of `source`, and reduce all ranks' parts for this one.

        The result is in `target`, reduced by `op` in rank order. ``rows[r]``: rows of rank r.
        """
        sends = split(source, rows)
        # this rank's own part needs no memory for receiving
        lengths = [0 if r == self.rank else len(sends[self.rank]) for r in range(self.world_size)]
        parts = split(new_like(source, sum(lengths)), lengths)
        self.exchange([self.bytes_of(p) for p in sends], [self.bytes_of(p) for p in parts])
        parts[self.rank] = sends[self.rank]
        self.reduce(parts, op, target)

    def all_reduce(self, source: Any, target: Any, op: str) -> None:
        """Write the reduction of all ranks' `source` to `target`, which may be the source.

        Small arrays are gathered and reduced on every rank; of large ones, each rank reduces a part
        and gathers the others.
        """
        length, world = len(source), self.world_size
        if world == 1:
            self.reduce([source], op, target)
            return
        if source.nbytes * world <= _SMALL_BYTES:
            received = new_like(source, length * world)
            self.all_gather(source, received, [length] * world)
            self.reduce(split(received, [length] * world), op, target)
            return
        counts = even_counts(length, world)
        # if `target` is the source, only this rank's part is overwritten before all parts are sent
        own_rows = split(target, counts)[self.rank]
        self.reduce_scatter(source, own_rows, counts, op)
        self.all_gather(own_rows, target, counts)

    def all_gather(self, source: Array, target: Array, rows: list[int]) -> None:
        """Fill `target` with all ranks' sources; `source` may be this rank's part of it."""
        own_bytes, parts = self.bytes_of(source), split(self.bytes_of(target), rows)
        if _address(parts[self.rank]) != _address(own_bytes):
            parts[self.rank][...] = own_bytes
        self.exchange([own_bytes] * self.world_size, parts)

    def all_to_all(
        self, source: Array, target: Array, sent: list[int], expected: list[int]
    ) -> None:
        """Send `sent[i]` rows to rank i, and receive `expected[i]` rows from it.

        `source` is copied first if it overlaps `target`.
        """
        source_bytes, target_bytes = self.bytes_of(source), self.bytes_of(target)
        source_start, target_start = _address(source_bytes), _address(target_bytes)
        overlaps = source_start < target_start + len(
            target_bytes
        ) and target_start < source_start + len(source_bytes)
        if overlaps:
            source_bytes = copy_of(source_bytes)
        sends, receives = split(source_bytes, sent), split(target_bytes, expected)
        receives[self.rank][...] = sends[self.rank]
        self.exchange(sends, receives)

    def broadcast(self, memory: Any, root: int) -> None:
        """Overwrite `memory` on all ranks with the memory of rank `root`.

        If it is large, the root sends each rank a part, which that rank passes on to the others.
        """
        flat, world = self.bytes_of(memory), self.world_size
        empty, is_root = flat[:0], self.rank == root  # empty parts are not sent
        is_shared = world > 2 and len(flat) >= _SHARED_BYTES  # ranks share the sending
        parts = split(flat, even_counts(len(flat), world)) if is_shared else [flat] * world
        own_part = parts[self.rank]
        from_root = [own_part if rank == root else empty for rank in range(world)]
        self.exchange(parts if is_root else [empty] * world, from_root)
        if is_shared:
            to_others = [empty if rank == root else own_part for rank in range(world)]
            self.exchange(to_others, [empty] * world if is_root else parts)

    def barrier(self) -> None:
        """Wait until every rank has called this: exchange one byte with each."""
        byte, ones = self.from_bytes(b"\0"), [1] * self.world_size
        self.exchange([byte for _ in ones], split(new_like(byte, len(ones)), ones))

    def gather_bytes(self, data: bytes, root: int | None) -> list[bytes] | None:
        """Return the bytes of all ranks, by rank; None if there is a root and this rank is not it.

        `root`: the rank that gets them; None: all ranks. Short ones are sent together with their
        lengths in slots of `_SLOT_BYTES`, in one exchange. If some are longer, a second exchange
        sends these as a whole.
        """
        most_in_slot, world = _SLOT_BYTES - _LENGTH_BYTES, self.world_size
        head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:most_in_slot]
        own_head = self.from_bytes(head.ljust(_SLOT_BYTES, b"\0"))
        slots = split(new_like(own_head, _SLOT_BYTES * world), [_SLOT_BYTES] * world)
        slots[self.rank] = own_head
        self.exchange([own_head] * world, slots)
        heads = [self.to_bytes(slot) for slot in slots]
        lengths = [int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads]
        results = [head[_LENGTH_BYTES:][:n] for head, n in zip(heads, lengths, strict=True)]
        long_lengths = [n if n > most_in_slot else 0 for n in lengths]
        if any(long_lengths):
            receivers = range(world) if root is None else [root]
            own_data = self.from_bytes(data if long_lengths[self.rank] else b"")
            # bytes that this rank receives from each rank
            counts = [
                n if self.rank in receivers and rank != self.rank else 0
                for rank, n in enumerate(long_lengths)
            ]
            received = split(new_like(own_data, sum(counts)), counts)
            self.exchange(
                [own_data if rank in receivers else own_data[:0] for rank in range(world)], received
            )
            for rank in (rank for rank, n in enumerate(counts) if n):
                results[rank] = self.to_bytes(received[rank])
            results[self.rank] = data
        return results if root in (None, self.rank) else None


def split(flat: Any, rows: Sequence[int]) -> list[Any]:
    """Return a view of each rank's part of flat memory, divided in proportion to `rows`."""
    ends = accumulate(shares(len(flat), rows), initial=0)
    return [flat[start:end] for start, end in pairwise(ends)]


def even_counts(length: int, world_size: int) -> list[int]:
    """Return each rank's part of a length, in the same unit; they differ by at most one."""
    ends = [length * rank // world_size for rank in range(world_size + 1)]
    return [end - start for start, end in pairwise(ends)]


def new_like(flat: Any, count: int) -> Any:
    """Return new flat memory for `count` elements of the dtype and kind of `flat`.

    A tensor is on the same device. The contents are arbitrary.
    """
    return flat.new_empty(count) if is_torch(flat) else np.empty(count, flat.dtype)


def _address(flat: Any) -> int:
    """Return the memory address of the first byte of a flat array or tensor."""
    return int(flat.data_ptr() if is_torch(flat) else flat.__array_interface__["data"][0])


def shares(size: int, rows: Sequence[int]) -> list[int]:
    """Return each rank's part of `size`, divided in proportion to `rows`.

    `size`: of a flat array, in elements or bytes; a multiple of the sum of `rows`. All parts are 0
    if that sum is 0.
    """
    total = sum(rows)
    row_size = size // total if total else 0
    return [n * row_size for n in rows]
