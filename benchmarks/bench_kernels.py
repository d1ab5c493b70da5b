"""Each kernel with each instruction set of this processor: which variants are worth having?

`MLSTATE_CPU` is read at import, so each instruction set has its own process.  The processes take
turns: one call each per round, in a shuffled order.  All data fits the second-level cache, where
the differences are largest; one thread.

Run one row with ``python benchmarks/bench_kernels.py --only diff``.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
from forced import Server, answer, server_parser, take_turns
from harness import Candidate, Report, rows_of

from mlstate import _core

COUNT = 1 << 16  # elements of an array
REPEATS = 20  # calls that are timed together
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
CONVERSIONS = (
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("bfloat16", "float16"),
)
CASES = (
    "copy float32",
    *(f"convert {source} to {target}" for source, target in CONVERSIONS),
    "CRC32C",
    *(f"diff {name}, all changed" for name in DTYPES),
    *(f"add {name} in place" for name in DTYPES),
    *(f"add {name} in place, with norm" for name in DTYPES),
    "add bfloat16 to float32, scaled",
    "plan of 60 blocks",
)


def values(name: str, seed: int) -> np.ndarray:
    """Random values of a dtype."""
    return np.random.default_rng(seed).random(COUNT, np.float32).astype(DTYPES[name])


def plan_call() -> Callable[[], object]:
    """Plan a chain of 60 blocks for half of its saved bytes."""
    from activation_planning import random_chain

    from mlstate.activation import plan

    chain = random_chain(60)
    budget = int(chain.saved_bytes.sum()) // 2
    return lambda: plan(chain, budget, slots=500)


def call_of(case: str) -> Callable[[], object]:
    """Prepare the call of a case."""
    from mlstate.kv import transition_kv_state
    from mlstate.state import diff, load_into

    words = case.replace(",", "").split()
    if words[0] == "plan":
        return plan_call()
    if words[0] == "CRC32C":
        data = values("float32", 1)
        return lambda: _core.crc32c(data)
    first, second = values(words[1], 1), values(words[1], 2)
    if words[0] == "copy":
        return lambda: load_into({"w": first}, {"w": second})
    if words[0] == "diff":
        return lambda: diff({"w": first}, {"w": second})
    if words[0] == "convert":
        source = first.reshape(1, 1, -1, 64)
        out = np.zeros(source.shape, DTYPES[words[3]])
        return lambda: transition_kv_state(source, source.shape[2], out=out)
    target = np.zeros(COUNT, DTYPES["float32" if words[-1] == "scaled" else words[1]])
    scale = 0.5 if words[-1] == "scaled" else 1.0
    wants_norms = words[-1] == "norm"
    small = (first.astype(np.float32) * 1e-6).astype(first.dtype)
    return lambda: _core.accumulate(["w"], [target], [small], scale, wants_norms)


def main() -> None:
    """Measure and print."""
    options = server_parser(__doc__).parse_args()
    if options.serve:
        answer(lambda case: {"ours": call_of(case)}, threads=1, repeats=REPEATS)
        return
    report = Report.open("mlstate: kernels with each instruction set", "kernels", options)
    sets = _core.cpu_offered()
    servers = {name: Server(__file__, {"MLSTATE_CPU": name}) for name in sets}
    candidates = [Candidate(n, lambda: None, baseline=n == sets[0]) for n in sets]
    for case in CASES:
        if options.only in case:
            asks = {name: (server, "ours") for name, server in servers.items()}
            samples = take_turns(case, asks, 5 if options.quick else 41, 1e-3 / REPEATS)
            report.table(case, rows_of(candidates, samples), unit="us")
    for server in servers.values():
        server.close()
    report.close()


if __name__ == "__main__":
    main()
