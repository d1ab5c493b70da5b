"""Checkpoints compared with safetensors, torch.save, torch DCP, np.savez and plain I/O.

``python benchmarks/bench_checkpoint.py [--quick] [--json] [--only PART] [--repeats N] [--folder
FOLDER]``; mlstate must be installed, torch and safetensors take part if they are.  PART is a state
(A or B), an operation, both (``A.save``), or crc.  Needs about 8 GB of disk and 16 GB of memory,
including the page cache; ``--quick`` uses states of a few MB and no rank processes, as a smoke
test. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint_crc import measure_crc
from checkpoint_peers import OURS, Dcp, Mlstate, Ranks, Way, ways
from checkpoint_states import (
    STATES,
    Raw,
    bytes_of,
    clear,
    clear_and_wait,
    keep_memory,
    reload_page_cache,
    takes_direct,
)
from harness import Action, Candidate, Report, Row, add_rates, option_parser
from turns import Aim, take_turns

MANY = 1000  # arrays; states with more skip the slowest ways
RAW_FILE = "raw: one file, pwrite + fsync"
RAW_UNSYNCED = "raw: one file, pwrite"
RAW_DIRECT = "raw: one file, O_DIRECT + fsync"
RAW_FILES = "raw: a file each, pwrite + fsync"
RAW_FILES_DIRECT = "raw: a file each, O_DIRECT + fsync"
RAW_READ = "raw: one pread, touched memory"
MEMCPY = "memcpy, touched memory"
TWO_RANKS = "torch DCP, 2 ranks"
SYNCED = "{} + fsync"
DURABLE = f"{OURS}.save (durable, checksums)"
LOAD, LOAD_VERIFIED = f"{OURS}.load, verify=False", f"{OURS}.load"
LOAD_INTO = f"{OURS}.load(into=...)"
LAZY = f"{OURS}.load(mmap=True)"


@dataclass
class Run:
    """Options and values shared by the parts."""

    report: Report
    repeats: int
    quick: bool
    disk: Path
    letter: str = ""
    state: dict[str, Any] = field(default_factory=dict)
    raw: Any = None
    ways: dict[str, Way] = field(default_factory=dict)
    ranks: Ranks | None = None

    def enter(self, letter: str) -> None:
        """Make a state and everything that saves it."""
        self.leave()
        self.letter, self.state = letter, STATES[letter](self.quick)
        self.raw = Raw(self.state)
        self.ways = {name: way(self.state) for name, way in ways().items()}

    def leave(self) -> None:
        """Release everything."""
        if self.ranks is not None:
            self.ranks.close()
        self.ranks = None
        self.ways, self.raw, self.state = {}, None, {}
        gc.collect()

    def has_ranks(self) -> bool:
        """Whether torch DCP takes part with rank processes."""
        return Dcp.name in self.ways and not self.quick

    def two_ranks(self) -> Ranks:
        """The processes that are ranks of torch DCP."""
        if self.ranks is None:
            self.ranks = Ranks(self.letter, self.quick, 2)
        return self.ranks

    def title(self, label: str) -> str:
        size = bytes_of(self.state.values()) / 1e6
        return f"{self.letter}: {label}, {len(self.state):,} arrays, {size:,.0f} MB"

    def show(
        self, label: str, candidates: list[Candidate], aims: list[Aim], note: str = ""
    ) -> list[Row]:
        """Time and print, with the rate and the aims."""
        rows = add_rates(take_turns(candidates, self.repeats), bytes_of(self.state.values()))
        self.report.table(self.title(label), rows, note=note)
        self.judge([aim.verdict(rows) for aim in aims])
        return rows

    def judge(self, verdicts: list[str]) -> None:
        """Print the verdicts after the last table; small states prove nothing."""
        if not self.quick:
            self.report.judge(verdicts)


# ---- save ----


def raw_saves(raw: Raw, folder: Path, before: Action) -> list[Candidate]:
    """The system calls that write the same bytes."""
    target = folder / "x"
    write = partial(raw.write_one, target)
    candidates = [
        Candidate(MEMCPY, raw.copy),
        Candidate(RAW_UNSYNCED, partial(write, durable=False), before),
        Candidate(RAW_FILE, partial(write, durable=True), before, limit=True),
    ]
    if takes_direct(folder):
        call = partial(write, durable=True, direct=True)
        candidates.append(Candidate(RAW_DIRECT, call, before))
        if len(raw.pieces) < MANY:
            call = partial(raw.write_each, target, direct=True)
            candidates.append(Candidate(RAW_FILES_DIRECT, call, before))
    candidates.append(Candidate(RAW_FILES, partial(raw.write_each, target), before))
    return candidates


def saving(run: Run) -> None:
    """Save into an empty folder."""
    before = partial(clear if run.quick else clear_and_wait, run.disk)
    target = run.disk / "x"
    candidates = raw_saves(run.raw, run.disk, before)
    for name, way in run.ways.items():
        label = DURABLE if name == OURS else name
        save = partial(way.save, target)
        candidates.append(Candidate(label, save, before, baseline=isinstance(way, Dcp)))
        if not way.durable:
            call = partial(way.save_durably, target)
            candidates.append(Candidate(SYNCED.format(name), call, before))
    if run.has_ranks() and run.letter == "A":
        candidates.append(Candidate(TWO_RANKS, partial(run.two_ranks().save, target), before))
    run.show("save, disk", candidates, save_aims(run.letter))
    clear(run.disk)


def save_aims(letter: str) -> list[Aim]:
    if letter == "B":
        return [Aim(DURABLE, 2.5, RAW_FILE)]
    return [
        Aim(DURABLE, 1.2, RAW_FILES),
        Aim(DURABLE, 1.2, RAW_FILES_DIRECT),
        Aim(DURABLE, 1.6, RAW_DIRECT),
        Aim(DURABLE, 3, Dcp.name, faster=True),
        Aim(DURABLE, 3, TWO_RANKS, faster=True),
    ]


# ---- load ----


def store(run: Run, folder: Path, *, ranks: bool = False) -> dict[str, Path]:
    """Save in every way, and read all files into the page cache."""
    clear(folder)
    paths = {RAW_READ: folder / "raw"}
    run.raw.write_one(paths[RAW_READ], durable=False)
    for name, way in run.ways.items():
        paths[name] = folder / name.replace(" ", "-")
        way.save(paths[name])
    if ranks and run.has_ranks():
        paths[TWO_RANKS] = folder / "ranks"
        run.two_ranks().save(paths[TWO_RANKS])
    if not run.quick:
        os.sync()
    for path in paths.values():
        reload_page_cache(path)
    return paths


def loading(run: Run) -> None:
    """Load everything into memory that the caller provides."""
    paths = store(run, run.disk, ranks=run.letter == "A")
    candidates = [
        Candidate(MEMCPY, run.raw.copy),
        Candidate(RAW_READ, partial(run.raw.read_one, paths[RAW_READ]), limit=True),
    ]
    for name, way in run.ways.items():
        call = partial(way.load, paths[name])
        if isinstance(way, Mlstate):
            candidates += [
                Candidate(LOAD, call),
                Candidate(LOAD_VERIFIED, partial(way.load_verified, paths[name])),
                Candidate(LOAD_INTO, partial(way.load_into, paths[name])),
            ]
        else:
            candidates.append(Candidate(name, call, baseline=name == "safetensors"))
    if TWO_RANKS in paths:
        candidates.append(Candidate(TWO_RANKS, partial(run.two_ranks().load, paths[TWO_RANKS])))
    aims = [Aim(LOAD, 1.15, RAW_READ), Aim(LOAD_VERIFIED, 1.3, LOAD)]
    run.show("load, disk", candidates, aims, "files in the system's cache, memory reused")
    clear(run.disk)


def mapping(run: Run) -> None:
    """Map the files and touch every page."""
    paths = store(run, run.disk)
    candidates = [
        Candidate("raw: mmap, touched", partial(run.raw.map_one, paths[RAW_READ]), limit=True)
    ]
    for name, way in run.ways.items():
        if (call := getattr(way, "lazy", None)) is not None:
            label = LAZY if name == OURS else f"{name}, mapped"
            candidates.append(Candidate(label, partial(call, paths[name])))
    run.show("lazy load + touch of each page", candidates, [], "files in the system's cache")
    clear(run.disk)


def checksums(run: Run) -> None:
    """Measure the checksum alone and with a copy."""
    run.judge(measure_crc(run.report, run.disk, run.quick))
    clear(run.disk)


PARTS: dict[str, Callable[[Run], None]] = {
    "save": saving,
    "load": loading,
    "map": mapping,
}


def selected_runs(only: str | None) -> list[tuple[str, list[str]]]:
    """Return the states and parts to run."""
    letter, _, part = (only or "").rpartition(".")
    if only in STATES:
        letter, part = only, ""
    if (letter and letter not in STATES) or (part and part not in PARTS):
        raise SystemExit(
            f"--only: expected crc, one of {', '.join(STATES)}, or {', '.join(PARTS)}, "
            f"or both as in A.save; got {only!r}"
        )
    chosen = [part] if part else list(PARTS)
    return [(state, chosen) for state in STATES if letter in ("", state)]


def options() -> argparse.Namespace:
    parser = option_parser(__doc__, "small states, one repeat")
    parser.add_argument("--only", help=f"crc, A, B, {', '.join(PARTS)}, or both, as A.save")
    parser.add_argument("--repeats", type=int, help="rounds, 5 if not given")
    parser.add_argument("--folder", type=Path, help="where, on a disk; default: here")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    keep_memory()
    warnings.filterwarnings("ignore", module="torch")
    report = Report.open("mlstate: checkpoints", "checkpoint", arguments)
    report.log(
        "medians; 'x base': times faster than the base; '/limit': times the limit's duration"
    )
    repeats = arguments.repeats or (1 if arguments.quick else 5)
    with tempfile.TemporaryDirectory(dir=arguments.folder or Path.cwd(), prefix="bench-") as disk:
        run = Run(report, repeats, arguments.quick, Path(disk))
        try:
            if arguments.only in (None, "crc"):
                checksums(run)
            for letter, chosen in [] if arguments.only == "crc" else selected_runs(arguments.only):
                run.enter(letter)
                for part in chosen:
                    PARTS[part](run)
        finally:
            run.leave()
    report.close()


if __name__ == "__main__":
    main()
