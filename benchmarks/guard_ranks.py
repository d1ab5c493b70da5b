"""The collectives of `bench_guard.py`, run by two threads, each with its simple code.

`RANKS` is the table. The simple code is two threads that wait at a `threading.Barrier`, do half of
the work each with NumPy, and wait again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from guard_rows import KIB, SINGLE, UP_TO_256, Operation, filled, touched
from paired import Case

from mlstate.collectives import LocalGroup


class Peer:
    """A thread that runs rank 1's part of each call while the caller runs rank 0's."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ends: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()
            self.ends.put(None)

    def run(self, own_call: Callable[[], object], other: Callable[[], object]) -> None:
        """Run both, and return when both have ended."""
        self.jobs.put(other)
        own_call()
        self.ends.get()

    def close(self, groups: list[Any]) -> None:
        self.jobs.put(None)
        self.thread.join()
        for group in groups:
            group.close()


def simple_part(
    operation: str, rank: int, sources: tuple[Any, Any], wholes: list[Any], barrier: Any
) -> Callable[[], None]:
    """Return one thread's part of the simple code: half of the work of both threads."""
    half = len(sources[0]) // 2
    part = slice(half * rank, half * (rank + 1))
    a, b = (source[part] for source in sources)
    outs = [array[part] for array in wholes]

    def add() -> None:
        np.add(a, b, out=outs[rank])

    def add_and_copy() -> None:
        np.add(a, b, out=outs[0])
        np.copyto(outs[1], outs[0])

    def gather() -> None:
        for out in outs:
            np.copyto(out, (a, b)[rank])

    def send() -> None:
        np.copyto(outs[1], a)

    ways = {"reduce_scatter": add, "all_reduce": add_and_copy, "all_gather": gather}
    work = ways.get(operation, send)

    def meet_and_work() -> None:
        barrier.wait()
        work()
        barrier.wait()

    return meet_and_work


def on_two_ranks(operation: str, nbytes: int, tensors: int) -> Case:
    """Run a collective of two threads of `nbytes` each."""
    groups = LocalGroup.threads(2, timeout=60)
    peer = Peer()
    sources = filled(nbytes, SINGLE, 1), filled(nbytes, SINGLE, 2)
    a, b = sources
    half = len(a) // 2
    calls = [getattr(group, operation) for group in groups]
    wholes = [touched(a) for _ in range(4)]  # two for the simple code, two for mlstate
    barrier = threading.Barrier(2)
    simple = [simple_part(operation, rank, sources, wholes[:2], barrier) for rank in range(2)]
    inputs, outs = sources, wholes[2:]
    if operation == "reduce_scatter":
        outs = [array[:half] for array in outs]
    elif operation == "all_gather":
        inputs = a[:half], b[half:]
    calls_of_mlstate = [partial(calls[i], inputs[i], out=outs[i]) for i in range(2)]
    if operation == "broadcast":
        calls_of_mlstate = [partial(calls[0], a), partial(calls[1], outs[1])]
    return Case(
        partial(peer.run, *simple),
        partial(peer.run, *calls_of_mlstate),
        close=partial(peer.close, groups),
    )


def submitting(nbytes: int, tensors: int) -> Case:
    """Start an operation that both threads take part in; it is not timed."""
    groups = LocalGroup.threads(2, timeout=60)
    source, pool = filled(nbytes, SINGLE), ThreadPoolExecutor(1)
    handles: list[Any] = []

    def submit(rank: int) -> None:
        handles.append(groups[rank].all_reduce(source, async_op=True))

    def wait() -> None:
        submit(1)
        while handles:
            handles.pop().wait()

    def simple() -> None:
        handles.append(pool.submit(len, source))

    def close() -> None:
        pool.shutdown()
        for group in groups:
            group.close()

    return Case(
        simple,
        partial(submit, 0),
        after_simple=lambda: handles.pop().result(),
        after_ours=wait,
        close=close,
    )


# ---- the table ----

WAKING = "the threads sleep until both are there, and wake each other"
COLLECTIVES = {  # the simple code, and the fixed microseconds
    "reduce_scatter out=": ("np.add(a, b, out=)", 250.0),
    "all_reduce out=": ("np.add(a, b, out=); np.copyto", 250.0),
    "all_gather out=": ("np.copyto to each rank", 180.0),
    "broadcast": ("np.copyto", 90.0),
}

RANKS = (
    *(
        Operation(
            f"collectives.{name}",
            f"each of two threads: barrier, its half of the work, barrier: {simple}",
            partial(on_two_ranks, name.partition(" ")[0]),
            UP_TO_256,
            threads=(2,),
            fixed_us=fixed_us,
            why=WAKING,
        )
        for name, (simple, fixed_us) in COLLECTIVES.items()
    ),
    Operation(
        "all_reduce async_op=, submission",
        "ThreadPoolExecutor.submit(work)",
        submitting,
        (64 * KIB,),
        threads=(1,),
        fixed_us=15.0,
        why="the arguments are checked, and the operation gets its place in the order",
    ),
)
