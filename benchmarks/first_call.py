"""Make one transition in a new process and print, as JSON, its milliseconds and extra MiB.

``python first_call.py NAME`` with a name of `CALLS`; `bench_kv.py` starts it many times. Imports
and the source are complete before the clock starts: it measures the first call itself, with new
memory from the system.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numpy as np
import peers
from resident import forget_peak, peak

SHAPE = (28, 8, 2048, 128)
TARGET = 4096


def peer() -> Callable[[], object]:
    source = np.ones(SHAPE, np.float16)
    return lambda: peers.numpy_expand(source, TARGET, SHAPE[2], np.float16)


def zeros() -> Callable[[], object]:
    source = np.ones(SHAPE, np.float16)
    return lambda: peers.numpy_zeros(source, TARGET, SHAPE[2], np.float16)


def torch_peer() -> Callable[[], object]:
    import torch

    source = torch.ones(SHAPE, dtype=torch.float16)
    return lambda: peers.torch_expand(source, TARGET, SHAPE[2], torch.float16)


def fresh(low_memory: bool = False, threads: int | None = None) -> Callable[[], object]:
    import mlstate

    if threads is not None:
        mlstate.set_num_threads(threads)
    source = np.ones(SHAPE, np.float16)
    return lambda: mlstate.transition_kv_state(source, TARGET, low_memory=low_memory)


def state(capacity: int, grow: str) -> Callable[[], object]:
    from mlstate.kv import KVState

    cache = KVState(SHAPE, capacity, np.float16)
    cache.array[...] = 1
    return lambda: getattr(cache, grow)(TARGET)


CALLS: dict[str, Callable[[], Callable[[], object]]] = {
    "NumPy peer: full + astype + copy": peer,
    "NumPy: zeros + copy": zeros,
    "torch peer: full + to + copy": torch_peer,
    "mlstate fresh, 1 thread": lambda: fresh(threads=1),
    "mlstate fresh": fresh,
    "mlstate fresh, low_memory": lambda: fresh(low_memory=True),
    "KVState.reserve (consumes the source)": lambda: state(SHAPE[2], "reserve"),
    "KVState.resize within its capacity": lambda: state(TARGET, "resize"),
}


def main() -> None:
    call = CALLS[sys.argv[1]]()
    before = forget_peak()
    start = time.perf_counter_ns()
    result_kept = call()
    elapsed = time.perf_counter_ns() - start
    print(json.dumps({"ms": elapsed * 1e-6, "extra_mib": peak() - before}))
    del result_kept


if __name__ == "__main__":
    main()
