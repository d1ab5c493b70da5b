"""State dicts compared with the specification's algorithms, NumPy and torch.

``python benchmarks/bench_state.py [--quick] [--json] [--only PART]``; mlstate must be installed,
torch and ml_dtypes take part if they are.  See docs/benchmarks.md.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from guard_rows import copy_each, numpy_diff
from harness import Candidate, Report, add_rates, count_threads, measure, option_parser
from optional import optional

import mlstate
from mlstate import StateDict
from mlstate.state import check_compatibility, diff, keys_match, load_into, shapes_match

torch, ml_dtypes = optional("torch"), optional("ml_dtypes")
NAMES = 10_000
PARTS = ["w", "b", "q", "k", "v", "o", "up", "down", "norm"]

libc = ctypes.CDLL(None)
Arrays = dict[str, np.ndarray]
Job = tuple[int, int, int]  # two addresses and the number of bytes
for function in (libc.memcmp, libc.memmove):
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def small() -> Arrays:
    """10,000 tensors in 1,112 layers."""
    return {
        f"model.layers.{i // 9}.{PARTS[i % 9]}.weight": np.zeros((4, 4), np.float32)
        for i in range(NAMES)
    }


def large(dtype: str, seed: int = 0) -> Arrays:
    """A gigabyte: eight tensors of 120 MB, the rest in small ones."""
    generator = np.random.default_rng(seed)
    item = np.dtype(dtype).itemsize

    def tensor(nbytes: int) -> np.ndarray:
        values = generator.random(nbytes // item, np.float32)
        return values.astype(dtype, copy=False)

    state = {f"layers.{i}.w": tensor(120_000_000) for i in range(8)}
    return state | {f"layers.{i}.b": tensor(40_000) for i in range(1000)}


def bytes_of(state: Arrays) -> int:
    return sum(array.nbytes for array in state.values())


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def share_out(jobs: list[Job], threads: int) -> list[list[Job]]:
    """Give each thread a part of every large job, and every n-th of the small jobs."""
    shares: list[list[Job]] = [[] for _ in range(threads)]
    for turn, (first, second, size) in enumerate(jobs):
        if size < 1 << 20:
            shares[turn % threads].append((first, second, size))
            continue
        for i, share in enumerate(shares):
            start, end = i * size // threads & ~63, (i + 1) * size // threads & ~63
            end = size if i == threads - 1 else end
            share.append((first + start, second + start, end - start))
    return shares


def by_threads(function: Callable[..., object], jobs: list[Job], threads: int) -> Callable:
    """Call a function of the C library for each job, with this many threads."""

    def work(share: list[Job]) -> None:
        for job in share:
            function(*job)

    shares = share_out(jobs, threads)
    if threads == 1:
        return partial(work, shares[0])
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(work, shares))


def thread_counts() -> list[int]:
    return sorted({1, mlstate.get_num_threads()})


# ---- names and shapes ----


def spec_check(a: Arrays, b: Arrays) -> bool:
    """Compare as the source document does, in plain Python."""
    keys1, keys2 = set(a.keys()), set(b.keys())
    if keys1 != keys2:
        return False
    for name, tensor in a.items():
        other = b.get(name)
        if other is None or tuple(tensor.shape) != tuple(other.shape):
            return False
    return True


def spec_result(a: Arrays, b: Arrays) -> tuple:
    """The whole StateCompatibilityChecker of the source document."""
    missing = set(a.keys())
    missing.difference_update(b.keys())
    unexpected = set(b.keys())
    unexpected.difference_update(a.keys())
    return missing, unexpected, spec_check(a, b)


def comparison(report: Report, repeats: int) -> None:
    """Compare names and shapes of two states of 10,000 tensors."""
    a = small()
    shuffled = list(a)
    random.Random(1).shuffle(shuffled)
    same = {name: array.copy() for name, array in a.items()}
    cases = {
        "NumPy arrays, in the same order": (a, same),
        "NumPy arrays, in another order": (a, {name: same[name] for name in shuffled}),
    }
    if torch is not None:
        cases["torch tensors, in the same order"] = (tensors_over(a), tensors_over(same))
    for case, (first, second) in cases.items():
        rows = measure(
            [
                Candidate("plain Python", partial(spec_check, first, second), baseline=True),
                Candidate(
                    "keys_match and shapes_match",
                    lambda a=first, b=second: keys_match(a, b) and shapes_match(a, b),
                    at_least=None if "torch" in case else 5,
                ),
            ],
            3 * repeats,
        )
        rows += measure(
            [
                Candidate(
                    "plain Python, with lists", partial(spec_result, first, second), baseline=True
                ),
                Candidate("check_compatibility", partial(check_compatibility, first, second)),
            ],
            3 * repeats,
        )
        report.table(f"names and shapes of 10,000 {case}", rows)


def tensors_over(state: Arrays) -> dict:
    """Return torch tensors over the arrays' memory."""
    return {name: torch.from_numpy(array) for name, array in state.items()}


# ---- elements ----


def reading(threads: int, *states: Arrays) -> Callable:
    """Make a call that reads every byte once, at the speed of the C library.

    It compares the two equal halves of each array, so that memcmp continues to the end.
    """
    arrays = [array for state in states for array in state.values()]
    halves = [array.nbytes // 2 for array in arrays]
    places = [address(array) for array in arrays]
    jobs = [(at, at + half, half) for at, half in zip(places, halves, strict=True)]
    return by_threads(libc.memcmp, jobs, threads)


def with_equal_halves(state: Arrays) -> Arrays:
    """Return the state with the second half of each array as its first."""
    for array in state.values():
        half = array.size // 2
        array[half : 2 * half] = array[:half]
    return state


def elements(report: Report, repeats: int) -> None:
    """Measure differences over a gigabyte."""
    dtypes = ["float32", "float16"] + ([] if ml_dtypes is None else ["bfloat16"])
    for dtype in dtypes:
        a = with_equal_halves(large(dtype))
        same = {name: array.copy() for name, array in a.items()}
        near = {name: array * np.array(1.01, dtype) for name, array in a.items()}
        near = with_equal_halves(near)
        nbytes = 2 * bytes_of(a)
        for threads in thread_counts():
            mlstate.set_num_threads(threads)
            limit = reading(threads, a, near)
            candidates = [
                Candidate("reading both (memcmp)", limit, baseline=True, limit=True),
                Candidate("diff, all changed", partial(diff, a, near), at_least=0.7),
                Candidate("diff, nothing changed", partial(diff, a, same), at_least=0.7),
                Candidate("==, nothing changed", lambda a=a, b=same: StateDict(a) == b),
            ]
            if threads == 1 and dtype == "float32":
                candidates.append(Candidate("NumPy", partial(numpy_diff, a, near)))
            report.table(
                f"differences of two states of 1 GB, {dtype}, {count_threads(threads)}",
                add_rates(measure(candidates, repeats), nbytes, digits=1),
            )
        del a, same, near, limit, candidates


# ---- loading ----


def copying(threads: int, target: Arrays, source: Arrays) -> Callable:
    """Make a call of memcpy for each tensor."""
    jobs = [(address(a), address(source[name]), a.nbytes) for name, a in target.items()]
    return by_threads(libc.memmove, jobs, threads)


def module_of(state: Arrays) -> object:
    """Make a torch module whose parameters use the arrays' memory."""
    module = torch.nn.Module()
    for name, array in state.items():
        module.register_parameter(
            name.replace(".", "_"), torch.nn.Parameter(torch.from_numpy(array))
        )
    return module


def by_torch(target: Arrays, source: Arrays) -> Callable:
    """Make a call of torch's load_state_dict."""
    named = {name.replace(".", "_"): array for name, array in source.items()}
    return partial(module_of(target).load_state_dict, tensors_over(named))


def loading(report: Report, repeats: int) -> None:
    """Copy a gigabyte into existing arrays."""
    source = large("float32")
    target = {name: np.ones_like(array) for name, array in source.items()}
    for threads in thread_counts():
        mlstate.set_num_threads(threads)
        memcpy = copying(threads, target, source)
        candidates = [
            Candidate("memcpy", memcpy, baseline=True, limit=True),
            Candidate("np.copyto, 1 thread", partial(copy_each, target, source)),
            Candidate("load_into", partial(load_into, target, source), at_least=0.9),
        ]
        if torch is not None:
            torch.set_num_threads(threads)
            candidates.append(Candidate("torch: module.load_state_dict", by_torch(target, source)))
        rows = add_rates(measure(candidates, repeats), bytes_of(source), digits=1)
        report.table(f"load_into, 1 GB in 1,008 tensors, {count_threads(threads)}", rows)


ALL = {"comparison": comparison, "elements": elements, "loading": loading}


def main() -> None:
    options = option_parser(__doc__, "3 repeats instead of 9", ALL).parse_args()
    report = Report.open("mlstate: state dicts", "state", options)
    report.run_parts(ALL, options.only, 3 if options.quick else 9)
    report.close()


if __name__ == "__main__":
    main()
