"""Savings from compression, for `bench_training.py`.

The state is Adam's state of the embedding in `training_words.py`, as bfloat16 would keep it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import training_words
from checkpoint_states import Arrays, bytes_of, clear, clear_and_wait, files_below
from harness import Candidate, Report
from training_words import Trained
from turns import take_turns

import mlstate

CODECS = (None, "zlib", "zstd")


def measuring(report: Report, folder: Path, repeats: int, quick: bool) -> None:
    """Train; save and load the upper halves of the numbers with each codec."""
    trained = training_words.train(quick)
    report.log(f"\n{described(trained)}")
    state = {n: (a.view(np.uint32) >> 16).astype(np.uint16) for n, a in trained.moments.items()}
    empty = partial(clear if quick else clear_and_wait, folder)
    target = folder / "x"
    candidates: list[Candidate] = []
    stored: dict[str, int] = {}
    places: list[Path] = []

    def compare(name: str, save: Callable[[], object], load: Callable[[Path], object]) -> None:
        empty()
        save()
        stored[f"{name}, save"] = sum(file.stat().st_size for file in files_below(folder))
        place = folder.with_name(f"{folder.name}-{len(stored)}")
        places.append(place)
        shutil.copytree(folder, place)
        candidates.append(Candidate(f"{name}, save", save, empty))
        candidates.append(Candidate(f"{name}, load", partial(load, place)))

    try:
        for codec in CODECS:
            compare(
                f"mlstate, sparse, {codec or 'no codec'}",
                partial(mlstate.save, target, state, sparse=True, compress=codec),
                lambda place: mlstate.load(place / "x"),
            )
        compare(
            "np.savez_compressed",
            lambda: np.savez_compressed(folder / "x.npz", **state),
            lambda place: dict(np.load(place / "x.npz").items()),
        )
        rows = take_turns(candidates, repeats)
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
    for row in rows:
        if row.name in stored:
            row.extra["MB stored"] = f"{stored[row.name] / 1e6:.1f}"
    report.table(
        f"the same numbers as bfloat16, {bytes_of(state.values()) / 1e6:,.0f} MB, compressed",
        rows,
        note="save: into an empty folder, mlstate's are durable; load: cached",
    )
    clear(folder)


def described(trained: Trained) -> str:
    """Describe the training, and the share of zero rows."""
    total = bytes_of(trained.moments.values())
    zero = 1 - non_zero_bytes(trained.moments) / total
    first, last = fmean(trained.losses[:10]), fmean(trained.losses[-10:])
    return (
        f"Adam's moments of an embedding of {trained.words:,} words, {total / 1e6:,.0f} MB: after "
        f"{trained.steps} steps (loss {first:.2f} to {last:.2f}) {zero:.1%} of the rows are zero"
    )


def non_zero_bytes(state: Arrays) -> int:
    """Bytes of the rows that are not all zero; -0.0 is not zero."""
    return sum(
        int(array.reshape(len(array), -1).view(np.uint8).any(1).sum()) * array[0].nbytes
        for array in state.values()
    )
