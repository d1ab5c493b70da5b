"""Ranks as threads of this process: a group of them, and functions to run them."""

import threading

from thread_team import thread_outcomes

from mlstate import CollectiveError
from mlstate.collectives import LocalGroup

SECONDS = 20


class Threads:
    """A rank among threads. If ranks do not make the same calls, the test fails.

    Arrays are copied before another rank sees them, so nothing is shared by accident.
    """

    def __init__(self, world, rank):
        self._slots, self._barrier = world
        self.rank = rank
        self.world_size = len(self._slots)
        self.calls = []
        self.largest = 0  # bytes of the largest array, sent or received

    def _exchange(self, kind, data, timeout=None):
        self.calls.append(kind)
        try:
            self._slots[self.rank] = (kind, data)
            self._barrier.wait(timeout)
            items = list(self._slots)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise CollectiveError(f"rank {self.rank} waits in {kind}") from None
        assert len({kind for kind, _ in items}) == 1, items
        return [data for _, data in items]

    def gather_bytes(self, data, *, root=None, timeout=None):
        items = self._exchange(f"gather to {root}", bytes(data), timeout)
        return items if root in (None, self.rank) else None

    def broadcast(self, array, *, root=0, timeout=None):
        self.largest = max(self.largest, array.nbytes)
        items = self._exchange(f"broadcast {array.nbytes} from {root}", array.copy(), timeout)
        array[...] = items[root]
        return array

    def all_gather(self, array, *, timeout=None):
        import numpy as np

        return np.concatenate(self._exchange("all_gather", array.copy(), timeout))

    def all_to_all(self, array, *, out, counts, out_counts, timeout=None):
        self.largest = max(self.largest, array.nbytes, out.nbytes)
        items = self._exchange("all_to_all", (array.copy(), list(counts)), timeout)
        at = 0
        for rank, (rows, row_counts) in enumerate(items):
            start = sum(row_counts[: self.rank])
            assert row_counts[self.rank] == out_counts[rank], "ranks do not agree what is sent"
            out[at : at + row_counts[self.rank]] = rows[start : start + row_counts[self.rank]]
            at += row_counts[self.rank]
        assert at == len(out)
        return out

    def barrier(self, *, timeout=None):
        self._exchange("barrier", None, timeout)


def run_ranks(function, world_size=2, *, seconds=SECONDS, groups=None):
    """The result or error of `function` with the group of each rank; waits up to `seconds`.

    `groups` are the groups of an engine, one for each rank, instead of `Threads`.
    """
    world = ([None] * world_size, threading.Barrier(world_size, timeout=seconds))
    if groups is None:
        groups = [Threads(world, rank) for rank in range(world_size)]
    return thread_outcomes(lambda rank: function(groups[rank]), len(groups), seconds=3 * seconds)


def run_local(function, world_size=2, *, timeout=SECONDS):
    """As `run_ranks`, with a `LocalGroup`, which a rank leaves at its end."""

    def work(group):
        with group:
            return function(group)

    return run_ranks(work, groups=LocalGroup.threads(world_size, timeout=timeout))
