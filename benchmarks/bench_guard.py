"""The guard: no operation that moves bytes is slower than the simple code it replaces.

``python benchmarks/bench_guard.py [--quick] [--json] [--store] [--only TEXT] [--list]``; mlstate
must be installed; torch, safetensors and ml_dtypes take part if they are. Each operation runs in
pairs with the NumPy, torch or memcpy line that it replaces (`guard_rows.py`, `guard_ranks.py`,
`guard_files.py`, or ``--list``), interleaved in one process. The exit status is 1, and the rows are
named, if the upper 95 % bound of the median of (simple time / our time) is below 0.95, or if an
operation on at most 1 MiB costs more than 5 us + 1 us per tensor over the simple way. An operation
on files or with several threads has an additional fixed cost (`fixed_us`); up to 4 MiB either that
cost or the ratio must hold. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import guard_files
import numpy as np
from guard_ranks import RANKS
from guard_rows import GIB, KIB, MANY, MANY_SIZES, MEMORY, MIB, Operation
from harness import Report, option_parser
from paired import SMALL_BYTES, as_row, measure_pairs
from rows import join_freed_memory, show

import mlstate

# time after which an undecided pair stays open, by bytes
SECONDS = {64 * KIB: 0.3, MANY * KIB: 0.3, MIB: 0.3, 4 * MIB: 0.5, 16 * MIB: 0.8, 64 * MIB: 1.2}
LONG_SECONDS = 2.0  # for anything larger
QUICK_BYTES = 16 * MIB


def size_text(nbytes: int, tensors: int) -> str:
    """Name a size: `64 KiB`, `4 MiB`, `1,000 x 1 KiB`."""
    if tensors > 1:
        return f"{tensors:,} x {size_text(nbytes // tensors, 1)}"
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def shapes_of(operation: Operation, quick: bool) -> list[tuple[int, int]]:
    """Return the sizes of an operation, each with the number of tensors."""
    shapes = [(nbytes, 1) for nbytes in operation.sizes]
    if operation.many:
        shapes += [(nbytes, MANY) for nbytes in MANY_SIZES]
    return [shape for shape in shapes if not quick or shape[0] <= QUICK_BYTES]


def print_row(report: Report, row: dict[str, Any]) -> None:
    """Print one row of the table."""
    low, high = row["interval"]
    line = f"{row['name']:<32}{row['size']:>15}{row['threads']:>3}"
    line += f"{show(row['simple_ms']):>9}{show(row['ours_ms']):>9}"
    line += f"{row['ratio']:>8.2f}{f'{low:.2f}-{high:.2f}':>14}"
    extra = f"{row['extra_us']:+.1f}/{row['allowed_us']:.0f}" if "extra_us" in row else ""
    report.log(f"{line}{extra:>15}{row['rounds']:>5}  {row['verdict']}")


def measure_size(
    operation: Operation, nbytes: int, tensors: int, threads: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Measure one operation at one size, with each number of threads."""
    case = operation.build(nbytes, tensors)
    case.fixed_us = operation.fixed_us
    seconds = SECONDS.get(nbytes, LONG_SECONDS)
    try:
        pairs = measure_pairs(case, nbytes, threads, seconds, mlstate.threads.set_num_threads)
    finally:
        case.close()
    del case
    gc.collect()
    join_freed_memory()
    more = {"size": size_text(nbytes, tensors)}
    return [as_row(operation.name, pair) | more for pair in pairs]


def confirmed(
    operation: Operation, rows: list[dict[str, Any]], shape: tuple[int, int]
) -> list[dict[str, Any]]:
    """Measure slow rows again: they stay slow only if the second run agrees.

    The second run has new arrays. It replaces a row whose verdict it does not confirm.
    """
    threads = tuple(row["threads"] for row in rows if row["verdict"] == "SLOW")
    again = measure_size(operation, *shape, threads) if threads else []
    better = {row["threads"]: row for row in again if row["verdict"] != "SLOW"}
    return [better.get(row["threads"], row) for row in rows]


def measure_operation(
    report: Report, operation: Operation, quick: bool, sizes: list[int] | None
) -> list[dict[str, Any]]:
    """Measure and print one operation at all its sizes."""
    rows = []
    for shape in shapes_of(operation, quick):
        if sizes is not None and shape[0] not in sizes:
            continue
        rows_measured = confirmed(
            operation, measure_size(operation, *shape, operation.threads), shape
        )
        for row in rows_measured:
            print_row(report, row)
        rows += rows_measured
    return rows


def label(row: dict[str, Any]) -> str:
    """Name a row in one line."""
    text = f"{row['name']}, {row['size']}, {row['threads']} thread{'s' * (row['threads'] > 1)}"
    low, high = row["interval"]
    ratio = f"{low:.2f} to {high:.2f} times as fast as the simple way"
    if "extra_us" not in row:
        return f"{text}: {ratio}"
    low, high = row["extra_interval"]
    over = f"{low:.1f} to {high:.1f} us over the simple way, {row['allowed_us']:g} allowed"
    return f"{text}: {over}" + (f"; {ratio}" if row["bytes"] > SMALL_BYTES else "")


def run(report: Report, operations: list[Operation], options: argparse.Namespace) -> int:
    """Measure the operations; return the exit status."""
    head = f"{'operation':<32}{'size':>15}{'th':>3}{'simple':>9}{'ours ms':>9}"
    report.log(f"\n{head}{'ratio':>8}{'95 %':>14}{'extra us':>15}{'n':>5}")
    rows: list[dict[str, Any]] = []
    threads = mlstate.threads.get_num_threads()
    try:
        for operation in operations:
            rows_measured = measure_operation(report, operation, options.quick, options.sizes)
            rows += rows_measured
            table = {"title": operation.name, "simple_way": operation.simple, "rows": rows_measured}
            if operation.fixed_us:
                table |= {"fixed_us": operation.fixed_us, "fixed_for": operation.why}
            report.tables.append(dict[str, object](table))
    finally:
        mlstate.threads.set_num_threads(threads)
    slow = [row for row in rows if row["verdict"] == "SLOW"]
    report.log(f"\n{len(rows)} rows, {len(slow)} slower than the simple way")
    for row in slow:
        report.log(f"SLOW {label(row)}")
        if report.as_json:
            print(f"SLOW {label(row)}", file=sys.stderr)
    return 1 if slow else 0


def warm_memory(operations: list[Operation], options: argparse.Namespace) -> None:
    """Touch as much memory as the largest rows need.

    A virtual machine gets memory from its host on first use, which takes several times as long as
    any later use.
    """
    sizes = [n for o in operations for n, _ in shapes_of(o, options.quick)]
    largest = max(
        n for n in sizes if options.sizes is None or n in options.sizes or n == min(sizes)
    )
    np.ones(4 * largest, np.uint8)


def chosen(operations: tuple[Operation, ...], only: str | None) -> list[Operation]:
    """Return the operations that can run here and whose names contain `only`."""
    selected = [o for o in operations if o.needs is not None and (only or "") in o.name]
    if not selected:
        raise SystemExit(f"--only: no operation's name contains {only!r}; see --list")
    return selected


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = option_parser(__doc__, "sizes up to 16 MiB")
    parser.add_argument("--only", help="operations whose names contain this text")
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes, of those in the table")
    parser.add_argument("--list", action="store_true", help="list operations and simple ways")
    return parser.parse_args(arguments)


def main(
    arguments: list[str] | None = None, memory: tuple[Operation, ...] = (*MEMORY, *RANKS)
) -> int:
    began = time.perf_counter()
    options = parse(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd(), prefix="bench-") as folder:
        operations = chosen((*memory, *guard_files.operations(Path(folder))), options.only)
        if options.list:
            for operation in operations:
                print(f"{operation.name:<34}{operation.simple}")
                if operation.fixed_us:
                    print(f"{'':<34}+{operation.fixed_us:g} us: {operation.why}")
            return 0
        warm_memory(operations, options)
        report = Report.open("mlstate: guard", "guard", options)
        report.log("ratio: simple time / our time, median of the rounds with its 95 % interval")
        report.log(
            "extra us: ours over the simple way, and how much is allowed, where that is judged"
        )
        status = run(report, operations, options)
    report.close()
    print(f"{time.perf_counter() - began:.0f} s in all", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
