"""Training that is killed and resumed, on the same number of ranks and on others.

``python benchmarks/resume_table.py [--kinds ...] [--optimizer adam]`` prints a table in Markdown. A
small transformer is trained on several processes over gloo, saved after three steps with
`mlstate.save`, killed by signal 9 after the next, and resumed with `mlstate.load` on new processes.
"State" compares parameters, buffers, optimizer states and hyperparameters, as torch gathers them
before the kill and after the load, bit for bit. "Losses" compares the losses of each rank with an
uninterrupted run: bit for bit on the same number of ranks; otherwise their means, whose sums have
another order.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from from_tests import import_from_tests

KINDS = {
    "fsdp1": "FSDP1",
    "fsdp1-orig": "FSDP1, use_orig_params",
    "fsdp2": "FSDP2",
    "plain": "plain (DDP; alone on 1 rank)",
}
CHANGES = ((2, 2), (2, 1), (2, 4), (4, 2))  # numbers of ranks


def measure(kinds: list[str], optimizer: str) -> Iterator[tuple[str, tuple[int, int], str]]:
    """Train, kill and resume; yield kind, change of ranks, and result."""
    starter = import_from_tests("resume_jobs")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for saved in sorted({saved for saved, _ in CHANGES}):
            starter.train_and_kill(saved, [(kind, optimizer) for kind in kinds], folder)
        for saved, resumed in CHANGES:
            starter.resume(resumed, [(kind, optimizer, saved, kind) for kind in kinds], folder)
            for kind in kinds:
                case = (folder, kind, optimizer, saved, kind, resumed)
                curves, uninterrupted = starter.curves(*case)
                pairs = zip(starter.means(curves), starter.means(uninterrupted), strict=True)
                largest = max(abs(a - b) / abs(b) for a, b in pairs)
                losses = "same bits" if curves == uninterrupted else f"within {largest:.0e}"
                difference = starter.state_difference(*case)
                state = f"DIFFERS: {difference}" if difference else "same bits"
                yield kind, (saved, resumed), f"state {state}, losses {losses}"


def main() -> None:
    """Measure and print; the exit status is 1 if something differs that must not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--optimizer", choices=("adam", "adamw", "momentum"), default="adam")
    options = parser.parse_args()
    if import_from_tests("resume_jobs") is None:
        parser.error("the tests, which start the ranks, are not in this checkout")
    results = {
        (kind, ranks): text for kind, ranks, text in measure(options.kinds, options.optimizer)
    }
    print(
        f"{options.optimizer}, gloo, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {metadata.version('torch')}\n"
    )
    print("| module | " + " | ".join(f"{a} -> {b} ranks" for a, b in CHANGES) + " |")
    print("| --- |" + " --- |" * len(CHANGES))
    for kind in options.kinds:
        cells = [KINDS[kind], *(results[kind, ranks] for ranks in CHANGES)]
        print(f"| {' | '.join(cells)} |")
    bad = [
        text
        for (_, (saved, resumed)), text in results.items()
        if "DIFFERS" in text or (saved == resumed and "within" in text)
    ]
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
