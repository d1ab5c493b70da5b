"""Ctrl-C at any line leaves no lock, descriptor, thread or file behind; runs interrupts.py.

MLSTATE_FAULTS sets the amount: "few" (the default) tries some lines and signals of each usual
operation, "slice" more of them, "all" every line. MLSTATE_STORM is the number of signals of the
storms, over all operations: an eighth of them for those that change files.
"""

import json
import os
import sys
from pathlib import Path

import child
import operations
import pytest
from amounts import AMOUNT, TRIED, amount
from needs import needs

LINES, SIGNALS, SECONDS = amount((8, 8, 100), (30, 30, 400), (0, 1000, 3000))
STORM = int(os.environ.get("MLSTATE_STORM", amount(2000, 9000, 50_000)))
USUAL = {
    "save_file", "checkpoint", "async", "async-manager", "publisher", "tiers", "prune", "export",
    "export async", "prompts", "tier budget", "group", "reductions", "snapshot_case", "prompt_case",
    "chunk_case",
}  # fmt: skip
# One process is interrupted. A mapped load has the lines of the other one.
OPERATIONS = [
    each
    for each in operations.ALL
    if each.ranks == each.prepare_ranks == 1 and not (each.seeded or getattr(each, "mmap", False))
]
CHANGES = [each for each in OPERATIONS if isinstance(each, operations.Change)]

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc"),
    pytest.mark.timeout(SECONDS + 20),
]


def cases():
    """Operations, and their numbers of signals in storms; fast changes in place get most."""
    for operation in OPERATIONS:
        is_change = operation in CHANGES
        others = CHANGES if is_change else [each for each in OPERATIONS if each not in CHANGES]
        share = -(-STORM * (7 if is_change else 1) // (8 * len(others)))
        # A signal just after `mkdtemp` leaves an empty folder for downloads.
        share = 0 if operation.name == "store" else share
        is_long = AMOUNT == "few" and operation.name not in USUAL
        marks = [needs(*operation.needs), *([pytest.mark.long] if is_long else [])]
        yield pytest.param(operation.name, share, marks=marks, id=operation.name)


@pytest.mark.parametrize(("operation", "storm"), [*cases()])
def test_interrupts_leave_old_or_new_content_and_no_resources(operation, storm):
    command = [sys.executable, Path(__file__).with_name("interrupts.py"), operation]
    numbers = (LINES, SIGNALS if storm else 0, storm)
    done = child.finished([*command, *numbers], timeout=SECONDS, **child.PATHS)
    assert done.returncode == 0, done.stderr
    tried, complaints = json.loads(done.stdout)
    TRIED["interrupts"] += tried
    assert not complaints, "\n".join(complaints)
    assert tried > storm
