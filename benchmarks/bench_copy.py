"""Large copies with each store instruction: the cost of a wrong choice, and of a read afterwards.

`MLSTATE_COPY` is read at import, so each way has its own process, and so does NumPy.  The processes
take turns: one call each per round, in a shuffled order.  A row with "then read" reads the result
once after the copy, as attention reads a cache.

Run one row with ``python benchmarks/bench_copy.py --only transition``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from forced import Server, answer, server_parser, take_turns
from harness import Candidate, Report, rows_of

WAYS = ("auto", "plain", "loop", "stream1")
SIMPLE = "NumPy"
CASES = (
    *(f"load_into float32, {mib} MiB" for mib in (1, 4, 16, 64, 256)),
    *(f"load_into float32, {mib} MiB, then read" for mib in (4, 8, 16, 64)),
    "transition float16 (36, 1, 256, 256) -> 512",
    "transition float16 (28, 8, 2048, 128) -> 4096",
    "transition float32 -> float16 (28, 8, 512, 128) -> 1024",
    "compact float16 (28, 8, 4096, 128) -> 2048 at 1800",
)


def read(array: np.ndarray) -> None:
    """Read all bytes of an array once."""
    np.bitwise_or.reduce(array.reshape(-1).view(np.uint64))


def load_calls(case: str) -> dict[str, Callable[[], object]]:
    """mlstate's and NumPy's copy of one array."""
    from mlstate.state import load_into

    mib = int(case.split(", ")[1].split()[0])
    source = {"w": np.ones(mib << 18, np.float32)}
    target = {"w": np.zeros(mib << 18, np.float32)}
    reads = case.endswith("read")

    def call_mlstate() -> None:
        load_into(target, source)
        if reads:
            read(target["w"])

    def simple() -> None:
        np.copyto(target["w"], source["w"])
        if reads:
            read(target["w"])

    return {"ours": call_mlstate, SIMPLE: simple}


def cache_calls(case: str) -> dict[str, Callable[[], object]]:
    """mlstate's and NumPy's transition into an existing cache."""
    from mlstate.kv import compact_kv_state, transition_kv_state

    shape = tuple(int(n) for n in case.partition("(")[2].partition(")")[0].split(", "))
    length = int(case.partition(") -> ")[2].split()[0])
    filled = int(case.partition(" at ")[2] or shape[2])
    source = np.ones(shape, np.float32 if "float32" in case else np.float16)
    out = np.zeros((*shape[:2], length, shape[3]), np.float16)
    move = compact_kv_state if case.startswith("compact") else transition_kv_state

    def simple() -> None:
        out[:, :, :filled] = source[:, :, :filled]
        out[:, :, filled:] = 0

    return {"ours": lambda: move(source, length, filled, out=out), SIMPLE: simple}


def calls_of(case: str) -> dict[str, Callable[[], object]]:
    """mlstate's and NumPy's way."""
    return (load_calls if case.startswith("load") else cache_calls)(case)


def server_of(way: str, threads: int) -> Server:
    """Start a process with one way to store."""
    forced = {"MLSTATE_COPY": way if way in WAYS else "auto"}
    return Server(__file__, forced, "--threads", str(threads))


def measure_case(case: str, servers: dict[str, Server], rounds: int) -> list:
    """One table: NumPy, and mlstate with each way to store."""
    asks = {way: (server, SIMPLE if way == SIMPLE else "ours") for way, server in servers.items()}
    samples = take_turns(case, asks, rounds, 1e-6)
    candidates = [Candidate(n, lambda: None, baseline=n == SIMPLE) for n in (SIMPLE, *WAYS)]
    return rows_of(candidates, samples)


def main() -> None:
    """Measure and print."""
    parser = server_parser(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.serve:
        answer(calls_of, options.threads)
        return
    report = Report.open("mlstate: copies with each way to store", "copy", options)
    for case in CASES:
        if options.only in case:
            servers = {way: server_of(way, options.threads) for way in (SIMPLE, *WAYS)}
            rounds = 5 if options.quick else 25
            report.table(case, measure_case(case, servers, rounds))
            for server in servers.values():
                server.close()
    report.close()


if __name__ == "__main__":
    main()
