"""Training: asynchronous saves, tiers and compressed states.

``python benchmarks/bench_training.py [--quick] [--json] [--only PART] [--repeats N] [--folder
FOLDER]``; mlstate and torch must be installed.  PART is async, tiers or compress.  Needs about 3 GB
of disk and 10 GB of memory; ``--quick`` uses small states, as a smoke test. See docs/benchmarks.md.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from checkpoint_states import (
    Arrays,
    Raw,
    bytes_of,
    clear,
    clear_and_wait,
    files_below,
    keep_memory,
    read_all,
    read_through,
    takes_direct,
)
from harness import Run, main
from processes import Processes, Ranks
from rows import Bar, Lines, Row, Way, Ways, no_op
from training_rank import DCP, DCP_KEPT, MEMCPY, SAVE, SHARES, STAGED, serve
from training_words import Trained, train

import mlstate
from mlstate.checkpoint import TieredState

WORLD = 2


def emptying(run: Run) -> partial[None]:
    """Return the call that empties the folder, and waits for the disk."""
    return partial(clear if run.quick else clear_and_wait, run.folder)


# ---- asynchronous saves ----


def way_of_ranks(run: Run, ranks: Processes, name: str) -> Way:
    """Let both ranks save; they are blocked until the slower one may change its state."""

    def save() -> dict[str, float]:
        answers = ranks.ask("time", name, run.folder / "x")
        staged, done = (max(times) for times in zip(*answers, strict=True))
        return {"ms": staged, "all of it": done}

    return Way(save, emptying(run), measures_itself=True)


def blocking(run: Run) -> Iterator[Row]:
    """Compare the times for which a save of two ranks blocks training.

    The state is Adam's m and v of 124 million parameters; each rank saves half of it.
    """
    with Ranks(serve, WORLD, "A", run.quick) as ranks:
        size = sum(ranks.ask("nbytes"))
        names = [SAVE, *(STAGED.format(share) for share in SHARES)]
        yield Row(
            f"time that a save blocks training: {WORLD} ranks over gloo, {size / 1e6:,.0f} MB",
            {name: way_of_ranks(run, ranks, name) for name in names},
            {name: way_of_ranks(run, ranks, name) for name in (DCP, DCP_KEPT)},
            {MEMCPY: way_of_ranks(run, ranks, MEMCPY)},
            () if run.quick else [Bar(STAGED.format(100), 1.2, MEMCPY)],
            note="both ranks at once, the slower one; all of it: until the checkpoint is on disk",
        )


# ---- tiers ----

TIERS = ("hot", "warm", "cold")
NAMES = tuple(f"experts.{i}.weight" for i in range(4))
MOVED = NAMES[0]
SPEED = 0.8  # least share of the speed of the raw copy or file

RAW_WRITE = "raw: one file, pwrite + fsync"
RAW_REPLACE = "raw: pwrite + fsync, rename over the old"
RAW_READ, RAW_READ_NEW = "raw: one pread, touched memory", "raw: one pread, new memory"
COPY, COPY_NEW = "memcpy, touched memory", "memcpy, new memory"


class Moves:
    """A tiered state with one unit that moves, and the bytes of this unit for raw moves."""

    def __init__(self, run: Run, folder: Path, **options: Any) -> None:
        self.run, rows = run, 64 if run.quick else 4096  # a unit of 192 MiB
        random = np.random.default_rng(5)
        model = {name: random.random((rows, 4096), np.float32) for name in NAMES}
        adam = {
            f"{name}.{moment}": random.random((rows, 4096), np.float32)
            for name in NAMES
            for moment in ("m", "v")
        }
        self.arrays = [model[MOVED], adam[f"{MOVED}.m"], adam[f"{MOVED}.v"]]
        self.raw = Raw({str(i): array for i, array in enumerate(self.arrays)})
        self.nbytes = sum(array.nbytes for array in self.arrays)
        folder.mkdir()
        self.folder, self.raw_file = folder / "tiers", folder / "raw"
        self.file = self.folder / f"{MOVED}.safetensors"  # path of the unit's file
        self.tiers = TieredState(model, adam, self.folder, **options)
        for name in NAMES[2:]:
            self.tiers.demote(name, to="cold")

    def put(self, tier: str) -> None:
        """Put the unit where a move begins."""
        now = TIERS.index(self.tiers.tier(MOVED))
        if TIERS.index(tier) < now:
            self.tiers.promote(MOVED, to=tier)
        elif TIERS.index(tier) > now:
            self.tiers.demote(MOVED, to=tier)

    def change(self) -> None:
        """Change every element, as a training step does."""
        self.put("warm")
        with self.tiers.use(MOVED) as unit:
            for array in (unit.parameter, *unit.states.values()):
                array += 1

    def row(self, title: str, *ways: Ways, least: dict[str, str], note: str) -> Row:
        """Make a row; `least` has the raw way whose speed is compared, by name."""
        bars = [Bar(name, SPEED, raw, faster=True) for name, raw in least.items()]
        title = f"{title}: a unit of {self.nbytes / (1 << 20):.0f} MiB"
        bars = [] if self.run.quick else bars
        options: dict[str, Any] = {"base": "", "nbytes": self.nbytes, "frees": False}
        return Row(title, *ways, bars=bars, note=note, **options)


def moving(run: Run) -> Iterator[Row]:
    """Compare moves to files and back, and to a device and back."""
    moves = Moves(run, run.folder / "files")
    yield demoting(moves)
    yield promoting(moves)
    moves.tiers.close()
    moves = Moves(run, run.folder / "cpu", device="cpu")
    yield copying(moves)
    moves.tiers.close()


def demoting(moves: Moves) -> Row:
    """Demote a changed unit to its file."""
    first, again = "TieredState.demote, no file yet", "TieredState.demote, replaces its file"
    sync = no_op if moves.run.quick else os.sync

    def empty() -> None:
        moves.raw_file.unlink(missing_ok=True)
        sync()

    def change(*, is_first: bool) -> None:
        moves.change()
        if is_first:
            moves.file.unlink(missing_ok=True)
        sync()

    def replace() -> None:
        new = moves.raw_file.with_suffix(".new")
        moves.raw.write_one(new, durable=True)
        new.rename(moves.raw_file)

    write = partial(moves.raw.write_one, moves.raw_file, durable=True)
    demote = partial(moves.tiers.demote, MOVED, to="cold")
    limits: Ways = {RAW_REPLACE: Way(replace, sync)}
    if takes_direct(moves.raw_file.parent):
        limits["raw: one file, O_DIRECT + fsync"] = Way(partial(write, direct=True), empty)
    limits[RAW_WRITE] = Way(write, empty)
    return moves.row(
        "demote to a file",
        {
            first: Way(demote, partial(change, is_first=True)),
            again: Way(demote, partial(change, is_first=False)),
        },
        {},
        limits,
        least={first: RAW_WRITE, again: RAW_REPLACE},
        note="all of it changed since it was cold; its file is durable when the call returns",
    )


def promoting(moves: Moves) -> Row:
    """Promote a unit from its file, in the page cache."""
    name = "TieredState.promote, cold to warm"
    moves.raw.write_one(moves.raw_file, durable=False)

    def in_cache() -> None:
        moves.put("cold")
        read_through(moves.folder)

    def read_new() -> np.ndarray:
        target = np.empty(moves.raw_file.stat().st_size, np.uint8)
        with moves.raw_file.open("rb") as file:
            read_all(file.fileno(), memoryview(target))
        return target

    cached = partial(read_through, moves.raw_file)
    return moves.row(
        "promote from a file",
        {name: Way(partial(moves.tiers.promote, MOVED, to="warm"), in_cache)},
        {},
        {
            RAW_READ_NEW: Way(read_new, cached),
            RAW_READ: Way(partial(moves.raw.read_one, moves.raw_file), cached),
        },
        least={name: RAW_READ_NEW},
        note="files in the system's cache, memory reused; ours is compared with its checksums",
    )


def copying(moves: Moves) -> Row:
    """Move a unit to separate memory, the stand-in for a device, and back."""
    promote, demote = (
        "TieredState.promote, warm to hot (cpu)",
        "TieredState.demote, hot (cpu) to warm",
    )
    return moves.row(
        "hot on 'cpu'",
        {
            promote: Way(partial(moves.tiers.promote, MOVED, to="hot"), partial(moves.put, "warm")),
            demote: Way(partial(moves.tiers.demote, MOVED, to="warm"), partial(moves.put, "hot")),
        },
        {},
        {COPY_NEW: lambda: [array.copy() for array in moves.arrays], COPY: moves.raw.copy},
        least={promote: COPY_NEW, demote: COPY_NEW},
        note="a move takes new memory and gives back the old; a process that keeps its memory",
    )


# ---- compression ----


def compressing(run: Run) -> Iterator[Row]:
    """Train; compare saves and loads of the upper halves of the numbers with each codec."""
    trained = train(run.quick)
    run.log(f"\n{described(trained)}")
    state = {n: (a.view(np.uint32) >> 16).astype(np.uint16) for n, a in trained.moments.items()}
    target, loaded_folder = run.folder / "x", run.folder.with_name(f"{run.folder.name}-loaded")
    loaded_folder.mkdir()

    def savez(path: object) -> None:
        with open(path, "wb") as file:  # noqa: PTH123
            np.savez_compressed(file, **state)

    calls = {
        f"mlstate, sparse, {codec or 'no codec'}": (
            partial(mlstate.save, model=state, sparse=True, compress=codec),
            mlstate.load,
        )
        for codec in (None, "zlib", "zstd")
    }
    calls["np.savez_compressed"] = savez, lambda path: dict(np.load(path))
    ways: Ways = {}
    stored: dict[str, int] = {}
    for name, (save, load) in calls.items():
        path = loaded_folder / name
        save(path)
        files = files_below(path) if path.is_dir() else [path]
        stored[f"{name}, save"] = sum(file.stat().st_size for file in files)
        ways[f"{name}, save"] = Way(partial(save, target), emptying(run))
        ways[f"{name}, load"] = partial(load, path)

    def add_sizes(lines: Lines) -> list[str]:
        for name, nbytes in stored.items():
            lines[name].extra["MB stored"] = f"{nbytes / 1e6:.1f}"
        return []

    peers = {name: ways.pop(name) for name in list(ways) if name.startswith("np.")}
    try:
        yield Row(
            f"the same numbers as bfloat16, {bytes_of(state.values()) / 1e6:,.0f} MB, compressed",
            ways,
            peers,
            base="",
            note="save: into an empty folder, mlstate's are durable; load: cached",
            frees=False,
            judge=add_sizes,
        )
    finally:
        clear(loaded_folder)
        loaded_folder.rmdir()


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


if __name__ == "__main__":
    keep_memory()
    warnings.filterwarnings("ignore", module="torch")
    main(
        __doc__,
        "training",
        "mlstate: training",
        {"async": blocking, "tiers": moving, "compress": compressing},
        quick="small states, one repeat",
        rounds=(5, 1),
    )
