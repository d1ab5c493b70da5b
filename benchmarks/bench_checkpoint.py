"""Checkpoints compared with safetensors, torch.save, torch DCP, np.savez and plain I/O.

``python benchmarks/bench_checkpoint.py [--quick] [--json] [--only PART] [--repeats N] [--folder
FOLDER] [--memory-folder FOLDER]``; mlstate must be installed, torch and safetensors take part if
they are.  PART is a state (A or B), an operation, both (``A.save``), or crc.  Needs about 8 GB of
disk and 16 GB of memory, including the page cache; ``--quick`` uses states of a few MB and no rank
processes, as a smoke test. See docs/benchmarks.md.
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
from checkpoint_memory import WHAT, peak_of
from checkpoint_peers import OURS, Dcp, Mlstate, Ranks, Way, ways
from checkpoint_states import (
    RANKS,
    STATES,
    Raw,
    bytes_of,
    clear,
    clear_and_wait,
    inodes_below,
    keep_memory,
    new_shard_bytes,
    read_through,
    reload_page_cache,
    takes_direct,
    written,
)
from harness import Action, Candidate, Report, Row, option_parser
from turns import Aim, take_turns

import mlstate

MANY = 1000  # arrays; states with more skip the slowest ways
RAW_FILE = "raw: one file, pwrite + fsync"
RAW_UNSYNCED = "raw: one file, pwrite"
RAW_DIRECT = "raw: one file, O_DIRECT + fsync"
RAW_FILES = "raw: a file each, pwrite + fsync"
RAW_FILES_DIRECT = "raw: a file each, O_DIRECT + fsync"
RAW_READ = "raw: one pread, touched memory"
RAW_ROWS = "raw: a pread each, touched memory"
RAW_THROUGH = "raw: all files through 1 MiB of memory"
MEMCPY = "memcpy, touched memory"
TWO_RANKS = "torch DCP, 2 ranks"
EIGHT_RANKS = f"torch DCP, first of {RANKS} ranks"
SYNCED = "{} + fsync"
DURABLE = f"{OURS}.save (durable, checksums)"
AGAIN = f"{OURS}.save, nothing changed"
LOAD, LOAD_VERIFIED = f"{OURS}.load, verify=False", f"{OURS}.load"
LOAD_INTO = f"{OURS}.load(into=...)"
PARTIAL, PARTIAL_VERIFIED = f"{OURS}.load of a rank, verify=False", f"{OURS}.load of a rank"
LAZY, VERIFY = f"{OURS}.load(mmap=True)", f"{OURS}.checkpoint.verify"


@dataclass
class Run:
    """Options and values shared by the parts."""

    report: Report
    repeats: int
    quick: bool
    disk: Path
    memory: Path | None
    letter: str = ""
    state: dict[str, Any] = field(default_factory=dict)
    raw: Any = None
    ways: dict[str, Way] = field(default_factory=dict)
    ranks: dict[str, Ranks] = field(default_factory=dict)

    def places(self) -> list[tuple[str, Path]]:
        """The disk, and memory if there is a file system in it."""
        places = [("disk", self.disk)]
        return places if self.memory is None else [*places, ("tmpfs", self.memory)]

    def enter(self, letter: str) -> None:
        """Make a state and everything that saves it."""
        self.leave()
        self.letter, self.state = letter, STATES[letter](self.quick)
        self.raw = Raw(self.state)
        self.ways = {name: way(self.state) for name, way in ways().items()}

    def leave(self) -> None:
        """Release everything."""
        for ranks in self.ranks.values():
            ranks.close()
        self.ranks = {}
        self.ways, self.raw, self.state = {}, None, {}
        gc.collect()

    def has_ranks(self) -> bool:
        """Whether torch DCP takes part with rank processes."""
        return Dcp.name in self.ways and not self.quick

    def group(self, name: str) -> Ranks:
        """The processes that are ranks of torch DCP."""
        if name not in self.ranks:
            world = 2 if name == TWO_RANKS else RANKS
            fake = name == EIGHT_RANKS
            self.ranks[name] = Ranks(self.letter, self.quick, world, fake=fake)
        return self.ranks[name]

    def title(self, label: str) -> str:
        size = bytes_of(self.state.values()) / 1e6
        return f"{self.letter}: {label}, {len(self.state):,} arrays, {size:,.0f} MB"

    def show(
        self, label: str, candidates: list[Candidate], aims: list[Aim], note: str = ""
    ) -> list[Row]:
        """Time and print, with the rate and the aims."""
        rows = take_turns(candidates, self.repeats)
        size = bytes_of(self.state.values())
        for row in rows:
            row.extra["GB/s"] = f"{size / row.median * 1e-6:.2f}"
        self.report.table(self.title(label), rows, note=note)
        self.judge([aim.verdict(rows) for aim in aims])
        return rows

    def judge(self, verdicts: list[str]) -> None:
        """Print the verdicts after the last table; small states prove nothing."""
        if not self.quick:
            self.report.judge(verdicts)


# ---- save ----


def raw_saves(raw: Raw, folder: Path, before: Action, disk: bool) -> list[Candidate]:
    """The system calls that write the same bytes."""
    target = folder / "x"
    write = partial(raw.write_one, target)
    candidates = [
        Candidate(MEMCPY, raw.copy),
        Candidate(RAW_UNSYNCED, partial(write, durable=False), before),
    ]
    if disk:
        candidates.append(Candidate(RAW_FILE, partial(write, durable=True), before, limit=True))
        if takes_direct(folder):
            call = partial(write, durable=True, direct=True)
            candidates.append(Candidate(RAW_DIRECT, call, before))
            if len(raw.pieces) < MANY:
                call = partial(raw.write_each, target, direct=True)
                candidates.append(Candidate(RAW_FILES_DIRECT, call, before))
        candidates.append(Candidate(RAW_FILES, partial(raw.write_each, target), before))
    else:
        candidates[-1].limit = True
    return candidates


def saving(run: Run) -> None:
    """Save into an empty folder."""
    for place, folder in run.places():
        disk = place == "disk"
        before = partial(clear_and_wait if disk and not run.quick else clear, folder)
        target = folder / "x"
        candidates = raw_saves(run.raw, folder, before, disk)
        for name, way in run.ways.items():
            label = DURABLE if name == OURS else name
            if isinstance(way, Dcp) and len(run.state) > MANY and not disk:
                continue
            if way.durable:
                call = partial(way.save, target)
                candidates.append(Candidate(label, call, before, baseline=isinstance(way, Dcp)))
                continue
            candidates.append(Candidate(label, partial(way.save, target), before))
            if disk:
                call = partial(way.save_durably, target)
                candidates.append(Candidate(SYNCED.format(name), call, before))
        if run.has_ranks() and run.letter == "A" and disk:
            call = partial(run.group(TWO_RANKS).save, target)
            candidates.append(Candidate(TWO_RANKS, call, before))
        run.show(f"save, {place}", candidates, save_aims(run.letter) if disk else [])
        clear(folder)


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


def again(run: Run) -> None:
    """Save the unchanged state again, and count the bytes written."""
    way = run.ways.get(OURS)
    if way is None:
        return
    for place, folder in run.places():
        clear(folder)
        target = folder / "x"
        way.save(target)
        inodes = inodes_below(target)
        asked = written()
        way.save(target)
        asked = written() - asked
        shards = new_shard_bytes(target, inodes)
        candidates = [
            Candidate(MEMCPY, run.raw.copy, limit=True),
            Candidate(AGAIN, partial(way.save, target)),
        ]
        run.show(f"save again, {place}", candidates, [])
        met = "met" if shards == 0 else "NOT MET"
        run.judge(
            [f"new shard files: {shards:,} bytes, 0 wanted: {met}; all writes: {asked:,} bytes"]
        )
        clear(folder)


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
        run.group(TWO_RANKS).save(paths[TWO_RANKS])
    if not run.quick:
        os.sync()
    for path in paths.values():
        reload_page_cache(path)
    return paths


def loading(run: Run) -> None:
    """Load everything into memory that the caller provides."""
    for place, folder in run.places():
        full = place == "disk"
        if not full:
            run.ways = {n: w for n, w in run.ways.items() if n in (OURS, "safetensors")}
        paths = store(run, folder, ranks=full and run.letter == "A")
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
                baseline = name == "safetensors"
                candidates.append(Candidate(name, call, baseline=baseline))
        if TWO_RANKS in paths:
            call = partial(run.group(TWO_RANKS).load, paths[TWO_RANKS])
            candidates.append(Candidate(TWO_RANKS, call))
        aims = [Aim(LOAD, 1.15, RAW_READ), Aim(LOAD_VERIFIED, 1.3, LOAD)]
        run.show(f"load, {place}", candidates, aims, "files in the system's cache, memory reused")
        clear(folder)
    run.ways = {name: way(run.state) for name, way in ways().items()}


def parts(run: Run) -> None:
    """Map and touch everything; load the first eighth of the rows; verify."""
    paths = store(run, run.disk)
    lazy_loads(run, paths)
    row_loads(run, paths)
    verifying(run, paths)
    clear(run.disk)


def lazy_loads(run: Run, paths: dict[str, Path]) -> None:
    candidates = [
        Candidate("raw: mmap, touched", partial(run.raw.map_one, paths[RAW_READ]), limit=True)
    ]
    for name, way in run.ways.items():
        if (call := getattr(way, "lazy", None)) is not None:
            label = LAZY if name == OURS else f"{name}, mapped"
            candidates.append(Candidate(label, partial(call, paths[name])))
    run.show("lazy load + touch of each page", candidates, [], "files in the system's cache")


def row_loads(run: Run, paths: dict[str, Path]) -> None:
    candidates = [
        Candidate(RAW_ROWS, partial(run.raw.read_rows, paths[RAW_READ]), limit=True),
    ]
    for name, way in run.ways.items():
        if isinstance(way, Mlstate):
            candidates += [
                Candidate(PARTIAL, partial(way.rows, paths[name])),
                Candidate(PARTIAL_VERIFIED, partial(way.rows, paths[name], verify=True)),
            ]
        elif (call := getattr(way, "rows", None)) is not None:
            candidates.append(Candidate(f"{name}, slices", partial(call, paths[name])))
    if run.has_ranks():
        call = partial(run.group(EIGHT_RANKS).load, paths[Dcp.name])
        candidates.append(Candidate(EIGHT_RANKS, call, baseline=True))
    aims = [Aim(PARTIAL, 1.5, RAW_ROWS), Aim(PARTIAL, 10, EIGHT_RANKS, faster=True)]
    note = "files in the system's cache; GB/s of the whole state"
    run.show(f"first 1/{RANKS} of the rows of each array", candidates, aims, note)


def verifying(run: Run, paths: dict[str, Path]) -> None:
    which = OURS if OURS in paths else RAW_READ
    candidates = [
        Candidate(RAW_THROUGH, partial(read_through, paths[which]), limit=True),
        Candidate(RAW_READ, partial(run.raw.read_one, paths[RAW_READ])),
    ]
    if OURS in paths:
        candidates.append(Candidate(VERIFY, partial(mlstate.checkpoint.verify, paths[OURS])))
    aims = [Aim(VERIFY, round(1 / 0.7, 2), RAW_THROUGH), Aim(VERIFY, round(1 / 0.7, 2), RAW_READ)]
    run.show("verify", candidates, aims, "files in the system's cache")


# ---- memory ----


def memory(run: Run) -> None:
    """Measure the peak of memory of single calls, each in a new process."""
    size = bytes_of(run.state.values()) / (1 << 20)
    report, lines = run.report, []
    report.log(f"\n{run.title('peak of memory')}")
    report.log(
        "(MiB beyond state and result; a process each; 'own', seen each ms: without mapped files)"
    )
    report.log(f"{'':<{report.WIDTH}}{'own':>9}{'all':>9}{'first ms':>10}")
    names = [n for n in run.ways if n != Dcp.name or len(run.state) < MANY]
    for name in names[: 1 if run.quick else None]:
        clear(run.disk)
        for operation in WHAT:
            peaks = peak_of(operation, name, run.letter, run.disk / "x", run.quick)
            result = size if operation == "load" else 0.0
            own_mib, every = peaks["own_mib"] - result, peaks["all_mib"] - result
            label = f"{name}: {operation}"
            report.log(f"{label:<{report.WIDTH}}{own_mib:>9.1f}{every:>9.1f}{peaks['ms']:>10.0f}")
            lines.append({"name": label, "own_mib": own_mib, "all_mib": every, "ms": peaks["ms"]})
    aims = [
        f"{line['name']} <= 16 MiB: {max(line['own_mib'], line['all_mib']):.1f}, "
        + ("met" if max(line["own_mib"], line["all_mib"]) <= 16 else "NOT MET")
        for line in lines
        if line["name"].startswith(OURS)
    ]
    report.tables.append({"title": run.title("peak of memory"), "rows": lines})
    run.judge(aims)
    clear(run.disk)


def checksums(run: Run) -> None:
    """Measure the checksum alone and with a copy."""
    run.judge(measure_crc(run.report, run.disk, run.quick))
    clear(run.disk)


PARTS: dict[str, Callable[[Run], None]] = {
    "save": saving,
    "again": again,
    "load": loading,
    "parts": parts,
    "memory": memory,
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
    return [(one, chosen) for one in STATES if letter in ("", one)]


def options() -> argparse.Namespace:
    parser = option_parser(__doc__, "small states, one repeat")
    parser.add_argument("--only", help=f"crc, A, B, {', '.join(PARTS)}, or both, as A.save")
    parser.add_argument("--repeats", type=int, help="rounds, 5 if not given")
    parser.add_argument("--folder", type=Path, help="where, on a disk; default: here")
    parser.add_argument("--memory-folder", type=Path, default=Path("/dev/shm"), help="on a tmpfs")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    keep_memory()
    warnings.filterwarnings("ignore", module="torch")
    report = Report(
        "mlstate: checkpoints", arguments.json, "checkpoint" if arguments.store else None
    )
    report.log(
        "medians; 'x base': times faster than the base; '/limit': times the limit's duration"
    )
    if not hasattr(mlstate, "save"):
        report.log("this mlstate has no mlstate.save: its lines are left out")
    memory_folder = arguments.memory_folder if arguments.memory_folder.is_dir() else None
    repeats = arguments.repeats or (1 if arguments.quick else 5)
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder or Path.cwd(), prefix="bench-") as disk,
        tempfile.TemporaryDirectory(dir=memory_folder, prefix="bench-") as shared,
    ):
        shm = None if memory_folder is None else Path(shared)
        run = Run(report, repeats, arguments.quick, Path(disk), shm)
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
