"""The time for which a save blocks training, for `bench_training.py`.

Two ranks save the two halves of a state. They are blocked until the slower one may change its
state.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import training_rank
from checkpoint_states import clear, clear_and_wait
from harness import Candidate, Report, no_op, rows_of, shuffled_turns
from spawned import SpawnedRanks
from training_rank import DCP, DCP_KEPT, SHARES
from turns import Aim

LETTER = "A"  # of checkpoint_states: Adam's m and v of 124 million parameters
WORLD = 2

MEMCPY = "memcpy, touched memory"
SAVE = "mlstate.save"
STAGED = "mlstate.save_async, staging {} %"
NAMES = {
    MEMCPY: training_rank.MEMCPY,
    SAVE: training_rank.SAVE,
    **{STAGED.format(share): str(share) for share in SHARES},
    "torch DCP async_save": DCP,
    "torch DCP async_save, stager kept": DCP_KEPT,
}


def blocking(report: Report, folder: Path, repeats: int, quick: bool) -> None:
    """Time until ranks may continue, and until their checkpoint is complete."""
    ranks = SpawnedRanks(training_rank.serve, WORLD, LETTER)
    try:
        size = sum(ranks.ask("load", quick))
        staged, done = take_turns(ranks, folder, repeats, quick)
    finally:
        ranks.close()
    candidates = [
        Candidate(name, no_op, limit=name == MEMCPY, baseline=way == DCP)
        for name, way in NAMES.items()
    ]
    rows = rows_of(candidates, staged)
    for row in rows:
        row.extra["all of it"] = f"{statistics.median(done[row.name]):.0f}"
    title = f"time that a save blocks training: {WORLD} ranks over gloo, {size / 1e6:,.0f} MB"
    note = "both ranks at once, the slower one; all of it: until the checkpoint is on the disk"
    report.table(title, rows, note=note)
    if not quick:
        report.judge([Aim(STAGED.format(100), 1.2, MEMCPY).verdict(rows)])


def take_turns(
    ranks: SpawnedRanks, folder: Path, repeats: int, quick: bool
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Milliseconds until all ranks may continue, and until all is done, by name."""
    staged: dict[str, list[float]] = {name: [] for name in NAMES}
    done: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn, name in shuffled_turns(list(NAMES), 1 + repeats):
        (clear if quick else clear_and_wait)(folder)
        answers = ranks.ask("time", NAMES[name], folder / "x")
        if turn > 0:
            staged[name].append(max(blocked for blocked, _ in answers))
            done[name].append(max(seconds for _, seconds in answers))
    clear(folder)
    return staged, done
