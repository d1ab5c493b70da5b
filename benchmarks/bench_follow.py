"""Deltas of one bfloat16 array compared with a copy, torch and NumPy: see docs/follow.md.

``python benchmarks/bench_follow.py [--quick] [--json]``: 128 Mi elements, 1 % and 3 % of them
changed, on one thread; figures are processor time.  The copy is NumPy's, into memory that was
touched before.

Last, one process publishes a model of 1 GiB and another follows: wall time of a step from the call
of `publish` to the end of `advance`, with 1 % changed and all checksums compared. The folder in
/dev/shm needs no sync; the difference to the folder on disk is the cost of syncs and writes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from harness import Candidate, Report, Row, count_threads, measure, met, option_parser
from optional import optional

from mlstate import _core
from mlstate.follow import Follower, Publisher
from mlstate.threads import set_num_threads

torch = optional("torch")
ELEMENTS = 128 << 20
NUMPY = "NumPy: != + flatnonzero + take"
COLUMNS = 4096  # of the tensor, for the filter
# times a copy, at most: 1 % and 3 % of the elements changed
AIMS = {"compare + encode": (1.5, 2.7), "apply": (0.3, 0.6)}
CHECKSUM_AIM = 0.9
TORCH_AIM = 8.0
BYTES_AIM = 0.02
STEP_AIMS = {1: 5.0, 2: 3.0}  # by threads: a whole step, times a copy on one thread


def changed_pair(elements: int, part: float) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of bfloat16 bits; a share `part` of the elements differs."""
    random = np.random.default_rng(7)
    base = random.integers(0, 1 << 16, elements, np.uint16)
    new = base.copy()
    for start in range(0, elements, 1 << 22):
        block = new[start : start + (1 << 22)]
        block ^= (random.random(block.size, np.float32) < part).astype(np.uint16)
    return base, new


def select_with_numpy(base: np.ndarray, new: np.ndarray) -> object:
    """The simple way: numbers and values."""
    numbers = np.flatnonzero(base != new)
    return numbers, new[numbers]


def select_with_torch(base: object, new: object) -> object:
    """The same with torch, as trainers do."""
    numbers = torch.ne(base, new).nonzero().reshape(-1)
    return numbers, torch.index_select(new, 0, numbers)


def as_bfloat16(array: np.ndarray) -> object:
    """A tensor over an array of bits."""
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def encoding_rows(base: np.ndarray, new: np.ndarray, target: np.ndarray, repeats: int) -> list[Row]:
    """Time the encoders and the copy."""
    candidates = [
        Candidate("copy", partial(np.copyto, target, base), baseline=True),
        Candidate("compare + encode", partial(_core.delta_encode, base, new, False)),
        Candidate("compare + encode + CRC32C", partial(_core.delta_encode, base, new, True)),
        Candidate("CRC32C", partial(_core.array_crc32c, new, 0)),
        Candidate(NUMPY, partial(select_with_numpy, base, new)),
    ]
    if torch is not None:
        tensors = as_bfloat16(base), as_bfloat16(new)
        call = partial(select_with_torch, *tensors)
        candidates.append(Candidate("torch: ne + nonzero + index_select", call))
    return measure(candidates, repeats, warm_up=1, clock=time.thread_time_ns)


def applying_rows(base: np.ndarray, new: np.ndarray, target: np.ndarray, repeats: int) -> list[Row]:
    """Time the application to a fresh copy of the base, with an undo log and without."""
    gaps, values, _ = _core.delta_encode(base, new, False)
    numbers, selected = select_with_numpy(base, new)

    def apply(logged: bool, checksum: bool) -> None:
        _core.delta_apply(target, gaps, values, base.size, [] if logged else None, checksum)

    def apply_with_numpy() -> None:
        target[numbers] = selected

    streams = base.size, gaps, values
    rows = (base.size // COLUMNS, COLUMNS), (), 0
    before = partial(np.copyto, target, base)
    candidates = [
        Candidate("copy", before, baseline=True),
        Candidate("apply", partial(apply, False, False), before),
        Candidate("apply + undo log", partial(apply, True, False), before),
        Candidate("apply + undo log + CRC32C", partial(apply, True, True), before),
        Candidate("NumPy: target[numbers] = values", apply_with_numpy, before),
        Candidate(
            "filter to a quarter of the columns",
            partial(_core.delta_filter, *streams, *rows, ((1, 4),), 1),
        ),
        Candidate("compose with itself", partial(_core.delta_compose, *streams, gaps, values)),
    ]
    return measure(candidates, repeats, warm_up=1, clock=time.thread_time_ns)


def model_of(elements: int, tensors: int = 64) -> dict[str, np.ndarray]:
    """A model of bfloat16 bits, whose pages exist."""
    return {f"layers.{n}": np.ones(elements // tensors, np.uint16) for n in range(tensors)}


def follow_steps(folder: str, elements: int, threads: int) -> None:
    """Follow, in a process of its own; each line of the input is a step."""
    set_num_threads(threads)
    follower = Follower(folder, into=model_of(elements))
    for _ in sys.stdin:
        step = follower.advance()
        print(step, flush=True)


def step_seconds(parent: str | None, elements: int, threads: int, repeats: int) -> dict[str, float]:
    """Median seconds of publishing, following, and a copy of the model, interleaved."""
    set_num_threads(threads)
    model = model_of(elements)
    target = {name: array.copy() for name, array in model.items()}
    seconds: dict[str, list[float]] = {"copy": [], "publish": [], "follow": []}
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        publisher = Publisher(Path(folder) / "weights", anchor_every=1 << 20)
        code = (
            f"from bench_follow import *; follow_steps({publisher.path!r}, {elements}, {threads})"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        ) as child:
            for step in range(repeats + 2):  # the anchor, and a first delta, do not count
                for number, array in enumerate(model.values()):
                    array[(step + number) % 100 :: 100] += 1
                times = [time.perf_counter()]
                for name, array in model.items():
                    np.copyto(target[name], array)
                times.append(time.perf_counter())
                publisher.publish(step, model)
                times.append(time.perf_counter())
                child.stdin.write("\n")
                child.stdin.flush()
                assert int(child.stdout.readline()) == step
                times.append(time.perf_counter())
                for name, start, end in zip(seconds, times, times[1:], strict=False):
                    seconds[name].append(end - start)
            child.stdin.close()
    return {name: sorted(values[2:])[repeats // 2] for name, values in seconds.items()}


def report_steps(report: Report, elements: int, repeats: int) -> None:
    """Measure whole steps between two processes."""
    for threads, aim in STEP_AIMS.items():
        totals = []
        for label, parent in (("/dev/shm", "/dev/shm"), ("disk", None)):
            if parent is not None and not Path(parent).is_dir():
                continue
            seconds = step_seconds(parent, elements, threads, repeats)
            total = seconds["publish"] + seconds["follow"]
            totals.append(total)
            shares = ", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in seconds.items())
            ratio = verdict_of("publish + follow, times a copy", total / seconds["copy"], aim)
            report.judge([f"{count_threads(threads)}, folder in {label}: {shares}; {ratio}"])
        if len(totals) == 2:
            report.judge([f"syncs and writes: {(totals[1] - totals[0]) * 1e3:.0f} ms"])


def verdict_of(label: str, ratio: float, aim: float) -> str:
    """A line for a ratio that must not exceed its aim."""
    return f"{label}: {ratio:.2f}, at most {aim:g}: {met(ratio <= aim)}"


def verdicts_of(rows: dict[str, Row], number: int) -> list[str]:
    """Compare with the aims; `number` selects the aim for the changed share."""
    copy = rows["copy"].median
    verdicts = [
        verdict_of(f"{name}, times a copy", rows[name].median / copy, aims[number])
        for name, aims in AIMS.items()
        if name in rows
    ]
    for name in ("compare + encode", "apply + undo log"):
        if name in rows:
            extra = rows[f"{name} + CRC32C"].median - rows[name].median
            text = f"checksum in the pass of {name}, times a copy"
            verdicts.append(verdict_of(text, extra / copy, CHECKSUM_AIM))
    peer = rows.get("torch: ne + nonzero + index_select")
    if peer is not None:
        encode, simple = (rows[name].median for name in ("compare + encode", NUMPY))
        aim = f", at least {TORCH_AIM:g}: {met(peer.median / encode >= TORCH_AIM)}" * (number == 0)
        verdicts.append(
            f"{peer.median / encode:.1f}x torch's speed{aim}; {simple / encode:.1f}x NumPy's speed"
        )
    return verdicts


def main() -> None:
    """Measure and print."""
    options = option_parser(__doc__, "few rounds, 16 Mi elements").parse_args()
    elements, repeats = (ELEMENTS >> 3, 3) if options.quick else (ELEMENTS, 9)
    set_num_threads(1)
    if torch is not None:
        torch.set_num_threads(1)
    title = f"mlstate: deltas of {elements >> 20} Mi bfloat16 elements, {count_threads(1)}"
    report = Report.open(title, "follow", options)
    for number, part in enumerate((0.01, 0.03)):
        base, new = changed_pair(elements, part)
        target = base.copy()
        gaps, values, _ = _core.delta_encode(base, new, False)
        share = (gaps.nbytes + values.nbytes) / base.nbytes
        for title, rows in (
            ("encode", encoding_rows(base, new, target, repeats)),
            ("apply", applying_rows(base, new, target, repeats)),
        ):
            report.table(f"{title}: {part:.0%} changed", rows)
            verdicts = verdicts_of({row.name: row for row in rows}, number)
            if title == "encode":
                limit = f", at most {BYTES_AIM:.1%}: {met(share <= BYTES_AIM)}" * (number == 0)
                verdicts.append(f"{share:.2%} of the bytes{limit}")
            report.judge(verdicts)
    del base, new, target
    report_steps(report, elements * 4, 3 if options.quick else 5)
    report.close()


if __name__ == "__main__":
    main()
