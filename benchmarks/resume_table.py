"""Training that is killed and resumed, on the same number of ranks and on others.

``python benchmarks/resume_table.py [--kinds ...] [--optimizer adam] [--changes 2-4 ...] [--json
FILE]`` prints a table in Markdown. A small transformer is trained on several processes over gloo,
saved after three steps with `mlstate.save`, killed by signal 9 after the next, and resumed with
`mlstate.load` on new processes. "State" compares parameters, buffers, optimizer states and
hyperparameters, as torch gathers them before the kill and after the load, bit for bit. "Losses"
compares the losses of each rank with an uninterrupted run: bit for bit on the same number of ranks;
otherwise their means, whose sums have another order.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from from_tests import import_from_tests

KINDS = {
    "fsdp1": "FSDP1",
    "fsdp1-orig": "FSDP1, use_orig_params",
    "fsdp2": "FSDP2",
    "plain": "plain (DDP; alone on 1 rank)",
}
CHANGES = ("2-2", "2-1", "2-4", "4-2")


class Resumed(NamedTuple):
    """The result of one kind of module on one number of ranks."""

    kind: str
    saved: int  # ranks
    resumed: int
    state: str  # differences of the states; empty if there are none
    same_bits: bool  # of the losses of all ranks
    largest: float  # difference of the mean losses, relative


def measure(kinds: list[str], optimizer: str, changes: list[tuple[int, int]]) -> list[Resumed]:
    """Train, kill and resume; return a result for each kind and change of ranks."""
    starter = import_from_tests("resume_jobs")
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for saved in sorted({saved for saved, _ in changes}):
            starter.train_and_kill(saved, [(kind, optimizer) for kind in kinds], folder)
        for saved, resumed in changes:
            starter.resume(resumed, [(kind, optimizer, saved, kind) for kind in kinds], folder)
            for kind in kinds:
                case = (folder, kind, optimizer, saved, kind, resumed)
                curves, uninterrupted = starter.curves(*case)
                pairs = zip(starter.means(curves), starter.means(uninterrupted), strict=True)
                largest = max(abs(a - b) / abs(b) for a, b in pairs)
                state = starter.state_difference(*case)
                results.append(
                    Resumed(kind, saved, resumed, state, curves == uninterrupted, largest)
                )
    return results


def table(results: list[Resumed]) -> str:
    """Return the table in Markdown: a row for each kind, a column for each change of ranks."""
    changes = list(dict.fromkeys((result_row.saved, result_row.resumed) for result_row in results))
    lines = [
        "| module | " + " | ".join(f"{a} -> {b} ranks" for a, b in changes) + " |",
        "| --- |" + " --- |" * len(changes),
    ]
    for kind in dict.fromkeys(result_row.kind for result_row in results):
        cells = []
        for ranks in changes:
            result_row = next(
                f for f in results if f.kind == kind and (f.saved, f.resumed) == ranks
            )
            state = "DIFFERS" if result_row.state else "same bits"
            losses = "same bits" if result_row.same_bits else f"within {result_row.largest:.0e}"
            cells.append(f"state {state}, losses {losses}")
        lines.append(f"| {KINDS[kind]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def good(results: list[Resumed]) -> bool:
    """Whether all states are equal, and losses too if the number of ranks is."""
    return all(
        not result_row.state and (result_row.same_bits or result_row.saved != result_row.resumed)
        for result_row in results
    )


def change(text: str) -> tuple[int, int]:
    """Parse the numbers of ranks, as in 2-4."""
    saved, _, resumed = text.partition("-")
    return int(saved), int(resumed)


def main() -> int:
    """Measure and print; return 1 if something differs that must not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--optimizer", choices=("adam", "adamw", "momentum"), default="adam")
    parser.add_argument("--changes", nargs="+", default=list(CHANGES), metavar="SAVED-RESUMED")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if import_from_tests("resume_jobs") is None:
        parser.error("the tests, which start the ranks, are not beside the benchmarks")
    results = measure(options.kinds, options.optimizer, list(map(change, options.changes)))
    print(
        f"{options.optimizer}, gloo, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {metadata.version('torch')}\n"
    )
    print(table(results))
    for result_row in results:
        if result_row.state:
            print(
                f"{result_row.kind}, {result_row.saved} -> {result_row.resumed}: {result_row.state}"
            )
    if options.json:
        Path(options.json).write_text(
            json.dumps([result_row._asdict() for result_row in results], indent=1)
        )
    return 0 if good(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
