"""Checkpoints of twelve kinds: read by mlstate and by the library that wrote them.

``python benchmarks/bench_kinds.py [--quick] [--json] [--store]``; mlstate must be installed, with
torch; each other library takes part if it is. The table's times are for files in the page cache.
Each whole read is followed by a read of every byte, because readers may map files. ``mlstate.load``
copies into memory and verifies the checksums that there are; with ``mmap=True, verify=False`` it
maps the file, as the readers of safetensors do. "1/8" is rank 3 of 8, with the share of the whole's
bytes that it reads. See docs/coming_from.md.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_states import read
from from_tests import import_from_tests
from harness import Candidate, Report, Row, option_parser
from turns import Aim, take_turns

import mlstate

WIDTH, QUICK_WIDTH = 2048, 128
OWN, OURS, PART = "its own reader", "mlstate.load", "mlstate.load, 1/8"
MAPPED = "mlstate.load(mmap=True)"


def touch(state: dict[str, Any]) -> None:
    """Read every byte of the tensors."""
    for tensor in state.values():
        array = tensor.detach().numpy() if hasattr(tensor, "detach") else np.asarray(tensor)
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        flat[: flat.size // 8 * 8].view(np.uint64).max(initial=0)


def time_kind(
    name: str, kind: Any, folder: Path, width: int, repeats: int
) -> tuple[list[Row], Any]:
    """Write a checkpoint of a kind, and time its readers."""
    path = kind.write(folder, width)
    state = mlstate.load(path).model
    size = sum(state[key].nbytes for key in state)

    def load_part() -> object:
        return mlstate.load(path, rank=3, world_size=8, layout="rows")

    candidates = [
        Candidate(OWN, lambda: touch(kind.read(path)), baseline=True),
        Candidate(OURS, lambda: touch(dict(mlstate.load(path).model))),
        Candidate(PART, load_part),
    ]
    if kind.has_ranges:
        candidates.append(
            Candidate(
                MAPPED, lambda: touch(dict(mlstate.load(path, mmap=True, verify=False).model))
            )
        )
    rows = take_turns(candidates, repeats)
    before = read()
    load_part()  # mapped bytes are not counted
    share = (read() - before) / size
    for row in rows:
        row.extra["MB"] = f"{size / 1e6:.0f}"
    rows[2].extra["read"] = f"{share:.3f}"
    verdict = f"{name}: reads {share:.3f} of the bytes for 1/8 of the rows"
    if kind.has_ranges:
        verdict += f" <= 0.15: {'met' if share <= 0.15 else 'NOT MET'}"
    return rows, [Aim(MAPPED if kind.has_ranges else OURS, 1.2, OWN).verdict(rows), verdict]


def main() -> None:
    """Time all kinds whose libraries are installed."""
    options = option_parser(__doc__, "small models").parse_args()
    warnings.simplefilter("ignore")
    report = Report.open("Checkpoints of twelve kinds", "kinds", options)
    width, repeats = (QUICK_WIDTH, 2) if options.quick else (WIDTH, 7)
    for name, kind in import_from_tests("checkpoint_kinds").KINDS.items():
        missing = kind.missing()
        if missing:
            report.log(f"\n{name}: {missing} is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows, verdicts = time_kind(name, kind, Path(folder), width, repeats)
            report.table(name, rows)
            report.judge(verdicts)
    report.close()


if __name__ == "__main__":
    main()
