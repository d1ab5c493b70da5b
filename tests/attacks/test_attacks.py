"""Every operation under faults of the system: old or new content, and the right exception.

An attack disturbs a call, or kills its process. Afterwards a reader finds the old content or the
new one, complete; the new one, if the call returned. Errors are exceptions. The next call works and
leaves no unused files.
"""

import operations
import pytest
from needs import needs

ALL = [each for each in operations.ALL if each.forks and not each.seeded]


def cases(chosen):
    """Parameters for operations."""
    return [
        pytest.param(
            each.name,
            marks=[*(getattr(pytest.mark, name) for name in each.marks), needs(*each.needs)],
        )
        for each in chosen
    ]


def complain(complaints):
    if complaints:
        pytest.fail(f"{len(complaints)} complaints:\n" + "\n".join(complaints[:40]), pytrace=False)


@pytest.mark.parametrize("operation", cases(each for each in ALL if not each.in_memory))
def test_failing_calls_and_kills_leave_old_or_new_content(attack, shim, operation):
    complain(attack(operation, "faults", library=shim))


@pytest.mark.long
@pytest.mark.parametrize(
    "operation", cases(each for each in ALL if not (each.reads or each.in_memory))
)
def test_a_power_failure_leaves_old_or_new_content(attack, shim, operation):
    complain(attack(operation, "power", library=shim))


@pytest.mark.long
@pytest.mark.parametrize("operation", cases(ALL))
def test_failing_allocations_leave_old_or_new_content(attack, alloc_shim, operation):
    complain(attack(operation, "memory", library=alloc_shim))


HISTORIES = [(each.name, name) for each in operations.ALL for name in each.seeded]


@pytest.mark.long
@pytest.mark.parametrize(("operation", "name"), HISTORIES)
def test_faults_of_random_histories_leave_one_complete_version(attack, shim, operation, name):
    complain(attack(operation, name, library=shim))


@pytest.mark.parametrize(
    ("operation", "name", "text"),
    [("no undo", "lines", "mixture"), ("stale", "faults", "poll returned")],
)
def test_wrong_followers_are_noticed(attack, shim, operation, name, text):
    complaints = attack(operation, name, library=shim)
    assert any(text in complaint for complaint in complaints), complaints


def test_all_has_many_points_of_histories():
    most = {
        operation.name: sum(numbers[-1] for numbers in operation.seeded.values())
        for operation in operations.ALL
    }
    assert most["publish"] + most["follow"] + most["mlstate follow"] >= 10_000
    assert most["prompt log"] >= 100_000


@pytest.mark.parametrize(
    ("step", "complaint"), [("file", "cannot load"), ("folder", "has the old content, not new")]
)
def test_a_writer_that_forgets_a_sync_is_found_out(attack, shim, step, complaint):
    complaints = attack(f"forgets-{step}", "power", library=shim)
    assert any(complaint in text for text in complaints), complaints


def test_correct_writer_has_no_complaints(attack, shim):
    complain(attack("forgets-nothing", "power", library=shim))
