"""Checkpoints in an object store compared with obstore, boto3 and torch DCP.

``python benchmarks/bench_remote.py [--quick] [--json] [--store]``; needs moto[server] and obstore.
boto3, and torch with s3fs, take part if they are installed. The store is moto's S3 server in
another process of this machine, so the figures contain no network. See docs/object_stores.md.
"""

from __future__ import annotations

import functools
import gc
import random
import statistics
import tempfile
import time
import urllib.request
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from harness import Report, Row, option_parser, settle
from remote_server import BUCKET, RemoteServer
from remote_ways import RANKS, Arrays, Boto3, Dcp, Mlstate, Obstore, Way, expect, part_of
from resident import forget_peak, peak, trim

MIB = 1 << 20
ROUNDS = {64: 4, 256: 2}  # rounds by MiB of the state
MOST_READ = 1.1  # times the bytes of the rows
METHODS = ("PUT", "GET", "POST")
STAGED = ", until the arrays may change"


@dataclass
class Task:
    """One operation of one way; `expected` is the state that it must return."""

    name: str
    call: Callable[[], Any]
    expected: Arrays | None = None
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def run(self, server: RemoteServer) -> None:
        """Call once, and note time, processor time, memory, requests and bytes."""
        gc.collect()
        trim()
        settle()
        server.take()
        before = forget_peak()
        cpu, start = time.process_time(), time.perf_counter()
        result = self.call()
        elapsed = time.perf_counter() - start
        figures = {"ms": elapsed * 1e3, "CPU ms": (time.process_time() - cpu) * 1e3}
        figures["peak MiB"] = peak() - before
        if self.expected is not None and result is not None:
            expect(result, self.expected)
        counts = server.take()
        for name in ("sent", "received"):
            figures[f"{name} MiB"] = counts.pop(name, 0) / MIB
        for name in METHODS:
            figures[name] = counts.pop(name, 0)
        figures["other"] = sum(counts.values())
        if isinstance(result, dict) and "staged" in result:
            figures["staged"] = result["staged"]
        for name, value in figures.items():
            self.samples[name].append(value)

    def rows(self) -> list[Row]:
        """Return the line of the table, and one until the arrays may change if it exists."""
        extra: dict[str, object] = {}
        for name, values in self.samples.items():
            if name not in ("ms", "staged"):
                middle = statistics.median(values)
                extra[name] = f"{middle:.2f}" if "sent" in name or "rec" in name else round(middle)
        rows = [Row(self.name, self.samples["ms"], extra=extra)]
        if "staged" in self.samples:
            rows.append(Row(self.name + STAGED, self.samples["staged"]))
        return rows


def take_turns(tasks: list[Task], server: RemoteServer, rounds: int) -> list[Row]:
    """Run all tasks in shuffled rounds, after one that is not counted."""
    order = random.Random(20)
    for turn in range(1 + rounds):
        for task in order.sample(tasks, len(tasks)):
            task.run(server)
        if turn == 0:
            for task in tasks:
                task.samples.clear()
    return [row for task in tasks for row in task.rows()]


def make_state(mib: int) -> Arrays:
    """Return float32 tensors of 16 MiB, or of half the state if it is small."""
    nbytes = min(16, mib // 2) * MIB
    draw = np.random.default_rng(1)
    return {
        f"layer.{i}": draw.standard_normal((nbytes // 4096, 1024), np.float32)
        for i in range(mib * MIB // nbytes)
    }


def saving(report: Report, ways: dict[str, Any], server: RemoteServer, rounds: int) -> None:
    """Compare writes of the whole state."""
    tasks = [Task(f"{name} save", way.save) for name, way in ways.items()]
    tasks.append(Task("mlstate save_async", ways["mlstate"].save_async))
    show(report, "save", ways, take_turns(tasks, server, rounds))


def loading(report: Report, ways: dict[str, Any], server: RemoteServer, rounds: int) -> None:
    """Compare reads of the whole state."""
    tasks = [Task(f"{name} load", way.load, way.state) for name, way in ways.items()]
    show(report, "load", ways, take_turns(tasks, server, rounds))


def loading_rows(report: Report, ways: dict[str, Any], server: RemoteServer, rounds: int) -> None:
    """Compare reads of one eighth of the rows, and the bytes read with the rows' size."""
    mlstate_way = ways["mlstate"]
    part = part_of(mlstate_way.state)
    nbytes = sum(array.nbytes for array in part.values())
    unverified = functools.partial(mlstate_way.rows, verify=False)
    tasks = [
        Task("mlstate load", mlstate_way.rows, part),
        Task("mlstate load, verify=False", unverified, part),
        Task("obstore get_ranges", ways["obstore"].rows, part),
    ]
    rows = take_turns(tasks, server, rounds)
    for task, row in zip(tasks, rows, strict=True):
        read = statistics.median(task.samples["received MiB"]) * MIB
        row.extra["bytes / rows"] = f"{read / nbytes:.4f}"
    show(report, f"load one of {RANKS} parts of the rows", ways, rows)
    verdicts = []
    for row in rows[:2]:
        ratio = float(str(row.extra["bytes / rows"]))
        verdict = "met" if ratio <= MOST_READ else "NOT MET"
        verdicts.append(f"[{row.name}] bytes / rows <= {MOST_READ}: {ratio:.4f}, {verdict}")
    report.judge(verdicts)


def show(report: Report, label: str, ways: dict[str, Any], rows: list[Row]) -> None:
    """Print one table."""
    state = ways["mlstate"].state
    mib = sum(array.nbytes for array in state.values()) // MIB
    packages = dict.fromkeys(name for way in ways.values() for name in way.versions())
    note = ", ".join([f"moto {metadata.version('moto')}", *packages])
    report.table(f"{label}: {len(state)} tensors, {mib} MiB", rows, note=note)


def kinds_of(report: Report) -> list[type[Way]]:
    """Return the ways whose packages are installed; print the reason for the others."""
    kinds: list[type[Way]] = []
    for kind in (Mlstate, Obstore, Boto3, Dcp):
        missing = kind.missing()
        if missing:
            report.log(f"{kind.name} does not take part: not installed: {missing}")
        else:
            kinds.append(kind)
    return kinds


def server_missing() -> str:
    """Return the packages without which nothing can be measured, if they are not installed."""
    return ", ".join(name for name in ("moto", "flask", "obstore") if find_spec(name) is None)


def measure_size(
    report: Report, kinds: list[type[Way]], server: RemoteServer, mib: int, rounds: int
) -> None:
    """Measure one size of the state in a new bucket."""
    for method, path in (("POST", "moto-api/reset"), ("PUT", BUCKET)):
        url = f"{server.endpoint}/{path}"
        urllib.request.urlopen(urllib.request.Request(url, method=method)).close()
    with tempfile.TemporaryDirectory() as folder:
        state = make_state(mib)
        ways = {kind.name: kind(state, server.endpoint, Path(folder)) for kind in kinds}
        for part in (saving, loading, loading_rows):
            part(report, ways, server, rounds)


def main() -> None:
    options = option_parser(__doc__, "one round of 16 MiB").parse_args()
    report = Report.open("mlstate: checkpoints in an object store", "remote", options)
    warnings.filterwarnings("ignore", module="torch")
    kinds = kinds_of(report)
    missing = server_missing()
    if missing:
        report.log(f"nothing was measured: not installed: {missing}")
        return
    try:
        with RemoteServer() as server:
            for mib, rounds in ({16: 1} if options.quick else ROUNDS).items():
                measure_size(report, kinds, server, mib, rounds)
    finally:
        report.close()


if __name__ == "__main__":
    main()
