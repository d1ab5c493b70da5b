"""How bytes travel over MPI, and how sums are made of them.

All operations are made of one exchange, in which each rank sends a part to every other, point
to point: so a rank that waits knows for whom. Messages carry a tag that depends on the call;
ranks that call different things find out by the first message.

Nothing blocks inside MPI. Requests are tested until they are done, so that a deadline, an
abort or Ctrl-C ends an operation that never will be.
"""

from __future__ import annotations

import os
import zlib
from itertools import pairwise
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._arrays import is_torch
from ..._collective_args import failed
from ._memory import bytes_of, item_bytes, new_like, split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# Larger parts travel as messages of this size, below what a count in C can say.
_MESSAGE_BYTES = 16 << 20
# How long to look without a pause since something last arrived, and the longest pause then.
_EAGER_SECONDS = 200e-6
_PAUSE_SECONDS = 1e-3
# Up to here, reducing everything on every rank saves a second exchange.
_SMALL_BYTES = 64 << 10
# From here, the root of a broadcast leaves the most of the sending to the others.
_SHARED_BYTES = 1 << 20
# Elements that are summed at a time, so that the sum stays in the cache.
_BLOCK = 1 << 18
# What each rank sends first to gather bytes: a length, and the bytes themselves if they fit.
_SLOT_BYTES = 256
_LENGTH_BYTES = 8

# A tag is an operation, and 12 bits of what was called: below 32768, which any MPI has.
_OPERATIONS = (
    "reduce_scatter",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "barrier",
    "gather_bytes",
)
_GONE = 7  # in place of an operation: that rank gave up in what the other bits say
_ENDINGS = (*_OPERATIONS, "abort")
_yield = getattr(os, "sched_yield", lambda: sleep(0))


class Channel:
    """A communicator of a group's own.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Borrowed; used for nothing else.
    """

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self.mpi: Any = MPI
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()
        self.aborted = False  # set by any thread: what is under way fails
        self._calls = 0
        self._unfinished: list[Any] = []  # memory that MPI may still read or write

    def link(self, operation: str, call: str, timeout: float) -> Link:
        """Begin an operation."""
        self._calls += 1
        digest = zlib.crc32(f"{self._calls} {call}".encode()) & 0xFFF
        tag = digest << 3 | _OPERATIONS.index(operation)
        return Link(self, operation, tag, timeout)

    def keep(self, *memory: Any) -> None:
        """Hold what requests that never ended refer to, for as long as the process lives."""
        self._unfinished.append(memory)

    def give_up(self, operation: str) -> None:
        """Tell every other rank that this one does not go on; waits for nobody."""
        tag = _ENDINGS.index(operation) << 3 | _GONE
        others = [r for r in range(self.world_size) if r != self.rank]
        nothing = bytearray()
        self.keep([self.comm.Isend([nothing, self.mpi.BYTE], r, tag) for r in others], nothing)

    def gone(self) -> tuple[int, str] | None:
        """Return a rank that gave up, and in which operation, if one did."""
        status = self.mpi.Status()
        for number, operation in enumerate(_ENDINGS):
            if self.comm.Iprobe(self.mpi.ANY_SOURCE, number << 3 | _GONE, status):
                return int(status.Get_source()), operation
        return None


def wait_for(request: Any, seconds: float) -> bool:
    """Wait until one request is done, or time is up; tell which."""
    deadline = monotonic() + seconds
    while not request.Test():
        if monotonic() > deadline:
            return False
        sleep(_PAUSE_SECONDS / 10)
    return True


class _Messages:
    """Messages under way: requests, and for each its rank and the bytes to receive or None."""

    def __init__(self, link: Link, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        channel = link.channel
        self.memory = (sends, receives)
        self.requests: list[Any] = []
        self.peers: list[tuple[int, int | None]] = []
        any_tag, byte = channel.mpi.ANY_TAG, channel.mpi.BYTE
        world = channel.world_size
        # begin with the next rank, so that not all write to one at first
        for step in range(1, world):
            source = (channel.rank - step) % world
            for part in _pieces(receives[source]):
                self.requests.append(channel.comm.Irecv([part, byte], source, any_tag))
                self.peers.append((source, len(part)))
        for step in range(1, world):
            target = (channel.rank + step) % world
            for part in _pieces(sends[target]):
                self.requests.append(channel.comm.Isend([part, byte], target, link.tag))
                self.peers.append((target, None))
        self.left = set(range(len(self.requests)))
        self.statuses = [channel.mpi.Status() for _ in self.requests]

    def waiting_for(self) -> tuple[list[int], list[int]]:
        """Return the ranks from which something is to come, and those that take nothing."""
        left = [self.peers[index] for index in self.left]
        sources = {rank for rank, length in left if length is not None}
        return sorted(sources), sorted({rank for rank, length in left if length is None} - sources)

    def abandon(self, channel: Channel) -> None:
        """Let go of what can be; the rest stays with the channel."""
        for index in self.left:
            request = self.requests[index]
            if self.peers[index][1] is not None and request != channel.mpi.REQUEST_NULL:
                request.Cancel()
        channel.keep(self.requests, self.memory)


def _pieces(part: Any) -> Iterable[Any]:
    """Cut what belongs to one rank into messages; none where it is empty."""
    return (part[at : at + _MESSAGE_BYTES] for at in range(0, len(part), _MESSAGE_BYTES))


class Link:
    """One operation's way to the other ranks, until its time is up."""

    __slots__ = ("_deadline", "_timeout", "began", "channel", "operation", "rank", "tag")

    def __init__(self, channel: Channel, operation: str, tag: int, timeout: float) -> None:
        self.channel = channel
        self.operation = operation
        self.tag = tag
        self.rank = channel.rank
        self.began = False
        self._timeout = timeout
        self._deadline = monotonic() + timeout

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.channel.world_size

    def error(self, what: str) -> Exception:
        """Make this operation's error."""
        return failed(self.operation, self.rank, f"{what}; the group is of no use any more")

    def exchange(self, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        """Send each other rank its bytes, and fill what is meant for theirs; empty ones stay here.

        Sends may be one array many times. What this rank has for itself is left alone.
        """
        self.began = True
        messages = _Messages(self, sends, receives)
        try:
            self._finish(messages)
        except BaseException:
            messages.abandon(self.channel)
            raise

    def _finish(self, messages: _Messages) -> None:
        """Test until everything has arrived, here and there."""
        quiet_since, pause = monotonic(), _EAGER_SECONDS / 2
        while messages.left:
            done = self._test(messages)
            if done:
                quiet_since, pause = monotonic(), _EAGER_SECONDS / 2
                continue
            if monotonic() - quiet_since < _EAGER_SECONDS:
                _yield()
                continue
            self._look_up(messages)
            sleep(pause)
            pause = min(pause * 1.25, _PAUSE_SECONDS)

    def _test(self, messages: _Messages) -> Sequence[int]:
        """Note what is done now, and return it."""
        mpi, statuses = self.channel.mpi, messages.statuses
        try:
            done = mpi.Request.Testsome(messages.requests, statuses)
        except mpi.Exception as error:
            raise self._refused(error, statuses) from error
        for index, status in zip(done or (), statuses, strict=False):
            messages.left.discard(index)
            source, length = messages.peers[index]
            if length is None:
                continue
            self._check_tag(source, status.Get_tag())
            if status.Get_count(mpi.BYTE) != length:
                what = f"{status.Get_count(mpi.BYTE)} bytes, expected {length}"
                raise self.error(
                    f"rank {source} sent {what}; pass arrays that go together on every rank"
                )
        return done or ()

    def _check_tag(self, source: int, tag: int) -> None:
        """Refuse a message that belongs to another call than this one."""
        if tag == self.tag:
            return
        if tag & 7 == _GONE:
            raise self._left_by(source, _ENDINGS[tag >> 3])
        name = _OPERATIONS[tag & 7]
        what = f"rank {source} called {name}, this rank {self.operation}"
        if name == self.operation:
            what = f"rank {source} called {name} with another shape, dtype, op, root or counts"
        raise self.error(f"{what}; all ranks must call the same in the same order")

    def _refused(self, error: Any, statuses: Sequence[Any]) -> Exception:
        """Explain what MPI refused: nearly always a message that is longer than expected."""
        mpi = self.channel.mpi
        for status in statuses:
            code = status.Get_error()
            if code and mpi.Get_error_class(code) == mpi.ERR_TRUNCATE:
                try:
                    self._check_tag(status.Get_source(), status.Get_tag())
                except Exception as known:
                    return known
                return self.error(
                    f"rank {status.Get_source()} sent more bytes than this rank expected; pass "
                    "arrays that go together on every rank"
                )
        return self.error(f"MPI failed ({' '.join(str(error).split())[:300]})")

    def _left_by(self, source: int, operation: str) -> Exception:
        how = "aborted the group" if operation == "abort" else f"gave up in {operation}"
        return self.error(f"rank {source} {how}: look there")

    def _look_up(self, messages: _Messages) -> None:
        """See, while nothing arrives, whether to go on waiting."""
        if self.channel.aborted:
            raise self.error("this group was aborted meanwhile")
        gone = self.channel.gone()
        if gone:
            raise self._left_by(*gone)
        if monotonic() < self._deadline:
            return
        sources, targets = messages.waiting_for()
        limit = f"not done after {self._timeout:g} s"
        if sources:
            who = ", ".join(map(str, sources))
            what = f"nothing more came from rank {who}, which did not call it, is slow, or is gone"
        else:
            what = f"rank {', '.join(map(str, targets))} did not take what this one sent"
        raise self.error(f"{limit}: {what}; pass a larger timeout= or look there")


# ---- moving ----


def spread(link: Link, mine: Any, everyone: Any, counts: Sequence[int]) -> None:
    """Fill `everyone` with the bytes of all ranks, ``counts[r]`` of rank r."""
    parts = split(everyone, counts)
    if not np.shares_memory(parts[link.rank], mine):
        parts[link.rank][...] = mine
    link.exchange([mine] * link.world_size, parts)


def trade(
    link: Link, send: Any, send_counts: Sequence[int], receive: Any, receive_counts: Sequence[int]
) -> None:
    """Send each rank its bytes, and put what ranks send one behind the other."""
    sends, receives = split(send, send_counts), split(receive, receive_counts)
    receives[link.rank][...] = sends[link.rank]
    link.exchange(sends, receives)


def hand_out(link: Link, flat: Any, root: int) -> None:
    """Overwrite the bytes with those of `root`.

    Long ones go out in parts, which the ranks then hand to each other: no rank sends more
    than twice the whole.
    """
    world, nothing = link.world_size, flat[:0]
    shared = world > 2 and len(flat) >= _SHARED_BYTES
    ends = [len(flat) * rank // world for rank in range(world + 1)]
    counts = [end - start for start, end in pairwise(ends)]
    parts = split(flat, counts) if shared else [flat] * world
    receives = [nothing] * world
    if link.rank == root:
        link.exchange(parts, receives)
    else:
        receives[root] = parts[link.rank]
        link.exchange([nothing] * world, receives)
    if shared:
        spread(link, parts[link.rank], flat, counts)


def meet(link: Link) -> None:
    """Wait for every rank."""
    parts = np.empty((2, link.world_size, 1), np.uint8)
    parts[0] = 0
    link.exchange(list(parts[0]), list(parts[1]))


def gather_texts(link: Link, data: bytes, root: int | None) -> list[bytes] | None:
    """Return the bytes of all ranks; None where this rank is not the root.

    Short ones travel with their lengths, in one exchange.
    """
    room, world = _SLOT_BYTES - _LENGTH_BYTES, link.world_size
    head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:room]
    slots = np.empty((world, _SLOT_BYTES), np.uint8)
    slots[link.rank] = np.frombuffer(head.ljust(_SLOT_BYTES, b"\0"), np.uint8)
    link.exchange([slots[link.rank]] * world, list(slots))
    heads = [slot.tobytes() for slot in slots]
    lengths = [int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads]
    texts = [head[_LENGTH_BYTES:][:n] for head, n in zip(heads, lengths, strict=True)]
    rest = [n if n > room else 0 for n in lengths]
    if any(rest):
        mine = np.frombuffer(data if rest[link.rank] else b"", np.uint8)
        ends = range(world) if root is None else [root]
        wanted = [n if link.rank in ends and r != link.rank else 0 for r, n in enumerate(rest)]
        long = split(np.empty(sum(wanted), np.uint8), wanted)
        link.exchange([mine if rank in ends else mine[:0] for rank in range(world)], long)
        texts = [part.tobytes() or text for part, text in zip(long, texts, strict=True)]
        texts[link.rank] = data
    return texts if root in (None, link.rank) else None


# ---- reducing ----


def reduce_parts(parts: Sequence[Any], op: str, out: Any) -> None:
    """Reduce flat arrays in their order into `out`, which may be one of them."""
    if is_torch(out):
        from ..torch import _exchange

        _exchange.reduce_parts(parts, op, out)
        return
    small = out.dtype.itemsize < 4 and out.dtype.kind not in "iub"
    wide = np.dtype(np.float32) if small else out.dtype
    steps: dict[str, Callable[..., Any]] = {"min": np.minimum, "max": np.maximum}
    for start in range(0, len(out), _BLOCK):
        block = slice(start, start + _BLOCK)
        total = parts[0][block].astype(wide)
        for part in parts[1:]:
            steps.get(op, np.add)(total, part[block].astype(wide), out=total)
        if op == "mean":
            total /= wide.type(len(parts))
        out[block] = total.astype(out.dtype)


def reduce_rows(link: Link, flat: Any, counts: Sequence[int], op: str, out: Any) -> None:
    """Reduce flat arrays; rank r gets its ``counts[r]`` elements of the result."""
    sends = split(flat, counts)
    shares = [counts[link.rank] if r != link.rank else 0 for r in range(link.world_size)]
    parts = split(new_like(flat, sum(shares)), shares)
    link.exchange([bytes_of(part) for part in sends], [bytes_of(part) for part in parts])
    parts[link.rank] = sends[link.rank]
    reduce_parts(parts, op, out)


def reduce_all(link: Link, flat: Any, op: str, out: Any) -> None:
    """Reduce flat arrays; every rank gets the result."""
    size, length = item_bytes(flat), len(flat)
    if length * size * link.world_size <= _SMALL_BYTES:
        received = new_like(flat, length * link.world_size)
        counts = [length] * link.world_size
        spread(link, bytes_of(flat), bytes_of(received), [n * size for n in counts])
        reduce_parts(split(received, counts), op, out)
        return
    ends = [length * rank // link.world_size for rank in range(link.world_size + 1)]
    counts = [end - start for start, end in pairwise(ends)]
    # where `out` is the input, only this rank's part of it is written before all were sent
    mine = split(out, counts)[link.rank]
    reduce_rows(link, flat, counts, op, mine)
    spread(link, bytes_of(mine), bytes_of(out), [n * size for n in counts])
