"""Deltas of one bfloat16 array compared with a copy, torch and NumPy: see docs/follow_format.md.

``python benchmarks/bench_follow.py [--quick] [--json]``: 128 Mi elements, 1 % and 3 % of them
changed, on one thread; figures are processor time.  The copy is NumPy's, into memory that was
touched before.

Last, one process publishes a model of 1 GiB and another follows: wall time of a step from the call
of `publish` to the end of `advance`, with 1 % changed and all checksums compared. The folder in
/dev/shm needs no sync; the difference to the folder on disk is the cost of syncs and writes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from harness import Run, count_threads, main
from optional import optional
from processes import Processes, answer
from rows import Bar, Lines, Row, Way, Ways, verdict

from mlstate import _core
from mlstate.follow import Follower, Publisher
from mlstate.threads import set_num_threads

torch = optional("torch")
ELEMENTS = 128 << 20
COPY, NUMPY, TORCH = (
    "copy", "NumPy: != + flatnonzero + take", "torch: ne + nonzero + index_select",
)  # fmt: skip
ENCODE, APPLY, LOGGED = "compare + encode", "apply", "apply + undo log"
COLUMNS = 4096  # of the tensor, for the filter
# times a copy, at most, if 1 % and 3 % of the elements changed
BOUNDS = {0.01: {ENCODE: 1.5, APPLY: 0.3}, 0.03: {ENCODE: 2.7, APPLY: 0.6}}
CHECKSUM_BOUND = 0.9
STEP_BOUNDS = {1: 5.0, 2: 3.0}  # by threads: a whole step, times a copy on one thread


def changed_pair(elements: int, part: float) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of bfloat16 bits; a share `part` of the elements differs."""
    random = np.random.default_rng(7)
    base = random.integers(0, 1 << 16, elements, np.uint16)
    new = base.copy()
    for start in range(0, elements, 1 << 22):
        block = new[start : start + (1 << 22)]
        block ^= (random.random(block.size, np.float32) < part).astype(np.uint16)
    return base, new


def select_with_numpy(base: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The simple way: numbers and values."""
    numbers = np.flatnonzero(base != new)
    return numbers, new[numbers]


def select_with_torch(base: object, new: object) -> object:
    """The same with torch, as trainers do."""
    numbers = torch.ne(base, new).nonzero().reshape(-1)
    return numbers, torch.index_select(new, 0, numbers)


def deltas(run: Run, part: float) -> Iterator[Row]:
    """Compare the encoders, and the applications to a fresh copy of the base."""
    set_num_threads(1)
    base, new = changed_pair(ELEMENTS >> 3 if run.quick else ELEMENTS, part)
    target = base.copy()
    gaps, values, _ = _core.delta_encode(base, new, False)
    share = (gaps.nbytes + values.nbytes) / base.nbytes

    def checksum_cost(lines: Lines, name: str) -> str:
        extra = lines[f"{name} + CRC32C"].median - lines[name].median
        label = f"checksum in the pass of {name}, times a copy"
        return verdict(label, extra / lines[COPY].median, CHECKSUM_BOUND)

    copy = partial(np.copyto, target, base)
    peers: Ways = {NUMPY: partial(select_with_numpy, base, new)}
    if torch is not None:
        torch.set_num_threads(1)
        as_bfloat16 = [torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) for a in (base, new)]
        peers[TORCH] = partial(select_with_torch, *as_bfloat16)
    bars = [Bar(ENCODE, BOUNDS[part][ENCODE], COPY)]
    yield Row(
        f"encode: {part:.0%} changed",
        {
            ENCODE: partial(_core.delta_encode, base, new, False),
            f"{ENCODE} + CRC32C": partial(_core.delta_encode, base, new, True),
            "CRC32C": partial(_core.array_crc32c, new, 0),
        },
        peers,
        {COPY: copy},
        [*bars, Bar(ENCODE, 8, TORCH, faster=True)] if part == 0.01 else bars,
        base=COPY,
        clock=time.thread_time_ns,
        judge=lambda lines: [
            checksum_cost(lines, ENCODE),
            verdict("share of the bytes", share, 0.02) if part == 0.01 else f"{share:.2%} of bytes",
        ],
    )
    numbers, selected = select_with_numpy(base, new)

    def apply(logged: bool, checksum: bool) -> None:
        _core.delta_apply(target, gaps, values, base.size, [] if logged else None, checksum)

    tensor = (base.size // COLUMNS, COLUMNS), (), 0
    yield Row(
        f"apply: {part:.0%} changed",
        {
            APPLY: Way(partial(apply, False, False), copy),
            LOGGED: Way(partial(apply, True, False), copy),
            f"{LOGGED} + CRC32C": Way(partial(apply, True, True), copy),
            "filter to a quarter of the columns": partial(
                _core.delta_filter, base.size, gaps, values, *tensor, ((1, 4),), 1
            ),
            "compose with itself": partial(
                _core.delta_compose, base.size, gaps, values, gaps, values
            ),
        },
        {
            "NumPy: target[numbers] = values": Way(
                partial(target.__setitem__, numbers, selected), copy
            )
        },
        {COPY: copy},
        [Bar(APPLY, BOUNDS[part][APPLY], COPY)],
        base=COPY,
        clock=time.thread_time_ns,
        judge=lambda lines: [checksum_cost(lines, LOGGED)],
    )


def model_of(elements: int, tensors: int = 64) -> dict[str, np.ndarray]:
    """A model of bfloat16 bits, whose pages exist."""
    return {f"layers.{n}": np.ones(elements // tensors, np.uint16) for n in range(tensors)}


def serve_follower(pipe: Connection, folder: str, elements: int, threads: int) -> None:
    """Follow, a step for each command."""
    set_num_threads(threads)
    answer(pipe, {"advance": Follower(folder, into=model_of(elements)).advance})


def steps(run: Run) -> Iterator[Row]:
    """Measure whole steps between two processes, and a copy of the model."""
    elements = (ELEMENTS >> 3 if run.quick else ELEMENTS) * 4
    model = model_of(elements)
    target = {name: array.copy() for name, array in model.items()}

    def copy() -> None:
        for name, array in model.items():
            np.copyto(target[name], array)

    def change(step: list[int]) -> None:
        step[0] += 1
        for number, array in enumerate(model.values()):
            array[(step[0] + number) % 100 :: 100] += 1

    for threads, bound in STEP_BOUNDS.items():
        set_num_threads(threads)
        for label, parent in (("/dev/shm", "/dev/shm"), ("disk", str(run.folder))):
            if not Path(parent).is_dir():
                continue
            with tempfile.TemporaryDirectory(dir=parent) as folder:
                publisher = Publisher(Path(folder) / "weights", anchor_every=1 << 20)
                arguments = str(publisher.path), elements, threads
                follower, step = Processes(serve_follower, [arguments]), [-1]

                def publish_and_follow(publisher=publisher, follower=follower, step=step):
                    start = time.perf_counter()
                    publisher.publish(step[0], model)
                    published = time.perf_counter()
                    assert follower.ask("advance") == step
                    end = time.perf_counter()
                    times = {"ms": end - start, "publish": published - start}
                    times["follow"] = end - published
                    return {name: 1e3 * seconds for name, seconds in times.items()}

                change(step)
                publish_and_follow()  # the anchor
                way = Way(publish_and_follow, partial(change, step), measures_itself=True)
                yield Row(
                    f"a step of a model, {count_threads(threads)}, folder in {label}",
                    {"publish + follow": way},
                    limit={COPY: copy},
                    bars=[Bar("publish + follow", bound, COPY)],
                    rounds=0.5,
                )
                follower.close()


if __name__ == "__main__":
    main(
        __doc__,
        "follow",
        "mlstate: deltas of bfloat16 elements, 1 thread",
        {"1%": partial(deltas, part=0.01), "3%": partial(deltas, part=0.03), "steps": steps},
        quick="few rounds, 16 Mi elements",
    )
