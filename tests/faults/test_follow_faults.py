"""After any failure, followers have one published version, the newest (follow_faults.py)."""

import json
import subprocess
import sys

import fault_harness
import pytest

# Number of states of a kind: in an ordinary run, in the slice and in all.
STATES = {
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
}
CHUNK = 250  # states of one process


def try_faults(shim, kind, first, states, *defect):
    """Run the program; return its report."""
    program = str(fault_harness.HERE / "follow_faults.py")
    done = subprocess.run(
        [sys.executable, program, kind, str(first), str(states), *defect],
        capture_output=True, text=True, timeout=3000, env=fault_harness.environment(shim),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.parametrize("kind", STATES)
def test_followers_have_one_version_after_each_fault(shim, kind):
    count = fault_harness.amount(*STATES[kind])
    for first in range(0, count, CHUNK):
        report = try_faults(shim, kind, first, min(CHUNK, count - first))
        fault_harness.TRIED[f"follow states, {kind}"] += report["states"]
        assert not report["complaints"], "\n".join(report["complaints"])


@pytest.mark.parametrize(
    ("defect", "kind", "text"),
    [("no undo", "interrupt_follower", "mixture"), ("stale", "kill_publisher", "poll returned")],
)
def test_wrong_followers_are_noticed(shim, defect, kind, text):
    complaints = try_faults(shim, kind, 3, 24, defect)["complaints"]
    assert any(text in complaint for complaint in complaints), complaints


def test_all_has_ten_thousand_states():
    assert sum(every for _, _, every in STATES.values()) >= 10_000
