"""Quantized caches compared with mlx, torch and memory speed, with one thread.

``python benchmarks/bench_quantize.py [--quick] [--json] [--only PART]``; mlstate must be installed,
and mlx or torch. `fused` compares a move to another capacity that quantizes with the two steps.
Times are processor time of all threads of the process, because mlx computes in a second thread, and
so that other programs disturb less.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import numpy as np
import peers
from harness import Action, Candidate, Report, Row, option_parser
from optional import optional

import mlstate
from mlstate.kv import CacheEntry, CacheSpec, CacheState

torch, mx, ml_dtypes = map(optional, ("torch", "mlx.core", "ml_dtypes"))
BITS = (2, 3, 4, 5, 6, 8)
GROUP = 64
SHAPE = (4, 8, 1024, 128)  # 4 Mi elements
AIM = 3.0


def dtypes() -> list[np.dtype[Any]]:
    """Return the dtypes that can be quantized here."""
    brain = [] if ml_dtypes is None else [np.dtype(ml_dtypes.bfloat16)]
    return [np.dtype(np.float16), *brain, np.dtype(np.float32)]


def random_values(dtype: np.dtype[Any]) -> Any:
    """Make normal values."""
    return np.random.default_rng(1).standard_normal(SHAPE, np.float32).astype(dtype)


def to_mlx(values: Any) -> Any:
    """Return an mlx array with the same bits."""
    if values.dtype.name == "bfloat16":
        return mx.array(values.view(np.uint16)).view(mx.bfloat16)
    return mx.array(values)


def full_state(values: Any) -> CacheState:
    """Make a cache of one full entry; the values are not copied."""
    entry = CacheEntry("keys", "full", SHAPE, values.dtype)
    return CacheState(CacheSpec([entry]), {"keys": values}, SHAPE[-2])


def quantized_state(values: Any, bits: int) -> CacheState:
    """Make a cache of one quantized entry."""
    state = full_state(values)
    state.quantize(bits, GROUP)
    return state


def dequantize_copy(state: CacheState) -> None:
    """Dequantize a cache of the same arrays; `state` stays quantized."""
    CacheState(state.spec, state.arrays, state.length).dequantize()


def run_mlx(operation: Callable[..., Any], arrays: list[Any], bits: int) -> None:
    """Run an operation of mlx on the CPU, and wait for it."""
    result = operation(*arrays, group_size=GROUP, bits=bits, stream=mx.cpu)
    mx.eval(result)


def core_quantize(values: Any, arrays: list[Any], bits: int) -> None:
    """Quantize into arrays that exist."""
    mlstate._core.kv_quantize(values, *arrays, bits, GROUP)


def core_dequantize(values: Any, arrays: list[Any], bits: int) -> None:
    """Dequantize into an array that exists."""
    mlstate._core.kv_dequantize(values, *arrays, bits, GROUP)


def measure(candidates: list[Candidate], repeats: int) -> list[Row]:
    """Measure processor time."""
    return harness.measure(candidates, repeats, clock=time.process_time_ns)


def with_base(candidates: list[Candidate]) -> list[Candidate]:
    """Make the faster one of mlx and torch the baseline, by one call of each after a first."""
    others = [c for c in candidates if c.name.startswith(("mlx", "torch"))]
    rows = measure(others, 3) if len(others) > 1 else []
    medians = {row.name: row.median for row in rows}
    base = min(others, key=lambda c: medians.get(c.name, 0.0), default=candidates[0])
    base.baseline = True
    return candidates


def title(name: str, values: Any, bits: int) -> str:
    """Name a table."""
    size = values.nbytes / (1 << 20)
    return f"{name} {values.dtype.name}, {bits} bits, groups of {GROUP}: {size:.4g} MiB of values"


def compare(
    report: Report, title: str, values: Any, calls: dict[str, Action], repeats: int
) -> None:
    """Time calls by name, and a copy of the values; mlstate's have the aim."""
    candidates = [
        Candidate(name, call, at_least=AIM if name.startswith("mlstate") else None)
        for name, call in calls.items()
    ]
    candidates.append(Candidate("limit: memcpy of the values", copying(values), limit=True))
    report.table(title, measure(with_base(candidates), repeats))


def quantizing(report: Report, repeats: int) -> None:
    """Time quantize for every dtype and width."""
    for dtype in dtypes():
        values = random_values(dtype)
        for bits in BITS:
            arrays = [array.copy() for array in quantized_state(values, bits).arrays.values()]
            calls: dict[str, Action] = {}
            if mx is not None:
                calls["mlx.core.quantize"] = partial(run_mlx, mx.quantize, [to_mlx(values)], bits)
            if torch is not None:
                tensor = peers.to_torch(values)
                calls["torch operations"] = partial(peers.torch_quantize, tensor, bits, GROUP)
            calls["mlstate, new arrays"] = partial(quantized_state, values, bits)
            calls["mlstate, arrays that exist"] = partial(core_quantize, values, arrays, bits)
            compare(report, title("quantize", values, bits), values, calls, repeats)


def dequantizing(report: Report, repeats: int) -> None:
    """Time dequantize for every dtype and width."""
    for dtype in dtypes():
        values = random_values(dtype)
        for bits in BITS:
            state = quantized_state(values, bits)
            arrays = list(state.arrays.values())
            calls: dict[str, Action] = {}
            if mx is not None:
                mlx_arrays = [to_mlx(array) for array in arrays]
                calls["mlx.core.dequantize"] = partial(run_mlx, mx.dequantize, mlx_arrays, bits)
            if torch is not None:
                codes, *others = arrays
                tensors = [peers.to_torch(array) for array in (codes.view(np.int32), *others)]
                calls["torch operations"] = partial(peers.torch_dequantize, *tensors, bits, GROUP)
            calls["mlstate, new array"] = partial(dequantize_copy, state)
            out = np.ones_like(values)
            calls["mlstate, array that exists"] = partial(core_dequantize, out, arrays, bits)
            compare(report, title("dequantize", values, bits), values, calls, repeats)


def two_steps(values: Any, bits: int) -> None:
    """Move to twice the capacity, then quantize."""
    state = full_state(values)
    state.resize(2 * SHAPE[-2])
    state.quantize(bits, GROUP)


def fused(report: Report, repeats: int) -> None:
    """Time a move to twice the capacity that quantizes on the way."""
    for dtype in dtypes():
        values = random_values(dtype)
        for bits in (4, 8):
            candidates = [
                Candidate("resize, then quantize", partial(two_steps, values, bits), baseline=True),
                Candidate(
                    "quantize(capacity=)",
                    lambda bits=bits, values=values: full_state(values).quantize(
                        bits, GROUP, capacity=2 * SHAPE[-2]
                    ),
                ),
                Candidate("limit: memcpy of the values", copying(values), limit=True),
            ]
            report.table(title("move and quantize", values, bits), measure(candidates, repeats))


def copying(values: Any) -> Callable[[], None]:
    """Return a copy of the values to memory that exists."""
    return partial(np.copyto, np.ones_like(values), values.copy())


def verdicts(tables: list[dict[str, Any]]) -> list[str]:
    """Return the range of mlstate's ratios in some tables, and the rows that miss the aim."""
    rows = [(table["title"], row) for table in tables for row in table["rows"]]
    own = [(title, row) for title, row in rows if row["name"].startswith(("mlstate", "quantize("))]
    compared = [row["times_baseline"] for _, row in own if row["times_baseline"] is not None]
    copies = [row["times_limit"] for _, row in own]
    lines = [f"{len(own)} rows: {min(copies):.2f} to {max(copies):.2f} times a memcpy"]
    if compared:
        lines[0] += f", {min(compared):.1f} to {max(compared):.1f} times faster than the base"
    for title, row in own:
        if str(row["to_reach"]).endswith("NO"):
            ratios = f"{row['times_baseline']:.1f}x base, {row['times_limit']:.2f}x memcpy"
            lines.append(f"below {AIM:g}x: {title.partition(':')[0]}, {row['name']}: {ratios}")
    return lines


PARTS: dict[str, Callable[[Report, int], None]] = {
    "quantize": quantizing,
    "dequantize": dequantizing,
    "fused": fused,
}


def main() -> None:
    options = option_parser(__doc__, "5 repeats instead of 15", PARTS).parse_args()
    mlstate.set_num_threads(1)
    if torch is not None:
        torch.set_num_threads(1)
    report = Report.open("mlstate: quantized caches, one thread", "quantize", options)
    load = ", ".join(f"{number:.1f}" for number in os.getloadavg())
    report.log(f"load of the machine (1, 5, 15 minutes): {load}")
    report.log("processor time; 'x base': times faster than the faster one of mlx and torch")
    report.log("'/limit': times the duration of a memcpy of the values")
    for name, part in PARTS.items():
        if options.only in (None, name):
            done = len(report.tables)
            part(report, 5 if options.quick else 15)
            report.judge(verdicts(report.tables[done:]))
    report.close()


if __name__ == "__main__":
    main()
