"""Messages over MPI: deadline, ranks that call other operations, give up or are late.

Ranks exchange point-to-point messages, so a waiting rank knows which rank it waits for. The tag
of a message depends on the call, so the first message reveals ranks that call different
operations.

No MPI call blocks. Requests are polled, so that a deadline, an abort or Ctrl-C can end an
operation that would never complete.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import numpy as np

from ...collectives._arguments import failed
from ...collectives._link import ExchangeLink

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Larger parts are split into messages of this size, below the limit of a C int count.
_MESSAGE_BYTES = 16 << 20
# Time of polling without a pause since the last arrival, and the longest pause after that.
_EAGER_SECONDS = 200e-6
_PAUSE_SECONDS = 1e-3

# A tag has the operation and 12 bits of a digest of the call: below 32768, which MPI guarantees.
_OPERATIONS = (
    "reduce_scatter",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "barrier",
    "gather_bytes",
)
_DEPARTED = 7  # replaces the operation, which the other bits encode: the rank gave up in it
_ENDINGS = (*_OPERATIONS, "abort")
_yield = getattr(os, "sched_yield", lambda: sleep(0))


class Channel:
    """A group's own communicator, which has no other user, with its state."""

    def __init__(self, comm: Any) -> None:
        """Wrap a communicator of mpi4py that only this channel uses."""
        from mpi4py import MPI

        self.mpi: Any = MPI
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()
        self.is_aborted = False  # set by any thread: running operations fail
        self.departed: dict[int, str] = {}  # ranks known to have given up, and the operation
        self._calls = 0
        self._unfinished: list[object] = []  # memory that MPI may still read or write

    def link(self, operation: str, call: str, timeout: float) -> Link:
        """Return the link of a new operation, which fails after `timeout` seconds.

        `call`: text of its arguments. The tag of its messages depends on the text and on the number
        of earlier calls.
        """
        self._calls += 1
        digest = zlib.crc32(f"{self._calls} {call}".encode()) & 0xFFF
        tag = digest << 3 | _OPERATIONS.index(operation)
        return Link(self, operation, tag, timeout)

    def keep(self, *memory: object) -> None:
        """Keep memory that MPI may still read or write alive until the process ends."""
        self._unfinished.append(memory)

    def give_up(self, operation: str) -> None:
        """Notify all other ranks that this rank gives up in an operation; does not wait.

        `operation`: the one that failed, or "abort".
        """
        tag = _ENDINGS.index(operation) << 3 | _DEPARTED
        others = [r for r in range(self.world_size) if r != self.rank]
        empty = bytearray()
        self.keep([self.comm.Isend([empty, self.mpi.BYTE], r, tag) for r in others], empty)

    def find_departed_ranks(self) -> dict[int, str]:
        """Return the ranks that have given up this group, and the operation that failed on each.

        Receives all notifications of `give_up` that have arrived; does not wait.
        """
        status = self.mpi.Status()
        for number, operation in enumerate(_ENDINGS):
            tag = number << 3 | _DEPARTED
            while message := self.comm.Improbe(self.mpi.ANY_SOURCE, tag, status):
                message.Recv([bytearray(), self.mpi.BYTE])
                self.departed.setdefault(status.Get_source(), operation)
        return self.departed


def wait_for(request: Any, seconds: float) -> bool:
    """Wait until one MPI request is done or `seconds` have passed; return whether it is done."""
    deadline = monotonic() + seconds
    while not request.Test():
        if monotonic() > deadline:
            return False
        sleep(_PAUSE_SECONDS / 10)
    return True


class _Messages:
    """The messages of one exchange.

    A message is probed before it is received: receiving a message that is longer than its buffer
    makes MPI fail or crash.
    """

    def __init__(self, link: Link, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        """Start to send `sends[i]` to rank i; `receives[i]` waits for the bytes that rank i sends.

        This rank's own items are ignored, and no message is sent for an empty item.
        """
        channel = link.channel
        self.memory: list[Any] = [sends, receives]  # that MPI reads and writes
        self.requests: list[Any] = []
        self.peers: list[tuple[int, bool]] = []  # by request: other rank, whether it sends
        self.left: set[int] = set()  # requests that are not done
        self.expected: dict[int, deque[Any]] = {}  # buffers of messages that have not been probed
        world = channel.world_size
        # start with the next rank, so that not all ranks send to the same rank first
        for step in range(1, world):
            target, source = (channel.rank + step) % world, (channel.rank - step) % world
            if len(receives[source]):
                self.expected[source] = deque(_split_messages(receives[source]))
            for part in _split_messages(sends[target]):
                request = channel.comm.Isend([part, channel.mpi.BYTE], target, link.tag)
                self.add(request, target, False)

    def add(self, request: Any, rank: int, sends: bool) -> None:
        """Register a request of MPI.

        `rank`: the other rank. `sends`: that rank sends the message, and this one receives it.
        """
        self.left.add(len(self.requests))
        self.requests.append(request)
        self.peers.append((rank, sends))

    def waiting_for(self) -> tuple[list[int], list[int]]:
        """Return the ranks that still have to send, and the other ranks that have not received.

        A rank that has to do both is only in the first list.
        """
        left = [self.peers[index] for index in self.left]
        sources = {rank for rank, sends in left if sends}.union(self.expected)
        return sorted(sources), sorted({rank for rank, sends in left if not sends} - sources)


def _split_messages(part: Any) -> Iterable[object]:
    """Yield one rank's part in messages; an empty part has none."""
    return (part[at : at + _MESSAGE_BYTES] for at in range(0, len(part), _MESSAGE_BYTES))


class Link(ExchangeLink):
    """Connection of one operation to the other ranks, with a deadline."""

    __slots__ = (
        "_deadline",
        "_timeout",
        "began",
        "channel",
        "operation",
        "rank",
        "tag",
        "world_size",
    )

    def __init__(self, channel: Channel, operation: str, tag: int, timeout: float) -> None:
        """Begin one operation on the channel's ranks.

        `tag`: of all its messages. `timeout`: seconds from now until it fails.
        """
        self.channel = channel
        self.operation = operation
        self.tag = tag
        self.rank = channel.rank
        self.world_size = channel.world_size
        self.began = False
        self._timeout = timeout
        self._deadline = monotonic() + timeout

    def error(self, reason: str) -> Exception:
        """Return the CollectiveError of this operation; `reason`: for the user."""
        return failed(
            self.operation, self.rank, f"{reason}; the group is unusable: create a new one"
        )

    def exchange(self, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        """Send `sends[i]` to rank i, and receive `receives[i]` from it, until all is done.

        It implements `ExchangeLink.exchange`. Raises CollectiveError if another rank gives up or
        calls something else, MPI fails, or the time is up. After an error, the memory of unfinished
        messages is kept alive until the process ends.
        """
        self.began = True
        messages = _Messages(self, sends, receives)
        try:
            self._poll_messages(messages)
        except BaseException as error:
            self.channel.keep(messages.requests, messages.memory)
            if isinstance(error, self.channel.mpi.Exception):
                text = " ".join(str(error).split())[:300]
                raise self.error(f"another rank is gone, or MPI failed ({text})") from error
            raise

    def _poll_messages(self, messages: _Messages) -> None:
        """Poll until all messages have been sent and received; pause longer while nothing arrives.

        Raises CollectiveError as `_check_waiting` does.
        """
        testsome = self.channel.mpi.Request.Testsome
        quiet_since, pause = monotonic(), _EAGER_SECONDS / 2  # in seconds
        while messages.left or messages.expected:
            has_arrived = messages.expected and self._receive_messages(messages)
            done = testsome(messages.requests)  # indices of requests; None: none is running
            messages.left.difference_update(done or ())
            if has_arrived or done:
                quiet_since, pause = monotonic(), _EAGER_SECONDS / 2
            elif monotonic() - quiet_since < _EAGER_SECONDS:
                _yield()
            else:
                self._check_waiting(messages)
                sleep(pause)
                pause = min(pause * 1.25, _PAUSE_SECONDS)

    def _receive_messages(self, messages: _Messages) -> bool:
        """Start to receive messages that have arrived; return whether there were any.

        Raises CollectiveError for a message with another tag or length than expected.
        """
        mpi, comm, has_arrived = self.channel.mpi, self.channel.comm, False
        status = mpi.Status()
        for source, buffers in [*messages.expected.items()]:
            message = comm.Improbe(source, mpi.ANY_TAG, status)
            if message is None:
                continue
            has_arrived = True
            length, tag = status.Get_count(mpi.BYTE), status.Get_tag()
            buffer = buffers.popleft()
            fits = tag == self.tag and length == len(buffer)
            if not fits:  # received nevertheless, so that MPI can finalize
                buffer = np.empty(length, np.uint8)
                messages.memory.append(buffer)
            messages.add(message.Irecv([buffer, mpi.BYTE]), source, True)
            if not buffers:
                del messages.expected[source]
            if not fits:
                raise self._mismatch_error(source, tag)
        return has_arrived

    def _mismatch_error(self, source: int, tag: int) -> Exception:
        """Return the CollectiveError for a message that this operation does not expect.

        `tag`: of the message; it contains the operation that rank `source` called. If the message
        is a notification of `give_up`, the channel records that the rank has departed.
        """
        if tag & 7 == _DEPARTED:
            self.channel.departed[source] = _ENDINGS[tag >> 3]
            return self._departure_error(source, _ENDINGS[tag >> 3])
        name = _OPERATIONS[tag & 7]
        if tag == self.tag:
            reason = f"rank {source} sent more or fewer bytes than this rank expects"
        elif name == self.operation:
            reason = f"rank {source} called {name} with another shape, dtype, op, root or counts"
        else:
            reason = f"rank {source} called {name}, this rank {self.operation}"
        return self.error(f"{reason}; all ranks must call the same in the same order")

    def _departure_error(self, source: int, operation: str) -> Exception:
        """Return the error if rank `source` gave up in an operation, or aborted the group."""
        how = "aborted the group" if operation == "abort" else f"gave up in {operation}"
        return self.error(f"rank {source} {how}: see its error")

    def _check_waiting(self, messages: _Messages) -> None:
        """Raise CollectiveError if a rank gave up, the group was aborted, or the time is up.

        Ranks that have finished their part of this operation may give up in a later one.
        """
        if self.channel.is_aborted:
            raise self.error("this group was aborted meanwhile")
        sources, targets = messages.waiting_for()
        for rank, operation in self.channel.find_departed_ranks().items():
            if operation != "abort" and rank not in (*sources, *targets):
                continue  # that rank has finished its part of this operation
            if self._receive_messages(messages):
                return  # its message was sent before it gave up
            raise self._departure_error(rank, operation)
        if monotonic() < self._deadline:
            return
        limit = f"not done after {self._timeout:g} s"
        if sources:
            who = ", ".join(map(str, sources))
            reason = (
                f"nothing more came from rank {who}, which did not call it, is slow, or is gone"
            )
        else:
            reason = f"rank {', '.join(map(str, targets))} did not take what this one sent"
        raise self.error(f"{limit}: {reason}; pass a larger timeout= or look there")
