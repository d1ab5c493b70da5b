"""Quantized caches compared with mlx, torch and memory speed, with one thread.

``python benchmarks/bench_quantize.py [--quick] [--json] [--only PART]``; mlstate must be installed,
and mlx or torch. `fused` compares a move to another capacity that quantizes with the two steps.
Times are processor time of all threads of the process, because mlx computes in a second thread, and
so that other programs disturb less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import peers
from harness import Run, main
from optional import optional
from rows import Bar, Row, Ways

import mlstate
from mlstate._core import kv_dequantize, kv_quantize
from mlstate.kv import CacheEntry, CacheSpec, CacheState

torch, mx, ml_dtypes = map(optional, ("torch", "mlx.core", "ml_dtypes"))
BITS = (2, 3, 4, 5, 6, 8)
GROUP = 64
SHAPE = (4, 8, 1024, 128)  # 4 Mi elements
BOUND = 3.0  # times as fast as mlx and torch


def all_values() -> Iterator[Any]:
    """Yield normal values of each dtype that can be quantized here; use one thread."""
    mlstate.threads.set_num_threads(1)
    if torch is not None:
        torch.set_num_threads(1)
    normal = np.random.default_rng(1).standard_normal(SHAPE, np.float32)
    brain = [] if ml_dtypes is None else [ml_dtypes.bfloat16]
    yield from (normal.astype(dtype) for dtype in (np.float16, *brain, np.float32))


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
    mx.eval(operation(*arrays, group_size=GROUP, bits=bits, stream=mx.cpu))


def row_of(name: str, values: Any, bits: int, ways: Ways, others: Ways, bars: Any) -> Row:
    """Compare with a copy of the values to memory that exists."""
    size = values.nbytes / (1 << 20)
    return Row(
        f"{name} {values.dtype.name}, {bits} bits, groups of {GROUP}: {size:.4g} MiB of values",
        ways,
        others,
        {"limit: memcpy of the values": partial(np.copyto, np.ones_like(values), values.copy())},
        bars,
        clock=time.process_time_ns,
    )


def quantizing(run: Run, name: str) -> Iterator[Row]:
    """Quantize every dtype to every width, or dequantize."""
    back, core = name == "dequantize", kv_dequantize if name == "dequantize" else kv_quantize
    for values in all_values():
        for bits in BITS:
            state = quantized_state(values, bits)
            arrays = [array.copy() for array in state.arrays.values()]
            codes, *scales = arrays
            others: Ways = {}
            if mx is not None:
                inputs = [to_mlx(array) for array in (arrays if back else [values])]
                call = partial(run_mlx, getattr(mx, name), inputs, bits)
                others[f"mlx.core.{name}"] = call
            if torch is not None:
                inputs = [codes.view(np.int32), *scales] if back else [values]
                peer = peers.torch_dequantize if back else peers.torch_quantize
                call = partial(peer, *map(peers.to_torch, inputs), bits, GROUP)
                others["torch operations"] = call
            fresh = partial(dequantize_copy, state)
            fresh = fresh if back else partial(quantized_state, values, bits)
            target = np.ones_like(values) if back else values
            ways = {
                f"mlstate, new array{'' if back else 's'}": fresh,
                f"mlstate, array{' that exists' if back else 's that exist'}": partial(
                    core, target, *arrays, bits, GROUP
                ),
            }
            bars = [Bar(way, BOUND, other, faster=True) for way in ways for other in others]
            yield row_of(name, values, bits, ways, others, bars)


def two_steps(values: Any, bits: int) -> None:
    """Move to twice the capacity, then quantize."""
    state = full_state(values)
    state.resize(2 * SHAPE[-2])
    state.quantize(bits, GROUP)


def fused_step(values: Any, bits: int) -> None:
    """Move to twice the capacity, and quantize on the way."""
    full_state(values).quantize(bits, GROUP, capacity=2 * SHAPE[-2])


def fused(run: Run) -> Iterator[Row]:
    """Compare a move that quantizes on the way with two steps."""
    for values in all_values():
        for bits in (4, 8):
            ways = {"quantize(capacity=)": partial(fused_step, values, bits)}
            others = {"resize, then quantize": partial(two_steps, values, bits)}
            yield row_of("move and quantize", values, bits, ways, others, ())


if __name__ == "__main__":
    main(
        __doc__,
        "quantize",
        "mlstate: quantized caches, one thread",
        {name: partial(quantizing, name=name) for name in ("quantize", "dequantize")}
        | {"fused": fused},
        quick="5 repeats instead of 15",
        rounds=(15, 5),
    )
