"""KV-cache transitions compared with NumPy, torch and memory speed: see docs/benchmarks.md.

``python benchmarks/bench_kv.py [--quick] [--json] [--only PART]``; mlstate must be installed, torch
and ml_dtypes take part if they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import peers
from first_call import first_call
from harness import Run, count_threads, main
from optional import optional
from rows import Bar, Lines, Row, Way, Ways

import mlstate
from mlstate.kv import compact_kv_state, transition_kv_state

torch, ml_dtypes = optional("torch"), optional("ml_dtypes")
THREADS = mlstate.threads.get_num_threads()
TORCH_THREADS = torch.get_num_threads() if torch else 1
HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)


def use_threads(threads: int) -> None:
    """Set mlstate's threads, and let new ones start outside of the timed part."""
    if mlstate.threads.get_num_threads() != threads:
        mlstate.threads.set_num_threads(threads)
        cache = np.zeros((4, 1, 1024, 512), np.float16)
        transition_kv_state(cache, 1024, out=np.empty_like(cache))


def use_torch_threads(threads: int) -> None:
    """Do the same for torch."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
        torch.ones(1 << 21).add_(1)


def with_threads(
    name: str, make: Callable[[], Any], use: Callable[[int], None], counts: tuple[int, ...]
) -> Ways:
    """Make a way for each number of threads.

    Each has its own call and `out`, because lines that another core wrote arrive slowly.
    """
    return {
        f"{name}, {count_threads(count)}": Way(make(), partial(use, count))
        for count in sorted(set(counts))
    }


class MemoryLimit:
    """The machine's time for a result's bytes with the C library alone, in one thread.

    `np.copyto` (a memcpy) of as many bytes as the result has in tokens, and memset of as many as it
    has in padding, each in one block, from the source to touched memory.
    """

    def __init__(self, source: np.ndarray, target: np.ndarray, token_bytes: int) -> None:
        self.source = source.reshape(-1).view(np.uint8)[:token_bytes]
        self.target = target.reshape(-1).view(np.uint8)

    def __call__(self) -> None:
        """Move the bytes once."""
        tokens = self.source.size
        np.copyto(self.target[:tokens], self.source)
        ctypes.memset(self.target.ctypes.data + tokens, 0, self.target.size - tokens)


def transition(
    shape: tuple[int, ...],
    length: int,
    dtypes: tuple[np.dtype[Any], np.dtype[Any]] = (HALF, HALF),
    *,
    used: int = 0,
    bars: dict[str, float] | None = None,
    rounds: float = 1,
) -> Row:
    """Compare one transition in every available way; `bars` are for the default of threads."""
    compact, used = length < shape[2], used or shape[2]
    kind, to = dtypes
    source = np.random.default_rng(1).standard_normal(shape, np.float32).astype(kind)
    out = np.ones(peers.longer(shape, length), to)
    move = partial(compact_kv_state if compact else transition_kv_state, source, length, used)
    how = "zeros" if compact else "full"
    peer = f"NumPy peer: {how} + astype + copy"
    others: Ways = {
        peer: partial(peers.numpy_filled, source, length, used, to, how),
        "NumPy: zeros + copy": partial(peers.numpy_zeros, source, length, used, to),
        "NumPy into a preallocated target": partial(peers.numpy_into, source, used, out.copy()),
    }
    if torch is not None:
        tensor = peers.to_torch(source), length, used, getattr(torch, to.name), how
        name, make = f"torch peer: {how} + to + copy", lambda: partial(peers.torch_filled, *tensor)
        others |= with_threads(name, make, use_torch_threads, (1, TORCH_THREADS))
    counts = (1, THREADS)
    make = partial(partial, move, dtype=to)
    ways = with_threads("mlstate fresh", make, use_threads, counts)
    if out.nbytes >= 32 << 20:
        make = partial(partial, move, dtype=to, low_memory=True)
        ways |= with_threads("mlstate fresh, low_memory", make, use_threads, counts[1:])
    ways |= with_threads("mlstate out=", lambda: partial(move, out=out.copy()), use_threads, counts)
    limit = MemoryLimit(source, out, out.nbytes // length * used)
    text = kind.name if kind == to else f"{kind.name} -> {to.name}"
    return Row(
        f"{'compact' if compact else 'expand'} {text}, {shape} -> {length} "
        f"at {used} tokens: {mib(source.nbytes)} -> {mib(out.nbytes)}",
        ways,
        others,
        {"limit: memcpy + memset, touched memory": limit},
        [
            Bar(f"{name}, {count_threads(THREADS)}", bound, peer, faster=True)
            for name, bound in (bars or {}).items()
        ],
        rounds=rounds,
    )


def mib(size: int) -> str:
    """Convert bytes to MiB."""
    return f"{size / (1 << 20):.4g} MiB"


def expanding(run: Run) -> Iterator[Row]:
    """Compare the expansions that keep their dtype."""
    yield transition((36, 1, 256, 256), 512, bars={"mlstate out=": 3.5}, rounds=5)
    yield transition((28, 8, 2048, 128), 4096, bars={"mlstate out=": 5})


def converting(run: Run) -> Iterator[Row]:
    """Compare the expansions that convert."""
    shape, bars = (28, 8, 512, 128), {"mlstate out=": 10.0, "mlstate fresh": 5.0}
    yield transition(shape, 1024, (SINGLE, HALF), bars=bars, rounds=2)
    if ml_dtypes is not None:
        yield transition(shape, 1024, (np.dtype(ml_dtypes.bfloat16), HALF), rounds=2)
    else:
        run.log("\nbfloat16 -> float16: skipped, ml_dtypes is not installed")


def compacting(run: Run) -> Iterator[Row]:
    """Compare the two compactions."""
    yield transition((36, 1, 512, 256), 256, used=200, rounds=5)
    yield transition((28, 8, 4096, 128), 2048, used=1800)


def cold(run: Run) -> Iterator[Row]:
    """Compare the first call of new processes, which take turns."""
    peer_names = ["NumPy peer: full + astype + copy", "NumPy: zeros + copy"]
    peer_names += ["torch peer: full + to + copy"] * (torch is not None)
    own_names = ["mlstate fresh, 1 thread", "mlstate fresh", "mlstate fresh, low_memory"]
    own_names += ["KVState.reserve (consumes the source)", "KVState.resize within its capacity"]
    peer_ways, our_ways = (
        {name: Way(partial(first_call, name), measures_itself=True) for name in names}
        for names in (peer_names, own_names)
    )

    def compare_memory(lines: Lines) -> list[str]:
        for line in lines.values():
            line.extra["of base"] = (
                line.extra["extra MiB"] / lines[peer_names[0]].extra["extra MiB"]
            )
        return []

    yield Row(
        "first call of a new process, expand float16 (28, 8, 2048, 128) -> 4096",
        our_ways,
        peer_ways,
        bars=[Bar("mlstate fresh", 10, peer_names[0], faster=True)],
        note="to reach: 10x the base, or a third of its extra memory",
        judge=compare_memory,
    )


PARTS = {"expand": expanding, "convert": converting, "compact": compacting, "cold": cold}

if __name__ == "__main__":
    quick = "3 repeats instead of 9"
    main(__doc__, "kv", "mlstate: KV-cache transitions", PARTS, quick=quick)
