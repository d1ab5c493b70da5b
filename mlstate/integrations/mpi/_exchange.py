"""How bytes travel over MPI, and how the parts of a reduction become one.

Each rank exchanges messages with every other, point to point: so a rank that waits knows for
whom. Messages carry a tag that depends on the call; ranks that call different things find out
by the first message.

Nothing blocks inside MPI. Requests are tested until they are done, so that a deadline, an
abort or Ctrl-C ends an operation that never will be.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._common.arrays import is_torch
from ..._common.dtypes import as_numbers
from ...collectives._arguments import dtype_name, failed
from ._memory import bytes_of, reals_of, wide_like

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Larger parts travel as messages of this size, below what a count in C can say.
_MESSAGE_BYTES = 16 << 20
# How long to look without a pause since something last arrived, and the longest pause then.
_EAGER_SECONDS = 200e-6
_PAUSE_SECONDS = 1e-3
_ONLY_IN_NUMPY = (np.dtype(np.longdouble).name, np.dtype(np.clongdouble).name)

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
        self.gone: dict[int, str] = {}  # ranks that gave up, as far as was seen
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

    def look_for_gone(self) -> dict[int, str]:
        """Return the ranks that are known to have given up, and in which operation each."""
        status = self.mpi.Status()
        for number, operation in enumerate(_ENDINGS):
            tag = number << 3 | _GONE
            while message := self.comm.Improbe(self.mpi.ANY_SOURCE, tag, status):
                message.Recv([bytearray(), self.mpi.BYTE])
                self.gone.setdefault(status.Get_source(), operation)
        return self.gone


def wait_for(request: Any, seconds: float) -> bool:
    """Wait until one request is done, or time is up; tell which."""
    deadline = monotonic() + seconds
    while not request.Test():
        if monotonic() > deadline:
            return False
        sleep(_PAUSE_SECONDS / 10)
    return True


class _Messages:
    """Messages under way.

    What comes is looked at before it is received: a message that is longer than its place
    would make MPI fail in ways of its own, down to a crash.
    """

    def __init__(self, link: Link, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        channel = link.channel
        self.memory: list[Any] = [sends, receives]
        self.requests: list[Any] = []
        self.peers: list[tuple[int, bool]] = []  # of each request: the rank, whether it sends
        self.left: set[int] = set()  # requests that are not done
        self.expected: dict[int, deque[Any]] = {}  # places of messages that were not seen yet
        world = channel.world_size
        # begin with the next rank, so that not all write to one at first
        for step in range(1, world):
            target, source = (channel.rank + step) % world, (channel.rank - step) % world
            if len(receives[source]):
                self.expected[source] = deque(_pieces(receives[source]))
            for part in _pieces(sends[target]):
                request = channel.comm.Isend([part, channel.mpi.BYTE], target, link.tag)
                self.add(request, target, False)

    def add(self, request: Any, rank: int, sends: bool) -> None:
        """Note that a request was made."""
        self.left.add(len(self.requests))
        self.requests.append(request)
        self.peers.append((rank, sends))

    def waiting_for(self) -> tuple[list[int], list[int]]:
        """Return the ranks from which something is to come, and those that take nothing."""
        left = [self.peers[index] for index in self.left]
        sources = {rank for rank, sends in left if sends}.union(self.expected)
        return sorted(sources), sorted({rank for rank, sends in left if not sends} - sources)


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
        """Send and receive messages; see the protocol."""
        self.began = True
        messages = _Messages(self, sends, receives)
        try:
            self._finish(messages)
        except BaseException as error:
            self.channel.keep(messages.requests, messages.memory)
            if isinstance(error, self.channel.mpi.Exception):
                text = " ".join(str(error).split())[:300]
                raise self.error(f"another rank is gone, or MPI failed ({text})") from error
            raise

    def bytes_of(self, flat: Any) -> Any:
        """Return an array of uint8 over the same memory."""
        return bytes_of(flat)

    def from_bytes(self, data: bytes) -> Any:
        """Return an array over bytes."""
        return np.frombuffer(data, np.uint8)

    def to_bytes(self, memory: Any) -> bytes:
        """Return a copy of an array."""
        copied: bytes = memory.tobytes()
        return copied

    def reduce(self, parts: Sequence[Any], op: str, out: Any) -> None:
        """Reduce in the order of the parts."""
        reduce_parts(parts, op, out)

    def _finish(self, messages: _Messages) -> None:
        """Look until everything has arrived, here and there."""
        testsome = self.channel.mpi.Request.Testsome
        quiet_since, pause = monotonic(), _EAGER_SECONDS / 2
        while messages.left or messages.expected:
            seen = messages.expected and self._receive(messages)
            done = testsome(messages.requests)
            messages.left.difference_update(done or ())
            if seen or done:
                quiet_since, pause = monotonic(), _EAGER_SECONDS / 2
            elif monotonic() - quiet_since < _EAGER_SECONDS:
                _yield()
            else:
                self._look_up(messages)
                sleep(pause)
                pause = min(pause * 1.25, _PAUSE_SECONDS)

    def _receive(self, messages: _Messages) -> bool:
        """Begin to receive what has come; tell whether anything has."""
        mpi, comm, seen = self.channel.mpi, self.channel.comm, False
        status = mpi.Status()
        for source, places in [*messages.expected.items()]:
            message = comm.Improbe(source, mpi.ANY_TAG, status)
            if message is None:
                continue
            seen, length, tag = True, status.Get_count(mpi.BYTE), status.Get_tag()
            place = places.popleft()
            fits = tag == self.tag and length == len(place)
            if not fits:  # taken all the same, so that MPI can end well
                place = np.empty(length, np.uint8)
                messages.memory.append(place)
            messages.add(message.Irecv([place, mpi.BYTE]), source, True)
            if not places:
                del messages.expected[source]
            if not fits:
                raise self._mismatch(source, tag)
        return seen

    def _mismatch(self, source: int, tag: int) -> Exception:
        """Say why a message is not the one that this operation expects."""
        if tag & 7 == _GONE:
            self.channel.gone[source] = _ENDINGS[tag >> 3]
            return self._left_by(source, _ENDINGS[tag >> 3])
        name = _OPERATIONS[tag & 7]
        if tag == self.tag:
            what = f"rank {source} sent more or fewer bytes than this rank expects"
        elif name == self.operation:
            what = f"rank {source} called {name} with another shape, dtype, op, root or counts"
        else:
            what = f"rank {source} called {name}, this rank {self.operation}"
        return self.error(f"{what}; all ranks must call the same in the same order")

    def _left_by(self, source: int, operation: str) -> Exception:
        how = "aborted the group" if operation == "abort" else f"gave up in {operation}"
        return self.error(f"rank {source} {how}: look there")

    def _look_up(self, messages: _Messages) -> None:
        """See, while nothing arrives, whether to go on waiting."""
        if self.channel.aborted:
            raise self.error("this group was aborted meanwhile")
        sources, targets = messages.waiting_for()
        for rank, operation in self.channel.look_for_gone().items():
            if operation != "abort" and rank not in (*sources, *targets):
                continue  # has done its part of this one
            if self._receive(messages):
                return  # was sent before
            raise self._left_by(rank, operation)
        if monotonic() < self._deadline:
            return
        limit = f"not done after {self._timeout:g} s"
        if sources:
            who = ", ".join(map(str, sources))
            what = f"nothing more came from rank {who}, which did not call it, is slow, or is gone"
        else:
            what = f"rank {', '.join(map(str, targets))} did not take what this one sent"
        raise self.error(f"{limit}: {what}; pass a larger timeout= or look there")


def reduce_parts(parts: Sequence[Any], op: str, out: Any) -> None:
    """Reduce flat arrays in their order into `out`, which may be one of them."""
    from ... import _core

    name = dtype_name(out)
    if name in _ONLY_IN_NUMPY:
        _reduce_in_numpy(parts, op, out)
        return
    kind, divisor = ("sum", float(len(parts))) if op == "mean" else (op, 1.0)
    if name == "complex128":  # sums of complex numbers are those of their parts
        parts, out = [reals_of(part) for part in parts], reals_of(out)
    if not name.startswith("float8"):
        _core.reduce(parts, out, kind, divisor)
        return
    wide = wide_like(out)  # the core leaves it to others to round to 8 bits
    _core.reduce(parts, wide, kind, divisor)
    place = out if is_torch(out) else as_numbers(out)
    place[:] = wide if is_torch(out) else wide.astype(place.dtype)


def _reduce_in_numpy(parts: Sequence[Any], op: str, out: Any) -> None:
    """The same for numbers that only NumPy computes with."""
    steps: dict[str, Any] = {"min": np.minimum, "max": np.maximum}
    total = parts[0].copy()
    for part in parts[1:]:
        steps.get(op, np.add)(total, part, out=total)
    if op == "mean":
        total.view(np.longdouble)[...] /= len(parts)  # complex numbers part by part
    out[...] = total
