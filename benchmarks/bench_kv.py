"""KV-cache transitions compared with NumPy, torch and memory speed: see docs/benchmarks.md.

``python benchmarks/bench_kv.py [--quick] [--json] [--only PART]``; mlstate must be installed, torch
and ml_dtypes take part if they are.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import peers
from first_call import CALLS
from harness import (
    Candidate,
    MemoryLimit,
    Report,
    Row,
    measure,
    note_memory,
    option_parser,
    rows_of,
)

import mlstate
from mlstate.kv import (
    CacheEntry,
    CacheSpec,
    CacheState,
    KVState,
    RollingKVState,
    compact_kv_state,
    create_attention_size_mask,
    create_causal_mask,
    create_decode_mask,
    rotate_keys,
    transition_kv_state,
)

try:
    import torch
except ImportError:
    torch = None
try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

THREADS = mlstate.get_num_threads()
TORCH_THREADS = torch.get_num_threads() if torch else 1
SMALL = (36, 1, 256, 256)
LARGE = (28, 8, 2048, 128)


def use_threads(threads: int) -> None:
    """Set mlstate's threads, and let new ones start outside of the timed part."""
    if mlstate.get_num_threads() != threads:
        mlstate.set_num_threads(threads)
        cache = np.zeros((4, 1, 1024, 512), np.float16)
        transition_kv_state(cache, 1024, out=np.empty_like(cache))


def use_torch_threads(threads: int) -> None:
    """Do the same for torch."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
        torch.ones(1 << 21).add_(1)


def random_cache(shape: tuple[int, ...], dtype: object) -> np.ndarray:
    """Make a cache of normal values."""
    values = np.random.default_rng(1).standard_normal(shape, np.float32)
    return values.astype(dtype)


def torch_source(source: np.ndarray) -> object:
    """Make a tensor over the array's memory, also for bfloat16."""
    if source.dtype.name == "bfloat16":
        return torch.from_numpy(source.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(source)


def torch_rows(
    how: str, source: np.ndarray, length: int, position: int, dtype: object
) -> list[Candidate]:
    """Make torch's candidates: one thread and, if different, its default."""
    if torch is None:
        return []
    tensor = torch_source(source)
    target_dtype = getattr(torch, np.dtype(dtype).name)
    call = peers.torch_compact if how == "zeros" else peers.torch_expand
    return [
        Candidate(
            f"torch peer: {how} + to + copy, {count_threads(count)}",
            partial(call, tensor, length, position, target_dtype),
            partial(use_torch_threads, count),
        )
        for count in sorted({1, TORCH_THREADS})
    ]


def count_threads(count: int) -> str:
    """Name a number of threads."""
    return "1 thread" if count == 1 else f"{count} threads"


def mlstate_rows(
    name: str, make: Callable[[], Callable[[], object]], at_least: float | None = None
) -> list[Candidate]:
    """Make mlstate's candidates: one thread and the default; the target is for the default.

    Each has its own call and `out`, because lines that another core wrote arrive slowly.
    """
    return [
        Candidate(
            f"{name}, {count_threads(count)}",
            make(),
            partial(use_threads, count),
            at_least=at_least if count == THREADS else None,
        )
        for count in sorted({1, THREADS})
    ]


def transition(
    report: Report,
    repeats: int,
    shape: tuple[int, ...],
    length: int,
    dtypes: tuple[object, object],
    *,
    position: int | None = None,
    out_target: float | None = None,
    fresh_target: float | None = None,
    reserve: bool = False,
) -> None:
    """Time one transition in every available way."""
    compact = length < shape[2]
    used = shape[2] if position is None else position
    kind, target_dtype = np.dtype(dtypes[0]), np.dtype(dtypes[1])
    source = random_cache(shape, kind)
    out = np.ones(peers.longer(shape, length), target_dtype)
    move = partial(compact_kv_state if compact else transition_kv_state, source, length, used)
    peer = peers.numpy_compact if compact else peers.numpy_expand
    how = "zeros" if compact else "full"
    candidates = [
        Candidate(
            f"NumPy peer: {how} + astype + copy",
            partial(peer, source, length, used, target_dtype),
            baseline=True,
        ),
        Candidate(
            "NumPy: zeros + copy", partial(peers.numpy_zeros, source, length, used, target_dtype)
        ),
        Candidate(
            "NumPy into a preallocated target", partial(peers.numpy_into, source, used, out.copy())
        ),
        *torch_rows(how, source, length, used, target_dtype),
        *mlstate_rows("mlstate fresh", lambda: partial(move, dtype=target_dtype), fresh_target),
    ]
    if out.nbytes >= 32 << 20:
        candidates += mlstate_rows(
            "mlstate fresh, low_memory", lambda: partial(move, dtype=target_dtype, low_memory=True)
        )[-1:]
    candidates += mlstate_rows("mlstate out=", lambda: partial(move, out=out.copy()), out_target)
    if reserve:
        candidates.append(reserving(source, length))
    limit = MemoryLimit(source, out, out.nbytes // length * used)
    candidates.append(Candidate("limit: memcpy + memset, touched memory", limit, limit=True))
    dtype_text = kind.name if kind == target_dtype else f"{kind.name} -> {target_dtype.name}"
    report.table(
        f"{'compact' if compact else 'expand'} {dtype_text}, {shape} -> {length} "
        f"at {used} tokens: {mib(source.nbytes)} -> {mib(out.nbytes)}",
        measure(candidates, repeats),
    )


def reserving(source: np.ndarray, length: int) -> Candidate:
    """Make the candidate that raises a KVState's capacity; each call needs a new one."""
    states: list[KVState] = []

    def prepare() -> None:
        states[:] = [KVState.from_array(source)]

    return Candidate(
        "KVState.reserve (consumes the source)", lambda: states[0].reserve(length), prepare
    )


def mib(size: int) -> str:
    """Convert bytes to MiB."""
    return f"{size / (1 << 20):.4g} MiB"


def growth(report: Report, repeats: int) -> None:
    """Time growth within reserved capacity, and check that nothing is copied."""
    rows = []
    for shape, filled in (
        ((36, 1, 256, 256), True),
        (LARGE, True),
        ((28, 8, 16384, 128), False),
        ((64, 8, 65536, 128), False),
    ):
        long = 2 * shape[2]
        state = KVState(shape, long, np.float16)
        if filled:
            state.array[...] = 1
        copied: set[int] = set()

        def grow(state: KVState = state, long: int = long) -> None:
            state.resize(long)
            state.array  # noqa: B018

        def prepare(
            state: KVState = state, shape: tuple[int, ...] = shape, filled: bool = filled
        ) -> None:
            if filled:
                state.resize(shape[2])
            elif state.seq_length > shape[2]:  # shrinking writes zeros, which would touch all pages
                state.__init__(shape, 2 * shape[2], np.float16)  # type: ignore[misc]

        name = f"{shape} -> {long}: {mib(state.nbytes)} more"
        row = measure([Candidate(name, grow, prepare, at_most=20)], repeats, unit=1e-3)[0]
        prepare()
        before = layout(state)
        state.resize(long)
        copied.add(0 if layout(state) == before else state.nbytes)
        row.extra = {"bytes copied": copied.pop()}
        rows.append(row)
    report.table(
        "KVState.resize inside reserved capacity, and .array",
        rows,
        unit="us",
        note="bytes copied is 0 where address and strides stay as they were; the last two "
        "caches were never written",
    )


def layout(state: KVState) -> tuple[int, tuple[int, ...]]:
    """The byte offset of an element of the cache."""
    array = state.array
    return array.ctypes.data, array.strides


def repeated(call: Callable[[], object], times: int = 100) -> Callable[[], None]:
    """Repeat a call that is too short for the clock."""

    def run() -> None:
        for _ in range(times):
            call()

    return run


def masks(report: Report, repeats: int) -> None:
    """Time full masks, and one row and the causal view, in microseconds."""
    length = 4096
    out = np.ones((1, 1, length, length), np.float16)
    full = [
        Candidate(
            "NumPy: the formula, row by row",
            partial(peers.mask_by_rows, length, 1024),
            baseline=True,
        ),
        Candidate("mlstate fresh", partial(create_attention_size_mask, length, 1024, length)),
        Candidate(
            "mlstate out=", partial(create_attention_size_mask, length, 1024, length, out=out)
        ),
        Candidate(
            "create_causal_mask: a view of 16 KiB", partial(create_causal_mask, length, 1024)
        ),
        Candidate("limit: memset, touched memory", MemoryLimit(out, out, 0), limit=True),
    ]
    report.table(f"mask float16, {length} x {length}: {mib(out.nbytes)}", measure(full, repeats))
    row = np.ones((1, 1, 1, length), np.float16)
    rows = [
        Candidate(
            "NumPy: full + slice",
            repeated(partial(peers.decode_row, length, 1024, 3000)),
            baseline=True,
        ),
        Candidate("mlstate fresh", repeated(partial(create_decode_mask, length, 1024, 3000))),
        Candidate(
            "mlstate out=", repeated(partial(create_decode_mask, length, 1024, 3000, out=row))
        ),
    ]
    report.table(
        f"mask row for decoding, {length} columns", measure(rows, repeats, unit=1e-5), unit="us"
    )


def child(*arguments: str, cache: str | None = None) -> str:
    """Run Python in a new process, its bytecode in `cache`, and return its output."""
    environment = dict(os.environ)
    if cache is not None:
        environment["PYTHONPYCACHEPREFIX"] = cache
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout


def cold(report: Report, repeats: int) -> None:
    """Time the first call of new processes, which take turns."""
    names = [name for name in CALLS if torch is not None or "torch" not in name]
    script = str(Path(__file__).parent / "first_call.py")
    samples: dict[str, list[float]] = {name: [] for name in names}
    extra: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            result = json.loads(child(script, name))
            samples[name].append(result["ms"])
            extra[name].append(result["extra_mib"])
    base = names[0]
    candidates = [
        Candidate(
            name, print, baseline=name == base, at_least=10 if name == "mlstate fresh" else None
        )
        for name in names
    ]
    rows = rows_of(candidates, samples)
    base_extra = statistics.median(extra[base])
    for row in rows:
        mid = statistics.median(extra[row.name])
        row.extra = {"extra MiB": f"{mid:.0f}", "of base": f"{mid / base_extra:.2f}"}
    report.table(
        f"first call of a new process, expand float16 {LARGE} -> 4096",
        rows,
        note="to reach: 10x the base, or a third of its extra memory",
    )


IMPORT = """
import time
start = time.perf_counter()
import numpy
between = time.perf_counter()
import {}
print((between - start) * 1e3, (time.perf_counter() - between) * 1e3)
"""


def importing(report: Report, repeats: int) -> None:
    """Time imports in new processes, which take turns, with bytecode as pip installs it."""
    numpy_ms: list[float] = []
    samples: dict[str, list[float]] = {"import mlstate": [], "import safetensors.numpy": []}
    if not has("safetensors"):
        del samples["import safetensors.numpy"]
    with tempfile.TemporaryDirectory() as cache:
        for turn in range(1 + 2 * repeats):
            for name, values in samples.items():
                code = IMPORT.format(name.split()[1])
                first, second = child("-c", code, cache=cache).split()
                if turn > 0:  # the first ones compile
                    numpy_ms.append(float(first))
                    values.append(float(second))
    rows = [Row("import numpy, for comparison", numpy_ms)]
    rows += [Row(name + " after numpy", values) for name, values in samples.items()]
    rows[1].at_most = 15
    report.table("imports in new processes", rows)


def has(package: str) -> bool:
    """Whether a package is installed, without importing it."""
    return importlib.util.find_spec(package) is not None


def compacting(report: Report, repeats: int) -> None:
    """Time the two compactions."""
    half = (np.float16, np.float16)
    transition(report, 5 * repeats, (36, 1, 512, 256), 256, half, position=200)
    transition(report, repeats, (28, 8, 4096, 128), 2048, half, position=1800)


def expanding(report: Report, repeats: int) -> None:
    """Time the expansions that keep their dtype."""
    half = (np.float16, np.float16)
    transition(report, 5 * repeats, SMALL, 512, half, out_target=3.5)
    transition(report, repeats, LARGE, 4096, half, out_target=5, reserve=True)


def layouts(report: Report, repeats: int) -> None:
    """Time the same bytes with five dimensions and with the sequence innermost."""
    for shape, times in ((SMALL, 5), (LARGE, 1)):
        layers, heads, length, head_dim = shape
        calls: list[Candidate] = []
        for name, other, axis in (
            ("4-D", shape, -2),
            ("5-D", (layers, 1, *shape[1:]), -2),
            ("innermost", (layers, 1, heads * head_dim, 1, length), -1),
        ):
            source = random_cache(other, np.float16)
            out = np.ones(peers.longer(other, 2 * length, axis), np.float16)
            call = partial(transition_kv_state, source, 2 * length, out=out, seq_axis=axis)
            is_first = other == shape
            calls += [
                Candidate(f"{name}: mlstate", call, partial(use_threads, THREADS), is_first),
                Candidate(f"{name}: NumPy", partial(peers.numpy_onto, source, out.copy(), axis)),
            ]
            if torch is not None:
                tensors = torch.from_numpy(source), torch.from_numpy(out.copy())
                prepare = partial(use_torch_threads, TORCH_THREADS)
                calls.append(
                    Candidate(f"{name}: torch", partial(peers.torch_onto, *tensors, axis), prepare)
                )
        limit = MemoryLimit(source, out.copy(), source.nbytes)
        calls.append(Candidate("limit: memcpy + memset, touched memory", limit, limit=True))
        rows = measure(calls, times * repeats)
        note_memory(rows, calls)
        report.table(
            f"expand float16 into out=, {shape} -> {2 * length}, {count_threads(THREADS)}",
            rows,
            note="4-D is (layers, heads, sequence, head_dim), 5-D (layers, 1, heads, sequence, "
            "head_dim), innermost (layers, 1, heads * head_dim, 1, sequence). To reach: at most "
            "1.1 times the first line's time for 5-D, at most 1.3 times for innermost",
        )


def converting(report: Report, repeats: int) -> None:
    """Time the expansions that convert."""
    shape = (28, 8, 512, 128)
    single = (np.float32, np.float16)
    transition(report, 2 * repeats, shape, 1024, single, out_target=10, fresh_target=5)
    if ml_dtypes is not None:
        brain = (ml_dtypes.bfloat16, np.float16)
        transition(report, 2 * repeats, shape, 1024, brain)
    else:
        report.log("\nbfloat16 -> float16: skipped, ml_dtypes is not installed")


def rolling(report: Report, repeats: int) -> None:
    """Time appends of one token to full rings; the cost must not depend on the capacity."""
    for outer, axis in (((28, 8), -2), ((4, 8), -1)):
        rows = []
        for capacity in (1024, 32768):
            shape = [*outer, 128]
            shape.insert(len(shape) + 1 + axis, capacity)
            state = RollingKVState(shape, sinks=4, seq_axis=axis)
            ring = np.ones(shape, np.float16)
            tokens = np.ones(np.take(ring, [0], axis).shape, np.float16)
            state.append(np.broadcast_to(tokens, shape))  # full: every append evicts
            candidates = [
                Candidate(
                    f"{capacity:,} positions: NumPy, rows of one token",
                    partial(peers.numpy_ring, ring, tokens, axis),
                    limit=True,
                ),
                Candidate(
                    f"{capacity:,} positions: RollingKVState.append",
                    repeated(partial(state.append, tokens)),
                ),
            ]
            measured = measure(candidates, repeats, unit=1e-5)
            note_memory(measured, candidates)
            rows += measured
        rows[3].extra["of 1,024"] = f"{rows[3].median / rows[1].median:.2f}"
        report.table(
            f"append one token of {tokens.nbytes / 1024:g} KiB, sequence axis {axis}",
            rows,
            unit="us",
            note="/limit to reach: 1.3; of 1,024 to reach on axis -2: 1.2. On axis -1 each of "
            "4,096 elements is on a page of its own",
        )


def rotating(report: Report, repeats: int) -> None:
    """Time the rotation of keys and a copy of the same bytes."""
    for dtype in (np.float16, np.float32):
        keys = random_cache(LARGE, dtype)
        inner = np.ascontiguousarray(keys.swapaxes(-1, -2)).swapaxes(-1, -2)
        shifts = -np.arange(LARGE[2])
        out, changed = np.ones_like(keys), keys.copy()
        calls: dict[str, Callable[[], object]] = {
            "half-split": partial(rotate_keys, keys, -256, out=out),
            "interleaved": partial(rotate_keys, keys, -256, interleaved=True, out=out),
            "a shift for each position": partial(rotate_keys, keys, shifts, out=out),
            "sequence innermost": partial(rotate_keys, inner, -256, out=np.ones_like(inner)),
            "in place": partial(rotate_keys, changed, -256, out=changed),
        }
        candidates = [
            Candidate("NumPy: half-split", partial(peers.numpy_rotate, keys, -256), baseline=True),
            Candidate(
                "limit: memcpy, touched memory", MemoryLimit(keys, out, out.nbytes), limit=True
            ),
        ]
        for name, call in calls.items():
            candidates += mlstate_rows(name, partial(lambda call: call, call))
        rows = measure(candidates, repeats)
        note_memory(rows, candidates)
        report.table(
            f"rotate keys, {np.dtype(dtype).name} {LARGE}: {mib(keys.nbytes)}",
            rows,
            note="results go into out=",
        )


def cache_of(length: int) -> CacheState:
    """Make a full cache of 28 layers in float16."""
    layers, heads, positions, head_dim = LARGE
    spec = CacheSpec(
        CacheEntry(f"{i}.{role}", "full", (1, heads, positions, head_dim), np.float16, layer=i)
        for i in range(layers)
        for role in ("keys", "values")
    )
    arrays = {entry.name: random_cache(entry.shape, np.float16) for entry in spec}
    return CacheState(spec, arrays, length)


def caches(report: Report, repeats: int) -> None:
    """Time operations on the 56 arrays of a cache."""
    full_cache = cache_of(LARGE[2])
    arrays, length = dict(full_cache.arrays), full_cache.length
    title = f"{len(arrays)} arrays {full_cache.spec[0].shape}, float16: {mib(full_cache.nbytes)}"

    def resize() -> CacheState:
        state = CacheState(full_cache.spec, arrays, length)
        state.resize(4096)
        return state

    candidates = [
        Candidate(
            "NumPy: zeros + copy, array by array",
            partial(peers.numpy_resize, arrays, 4096, length),
            baseline=True,
        ),
        *mlstate_rows("CacheState.resize", lambda: resize),
    ]
    report.table(f"resize a cache to 4096, {title}", measure(candidates, repeats))

    def cropped() -> dict[str, np.ndarray]:
        return {name: array[:, :, : length - 8] for name, array in arrays.items()}

    def trim() -> None:
        full_cache.trim(8)
        full_cache.advance(8)

    candidates = [
        Candidate("NumPy: a slice of each array", repeated(cropped), baseline=True),
        Candidate("CacheState.trim and advance", repeated(trim)),
    ]
    report.table(f"trim a cache, {title}", measure(candidates, repeats, unit=1e-5), unit="us")
    for bits in (8, 4):
        quantizing(report, repeats, bits)


def quantizing(report: Report, repeats: int, bits: int) -> None:
    """Time a cache of one array in 8 or 4 bits, and back."""
    keys = random_cache((1, 8, 16384, 128), np.float16)
    spec = CacheSpec([CacheEntry("keys", "full", keys.shape, keys.dtype)])
    coded = CacheState(spec, {"keys": keys}, keys.shape[2])
    coded.quantize(bits)

    def quantize() -> CacheState:
        state = CacheState(spec, {"keys": keys}, keys.shape[2])
        state.quantize(bits)
        return state

    def dequantize() -> CacheState:
        state = CacheState(coded.spec, coded.arrays, keys.shape[2])
        state.dequantize()
        return state

    parts = peers.numpy_quantize(keys, bits, 64)
    for part, array in zip(parts, coded.arrays.values(), strict=True):
        assert np.array_equal(part, array)
    out = np.ones_like(keys)
    limit = Candidate(
        "limit: memcpy, touched memory", MemoryLimit(keys, out, out.nbytes), limit=True
    )
    for name, call, peer in (
        ("quantize", quantize, partial(peers.numpy_quantize, keys, bits, 64)),
        ("dequantize", dequantize, partial(peers.numpy_dequantize, *parts, bits, 64)),
    ):
        candidates = [
            Candidate("NumPy: whole arrays", peer, baseline=True),
            limit,
            *mlstate_rows(f"CacheState.{name}", partial(lambda call: call, call)),
        ]
        report.table(
            f"{name}, {bits} bits, groups of 64, float16 {keys.shape}: {mib(keys.nbytes)}",
            measure(candidates, repeats),
        )


PARTS: dict[str, Callable[[Report, int], None]] = {
    "expand": expanding,
    "layouts": layouts,
    "convert": converting,
    "compact": compacting,
    "grow": growth,
    "mask": masks,
    "roll": rolling,
    "rotate": rotating,
    "caches": caches,
    "cold": cold,
    "import": importing,
}


def main() -> None:
    parser = option_parser(__doc__, "3 repeats instead of 9", PARTS)
    options = parser.parse_args()
    report = Report("mlstate: KV-cache transitions", options.json, "kv" if options.store else None)
    report.log("figures are medians; 'x base': times faster than the first line of the table")
    report.log("'/limit': times the duration of what the C library needs for the same bytes")
    for name, part in PARTS.items():
        if options.only in (None, name):
            part(report, 3 if options.quick else 9)
    report.close()


if __name__ == "__main__":
    main()
