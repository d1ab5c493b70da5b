"""The command line of all benchmarks, and their report: the machine, and a table for each row."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import stored
from rows import Line, Row, show


def option_parser(
    text: str, quick: str, parts: Iterable[str] | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks; the first line of `text` is its title."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--store", action="store_true", help="store the figures in results/")
    parser.add_argument("--folder", type=Path, help="where, on a disk; default: here")
    if parts is not None:
        parser.add_argument("--only", choices=tuple(parts), help="one part")
    return parser


def count_threads(count: int) -> str:
    """Name a number of threads."""
    return "1 thread" if count == 1 else f"{count} threads"


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

    def log(self, text: str = "") -> None:
        """Print a line unless the output is JSON."""
        if not self.as_json:
            print(text, flush=True)

    def show(self, row: Row, rounds: int) -> None:
        """Measure a row, and print its table and its verdicts."""
        lines = row.measure(rounds)
        verdicts = row.judge(lines)
        verdicts = [bar.verdict(lines, row.unit) for bar in row.bars] + verdicts
        self.table(row.name, list(lines.values()), unit=row.unit, note=row.note)
        for verdict in verdicts:
            self.log(f"  {verdict}")
        if verdicts:
            self.tables[-1]["aims"] = verdicts

    def table(self, title: str, lines: list[Line], *, unit: str = "ms", note: str = "") -> None:
        """Print one table; `extra` of the lines become columns."""
        columns = list(dict.fromkeys(name for line in lines for name in line.extra))
        head = f"{'':<{self.WIDTH}}{unit:>9}{'quartiles':>16}"
        head += f"{'x base':>8}" if any(line.ratio is not None for line in lines) else ""
        head += f"{'/limit':>8}" if any(line.limit_ratio is not None for line in lines) else ""
        self.log(f"\n{title}" + (f"\n({note})" if note else ""))
        self.log(head + "".join(f"{name:>14}" for name in columns))
        for line in lines:
            low, high = line.quartiles()
            text = f"{line.name:<{self.WIDTH}}{show(line.median):>9}"
            text += f"{show(low) + '-' + show(high):>16}"
            text += f"{line.ratio:>8.1f}" if line.ratio is not None else ""
            text += f"{line.limit_ratio:>8.2f}" if line.limit_ratio is not None else ""
            text += "".join(f"{cell(line.extra.get(name, '')):>14}" for name in columns)
            self.log(text.rstrip())
        rows = [as_dict(line) for line in lines]
        self.tables.append({"title": title, "unit": unit, "note": note, "rows": rows})

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
    folder: Path  # empty, and removed after the part
    report: Report

    def log(self, text: str) -> None:
        """Print a line."""
        self.report.log(text)


def main(
    text: str,
    name: str,
    title: str,
    parts: dict[str, Callable[[Run], Iterable[Row]]],
    *,
    quick: str,
    rounds: tuple[int, int] = (9, 3),
) -> None:
    """Run the command line of the benchmark `name`: measure the rows of each part.

    `text` is the module's docstring, `quick` the help of that option, and `rounds` the numbers of
    rounds without and with it.
    """
    parser = option_parser(text, quick, parts)
    parser.add_argument("--repeats", type=int, help=f"rounds, {rounds[0]} if not given")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that folders are removed
    report = Report.open(title, name, options)
    report.log("medians; 'x base': times as fast as the base; '/limit': times the limit's duration")
    count = options.repeats or rounds[options.quick]
    for part in [options.only] if options.only else parts:
        place = tempfile.TemporaryDirectory(dir=options.folder or Path.cwd(), prefix="bench-")
        with place as folder:
            run = Run(options.quick, Path(folder), report)
            with contextlib.closing(part_rows(parts[part], run)) as rows:
                for row in rows:
                    report.show(row, count)
                    del row  # with its arrays
    report.close()


def part_rows(part: Callable[[Run], Iterable[Row]], run: Run) -> Iterable[Row]:
    """Yield the rows of a part."""
    yield from part(run)


def cell(value: object) -> str:
    """Format a value of a column."""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else show(value)
    return str(value)


def relative(path: str) -> str:
    """Return a path relative to the working folder: results do not contain absolute paths."""
    return os.path.relpath(path) if os.path.isabs(path) else path  # noqa: PTH117


def as_dict(line: Line) -> dict[str, object]:
    """Turn a line into values for JSON."""
    return {
        "name": line.name,
        "median": line.median,
        "quartiles": list(line.quartiles()),
        "range": [min(line.values), max(line.values)],
        "repeats": len(line.values),
        "times_baseline": line.ratio,
        "times_limit": line.limit_ratio,
    } | line.extra


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
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0]


def machine() -> dict[str, str]:
    """Date and kind of machine, without its name."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{stored.describe()}, {processors()} processors, {memory:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}, huge pages: {huge_pages()}",
        "software": versions(),
    }
