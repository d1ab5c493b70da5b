"""The power fails at any point of a save.

A reader finds the old state or the new one, complete; the new one if the save had returned.
"""

import os
import random
import shutil

import fault_harness
import pytest
import replay
import scenarios

pytestmark = pytest.mark.long

SEED = int(os.environ.get("MLSTATE_FAULTS_SEED", "20"))


def record(bench, start="A"):
    """Save B over A while recording; return the folder, the initial disk, and the entries."""
    root = bench.fresh(start)
    disk = replay.Disk(root)
    log = bench.folder / f"log-{bench.used}"
    ends = bench.server.run(root, "B", log=log)
    assert all(end["told"].get("returned") for end in ends), ends
    entries = replay.parse(log.read_bytes())
    assert sum(entry.kind == "N" for entry in entries) == bench.scenario.ranks
    return root, disk, entries


def test_replayed_recording_equals_the_folder(bench):
    root, disk, entries = record(bench)
    for entry in entries:
        disk.apply(entry)
    built = bench.folder / f"built-{bench.used}"
    built.mkdir()
    replay.materialise(replay.tree(disk, random.Random(0), "all", "all"), built)
    compare = lambda folder: {  # noqa: E731
        p.relative_to(folder).as_posix(): p.is_dir() or p.read_bytes() for p in folder.rglob("*")
    }
    assert compare(built) == compare(root)


def judge_states(bench, disk, rng, samples, seen, allowed):
    """Complaints about the states that a power failure now could leave."""
    complaints = []
    for state in replay.states(disk, rng, samples):
        key = (replay.digest(state), allowed)
        if key in seen:
            continue
        seen.add(key)
        fault_harness.TRIED["states after a power failure"] += 1
        root = bench.folder / f"power-{len(seen)}"
        root.mkdir()
        replay.materialise(state, root)
        problems = fault_harness.judge_content(bench.scenario, root, allowed)
        if len(seen) % fault_harness.amount(10, 5, 2) == 0:
            problems += bench.judge_next(root, True)
        if problems and os.environ.get("MLSTATE_FAULTS_KEEP"):
            problems.append(f"see {root}")
        else:
            shutil.rmtree(root)
        complaints += problems
    return complaints


def fail_everywhere(bench, start="A"):
    """Complaints about the states after each entry, and the number of states."""
    _, disk, entries = record(bench, start)
    rng = random.Random(SEED)
    chosen = set(fault_harness.spread(len(entries), bench.most(3, 10)))
    telling = [number for number, entry in enumerate(entries, 1) if entry.kind in "RDSN"]
    chosen.update(telling[n - 1] for n in fault_harness.spread(len(telling), bench.most(8, 16)))
    chosen.add(len(entries))
    complaints, seen, allowed = [], set(), start + "B"
    for number, entry in enumerate(entries, 1):
        disk.apply(entry)
        if (entry.kind, entry.name) == ("N", "returned"):
            allowed = "B"
        if number in chosen:
            samples = fault_harness.amount(1, 2, 20)
            for text in judge_states(bench, disk, rng, samples, seen, allowed):
                complaints.append(f"after entry {number} ({entry}): {text}")
    return complaints, len(seen)


@pytest.mark.parametrize("start", ["A", "-"], ids=["over A", "over nothing"])
def test_power_fails_at_each_point(bench, start):
    complaints, count = fail_everywhere(bench, start)
    print(f"{bench.scenario.name}: {count} states")
    if complaints:
        summary = "\n".join(complaints[:30])
        pytest.fail(f"{len(complaints)} complaints, seed {SEED}:\n{summary}", pytrace=False)


@pytest.mark.parametrize(
    ("forgets", "complaint"), [("file", "cannot load"), ("folder", "loads A, not B")]
)
def test_a_writer_that_forgets_a_sync_is_found_out(make_bench, forgets, complaint):
    with make_bench(scenarios.BAD[f"forgets-{forgets}"]) as bench:
        complaints, _ = fail_everywhere(bench)
    assert any(complaint in text for text in complaints), complaints


def test_correct_writer_has_no_complaints(make_bench):
    with make_bench(scenarios.BAD["forgets-nothing"]) as bench:
        complaints, _ = fail_everywhere(bench)
    assert not complaints
