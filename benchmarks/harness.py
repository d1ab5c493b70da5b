"""Timing of named candidates in turns, and the table of results.

Candidates take turns in each round, in a new random order (with a fixed seed), so that slow moments
of the machine and the state of the caches affect all of them alike. Figures are medians over the
rounds; the quartiles show their spread. The result of a call is dropped within the timed part,
because users pay for freeing memory too.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import rows as rows_module
import stored

Action = Callable[[], object]
Item = TypeVar("Item")

SETTLE_SECONDS = 0.003


def option_parser(
    text: str, quick: str, parts: Iterable[str] | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks; the first line of `text` is its title."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--store", action="store_true", help="store the figures in results/")
    if parts is not None:
        parser.add_argument("--only", choices=tuple(parts), help="one part")
    return parser


def no_op() -> None:
    """Prepare nothing."""


def met(good: bool) -> str:
    """Return the last word of a verdict."""
    return "met" if good else "NOT MET"


def count_threads(count: int) -> str:
    """Name a number of threads."""
    return "1 thread" if count == 1 else f"{count} threads"


def settle() -> None:
    """Wait without sleeping, which would lose caches and clock rate.

    Threads of OpenMP (torch) spin for a while after their work, and would take a processor from the
    next candidate.
    """
    end = time.perf_counter() + SETTLE_SECONDS
    while time.perf_counter() < end:
        pass


@dataclass
class Candidate:
    """Something to time; `before` runs untimed ahead of each call."""

    name: str
    call: Action
    before: Action = no_op
    baseline: bool = False
    limit: bool = False
    at_least: float | None = None  # aim: times faster than the baseline
    at_most: float | None = None  # aim, in the case's unit


@dataclass
class Row:
    """One line of a table."""

    name: str
    values: list[float]
    ratio: float | None = None  # times faster than the baseline
    limit_ratio: float | None = None  # times the limit's duration
    at_least: float | None = None
    at_most: float | None = None
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Return the median."""
        return statistics.median(self.values)

    def quartiles(self) -> tuple[float, float]:
        """Return the first and third quartile."""
        if len(self.values) < 2:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    def target(self) -> str:
        """The aim and whether it is reached."""
        if self.at_least is not None and self.ratio is not None:
            verdict = "yes" if self.ratio >= self.at_least else "NO"
            return f">= {self.at_least:g}x: {verdict}"
        if self.at_most is not None:
            verdict = "yes" if self.median <= self.at_most else "NO"
            return f"<= {self.at_most:g}: {verdict}"
        return ""


def shuffled_turns(items: Sequence[Item], rounds: int) -> Iterator[tuple[int, Item]]:
    """Yield each item once in every round, in a new random order, with the round's number."""
    order = random.Random(20)
    for number in range(rounds):
        for item in order.sample(items, len(items)):
            yield number, item


def measure(
    candidates: list[Candidate],
    repeats: int,
    *,
    unit: float = 1e-6,
    warm_up: int = 2,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> list[Row]:
    """Time every candidate `repeats` times; `unit` turns nanoseconds into the table's unit.

    `clock` may be `time.thread_time_ns`, for work of one thread on a busy machine.
    """
    samples: dict[str, list[float]] = {c.name: [] for c in candidates}
    gc.collect()
    gc.disable()
    try:
        for turn, candidate in shuffled_turns(candidates, warm_up + repeats):
            candidate.before()
            settle()
            start = clock()
            candidate.call()
            elapsed = clock() - start
            if turn >= warm_up:
                samples[candidate.name].append(elapsed * unit)
    finally:
        gc.enable()
    return rows_of(candidates, samples)


def rows_of(candidates: list[Candidate], samples: dict[str, list[float]]) -> list[Row]:
    """Compare samples of any origin with the baseline and the limit."""
    rows = [
        Row(c.name, samples[c.name], at_least=c.at_least, at_most=c.at_most) for c in candidates
    ]
    base = next((r for r, c in zip(rows, candidates, strict=True) if c.baseline), None)
    limit = next((r for r, c in zip(rows, candidates, strict=True) if c.limit), None)
    for row in rows:
        row.ratio = base.median / row.median if base else None
        row.limit_ratio = row.median / limit.median if limit else None
    return rows


def add_rates(rows: list[Row], nbytes: int, digits: int = 2) -> list[Row]:
    """Add the rate of `nbytes` for each call; the unit of the rows is a millisecond."""
    for row in rows:
        row.extra["GB/s"] = f"{nbytes / row.median * 1e-6:.{digits}f}"
    return rows


class Report:
    """Prints tables at once, or all of them as JSON at the end."""

    WIDTH = 46

    def __init__(self, title: str, as_json: bool, store_as: str | None = None) -> None:
        self.as_json = as_json
        self.store_as = store_as
        self.where = stored.processor()
        self.document: dict[str, object] = {"title": title, "machine": machine()}
        self.document["command"] = shlex.join(["python", *map(relative, sys.argv)])
        self.document["load"] = load()
        self.tables: list[dict[str, object]] = []
        self.log(f"{title}\n")
        for name, value in machine().items():
            self.log(f"{name:<8} {value}")
        self.log(f"{'busy':<8} {load()}")

    @classmethod
    def open(cls, title: str, name: str, options: argparse.Namespace) -> Report:
        """Start the report of the benchmark `name`, with the options of `option_parser`."""
        return cls(title, options.json, name if options.store else None)

    def run_parts(
        self, parts: dict[str, Callable[..., None]], only: str | None, *arguments: Any
    ) -> None:
        """Call all parts, or `only` one, with this report and the arguments."""
        for name, part in parts.items():
            if only in (None, name):
                part(self, *arguments)

    def log(self, text: str = "") -> None:
        """Print a line unless the output is JSON."""
        if not self.as_json:
            print(text, flush=True)

    def table(self, title: str, rows: list[Row], *, unit: str = "ms", note: str = "") -> None:
        """Print one table; `extra` of the rows become columns ahead of the target."""
        extras = list(dict.fromkeys(name for row in rows for name in row.extra))
        compared = any(row.ratio is not None for row in rows)
        limited = any(row.limit_ratio is not None for row in rows)
        head = f"{'':<{self.WIDTH}}{unit:>9}{'quartiles':>16}"
        head += f"{'x base':>8}" if compared else ""
        head += f"{'/limit':>8}" if limited else ""
        head += "".join(f"{name:>14}" for name in extras) + "  to reach"
        self.log(f"\n{title}" + (f"\n({note})" if note else ""))
        self.log(head)
        for row in rows:
            low, high = row.quartiles()
            line = f"{row.name:<{self.WIDTH}}{show(row.median):>9}"
            line += f"{show(low) + '-' + show(high):>16}"
            line += f"{row.ratio:>8.1f}" if row.ratio is not None else ""
            line += f"{row.limit_ratio:>8.2f}" if row.limit_ratio is not None else ""
            line += "".join(f"{cell(row.extra.get(name, '')):>14}" for name in extras)
            self.log(f"{line}  {row.target() if isinstance(row, Row) else ''}".rstrip())
        self.tables.append(
            {"title": title, "unit": unit, "note": note, "rows": [as_dict(r) for r in rows]}
        )

    def show(self, row: rows_module.Row, rounds: int) -> None:
        """Measure a row, and print its table and its verdicts."""
        lines = row.measure(rounds)
        verdicts = row.judge(lines)
        verdicts = [bar.verdict(lines, row.unit) for bar in row.bars] + verdicts
        self.table(row.name, list(lines.values()), unit=row.unit, note=row.note)
        if verdicts:
            self.judge(verdicts)

    def judge(self, verdicts: list[str]) -> None:
        """Print the verdicts, after the last table."""
        for verdict in verdicts:
            self.log(f"  {verdict}")
        self.tables[-1]["aims"] = verdicts

    def close(self) -> None:
        """Print the machine's load at the end; print the JSON; store the results."""
        self.log(f"\n{'busy':<8} {load()}")
        self.document["load"] = [self.document["load"], load()]
        document = self.document | {"tables": self.tables}
        if self.store_as is not None:
            path = stored.store(self.store_as, document, time.strftime("%Y-%m-%d"), self.where)
            self.log(f"{'stored':<8} {relative(str(path))}")
        if self.as_json:
            print(json.dumps(document, indent=2))


@dataclass
class Run:
    """The options that the parts of a benchmark share."""

    quick: bool
    rounds: int
    folder: Path  # empty, and removed after the part
    report: Report

    def log(self, text: str) -> None:
        """Print a line."""
        self.report.log(text)


Part = Callable[[Run], Iterable[rows_module.Row]]


def main(
    text: str,
    name: str,
    title: str,
    parts: dict[str, Part],
    *,
    quick: str,
    rounds: tuple[int, int] = (9, 3),
    notes: Sequence[str] = (),
) -> None:
    """Run the command line of the benchmark `name`: measure the rows of each part.

    `text` is the module's docstring, `quick` the help of that option, and `rounds` the numbers of
    rounds without and with it.
    """
    parser = option_parser(text, quick, parts)
    parser.add_argument("--repeats", type=int, help=f"rounds, {rounds[0]} if not given")
    parser.add_argument("--folder", type=Path, help="where, on a disk; default: here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that folders are removed
    report = Report.open(title, name, options)
    report.log("medians; 'x base': times as fast as the base; '/limit': times the limit's duration")
    for note in notes:
        report.log(note)
    count = options.repeats or rounds[options.quick]
    for part in [options.only] if options.only else parts:
        place = tempfile.TemporaryDirectory(dir=options.folder or Path.cwd(), prefix="bench-")
        with place as folder:
            run = Run(options.quick, count, Path(folder), report)
            with contextlib.closing(iter(parts[part](run))) as measured:
                for row in measured:
                    report.show(row, count)
                    del row  # with its arrays
    report.close()


def cell(value: object) -> str:
    """Format a value of a column."""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else show(value)
    return str(value)


def relative(path: str) -> str:
    """Return a path relative to the working folder: results do not contain absolute paths."""
    return os.path.relpath(path) if os.path.isabs(path) else path  # noqa: PTH117


def as_dict(row: Row) -> dict[str, object]:
    """Turn a row into values for JSON."""
    low, high = row.quartiles()
    return {
        "name": row.name,
        "median": row.median,
        "quartiles": [low, high],
        "range": [min(row.values), max(row.values)],
        "repeats": len(row.values),
        "times_baseline": row.ratio,
        "times_limit": row.limit_ratio,
        "to_reach": (isinstance(row, Row) and row.target()) or None,
    } | row.extra


def show(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def load() -> str:
    """The number of runnable processes, if the system reports it."""
    if not hasattr(os, "getloadavg"):
        return "unknown"
    return f"load {os.getloadavg()[0]:.2f} over the last minute, of {processors()} processors"


def processors() -> int:
    """The number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def versions() -> str:
    """Python and the packages that take part."""
    texts = [f"Python {platform.python_version()}"]
    for name in ("mlstate", "numpy", "torch", "safetensors", "transformers", "ml_dtypes"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name != "mlstate":
                continue
            import mlstate

            version = mlstate.__version__
        texts.append(f"{name} {version}")
    return ", ".join(texts)


def huge_pages() -> str:
    """The system's policy for huge pages."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="utf-8") as f:  # noqa: PTH123
            return f.read().partition("[")[2].partition("]")[0]
    except OSError:
        return "unknown"


def machine() -> dict[str, str]:
    """Date and kind of machine, without its name."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{stored.describe()}, {processors()} processors, {memory:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}, huge pages: {huge_pages()}",
        "software": versions(),
    }
