"""Ctrl-C at any line leaves no lock, descriptor, thread or file behind; runs interrupts.py.

MLSTATE_FAULTS sets the amount: "few" (the default) tries some lines and signals of each case,
"slice" more of them, "all" every line. MLSTATE_STORM is the number of signals of the storms, over
all cases: the operations, and the changes in place of changed_objects.py.
"""

import json
import os
import sys
from pathlib import Path

import child
import pytest
from changed_objects import CASES as CHANGES
from changed_objects import MLX, TRANSFORMERS
from needs import needs

AMOUNT = os.environ.get("MLSTATE_FAULTS", "few")
SEED = int(os.environ.get("MLSTATE_FAULTS_SEED", "20"))
LINES = {"few": 8, "slice": 100, "all": 0}[AMOUNT]
SIGNALS = {"few": 8, "slice": 100, "all": 1000}[AMOUNT]
SECONDS = {"few": 100, "slice": 200, "all": 3000}[AMOUNT]
CASES = ("save", "async", "prune", "manager_async", "export", "export_async", "files", "prompts")
CASES += ("publish", "follow", "tiers", "group", "reductions")
MORE = ("new", "incremental", "load", "verify", "repair", "mend", "manager", "reshard", "convert")
NEED_STORE = ("store",)
STORM = int(os.environ.get("MLSTATE_STORM", {"few": 2000, "slice": 9000, "all": 50_000}[AMOUNT]))
STORMS = ("save", "async", "prompts", "tiers", "group", "reductions")
MORE_STORMS = ("incremental", "manager", "manager_async", "prune", "export", "export_async")
MORE_STORMS += ("convert", "publish", "follow")


def few_of(names, more):
    """Cases of the ordinary test run, then the cases of longer runs."""
    marks = [pytest.mark.long] if AMOUNT == "few" else []
    return [*names, *(pytest.param(name, marks=marks) for name in more)]


pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc"),
    pytest.mark.timeout(SECONDS + 20),
]


def attempt(*arguments):
    """Run interrupts.py, which must end with status 0, and return its result."""
    command = [sys.executable, Path(__file__).with_name("interrupts.py"), *arguments]
    done = child.finished(command, timeout=SECONDS, **child.PATHS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", few_of(CASES, MORE + NEED_STORE))
def test_interrupt_at_any_line_leaves_no_resources(case):
    if case in NEED_STORE:
        pytest.importorskip("obstore", reason="needs obstore: mlstate[remote]")
    outcome = attempt("lines", case, LINES)
    print(
        sum(outcome["tried"].values()), "lines tried,", len(outcome["skipped"]), "reasons to skip"
    )
    assert not outcome["failures"], "\n".join(outcome["failures"])
    assert outcome["tried"] and sum(outcome["tried"].values()) <= outcome["count"]


@pytest.mark.parametrize("case", few_of(STORMS, MORE_STORMS))
def test_interrupt_at_any_moment_leaves_no_resources(case):
    outcome = attempt("signals", case, SIGNALS, SEED)
    print(outcome["tried"], "signals tried,", outcome["came"], "came in the call")
    assert not outcome["failures"], "\n".join(outcome["failures"])
    assert AMOUNT == "few" or outcome["came"]


def storm_cases():
    """Cases with their numbers of signals; changes in place, which are fast, get most of them."""
    operations = [*STORMS, *MORE_STORMS]
    changes = [case.__name__ for case in [*CHANGES, *TRANSFORMERS, *MLX]]
    counts = dict.fromkeys(operations, -(-STORM // (8 * len(operations))))
    counts |= dict.fromkeys(changes, -(-7 * STORM // (8 * len(changes))))
    modules = {case.__name__: ("torch", "transformers") for case in TRANSFORMERS}
    modules |= {case.__name__: ("mlx", "mlx_lm") for case in MLX}
    often = {*STORMS, "snapshot_case", "prompt_case", "chunk_case"}
    for name, count in counts.items():
        marks = [needs(*modules.get(name, ()))]
        marks += [pytest.mark.long] if AMOUNT == "few" and name not in often else []
        yield pytest.param(name, count, marks=marks, id=name)


@pytest.mark.parametrize("case, count", [*storm_cases()])
def test_storms_leave_old_or_new_content_and_no_resources(case, count):
    outcome = attempt("storm", case, count, SEED)
    print(outcome["signals"], "signals in", outcome["tried"], "tries")
    assert not outcome["failures"], "\n".join(outcome["failures"])
    assert outcome["signals"] >= count
