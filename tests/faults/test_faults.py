"""B is saved over A while one call fails, or while the process is killed in a call.

Afterwards a reader finds A or B, complete; B, if the save returned. Errors are exceptions. The next
save works and leaves no unused files.
"""

import fault_harness
import pytest
import scenarios
from fault_harness import ERRORS

import mlstate

# The calls that the ordinary test run fails.
USUAL = ["create", "close", "pwrite", "fsync", "fsync_folder", "syncfs", "rename", "unlink"]


def complain(complaints):
    if complaints:
        pytest.fail(f"{len(complaints)} complaints:\n" + "\n".join(complaints[:40]), pytrace=False)


def points(bench, call, most, start="A"):
    """Pairs (rank, n) of the calls to try, spread over the whole save."""
    return [
        (rank, n)
        for rank, counts in enumerate(bench.counts(start=start))
        for n in fault_harness.spread(counts[call], most)
    ]


@pytest.mark.parametrize(("name", "most"), [("sparse", 1), ("incremental", 3), ("compressed", 3)])
def test_fault_scenarios_store_overlays(make_bench, name, most):
    with make_bench(scenarios.ALL[name]) as bench:
        root = bench.fresh()
        bench.clean(root, "B")
        shards = mlstate.checkpoint.inspect(root / bench.scenario.folder).shards()
        layers = [len(shard.layers) for shard in shards if shard.layers is not None]
        assert len(layers) >= 2
        assert max(layers) == most
        coded = [layer.codec for shard in shards for layer in shard.layers or () if layer.codec]
        assert len(coded) >= (6 if name == "compressed" else 0)
        assert name == "compressed" or not coded
        assert bench.scenario.load(root)[0] == "B"


@pytest.mark.turns(2)
@pytest.mark.parametrize("call", fault_harness.amount(USUAL, ERRORS, ERRORS))
def test_each_call_fails_once(bench, call):
    complaints = []
    for rank, n in points(bench, call, bench.most(1, 2)):
        for how in ERRORS[call][: fault_harness.amount(1, 2)]:
            complaints += bench.try_fault(f"{call}:{n}:{how}", rank)
    complain(complaints)


@pytest.mark.turns(1)
@pytest.mark.parametrize("start", ["A", "-"], ids=["over A", "over nothing"])
@pytest.mark.parametrize("how", ["kill-before", "kill-after", "kill-half"])
def test_killed_at_each_change(bench, how, start):
    complaints = []
    most = bench.most(4, 10) if start == "A" else bench.most(2, 4)
    for rank, n in points(bench, "change", most, start):
        complaints += bench.try_fault(f"change:{n}:{how}", rank, start)
    complain(complaints)


@pytest.mark.turns(1)
@pytest.mark.parametrize(
    "fault", ["pwrite:{}+:ENOSPC", "write:{}+:ENOSPC", "create:{}+:ENOSPC", "change:{}+:EIO"]
)
def test_all_calls_fail_from_some_call_on(bench, fault):
    complaints = []
    for rank, n in points(bench, fault.partition(":")[0], bench.most(2, 4)):
        complaints += bench.try_fault(fault.format(n), rank)
    complain(complaints)
