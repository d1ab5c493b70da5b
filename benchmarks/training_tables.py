"""Resumed runs and plans of large worlds, for `bench_training.py`: tables and verdicts."""

from __future__ import annotations

from typing import Any

import resume_table
import scale
from from_tests import import_from_tests
from harness import Report

KINDS, OPTIMIZER = ("fsdp1", "fsdp2", "plain"), "adam"
WORLDS, LAYERS, QUICK_LAYERS = (64, 256, 1024, 4096), 61, 3
PLANS = ("save", "load", "reshard")


def resuming(report: Report, quick: bool) -> None:
    """Train on several processes, kill them, resume on the same number of ranks and on others."""
    title = f"training that is killed and resumed: {OPTIMIZER}, ranks over gloo"
    report.log(f"\n{title}")
    if import_from_tests("resume_jobs") is None:
        report.log("not measured: the tests, which start the ranks, are not beside the benchmarks")
        return
    texts = resume_table.CHANGES[:1] if quick else resume_table.CHANGES
    changes = [resume_table.change(text) for text in texts]
    kinds = ["plain"] if quick else list(KINDS)
    results = resume_table.measure(kinds, OPTIMIZER, changes)
    report.log(resume_table.table(results))
    report.tables.append({"title": title, "rows": [result_row._asdict() for result_row in results]})
    same = [
        result_row.same_bits for result_row in results if result_row.saved == result_row.resumed
    ]
    report.judge(
        [
            verdict("same state bits", [not result_row.state for result_row in results]),
            verdict("same bits of losses on as many ranks", same),
        ]
    )


def verdict(label: str, good: list[bool]) -> str:
    return f"{label}: {sum(good)} of {len(good)}, {'met' if all(good) else 'NOT MET'}"


def planning(report: Report, quick: bool) -> None:
    """Plan one rank's part in worlds of increasing size."""
    layers = QUICK_LAYERS if quick else LAYERS
    lines = scale.head(layers)
    report.log("\nplans of one rank: " + "\n".join(lines))
    plans = []
    for world in WORLDS[:2] if quick else WORLDS:
        plans.append(scale.figures(world, layers, True, world // 3))
        report.log(scale.row(plans[-1]))
    report.tables.append({"title": f"plans of one rank: {lines[0]}", "rows": plans})
    if not quick:
        report.judge(growth(plans[0], plans[-1]))


def growth(first: dict[str, Any], last: dict[str, Any]) -> list[str]:
    """The work of a rank must not grow with the world."""
    pairs = {
        "shards": (first["shards"], last["shards"]),
        "bytes of the index": (first["index_bytes"], last["index_bytes"]),
        "indexes read to load": (first["indexes"], last["indexes"]),
    }
    for i, plan in enumerate(PLANS):
        pairs[f"time to plan a {plan}"] = (first["seconds"][i], last["seconds"][i])
        pairs[f"memory to plan a {plan}"] = (first["kib"][i], last["kib"][i])
    worlds = f"on {last['world']:,} ranks <= 1x those on {first['world']:,}"
    return [
        f"{label} {worlds}: {after / before:.2f}, {'met' if after <= before else 'NOT MET'}"
        for label, (before, after) in pairs.items()
    ]
