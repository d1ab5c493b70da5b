"""Operations of a link that only exchanges bytes: ranks are threads, messages go through queues."""

from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import numpy as np
import pytest

from mlstate.collectives._link import ExchangeLink

SECONDS = 20


class Link(ExchangeLink):
    """A rank's link to the others, which counts the bytes it sent."""

    def __init__(self, queues, rank):
        self.queues, self.rank, self.world_size = queues, rank, len(queues)
        self.sent_bytes = 0

    def exchange(self, sends, receives):
        for to, part in enumerate(sends):
            if to != self.rank and len(part):
                self.queues[to][self.rank].put(part.copy())
                self.sent_bytes += len(part)
        for source, part in enumerate(receives):
            if source != self.rank and len(part):
                part[:] = self.queues[self.rank][source].get(timeout=SECONDS)

    def reduce(self, parts, op, out):
        assert op == "sum"
        out[:] = sum(part.copy() for part in parts)


def run(world, operation):
    """Return the result of each rank's operation, and the bytes it sent."""
    queues = [[Queue() for _ in range(world)] for _ in range(world)]
    links = [Link(queues, rank) for rank in range(world)]
    with ThreadPoolExecutor(world) as pool:
        outputs = list(pool.map(operation, links))
    assert all(queue.empty() for of_rank in queues for queue in of_rank)
    return outputs, [link.sent_bytes for link in links]


WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 5])


@WORLDS
@pytest.mark.parametrize("length", [0, 1, 7, 20_003])
@pytest.mark.parametrize("in_place", [False, True])
def test_every_rank_gets_the_sum(world, length, in_place):
    def operation(link):
        source = np.arange(length) * (link.rank + 1)
        target = source if in_place else np.empty_like(source)
        link.all_reduce(source, target, "sum")
        return target

    for total in run(world, operation)[0]:
        assert np.array_equal(total, np.arange(length) * (world * (world + 1) // 2))


@WORLDS
def test_rows_are_reduced_and_spread(world):
    rows = [rank % 3 for rank in range(world)]  # rows of two elements

    def operation(link):
        source = np.arange(2 * sum(rows)) + link.rank
        part, gathered = np.empty(2 * rows[link.rank], int), np.empty_like(source)
        link.reduce_scatter(source, part, rows, "sum")
        link.all_gather(part, gathered, rows)
        return gathered

    for gathered in run(world, operation)[0]:
        total = np.arange(2 * sum(rows)) * world + sum(range(world))
        assert np.array_equal(gathered, total)


@WORLDS
@pytest.mark.parametrize("shift", [None, 0, 1])  # offset of the target from the source, in elements
def test_rows_are_traded_also_over_the_same_memory(world, shift):
    def operation(link):
        memory = np.zeros(world + 1, int)
        source = memory[:world]
        source[:] = np.arange(world) + 10 * link.rank
        target = np.empty(world, int) if shift is None else memory[shift:][:world]
        link.all_to_all(source, target, [1] * world, [1] * world)
        return target

    for rank, received in enumerate(run(world, operation)[0]):
        assert np.array_equal(received, np.arange(world) * 10 + rank)


@WORLDS
@pytest.mark.parametrize("length", [0, 100, 1 << 20])
def test_long_broadcasts_are_passed_on_in_parts(world, length):
    root = world - 1

    def operation(link):
        memory = np.arange(length, dtype=np.uint8) if link.rank == root else np.zeros(length, "u1")
        link.broadcast(memory, root)
        return memory

    received, sent = run(world, operation)
    for memory in received:
        assert np.array_equal(memory, np.arange(length, dtype=np.uint8))
    assert max(sent) <= (2 * length if length >= 1 << 20 else length * (world - 1))


@WORLDS
@pytest.mark.parametrize("root", [None, 0])
def test_short_and_long_texts_are_gathered(world, root):
    texts = [bytes([rank]) * (rank * 150) for rank in range(world)]
    gathered, _ = run(world, lambda link: link.gather_bytes(texts[link.rank], root))
    expected = [texts if root in (None, rank) else None for rank in range(world)]
    assert gathered == expected


@WORLDS
def test_a_barrier_waits_for_every_rank(world):
    came = []

    def operation(link):
        came.append(link.rank)
        link.barrier()
        return len(came)

    assert run(world, operation)[0] == [world] * world
