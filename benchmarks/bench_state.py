"""State dicts compared with the specification's algorithms, NumPy and torch.

``python benchmarks/bench_state.py [--quick] [--json] [--only PART]``; mlstate must be installed,
torch and ml_dtypes take part if they are.  See docs/benchmarks.md.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from guard_rows import copy_each, numpy_diff
from harness import Run, count_threads, main
from optional import optional
from rows import Bar, Row, Ways

import mlstate
from mlstate import StateDict, _core
from mlstate._common.dtypes import EXTENSIONS, stored_dtype
from mlstate.state import check_compatibility, diff, keys_match, load_into, shapes_match

torch, ml_dtypes = optional("torch"), optional("ml_dtypes")
PARTS = ("w", "b", "q", "k", "v", "o", "up", "down", "norm")  # of a layer

libc = ctypes.CDLL(None)
Arrays = dict[str, np.ndarray]
Job = tuple[int, int, int]  # two addresses and the number of bytes
for function in (libc.memcmp, libc.memmove):
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def large(dtype: str) -> Arrays:
    """A gigabyte: eight tensors of 120 MB, the rest in small ones."""
    generator = np.random.default_rng(0)

    def tensor(nbytes: int) -> np.ndarray:
        values = generator.random(nbytes // np.dtype(dtype).itemsize, np.float32)
        return values.astype(dtype, copy=False)

    state = {f"layers.{i}.w": tensor(120_000_000) for i in range(8)}
    return state | {f"layers.{i}.b": tensor(40_000) for i in range(1000)}


def bytes_of(state: Arrays) -> int:
    return sum(array.nbytes for array in state.values())


def by_threads(function: Callable[..., object], jobs: list[Job], threads: int) -> Callable:
    """Call a function of the C library for each job, each of the threads with an equal part."""

    def work(number: int) -> None:
        for first, second, size in jobs:
            start, end = number * size // threads, (number + 1) * size // threads
            function(first + start, second + start, end - start)

    if threads == 1:
        return partial(work, 0)
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(work, range(threads)))


def each_thread_count() -> Iterator[int]:
    """Use one thread, then the default number."""
    for threads in sorted({1, mlstate.threads.get_num_threads()}):
        mlstate.threads.set_num_threads(threads)
        yield threads


def tensors_over(state: Arrays) -> dict[str, Any]:
    """Return torch tensors over the arrays' memory."""
    return {name: torch.from_numpy(array) for name, array in state.items()}


# ---- names and shapes ----


def spec_check(a: Arrays, b: Arrays) -> bool:
    """Compare as the source document does, in plain Python."""
    if set(a.keys()) != set(b.keys()):
        return False
    for name, tensor in a.items():
        other = b.get(name)
        if other is None or tuple(tensor.shape) != tuple(other.shape):
            return False
    return True


def spec_result(a: Arrays, b: Arrays) -> tuple[set[str], set[str], bool]:
    """The whole StateCompatibilityChecker of the source document."""
    return set(a) - set(b), set(b) - set(a), spec_check(a, b)


def comparison(run: Run) -> Iterator[Row]:
    """Compare names and shapes of two states of 10,000 tensors in 1,112 layers."""
    names = [f"model.layers.{i // 9}.{PARTS[i % 9]}.weight" for i in range(10_000)]
    a = {name: np.zeros((4, 4), np.float32) for name in names}
    same = {name: array.copy() for name, array in a.items()}
    random.Random(1).shuffle(names)
    cases = {
        "NumPy arrays, in the same order": (a, same),
        "NumPy arrays, in another order": (a, {name: same[name] for name in names}),
    }
    if torch is not None:
        cases["torch tensors, in the same order"] = (tensors_over(a), tensors_over(same))
    check, python = "keys_match and shapes_match", "plain Python"
    for case, pair in cases.items():
        yield Row(
            f"names and shapes of 10,000 {case}",
            {
                check: lambda pair=pair: keys_match(*pair) and shapes_match(*pair),
                "check_compatibility": partial(check_compatibility, *pair),
            },
            {
                python: partial(spec_check, *pair),
                "plain Python, with lists": partial(spec_result, *pair),
            },
            bars=[] if "torch" in case else [Bar(check, 5, python, faster=True)],
            rounds=3,
        )


# ---- elements ----


def with_equal_halves(state: Arrays) -> Arrays:
    """Return the state with the second half of each array as its first."""
    for array in state.values():
        half = array.size // 2
        array[half : 2 * half] = array[:half]
    return state


def reading(threads: int, *states: Arrays) -> Callable:
    """Make a call that reads every byte once, at the speed of the C library.

    It compares the two equal halves of each array, so that memcmp continues to the end.
    """
    arrays = [array for state in states for array in state.values()]
    places = [(array.ctypes.data, array.nbytes // 2) for array in arrays]
    return by_threads(libc.memcmp, [(at, at + half, half) for at, half in places], threads)


def elements(run: Run) -> Iterator[Row]:
    """Measure differences over a gigabyte."""
    limit = "reading both (memcmp)"
    for dtype in ["float32", "float16"] + ["bfloat16"] * (ml_dtypes is not None):
        a = with_equal_halves(large(dtype))
        same = {name: array.copy() for name, array in a.items()}
        near = {name: array * np.array(1.01, dtype) for name, array in a.items()}
        near = with_equal_halves(near)
        for threads in each_thread_count():
            numpy = {"NumPy": partial(numpy_diff, a, near)}
            calls: Ways = {
                "diff, all changed": partial(diff, a, near),
                "diff, nothing changed": partial(diff, a, same),
                "==, nothing changed": lambda a=a, b=same: StateDict(a) == b,
            }
            yield Row(
                f"differences of two states of 1 GB, {dtype}, {count_threads(threads)}",
                calls,
                numpy if threads == 1 and dtype == "float32" else {},
                {limit: reading(threads, a, near)},
                [Bar(name, 0.7, limit, faster=True) for name in calls if name.startswith("diff")],
                base=limit,
                nbytes=2 * bytes_of(a),
            )
        del a, same, near, calls, numpy


# ---- loading ----


def by_torch(target: Arrays, source: Arrays) -> Callable:
    """Make a call of torch's load_state_dict, to parameters that use the target's memory."""
    module = torch.nn.Module()
    for name, tensor in tensors_over(target).items():
        module.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor))
    named = {name.replace(".", "_"): array for name, array in source.items()}
    return partial(module.load_state_dict, tensors_over(named))


def loading(run: Run) -> Iterator[Row]:
    """Copy a gigabyte into existing arrays."""
    source = large("float32")
    target = {name: np.ones_like(array) for name, array in source.items()}
    pairs = [(target[name], array) for name, array in source.items()]
    jobs = [(to.ctypes.data, at.ctypes.data, at.nbytes) for to, at in pairs]
    for threads in each_thread_count():
        peers: Ways = {"np.copyto, 1 thread": partial(copy_each, target, source)}
        if torch is not None:
            torch.set_num_threads(threads)
            peers["torch: module.load_state_dict"] = by_torch(target, source)
        yield Row(
            f"load_into, 1 GB in 1,008 tensors, {count_threads(threads)}",
            {"load_into": partial(load_into, target, source)},
            peers,
            {"memcpy": by_threads(libc.memmove, jobs, threads)},
            [Bar("load_into", 0.9, "memcpy", faster=True)],
            base="memcpy",
            nbytes=bytes_of(source),
        )


# ---- digests ----


def repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


DIGESTED = (
    "float32", "float64", "bfloat16", "int8", "bool", "complex64", "float4_e2m1fn_x2",
)  # fmt: skip


def digests(run: Run) -> Iterator[Row]:
    """Digest a gigabyte, dtypes, and columns of a matrix, compared with a copy of the bytes."""
    source = large("float32")
    target = {name: np.empty_like(array) for name, array in source.items()}
    copy = {"np.copyto, 1 thread": partial(copy_each, target, source)}
    for threads in each_thread_count():
        yield Row(
            f"digest, 1 GB in 1,008 tensors, {count_threads(threads)}",
            {"digest": partial(mlstate.digest, source), "SHA-256": StateDict(source).digest},
            {},
            copy,
            [Bar("digest", 1.0, "np.copyto, 1 thread", faster=True)],
            base="np.copyto, 1 thread",
            nbytes=bytes_of(source),
        )
    mlstate.threads.set_num_threads(1)
    # in the cache, and beyond it; other programs change the time of a thread less than the clock
    for name, (kib, times) in itertools.product(DIGESTED, ((256, 100), (65_536, 1))):
        dtype = stored_dtype(name) if name in EXTENSIONS else np.dtype(name)
        array = np.random.default_rng(0).integers(0, 2, kib << 10, np.uint8).view(dtype)
        part = partial(_core.digest_part, array, array.shape, (0,))
        into = partial(np.copyto, np.empty_like(array), array)
        yield Row(
            f"digest, {kib:,} KiB of {name}, 1 thread, {times} times",
            {"digest": partial(repeat, part, times)},
            {},
            {"np.copyto": partial(repeat, into, times)},
            [Bar("digest", 1.0, "np.copyto", faster=True)] if times == 1 else [],
            base="np.copyto",
            nbytes=array.nbytes * times,
            clock=time.thread_time_ns,
        )
    matrix = np.random.default_rng(0).random((4096, 8192), np.float32)
    for columns in (16, 64, 256, 1024):
        part = matrix[:, 512 : 512 + columns]
        out = np.empty_like(part)
        yield Row(
            f"digest, rows of {4 * columns} bytes of a matrix, 1 thread",
            {"digest": partial(_core.digest_part, part, matrix.shape, (0, 512))},
            {},
            {"np.copyto": partial(np.copyto, out, part)},
            [Bar("digest", 1.0, "np.copyto", faster=True)],
            base="np.copyto",
            nbytes=part.nbytes,
            clock=time.thread_time_ns,
        )


if __name__ == "__main__":
    parts = {
        "comparison": comparison, "elements": elements, "loading": loading, "digests": digests
    }  # fmt: skip
    main(__doc__, "state", "mlstate: state dicts", parts, quick="3 repeats instead of 9")
