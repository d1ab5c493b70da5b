"""Prompt logs keep each stored record, after failures of all kinds (prompt_faults.py)."""

import json
import subprocess
import sys

import fault_harness
import pytest

# Number of states of a kind: in an ordinary run, in the slice (10,000) and in all (100,000).
STATES = {
    "fail_calls": (20, 2_000, 20_000),
    "kill": (20, 1_500, 15_000),
    "fail_power": (100, 3_000, 30_000),
    "flip": (50, 3_200, 32_000),
    "race": (5, 300, 3_000),
}
CHUNK = 2_000  # states of one process


@pytest.mark.long
@pytest.mark.parametrize("kind", STATES)
def test_prompt_log_loses_no_record_and_returns_no_other(shim, kind):
    count = fault_harness.amount(*STATES[kind])
    program = str(fault_harness.HERE / "prompt_faults.py")
    for first in range(0, count, CHUNK):
        states = min(CHUNK, count - first)
        done = subprocess.run(
            [sys.executable, program, kind, str(first), str(states)],
            capture_output=True, text=True, timeout=3000, env=fault_harness.environment(shim),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        report = json.loads(done.stdout)
        fault_harness.TRIED[f"prompt log states, {kind}"] += report["states"]
        assert not report["complaints"], "\n".join(report["complaints"])
