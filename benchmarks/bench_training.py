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
from pathlib import Path

import training_async
import training_compression
import training_tiers
from checkpoint_states import keep_memory
from harness import Report, option_parser, show

PARTS: dict[str, Callable[[Report, Path, int, bool], None]] = {
    "async": training_async.blocking,  # how long saves block two training ranks
    "tiers": training_tiers.moving,  # moves of one unit, and raw copies and files
    "compress": training_compression.measuring,  # saves and loads with each codec
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
    report = Report.open("mlstate: training", "training", arguments)
    report.log(
        "medians; 'x base': times faster than the base; '/limit': times the limit's duration"
    )
    repeats = arguments.repeats or (1 if arguments.quick else 5)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=arguments.folder or Path.cwd(), prefix="bench-") as folder:
        report.run_parts(PARTS, arguments.only, Path(folder), repeats, arguments.quick)
    report.log(f"\n{show(time.perf_counter() - began)} s in all")
    report.close()


if __name__ == "__main__":
    main()
