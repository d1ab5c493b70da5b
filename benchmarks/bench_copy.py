"""Large copies with each store instruction: the cost of a wrong choice, and of a read afterwards.

`MLSTATE_COPY` is read at import, so each way has its own process, and so does NumPy.  The processes
take turns: one call each per round, in a shuffled order.  A row with "then read" reads the result
once after the copy, as attention reads a cache.

Run one part with ``python benchmarks/bench_copy.py --only transition``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
from harness import Run, main
from processes import Processes, answer_times, timed_in
from rows import Action, Row

WAYS = ("auto", "plain", "loop", "stream1")
SIMPLE = "NumPy"
CASES = {
    "load_into": (
        *(f"load_into float32, {mib} MiB" for mib in (1, 4, 16, 64, 256)),
        *(f"load_into float32, {mib} MiB, then read" for mib in (4, 8, 16, 64)),
    ),
    "transition": (
        "transition float16 (36, 1, 256, 256) -> 512",
        "transition float16 (28, 8, 2048, 128) -> 4096",
        "transition float32 -> float16 (28, 8, 512, 128) -> 1024",
    ),
    "compact": ("compact float16 (28, 8, 4096, 128) -> 2048 at 1800",),
}


def read(array: np.ndarray) -> None:
    """Read all bytes of an array once."""
    np.bitwise_or.reduce(array.reshape(-1).view(np.uint64))


def load_call(case: str, *, simple: bool) -> Action:
    """mlstate's or NumPy's copy of one array."""
    from mlstate.state import load_into

    mib = int(case.split(", ")[1].split()[0])
    source = {"w": np.ones(mib << 18, np.float32)}
    target = {"w": np.zeros(mib << 18, np.float32)}
    copy = partial(np.copyto, target["w"], source["w"])
    copy = copy if simple else partial(load_into, target, source)
    return (lambda: (copy(), read(target["w"]))) if case.endswith("read") else copy


def cache_call(case: str, *, simple: bool) -> Action:
    """mlstate's or NumPy's transition into an existing cache."""
    from mlstate.kv import compact_kv_state, transition_kv_state

    shape = tuple(int(n) for n in case.partition("(")[2].partition(")")[0].split(", "))
    length = int(case.partition(") -> ")[2].split()[0])
    filled = int(case.partition(" at ")[2] or shape[2])
    source = np.ones(shape, np.float32 if "float32" in case else np.float16)
    out = np.zeros((*shape[:2], length, shape[3]), np.float16)

    def with_numpy() -> None:
        out[:, :, :filled] = source[:, :, :filled]
        out[:, :, filled:] = 0

    move = compact_kv_state if case.startswith("compact") else transition_kv_state
    return with_numpy if simple else partial(move, source, length, filled, out=out)


def serve(pipe: Connection, way: str) -> None:
    """Run the calls of one way, on one thread."""

    def call_of(case: str) -> Action:
        return (load_call if case.startswith("load") else cache_call)(case, simple=way == SIMPLE)

    answer_times(pipe, call_of)


def copies(run: Run, part: str) -> Iterator[Row]:
    """Compare NumPy, and mlstate with each way to store."""
    for case in CASES[part]:
        processes = {
            way: Processes(serve, [(way,)], variables={"MLSTATE_COPY": way.replace(SIMPLE, "auto")})
            for way in (SIMPLE, *WAYS)
        }
        ways = {way: timed_in(process, case) for way, process in processes.items()}
        yield Row(case, ways, {SIMPLE: ways.pop(SIMPLE)})
        for process in processes.values():
            process.close()


if __name__ == "__main__":
    main(
        __doc__,
        "copy",
        "mlstate: copies with each way to store",
        {part: partial(copies, part=part) for part in CASES},
        quick="few rounds",
        rounds=(25, 5),
    )
