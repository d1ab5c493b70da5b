"""Each kernel with each instruction set of this processor: which variants are worth having?

`MLSTATE_CPU` is read at import, so each instruction set has its own process.  The processes take
turns: one call each per round, in a shuffled order.  All data fits the second-level cache, where
the differences are largest; one thread.

Run one part with ``python benchmarks/bench_kernels.py --only diff``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection

import ml_dtypes
import numpy as np
from harness import Run, main
from processes import Processes, answer_times, timed_in
from rows import Action, Row

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
CASES = {
    "copy": ("copy float32",),
    "convert": [f"convert {source} to {target}" for source, target in CONVERSIONS],
    "CRC32C": ("CRC32C",),
    "diff": [f"diff {name}, all changed" for name in DTYPES],
    "add": (
        *(f"add {name} in place" for name in DTYPES),
        *(f"add {name} in place, with norm" for name in DTYPES),
        "add bfloat16 to float32, scaled",
    ),
    "plan": ("plan of 60 blocks",),
}


def values(name: str, seed: int) -> np.ndarray:
    """Random values of a dtype."""
    return np.random.default_rng(seed).random(COUNT, np.float32).astype(DTYPES[name])


def plan_call() -> Action:
    """Plan a chain of 60 blocks for half of its saved bytes."""
    from bench_activation import random_chain

    from mlstate.activation import plan

    chain = random_chain(60)
    return partial(plan, chain, int(chain.saved_bytes.sum()) // 2, slots=500)


def call_of(case: str) -> Action:
    """Prepare the call of a case."""
    from mlstate.kv import transition_kv_state
    from mlstate.state import diff, load_into

    words = case.replace(",", "").split()
    if words[0] == "plan":
        return plan_call()
    if words[0] == "CRC32C":
        return partial(_core.crc32c, values("float32", 1))
    first, second = values(words[1], 1), values(words[1], 2)
    if words[0] in ("copy", "diff"):
        return partial(load_into if words[0] == "copy" else diff, {"w": first}, {"w": second})
    if words[0] == "convert":
        source = first.reshape(1, 1, -1, 64)
        out = np.zeros(source.shape, DTYPES[words[3]])
        return partial(transition_kv_state, source, source.shape[2], out=out)
    is_scaled = words[-1] == "scaled"
    target = np.zeros(COUNT, DTYPES["float32" if is_scaled else words[1]])
    small = (first.astype(np.float32) * 1e-6).astype(first.dtype)
    scale, wants_norms = 0.5 if is_scaled else 1.0, words[-1] == "norm"
    return partial(_core.accumulate, ["w"], [target], [small], scale, wants_norms)


def serve(pipe: Connection) -> None:
    """Run calls with one instruction set, on one thread."""
    answer_times(pipe, call_of, REPEATS)


def kernels(run: Run, part: str) -> Iterator[Row]:
    """Compare the instruction sets; the simplest one is the base."""
    first, *sets = _core.cpu_offered()
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(Processes(serve, [()], variables={"MLSTATE_CPU": name}))
            for name in (first, *sets)
        }
        for case in CASES[part]:
            ways = {name: timed_in(process, case) for name, process in processes.items()}
            yield Row(case, ways, {first: ways.pop(first)}, unit="us")


if __name__ == "__main__":
    main(
        __doc__,
        "kernels",
        "mlstate: kernels with each instruction set",
        {part: partial(kernels, part=part) for part in CASES},
        quick="few rounds",
        rounds=(41, 5),
    )
