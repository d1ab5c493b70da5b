"""Random faults of followers and prompt logs, one process for many seeds (seeded_faults.py).

After any failure followers have one published version, the newest (follow_faults.py), and prompt
logs lose no stored record and return no other (prompt_faults.py).
"""

import json
import subprocess
import sys

import fault_harness
import pytest

# Number of states of a kind: in an ordinary run, in the slice and in all.
STATES = {
    "follow_faults": {
        "fail_publisher": (6, 12, 1_500),
        "kill_publisher": (6, 12, 1_200),
        "interrupt_publisher": (1, 12, 400),
        "fail_power": (12, 20, 1_500),
        "fail_follower": (12, 24, 2_400),
        "interrupt_follower": (12, 24, 1_200),
        "exhaust_memory": (1, 24, 1_000),
        "fail_command": (1, 12, 300),
        "kill_command": (6, 12, 300),
        "damage": (12, 12, 1_500),
        "race": (2, 3, 100),
    },
    "prompt_faults": {
        "fail_calls": (20, 2_000, 20_000),
        "kill": (20, 1_500, 15_000),
        "fail_power": (100, 3_000, 30_000),
        "flip": (50, 3_200, 32_000),
        "race": (5, 300, 3_000),
    },
}
CHUNKS = {"follow_faults": 250, "prompt_faults": 2_000}  # states of one process
CASES = [(program, kind) for program, kinds in STATES.items() for kind in kinds]


def try_faults(shim, program, kind, first, states, *defect):
    """Run a program; return its report."""
    done = subprocess.run(
        [sys.executable, str(fault_harness.HERE / f"{program}.py"), kind, str(first), str(states),
         *defect],
        capture_output=True, text=True, timeout=3000, env=fault_harness.environment(shim),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.parametrize(("program", "kind"), CASES)
def test_faults_leave_one_complete_version(shim, program, kind):
    count, chunk = fault_harness.amount(*STATES[program][kind]), CHUNKS[program]
    for first in range(0, count, chunk):
        report = try_faults(shim, program, kind, first, min(chunk, count - first))
        fault_harness.TRIED[f"states of {program}, {kind}"] += report["states"]
        assert not report["complaints"], "\n".join(report["complaints"])


@pytest.mark.parametrize(
    ("defect", "kind", "text"),
    [("no undo", "interrupt_follower", "mixture"), ("stale", "kill_publisher", "poll returned")],
)
def test_wrong_followers_are_noticed(shim, defect, kind, text):
    complaints = try_faults(shim, "follow_faults", kind, 3, 24, defect)["complaints"]
    assert any(text in complaint for complaint in complaints), complaints


def test_all_has_many_states():
    most = {
        program: sum(every for *_, every in kinds.values()) for program, kinds in STATES.items()
    }
    assert most["follow_faults"] >= 10_000 and most["prompt_faults"] >= 100_000
