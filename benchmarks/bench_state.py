"""State dicts compared with dict, the specification's algorithms, NumPy and torch.

``python benchmarks/bench_state.py [--quick] [--json] [--only PART]``; mlstate must be installed,
torch and ml_dtypes take part if they are.  See docs/benchmarks.md.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from harness import Candidate, Report, measure, option_parser, rows_of

import mlstate
from mlstate import ModelStateDict, StateDict
from mlstate.state import check_compatibility, diff, keys_match, load_into, shapes_match

try:
    import torch
except ImportError:
    torch = None
try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

NAMES = 10_000
PARTS = ["w", "b", "q", "k", "v", "o", "up", "down", "norm"]
GIGABYTE = 1_000_000_000

libc = ctypes.CDLL(None)
Arrays = dict[str, np.ndarray]
Job = tuple[int, int, int]  # two addresses and the number of bytes
for function in (libc.memcmp, libc.memmove):
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Mine(StateDict):
    """A user's subclass, in Python."""


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


def count_threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def thread_counts() -> list[int]:
    return sorted({1, mlstate.get_num_threads()})


def rated(nbytes: int, candidates: list[Candidate], repeats: int) -> list:
    """Time, and add the rate of `nbytes` for each call."""
    rows = measure(candidates, repeats)
    for row in rows:
        row.extra = {"GB/s": f"{nbytes / row.median * 1e-6:.1f}"}
    return rows


# ---- a dict ----


def look_up(state: dict, names: list[str]) -> None:
    for name in names:
        state[name]


def walk(state: dict) -> None:
    for _ in state.items():
        pass


def assign(state: dict, names: list[str], array: np.ndarray) -> None:
    for name in names:
        state[name] = array


def as_dict(report: Report, repeats: int) -> None:
    """Time the operations of a dict with 10,000 entries."""
    tensors = small()
    kinds = {"dict": dict, "StateDict": StateDict, "ModelStateDict": ModelStateDict}
    kinds["subclass in Python"] = Mine
    states = {name: kind(tensors) for name, kind in kinds.items()}
    names, array = list(tensors), np.zeros(1)
    random.Random(0).shuffle(names)

    def table(title: str, call: Callable[[str], Callable[[], object]], reach: float) -> None:
        candidates = [
            Candidate(name, call(name), baseline=name == "dict", at_least=round(1 / reach, 2))
            for name in kinds
        ]
        candidates[0].at_least = None
        rows = measure(candidates, 5 * repeats, unit=1e-3)
        report.table(
            title,
            rows,
            unit="us",
            note=f"x base 0.77 is 1.3 times dict's time, {1 / 1.5:.2f} is 1.5 times",
        )

    table("lookup of 10,000 names", lambda k: partial(look_up, states[k], names), 1.3)
    table("iteration over 10,000 items", lambda k: partial(walk, states[k]), 1.5)
    table("10,000 assignments", lambda k: partial(assign, states[k], names, array), 1.5)
    table(
        "update of 10,000 entries that are there", lambda k: partial(states[k].update, tensors), 1.5
    )
    table(
        "update of an empty one with 10,000 entries",
        lambda k: lambda: kinds[k]().update(tensors),
        1.5,
    )


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
    """Return the state, in which each array's second half becomes its first."""
    for array in state.values():
        half = array.size // 2
        array[half : 2 * half] = array[:half]
    return state


def numpy_diff(a: Arrays, b: Arrays) -> None:
    """Compute the differences with NumPy."""
    for name, array in a.items():
        distance = np.abs(array - b[name])
        np.nanmax(distance)
        np.count_nonzero(distance)


def elements(report: Report, repeats: int) -> None:
    """Measure differences over a gigabyte."""
    dtypes = ["float32", "float16"] + ([] if ml_dtypes is None else ["bfloat16"])
    for dtype in dtypes:
        a = with_equal_halves(large(dtype))
        same = {name: array.copy() for name, array in a.items()}
        near = {name: array * np.array(1.01, dtype) for name, array in a.items()}
        near = with_equal_halves(near)
        nbytes = 2 * bytes_of(a)
        counts = thread_counts()
        for threads in counts:
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
                rated(nbytes, candidates, repeats),
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


def copy_numpy(target: Arrays, source: Arrays) -> None:
    for name, array in target.items():
        np.copyto(array, source[name], casting="same_kind")


def loading(report: Report, repeats: int) -> None:
    """Copy a gigabyte into existing arrays."""
    source = large("float32")
    target = {name: np.ones_like(array) for name, array in source.items()}
    for threads in thread_counts():
        mlstate.set_num_threads(threads)
        memcpy = copying(threads, target, source)
        candidates = [
            Candidate("memcpy", memcpy, baseline=True, limit=True),
            Candidate("np.copyto, 1 thread", partial(copy_numpy, target, source)),
            Candidate("load_into", partial(load_into, target, source), at_least=0.9),
        ]
        if torch is not None:
            torch.set_num_threads(threads)
            candidates.append(Candidate("torch: module.load_state_dict", by_torch(target, source)))
        rows = rated(bytes_of(source), candidates, repeats)
        report.table(f"load_into, 1 GB in 1,008 tensors, {count_threads(threads)}", rows)
    halves = {name: array.astype(np.float16) for name, array in source.items()}
    candidates = [
        Candidate("np.copyto", partial(copy_numpy, halves, source), baseline=True),
        Candidate("load_into(cast=True)", partial(load_into, halves, source, cast=True)),
    ]
    report.table("float32 to float16, 1 GB", rated(bytes_of(source), candidates, repeats))
    many = {f"t{i}": np.ones(1024, np.float32) for i in range(NAMES)}
    into = {name: np.zeros_like(array) for name, array in many.items()}
    candidates = [
        Candidate("np.copyto", partial(copy_numpy, into, many), baseline=True),
        Candidate("memcpy, 1 thread", copying(1, into, many)),
        Candidate("load_into", partial(load_into, into, many)),
    ]
    report.table("10,000 tensors of 4 KiB", rated(bytes_of(many), candidates, repeats))


# ---- layers, digest, pages ----


def spec_layer(state: Arrays, layer: str) -> Arrays:
    """Extract as the source document does: scan every key."""
    prefix = f"{layer}."
    return {n[len(prefix) :]: a for n, a in state.items() if n.startswith(prefix)}


def layers(report: Report, repeats: int) -> None:
    """Extract all layers of a model of 10,000 tensors."""
    tensors = small()
    model = ModelStateDict(tensors)
    names = model.layer_names(3)

    def forget() -> None:
        model["x"] = np.zeros(1)
        del model["x"]

    def extract() -> None:
        for name in names:
            model.get_layer_state(name)

    def scan() -> None:
        for name in names:
            spec_layer(tensors, name)

    candidates = [
        Candidate("a scan for each layer, plain Python", scan, baseline=True),
        Candidate("get_layer_state, first time", extract, forget, at_most=5),
        Candidate("get_layer_state, again", extract, at_most=5),
    ]
    title = f"{len(names):,} layers of {NAMES:,} tensors"
    report.table(title, measure(candidates, repeats, warm_up=1))


def pages(report: Report, repeats: int) -> None:
    """Render 10,000 tensors; digest a gigabyte."""
    model = ModelStateDict(small())
    candidates = [Candidate("repr", lambda: repr(model)), Candidate("HTML", model._repr_html_)]
    rows = measure(candidates, repeats)
    rows[0].extra = {"bytes": len(repr(model).encode())}
    rows[1].extra = {"bytes": len(model._repr_html_().encode())}
    report.table("a page for 10,000 tensors", rows)
    state = StateDict(large("float32"))

    def hash_all() -> None:
        hashed = hashlib.sha256()
        for array in state.values():
            hashed.update(array)

    candidates = [
        Candidate("hashlib.sha256 of the arrays", hash_all, baseline=True),
        Candidate("digest", state.digest),
    ]
    report.table("digest of 1 GB", rated(state.nbytes, candidates, min(repeats, 3)))


# ---- a real model ----


def real_model(report: Report, repeats: int) -> None:
    """Load a transformer in new processes that take turns."""
    if not importlib.util.find_spec("torch"):
        return
    script = Path(__file__).with_name("load_model.py")

    def run(*arguments: str) -> str:
        done = subprocess.run([sys.executable, script, *arguments], capture_output=True, check=True)
        return done.stdout.decode()

    import load_model

    names = [
        name
        for name in load_model.CALLS
        if "safetensors" not in name or importlib.util.find_spec("safetensors")
    ]
    with tempfile.TemporaryDirectory() as folder:
        nbytes = int(run("write", folder))
        samples: dict[str, list[float]] = {name: [] for name in names}
        extra: dict[str, list[float]] = {name: [] for name in names}
        order = random.Random(3)
        for turn in range(repeats + 1):
            for name in order.sample(names, len(names)):
                answer = json.loads(run(name, folder))
                if turn:
                    samples[name].append(answer["ms"])
                    extra[name].append(answer["extra_mib"])
    rows = rows_of(
        [Candidate(n, lambda: None, baseline=i == 0) for i, n in enumerate(names)], samples
    )
    for row in rows:
        row.extra = {"extra MiB": f"{sorted(extra[row.name])[repeats // 2]:.0f}"}
    title = f"transformer encoder, {nbytes >> 20} MiB in 72 tensors, into a model that is there"
    report.table(title, rows, note="first call of a process, files in the system's cache")


ALL = {
    "dict": as_dict,
    "comparison": comparison,
    "elements": elements,
    "loading": loading,
    "layers": layers,
    "pages": pages,
    "model": real_model,
}


def main() -> None:
    parser = option_parser(__doc__, "3 repeats instead of 9", ALL)
    options = parser.parse_args()
    report = Report("mlstate: state dicts", options.json, "state" if options.store else None)
    for name, part in ALL.items():
        if options.only in (None, name):
            part(report, 3 if options.quick else 9)
    report.close()


if __name__ == "__main__":
    main()
