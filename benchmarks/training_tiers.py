"""The cost of moving one unit between tiers, for `bench_training.py`.

A unit is a parameter and Adam's two moments. Raw copies and raw files of the same size are the
limits. Other units exist in memory and in files of the same folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_states import Raw, read_all, read_through, takes_direct
from harness import Run
from rows import Bar, Row, Way, Ways, no_op

from mlstate import TieredState

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
