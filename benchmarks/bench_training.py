"""Training: asynchronous saves, tiers and compressed states.

``python benchmarks/bench_training.py [--quick] [--json] [--only PART] [--repeats N] [--folder
FOLDER]``; mlstate and torch must be installed.  PART is async, tiers or compress.  Needs about 3 GB
of disk and 10 GB of memory; ``--quick`` uses small states, as a smoke test. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import training_async
import training_compression
import training_tiers
from checkpoint_states import keep_memory
from harness import Report, option_parser, show


@dataclass
class Run:
    """The options, and a folder on a disk."""

    report: Report
    repeats: int
    quick: bool
    folder: Path


def saving(run: Run) -> None:
    """Compare how long saves block two training ranks."""
    training_async.blocking(run.report, run.folder, run.repeats, run.quick)


def moving(run: Run) -> None:
    """Compare moves of one unit between tiers with raw copies and files."""
    training_tiers.moving(run.report, run.folder, run.repeats, run.quick)


def compressing(run: Run) -> None:
    """Compare saves and loads with each codec."""
    training_compression.measuring(run.report, run.folder, run.repeats, run.quick)


PARTS: dict[str, Callable[[Run], None]] = {
    "async": saving,
    "tiers": moving,
    "compress": compressing,
}


def options() -> argparse.Namespace:
    parser = option_parser(__doc__, "small states, one repeat", PARTS)
    parser.add_argument("--repeats", type=int, help="rounds, 5 if not given")
    parser.add_argument("--folder", type=Path, help="where, on a disk; default: here")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    keep_memory()
    warnings.filterwarnings("ignore", module="torch")
    report = Report("mlstate: training", arguments.json, "training" if arguments.store else None)
    report.log(
        "medians; 'x base': times faster than the base; '/limit': times the limit's duration"
    )
    repeats = arguments.repeats or (1 if arguments.quick else 5)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=arguments.folder or Path.cwd(), prefix="bench-") as folder:
        run = Run(report, repeats, arguments.quick, Path(folder))
        for part in [arguments.only] if arguments.only else PARTS:
            PARTS[part](run)
    report.log(f"\n{show(time.perf_counter() - began)} s in all")
    report.close()


if __name__ == "__main__":
    main()
