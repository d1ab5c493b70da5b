"""The cost of moving one unit between tiers, for `bench_training.py`.

A unit is a parameter and Adam's two moments. Raw copies and raw files of the same size are the
limits. Other units exist in memory and in files of the same folder; the effect of a move on them is
counted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_states import Raw, read, read_all, read_through, takes_direct, written
from harness import Candidate, Report, Row, add_rates, met
from turns import Aim, take_turns

from mlstate import TieredState

TIERS = ("hot", "warm", "cold")
NAMES = tuple(f"experts.{i}.weight" for i in range(4))
MOVED = NAMES[0]
SPEED = 0.8  # aim: share of the speed of the raw copy or file
FEW = 8192  # bytes: added by reading the counters, and a header read twice

RAW_WRITE, RAW_DIRECT = "raw: one file, pwrite + fsync", "raw: one file, O_DIRECT + fsync"
RAW_REPLACE = "raw: pwrite + fsync, rename over the old"
RAW_READ, RAW_READ_NEW = "raw: one pread, touched memory", "raw: one pread, new memory"
COPY, COPY_NEW = "memcpy, touched memory", "memcpy, new memory"


def moving(report: Report, folder: Path, repeats: int, quick: bool) -> None:
    """Time moves to files and back, and to a device and back."""
    rows = 64 if quick else 4096  # a unit of 192 MiB
    with moves(folder / "files", rows) as moves_object:
        files(moves_object, report, repeats, quick)
    for device in devices():
        with moves(folder / device, rows, device=device) as moves_object:
            copies(moves_object, report, repeats, quick, device)


def devices() -> list[str]:
    """Devices for hot units; "cpu": separate memory, as torch tensors."""
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


class Moves:
    """A tiered state in which one unit moves, and the bytes of this unit for raw moves."""

    def __init__(self, folder: Path, rows: int, **options: Any) -> None:
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

    def show(
        self, report: Report, title: str, candidates: list[Candidate], repeats: int, note: str
    ) -> list[Row]:
        """Time and print, with the rate."""
        rows = add_rates(take_turns(candidates, repeats), self.nbytes)
        title = f"{title}: a unit of {self.nbytes / (1 << 20):.0f} MiB"
        report.table(title, rows, note=note)
        return rows


@contextmanager
def moves(folder: Path, rows: int, **options: Any) -> Iterator[Moves]:
    folder.mkdir()
    moves_object = Moves(folder, rows, **options)
    try:
        yield moves_object
    finally:
        moves_object.tiers.close()
        shutil.rmtree(folder)


# ---- files ----


def files(moves_object: Moves, report: Report, repeats: int, quick: bool) -> None:
    """Demote a changed unit to its file; promote it from the page cache."""
    verdicts = [
        *demoting(moves_object, report, repeats, quick),
        *promoting(moves_object, report, repeats),
        *others(moves_object),
    ]
    if not quick:
        report.judge(verdicts)


def demoting(moves_object: Moves, report: Report, repeats: int, quick: bool) -> list[str]:
    first, again = "TieredState.demote, no file yet", "TieredState.demote, replaces its file"
    sync: Callable[[], object] = (lambda: None) if quick else os.sync

    def empty() -> None:
        moves_object.raw_file.unlink(missing_ok=True)
        sync()

    def changed(*, is_first: bool) -> None:
        moves_object.change()
        if is_first:
            moves_object.file.unlink(missing_ok=True)
        sync()

    def replace() -> None:
        new = moves_object.raw_file.with_suffix(".new")
        moves_object.raw.write_one(new, durable=True)
        new.rename(moves_object.raw_file)

    write = partial(moves_object.raw.write_one, moves_object.raw_file, durable=True)
    demote = partial(moves_object.tiers.demote, MOVED, to="cold")
    candidates = [
        Candidate(RAW_WRITE, write, empty, limit=True),
        Candidate(RAW_REPLACE, replace, sync),
        Candidate(first, demote, partial(changed, is_first=True)),
        Candidate(again, demote, partial(changed, is_first=False)),
    ]
    if takes_direct(moves_object.raw_file.parent):
        candidates.insert(1, Candidate(RAW_DIRECT, partial(write, direct=True), empty))
    note = "all of it changed since it was cold; its file is durable when the call returns"
    rows = moves_object.show(report, "demote to a file", candidates, repeats, note)
    pairs = ((first, RAW_WRITE), (again, RAW_REPLACE))
    return [Aim(mlstate_name, SPEED, raw, faster=True).verdict(rows) for mlstate_name, raw in pairs]


def promoting(moves_object: Moves, report: Report, repeats: int) -> list[str]:
    mlstate_name = "TieredState.promote, cold to warm"
    moves_object.raw.write_one(moves_object.raw_file, durable=False)

    def in_cache() -> None:
        moves_object.put("cold")
        read_through(moves_object.folder)

    def read_new() -> np.ndarray:
        target = np.empty(moves_object.raw_file.stat().st_size, np.uint8)
        with moves_object.raw_file.open("rb") as file:
            read_all(file.fileno(), memoryview(target))
        return target

    cached = partial(read_through, moves_object.raw_file)
    candidates = [
        Candidate(
            RAW_READ, partial(moves_object.raw.read_one, moves_object.raw_file), cached, limit=True
        ),
        Candidate(RAW_READ_NEW, read_new, cached),
        Candidate(mlstate_name, partial(moves_object.tiers.promote, MOVED, to="warm"), in_cache),
    ]
    note = "files in the system's cache, memory reused; ours is compared with its checksums"
    rows = moves_object.show(report, "promote from a file", candidates, repeats, note)
    return [Aim(mlstate_name, SPEED, RAW_READ_NEW, faster=True).verdict(rows)]


# ---- other units ----


def others(moves_object: Moves) -> list[str]:
    """Move the unit once more each way, and check the other units."""
    moves_object.change()
    verdicts = []
    for call, count in ((moves_object.tiers.demote, written), (moves_object.tiers.promote, read)):
        before, counted = looks(moves_object), count()
        call(MOVED)
        counted = count() - counted
        same = looks(moves_object) == before
        beyond = counted - moves_object.file.stat().st_size
        verdicts.append(
            f"{call.__name__}: bytes of other units touched, 0 wanted: "
            f"files and memory {'as before' if same else 'CHANGED'}, "
            f"{count.__name__} beyond the unit's file: {max(beyond, 0):,} bytes, "
            + met(same and beyond <= FEW)
        )
    return verdicts


def looks(moves_object: Moves) -> dict[str, Any]:
    """Facts that reveal a change: of files inode, size and times, of arrays address and bits.

    A writer cannot set back the time at which an inode was changed.
    """
    looks_by_path: dict[str, Any] = {}
    for path in sorted(moves_object.folder.iterdir()):
        if path != moves_object.file:
            facts = path.stat()
            looks_by_path[path.name] = (
                facts.st_ino,
                facts.st_size,
                facts.st_mtime_ns,
                facts.st_ctime_ns,
            )
    with moves_object.tiers.use(NAMES[1]) as unit:
        for name, array in {"parameter": unit.parameter, **unit.states}.items():
            looks_by_path[f"array {name}"] = array.ctypes.data, hash(array.tobytes())
    return looks_by_path


# ---- memory ----


def copies(moves_object: Moves, report: Report, repeats: int, quick: bool, device: str) -> None:
    """Move a unit to the memory of a device, and back."""
    promote = f"TieredState.promote, warm to hot ({device})"
    demote = f"TieredState.demote, hot ({device}) to warm"
    raw = raw_copies(moves_object, device)
    candidates = [
        *raw,
        Candidate(
            promote,
            partial(moves_object.tiers.promote, MOVED, to="hot"),
            partial(moves_object.put, "warm"),
        ),
        Candidate(
            demote,
            partial(moves_object.tiers.demote, MOVED, to="warm"),
            partial(moves_object.put, "hot"),
        ),
    ]
    note = "a move takes new memory and gives back the old; a process that keeps its memory"
    rows = moves_object.show(report, f"hot on {device!r}", candidates, repeats, note)
    back = raw[-1].name
    reference = raw[-2].name if device == "cuda" else back
    if not quick:
        pairs = ((promote, reference), (demote, back))
        report.judge(
            [
                Aim(mlstate_name, SPEED, other, faster=True).verdict(rows)
                for mlstate_name, other in pairs
            ]
        )


def raw_copies(moves_object: Moves, device: str) -> list[Candidate]:
    """Plain copies of the unit's arrays; the last one is the way back."""
    candidates = [Candidate(COPY, moves_object.raw.copy, limit=device == "cpu")]
    if device == "cpu":
        return [
            *candidates,
            Candidate(COPY_NEW, lambda: [array.copy() for array in moves_object.arrays]),
        ]
    import torch

    near = [torch.from_numpy(array) for array in moves_object.arrays]
    far = [tensor.to(device) for tensor in near]

    def there() -> object:
        moved = [tensor.to(device) for tensor in near]
        torch.cuda.synchronize()
        return moved

    return [
        *candidates,
        Candidate(f"torch: to {device}, new memory", there, limit=True),
        Candidate(f"torch: from {device}, new memory", lambda: [t.to("cpu") for t in far]),
    ]
