"""Savings from zero rows, unchanged rows and compression, for `bench_training.py`.

The state is Adam's state of the embedding in `training_words.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import training_words
from checkpoint_states import (
    Arrays,
    Raw,
    bytes_of,
    clear,
    clear_and_wait,
    files_below,
    inodes_below,
    new_shard_bytes,
    read_through,
    written,
)
from harness import Candidate, Report, Row
from training_words import MORE_STEPS, Trained
from turns import Aim, take_turns

import mlstate

SMALLER, WRITTEN = 3.5, 1.2  # aims, as ratios
LOAD_TURNS = 3  # loads are short: this many times as many rounds
RAW_WRITE, RAW_READ = "raw: one file, pwrite + fsync", "raw: one pread, touched memory"
WAYS = {  # how the state is stored: arguments of `save`
    "full": {},
    "sparse": {"sparse": True},
    "incremental": {"sparse": True, "incremental": True},
}
CODECS = (None, "zlib", "zstd")
LOADS = {  # how it is loaded, and whether into existing arrays
    "load, verify=False": (False, False),
    "load": (True, False),
    "load(into=...)": (True, True),
}


def measuring(report: Report, folder: Path, repeats: int, quick: bool) -> None:
    """Train; save and load all rows, the nonzero rows, and the changed rows."""
    trained = training_words.train(quick)
    report.log(f"\n{described(trained)}")
    sparse = Sparse(trained, folder, repeats, quick)
    for part in (sparse.saving, sparse.adding, sparse.loading, sparse.compressing):
        rows, title, note, verdicts = part()
        report.table(title, rows, note=note)
        if not quick:
            report.judge(verdicts)
        clear(folder)


def described(trained: Trained) -> str:
    """Describe the training, and the share of zero and unchanged rows."""
    total = bytes_of(trained.before.values())
    zero = 1 - non_zero_bytes(trained.before) / total
    changed = changed_bytes(trained.before, trained.after) / total
    first, last = fmean(trained.losses[:10]), fmean(trained.losses[-10:])
    return (
        f"Adam's moments of an embedding of {trained.words:,} words, {total / 1e6:,.0f} MB: after "
        f"{trained.steps} steps (loss {first:.2f} to {last:.2f}) {zero:.1%} of the rows are zero; "
        f"{MORE_STEPS} steps later {changed:.1%} changed"
    )


def non_zero_bytes(state: Arrays) -> int:
    """Bytes of the rows that are not all zero."""
    return sum(int(as_bytes(array).any(1).sum()) * array[0].nbytes for array in state.values())


def changed_bytes(before: Arrays, after: Arrays) -> int:
    """Bytes of the rows with a changed byte."""
    return sum(
        int((as_bytes(array) != as_bytes(after[name])).any(1).sum()) * array[0].nbytes
        for name, array in before.items()
    )


def as_bytes(array: np.ndarray) -> np.ndarray:
    """View rows as bytes: -0.0 is not zero."""
    return array.reshape(len(array), -1).view(np.uint8)


Table = tuple[list[Row], str, str, list[str]]


class Sparse:
    """The states, their folders, and the measurements."""

    def __init__(self, trained: Trained, folder: Path, repeats: int, quick: bool) -> None:
        self.before, self.after = trained.before, trained.after
        self.folder, self.repeats = folder, repeats
        self.empty = partial(clear if quick else clear_and_wait, folder)
        self.raw = Raw(self.before)
        self.size = f"{bytes_of(self.before.values()) / 1e6:,.0f} MB"

    def save(self, path: Path, state: Arrays, way: str) -> None:
        optimizer = mlstate.OptimizerStateDict(state, optimizer_type="adam")
        mlstate.save(path, optimizer=optimizer, **WAYS[way])

    def base(self) -> Path:
        """A sparse checkpoint of the previous state, which others are copied from."""
        base = self.folder / "base"
        if not base.exists():
            self.save(base, self.before, "sparse")
        return base

    # ---- save ----

    def saving(self) -> Table:
        """Save into an empty folder."""
        target = self.folder / "x"
        write = partial(self.raw.write_one, target, durable=True)
        candidates = [Candidate(RAW_WRITE, write, self.empty, limit=True)]
        stored = {RAW_WRITE: bytes_of(self.before.values())}
        for way in ("full", "sparse"):
            self.empty()
            name, save = f"mlstate.save, {way}", partial(self.save, target, self.before, way)
            save()
            stored[name] = sum(file.stat().st_size for file in files_below(target))
            candidates.append(Candidate(name, save, self.empty, baseline=way == "full"))
        rows = take_turns(candidates, self.repeats)
        for row in rows:
            row.extra["MB stored"] = f"{stored[row.name] / 1e6:.1f}"
        smaller = stored["mlstate.save, full"] / stored["mlstate.save, sparse"]
        met = "met" if smaller >= SMALLER else "NOT MET"
        verdicts = [f"sparse >= {SMALLER:g}x smaller than full: {smaller:.2f}, {met}"]
        return rows, f"save, {self.size}", "into an empty folder; MB stored: all files", verdicts

    def adding(self) -> Table:
        """Save the new state over the previous checkpoint."""
        base, target = self.base(), self.folder / "x"
        candidates, asked = [], {}
        before = partial(put_back, base, target)
        for way in WAYS:
            name, save = f"mlstate.save, {way}", partial(self.save, target, self.after, way)
            before()
            asked[name] = bytes_written(save, target)
            check(target, self.after)
            candidates.append(Candidate(name, save, before, baseline=way == "full"))
        rows = take_turns(candidates, self.repeats)
        for row in rows:
            row.extra["MB written"] = f"{asked[row.name] / 1e6:.1f}"
        changed = changed_bytes(self.before, self.after)
        ratio = asked["mlstate.save, incremental"] / changed
        met = "met" if ratio <= WRITTEN else "NOT MET"
        verdicts = [
            f"incremental: bytes written <= {WRITTEN:g}x the {changed:,} of changed rows: "
            f"{ratio:.3f}, {met}"
        ]
        title = f"save again after {MORE_STEPS} more steps, {self.size}"
        return rows, title, "onto a sparse checkpoint; MB written: all files", verdicts

    # ---- load ----

    def loading(self) -> Table:
        """Load the checkpoint of each way."""
        raw = self.folder / "raw"
        self.raw.write_one(raw, durable=False)
        candidates = [Candidate(RAW_READ, partial(self.raw.read_one, raw), limit=True)]
        places = {}
        for way in WAYS:
            places[way] = self.folder / way
            if way == "incremental":
                put_back(self.base(), places[way])
            state = self.after if way == "incremental" else self.before
            self.save(places[way], state, way)
            check(places[way], state)
            read_through(places[way])
        into = mlstate.OptimizerStateDict({n: np.ones_like(a) for n, a in self.before.items()})
        verdicts: list[Callable[[list[Row]], str]] = []
        for name, (verify, filled) in LOADS.items():
            options = {"into": {"optimizer": into}} if filled else {}
            for way, path in places.items():
                call = partial(mlstate.load, path, verify=verify, **options)
                candidates.append(Candidate(f"mlstate.{name}, {way}", call))
            aim = Aim(f"mlstate.{name}, sparse", 1, f"mlstate.{name}, full")
            verdicts.append(aim.verdict)
        rows = take_turns(candidates, LOAD_TURNS * self.repeats)
        note = "files in the system's cache, memory reused; incremental: on a sparse one"
        return rows, f"load, {self.size}", note, [verdict(rows) for verdict in verdicts]

    # ---- compression ----

    def compressing(self) -> Table:
        """Save and load the upper halves of the numbers, as bfloat16 would keep them."""
        state = {n: (a.view(np.uint32) >> 16).astype(np.uint16) for n, a in self.before.items()}
        total, target = bytes_of(state.values()), self.folder / "x"
        candidates, stored = [], {}

        def compare(name: str, save: Callable[[], object], load: Callable[[], object]) -> None:
            self.empty()
            save()
            stored[f"{name}, save"] = sum(f.stat().st_size for f in files_below(self.folder))
            place = self.folder.with_name(f"{self.folder.name}-{len(stored)}")
            places.append(place)
            shutil.copytree(self.folder, place)
            candidates.append(Candidate(f"{name}, save", save, self.empty))
            candidates.append(Candidate(f"{name}, load", partial(load, place)))

        places: list[Path] = []
        try:
            for codec in CODECS:
                options = {"sparse": True, "compress": codec}
                compare(
                    f"mlstate, sparse, {codec or 'no codec'}",
                    partial(mlstate.save, target, state, **options),
                    lambda place: mlstate.load(place / "x"),
                )
            compare(
                "np.savez_compressed",
                lambda: np.savez_compressed(self.folder / "x.npz", **state),
                lambda place: dict(np.load(place / "x.npz").items()),
            )
            rows = take_turns(candidates, self.repeats)
        finally:
            for place in places:
                shutil.rmtree(place, ignore_errors=True)
        for row in rows:
            if row.name in stored:
                row.extra["MB stored"] = f"{stored[row.name] / 1e6:.1f}"
        title = f"the same numbers as bfloat16, {total / 1e6:,.0f} MB, compressed"
        return rows, title, "save: into an empty folder, mlstate's are durable; load: cached", []


def put_back(base: Path, target: Path) -> None:
    """Restore a checkpoint on the disk."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(base, target)
    os.sync()


def bytes_written(save: Callable[[], object], target: Path) -> int:
    """Bytes that a save writes: all files or, if the system does not count them, shard files."""
    inodes, asked = inodes_below(target), written()
    save()
    return max(written() - asked, new_shard_bytes(target, inodes))


def check(path: Path, state: Arrays) -> None:
    """The loaded state has the bits of the saved one."""
    arrays = mlstate.load(path).optimizer
    for name, array in state.items():
        if not np.array_equal(as_bytes(arrays[name]), as_bytes(array)):
            raise RuntimeError(f"{path.name}: {name} is not as it was saved")
