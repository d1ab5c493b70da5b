"""A new process that makes one transition, for `bench_kv.py`: its milliseconds and extra MiB.

Imports and the source are complete before the clock starts: it measures the first call itself,
with new memory from the system.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import peers
from processes import Processes, answer
from resident import forget_peak, peak

import mlstate
from mlstate.kv import KVState

SHAPE = (28, 8, 2048, 128)
TARGET = 4096

Call = Callable[[], object]


def torch_peer() -> Call:
    import torch

    source = torch.ones(SHAPE, dtype=torch.float16)
    return partial(peers.torch_filled, source, TARGET, SHAPE[2], torch.float16)


def fresh(source: np.ndarray, threads: int | None = None, low_memory: bool = False) -> Call:
    if threads is not None:
        mlstate.threads.set_num_threads(threads)
    return partial(mlstate.transition_kv_state, source, TARGET, low_memory=low_memory)


def state(capacity: int, grow: str) -> Call:
    cache = KVState(SHAPE, capacity, np.float16)
    cache.array[...] = 1
    return lambda: getattr(cache, grow)(TARGET)


def call_of(name: str) -> Call:
    """Prepare a call."""
    if name.startswith("torch"):
        return torch_peer()
    if name.startswith("KVState"):
        is_reserve = "reserve" in name
        return state(SHAPE[2] if is_reserve else TARGET, "reserve" if is_reserve else "resize")
    source = np.ones(SHAPE, np.float16)
    if name.startswith("NumPy"):
        peer = peers.numpy_filled if "peer" in name else peers.numpy_zeros
        return partial(peer, source, TARGET, SHAPE[2], np.float16)
    return fresh(source, 1 if "1 thread" in name else None, "low_memory" in name)


def serve(pipe: Connection, name: str) -> None:
    """Prepare a call, and make it when asked to."""
    call = call_of(name)

    def make() -> dict[str, float]:
        before = forget_peak()
        start = time.perf_counter_ns()
        result_kept = call()
        elapsed = time.perf_counter_ns() - start
        extra = peak() - before
        del result_kept
        return {"ms": elapsed * 1e-6, "extra MiB": extra}

    answer(pipe, {"make": make})


def first_call(name: str) -> dict[str, float]:
    """Make a call in a new process, and return its figures."""
    with Processes(serve, [(name,)]) as process:
        figures: dict[str, float] = process.ask("make")[0]
        return figures
