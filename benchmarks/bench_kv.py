"""KV-cache transitions compared with NumPy, torch and memory speed: see docs/benchmarks.md.

``python benchmarks/bench_kv.py [--quick] [--json] [--only PART]``; mlstate must be installed, torch
and ml_dtypes take part if they are.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import peers
from first_call import CALLS
from harness import Candidate, MemoryLimit, Report, count_threads, measure, option_parser, rows_of
from optional import optional

import mlstate
from mlstate.kv import compact_kv_state, transition_kv_state

torch, ml_dtypes = optional("torch"), optional("ml_dtypes")
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


def torch_rows(
    how: str, source: np.ndarray, length: int, position: int, dtype: object
) -> list[Candidate]:
    """Make torch's candidates: one thread and, if different, its default."""
    if torch is None:
        return []
    tensor = peers.to_torch(source)
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
    limit = MemoryLimit(source, out, out.nbytes // length * used)
    candidates.append(Candidate("limit: memcpy + memset, touched memory", limit, limit=True))
    dtype_text = kind.name if kind == target_dtype else f"{kind.name} -> {target_dtype.name}"
    report.table(
        f"{'compact' if compact else 'expand'} {dtype_text}, {shape} -> {length} "
        f"at {used} tokens: {mib(source.nbytes)} -> {mib(out.nbytes)}",
        measure(candidates, repeats),
    )


def mib(size: int) -> str:
    """Convert bytes to MiB."""
    return f"{size / (1 << 20):.4g} MiB"


def cold(report: Report, repeats: int) -> None:
    """Time the first call of new processes, which take turns."""
    names = [name for name in CALLS if torch is not None or "torch" not in name]
    script = str(Path(__file__).parent / "first_call.py")
    samples: dict[str, list[float]] = {name: [] for name in names}
    extra: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            command = [sys.executable, script, name]
            result = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
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


def compacting(report: Report, repeats: int) -> None:
    """Time the two compactions."""
    half = (np.float16, np.float16)
    transition(report, 5 * repeats, (36, 1, 512, 256), 256, half, position=200)
    transition(report, repeats, (28, 8, 4096, 128), 2048, half, position=1800)


def expanding(report: Report, repeats: int) -> None:
    """Time the expansions that keep their dtype."""
    half = (np.float16, np.float16)
    transition(report, 5 * repeats, SMALL, 512, half, out_target=3.5)
    transition(report, repeats, LARGE, 4096, half, out_target=5)


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


PARTS: dict[str, Callable[[Report, int], None]] = {
    "expand": expanding,
    "convert": converting,
    "compact": compacting,
    "cold": cold,
}


def main() -> None:
    options = option_parser(__doc__, "3 repeats instead of 9", PARTS).parse_args()
    report = Report.open("mlstate: KV-cache transitions", "kv", options)
    report.log("figures are medians; 'x base': times faster than the first line of the table")
    report.log("'/limit': times the duration of what the C library needs for the same bytes")
    report.run_parts(PARTS, options.only, 3 if options.quick else 9)
    report.close()


if __name__ == "__main__":
    main()
