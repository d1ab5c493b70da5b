"""Gradients across two ranks: mlstate's engines, gloo, MPI, DDP and FSDP2.

Each engine has two processes, which are started first and then take turns in a new random order
each round; the others sleep. A figure is the time of the slower rank, measured from a barrier. All
use the gradients of GPT-2 small, 148 parameters and 124 million elements, in warm memory: buffers
and results of the previous step are reused. The limit is a C loop that adds the same gradients in
shared memory, so that nothing is sent: each rank sums its half.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import dist_accumulator
from dist_jobs import NAMES, Job, JobError, reason_against
from dist_model import DTYPES, shapes_of
from harness import Candidate, Report, Row, option_parser, rows_of, settle, show, shuffled_turns
from turns import Aim

COMMAND_SECONDS = 120.0
ENGINES = ("local", "gloo", "mpich", "openmpi")

LIMIT = "limit: C add, memory that is shared"
HOOK = "mlstate LocalGroup: hook"
GLOO = "gloo: 25 MB buckets"
MPICH = "MPICH: 25 MB buckets"


@dataclass
class Turn:
    """A candidate: an engine and a way."""

    name: str
    engine: str
    way: str
    baseline: bool = False
    limit: bool = False


class Run:
    """Shared by all parts."""

    def __init__(self, report: Report, quick: bool, repeats: int, folder: Path) -> None:
        self.report = report
        self.quick = quick
        self.repeats = repeats
        self.folder = folder
        self.jobs: dict[str, Job] = {}

    def start(self) -> None:
        """Start all engines that are installed."""
        for engine in ENGINES:
            reason = reason_against(engine)
            try:
                if not reason:
                    self.jobs[engine] = Job(engine, self.folder, COMMAND_SECONDS)
            except JobError as error:
                reason = str(error)
            if reason:
                self.report.log(reason)

    def stop(self) -> None:
        for job in self.jobs.values():
            job.close()
        self.jobs.clear()

    def ask(self, engine: str, command: str, *arguments: Any) -> list[Any] | None:
        """Send a command to a running engine; an engine that fails is dropped."""
        if engine not in self.jobs:
            return None
        try:
            return self.jobs[engine].ask(command, *arguments)
        except JobError as error:
            self.jobs.pop(engine).close()
            self.report.log(f"\n{NAMES[engine]} is out: {error}")
            return None

    # ---- tables ----

    def measure(self, dtype: str, turns: list[Turn]) -> dict[str, Row]:
        """Make the ways, let them take turns, and return their rows."""
        engines = [e for e in ENGINES if e in self.jobs and any(t.engine == e for t in turns)]
        facts_of_turns: dict[tuple[str, str], dict[str, Any]] = {}
        for engine in engines:
            names = [turn.way for turn in turns if turn.engine == engine]
            self.ask(engine, "load", dtype, self.quick)
            for rank in self.ask(engine, "make", names) or []:
                for way, facts in rank.items():
                    turn_facts = facts_of_turns.setdefault((engine, way), facts)
                    turn_facts["mib"] = max(turn_facts["mib"], facts["mib"])
                    if facts["bits"] != "same":
                        turn_facts["bits"] = facts["bits"]
        samples = self._take_turns([t for t in turns if (t.engine, t.way) in facts_of_turns])
        for engine in engines:
            self.ask(engine, "drop")
        complete_turns = [turn for turn in turns if len(samples.get(turn.name, [])) == self.repeats]
        candidates = [
            Candidate(t.name, settle, baseline=t.baseline, limit=t.limit) for t in complete_turns
        ]
        rows = rows_of(candidates, samples)
        for row, turn in zip(rows, complete_turns, strict=True):
            facts = facts_of_turns[turn.engine, turn.way]
            if facts["bits"]:
                row.extra["bits"] = facts["bits"]
            row.extra["extra MiB"] = f"{facts['mib']:.0f}"
            if "sent" in facts:
                row.extra["sent MB"] = f"{facts['sent'] / 1e6:.0f}"
        return {row.name: row for row in rows}

    def _take_turns(self, turns: list[Turn]) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {turn.name: [] for turn in turns}
        for number, turn in shuffled_turns(turns, 1 + self.repeats):
            settle()
            answer = self.ask(turn.engine, "time", turn.way)
            if answer is not None and number > 0:
                samples[turn.name].append(max(answer))
        return samples

    def show(self, title: str, rows: dict[str, Row], aims: list[Aim], *, note: str = "") -> None:
        self.report.table(title, list(rows.values()), note=note)
        self.report.judge([aim.verdict(list(rows.values())) for aim in aims])

    def size(self, dtype: str) -> str:
        """Describe the amount of data to reduce."""
        shapes = shapes_of(self.quick)
        count = sum(prod(shape) for shape in shapes.values())
        size = count * DTYPES[dtype].itemsize
        amount = f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
        return f"{len(shapes)} parameters, {count / 1e6:.3g} M elements, {dtype}, {amount} a rank"


# ---- parts ----


def reducing(run: Run, dtype: str) -> None:
    """Compare reduce-scatters of gradients that exist."""
    turns = [
        Turn(LIMIT, "local", "limit", limit=True),
        Turn(HOOK, "local", "ours hook"),
        Turn("mlstate LocalGroup: scatter_multiple", "local", "ours"),
        Turn("mlstate LocalGroup: a bucket each", "local", "ours each"),
        Turn("mlstate TorchGroup over gloo: hook", "gloo", "ours hook"),
        Turn("mlstate MPIGroup over MPICH: hook", "mpich", "ours hook"),
        Turn("mlstate MPIGroup over Open MPI: hook", "openmpi", "ours hook"),
        Turn(GLOO, "gloo", "bucketed", baseline=True),
        Turn("gloo: per parameter", "gloo", "each"),
        Turn(MPICH, "mpich", "bucketed"),
        Turn("MPICH: per parameter", "mpich", "each"),
        Turn("Open MPI: 25 MB buckets", "openmpi", "bucketed"),
        Turn("Open MPI: per parameter", "openmpi", "each"),
    ]
    if dtype == "f32":
        turns.insert(1, Turn("NumPy add, memory that is shared", "local", "limit numpy"))
    aims = [
        Aim(HOOK, 1.3, LIMIT),
        Aim(HOOK, 8, GLOO, faster=True),
        Aim(HOOK, 2, MPICH, faster=True),
    ]
    note = "bits: against float32 sums in the order of ranks; extra MiB: first call, a rank"
    run.show(f"reduce-scatter: {run.size(dtype)}", run.measure(dtype, turns), aims, note=note)


def backwards(run: Run, dtype: str) -> None:
    """Compare backward passes of wrapped modules."""
    torch_name, mlstate_name = "FSDP2", "FSDP2, mlstate LocalGroup plugged in"
    turns = [
        Turn("copies of the gradients alone", "gloo", "alone"),
        Turn("DDP", "gloo", "ddp"),
        Turn("DDP, mlstate LocalGroup plugged in", "gloo", "ddp ours"),
        Turn(torch_name, "gloo", "fsdp2", baseline=True),
        Turn(mlstate_name, "gloo", "fsdp2 ours"),
        Turn("FSDP2, mlstate TorchGroup plugged in", "gloo", "fsdp2 ours gloo"),
    ]
    aims = [Aim(mlstate_name, 3.0 if dtype == "f32" else 2.5, torch_name, faster=True)]
    note = "over gloo; parameters are gathered in the forward pass, untimed; autograd copies"
    run.show(f"backward pass: {run.size(dtype)}", run.measure(dtype, turns), aims, note=note)


def accumulator(run: Run) -> None:
    dist_accumulator.accumulator(run.report, run.quick, run.repeats)


def both(part: Callable[[Run, str], None]) -> Callable[[Run], None]:
    """Run a part for both dtypes."""

    def of_each(run: Run) -> None:
        for dtype in DTYPES:
            part(run, dtype)

    return of_each


PARTS: dict[str, Callable[[Run], None]] = {
    "reduce": both(reducing),
    "backward": both(backwards),
    "accumulator": accumulator,
}


def options() -> argparse.Namespace:
    parser = option_parser(__doc__, "a small model, two rounds", PARTS)
    parser.add_argument("--repeats", type=int, help="rounds, 5 if not given")
    return parser.parse_args()


def interrupted(*_: object) -> None:
    """End all jobs on an interrupt."""
    raise SystemExit(143)


def main() -> None:
    arguments = options()
    signal.signal(signal.SIGTERM, interrupted)
    report = Report.open("mlstate: gradients across ranks", "dist", arguments)
    report.log("medians; 'x base': times as fast as the base; '/limit': times the limit's duration")
    chosen = [arguments.only] if arguments.only else list(PARTS)
    repeats = arguments.repeats or (2 if arguments.quick else 5)
    began = time.perf_counter()
    # in memory if possible, because the limit's arrays are in this folder
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shared, prefix="bench-dist-") as folder:
        run = Run(report, arguments.quick, repeats, Path(folder))
        try:
            if chosen != ["accumulator"]:
                run.start()
            for part in chosen:
                if part == "accumulator":
                    run.stop()
                PARTS[part](run)
        finally:
            with contextlib.suppress(KeyboardInterrupt):
                run.stop()
    report.log(f"\n{show(time.perf_counter() - began)} s in all")
    report.close()


if __name__ == "__main__":
    main()
