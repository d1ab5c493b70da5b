"""The log of prompt stores, compared with raw files.

``python benchmarks/bench_prompts.py [--quick] [--json] [--only PART]``; the files are in the folder
for temporary files (TMPDIR).
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from harness import Candidate, Report, Row, measure, option_parser

import mlstate
from mlstate._core import PromptLog

BLOCK = 256
LAYERS = 28
PART = (8, BLOCK, 128)  # (heads, tokens, head_dim) of float16: 512 KiB
PARTS = 2 * LAYERS  # K and V: 28 MiB a block
BLOCKS = 8  # of the prompt that is restored: 2,048 tokens, 224 MiB
STORED = 100_000
CHAIN = 1_000  # blocks of each stored prompt
FINGERPRINT = b"benchmark"


class Appender:
    """A store to which blocks of a new prompt are appended, and a raw file."""

    def __init__(self, folder: Path, log: PromptLog) -> None:
        random = np.random.default_rng(1)
        self.parts = [random.standard_normal(PART, np.float32).astype(np.float16)] * PARTS
        self.parts = [part.copy() for part in self.parts]
        self.log = log
        self.tokens = 0
        self.raw = os.open(folder / "raw", os.O_RDWR | os.O_CREAT, 0o666)
        self.raw_end = 0

    def append(self) -> None:
        """Store one block of a prompt that no other block begins with."""
        self.tokens += 1
        tokens = np.full(BLOCK, self.tokens, np.uint32)
        done = self.log.put(FINGERPRINT, tokens, BLOCK, [(0, BLOCK, b"", self.parts)], None, 60.0)
        assert done == [1]

    def append_raw(self) -> None:
        """Write the same bytes with one system call, and sync."""
        end = self.raw_end
        for start in range(0, PARTS, 2):
            end += os.pwritev(self.raw, self.parts[start : start + 2], end)
        os.fdatasync(self.raw)
        self.raw_end = end


def fill(log: PromptLog, count: int) -> np.ndarray:
    """Store `count` blocks without much payload; return the tokens of one prompt."""
    tokens = np.zeros(CHAIN * BLOCK, np.uint32)
    payload = [np.zeros(64, np.uint8)]
    for prompt in range(count // CHAIN):
        tokens = np.random.default_rng(prompt).integers(0, 150_000, CHAIN * BLOCK, np.uint32)
        records = [(0, (i + 1) * BLOCK, b"", payload) for i in range(CHAIN)]
        log.put(FINGERPRINT, tokens, BLOCK, records, None, 60.0)
    return tokens


def appending(report: Report, folder: Path, repeats: int) -> None:
    """Time an append to an empty store and to one with many blocks."""
    empty = Appender(folder, PromptLog(folder / "empty", True))
    full = Appender(folder, PromptLog(folder / "full", True))
    fill(full.log, STORED)
    candidates = [
        Candidate("raw append + fdatasync", empty.append_raw, limit=True),
        Candidate("put", empty.append),
        Candidate(f"put, {STORED:,} blocks stored", full.append),
    ]
    rows = measure(candidates, repeats)
    report.table("append 256 tokens: 28 MiB", rows, note="at most 1.25 of the limit")


def read_raw(file: int, offset: int, targets: list[np.ndarray]) -> None:
    """Read the payload of all blocks, in the steps that the system likes."""
    for target in targets:
        view = memoryview(target).cast("B")
        done = 0
        while done < len(view):
            done += os.preadv(file, [view[done : done + (1 << 20)]], offset + done)
        offset += done


def stored_prompt(folder: Path) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Store 2,048 tokens; return functions that restore them, and read the raw bytes."""
    appender = Appender(folder, PromptLog(folder / "restored", True))
    tokens = np.arange(BLOCKS * BLOCK, dtype=np.uint32)
    for block in range(BLOCKS):
        records = [(0, (block + 1) * BLOCK, b"", appender.parts)]
        appender.log.put(FINGERPRINT, tokens, BLOCK, records, None, 60.0)
        appender.append_raw()
    cache = [np.ones((8, 2 * BLOCKS * BLOCK, 128), np.float16) for _ in range(PARTS)]
    flat = [np.ones(8 * BLOCKS * BLOCK * 128, np.float16) for _ in range(PARTS)]
    match = appender.log.match(FINGERPRINT, tokens, BLOCK)
    requests = [
        (block, part, cache[part][:, block * BLOCK : (block + 1) * BLOCK])
        for block in range(BLOCKS)
        for part in range(PARTS)
    ]

    def restore(threads: int) -> None:
        mlstate.set_num_threads(threads)
        assert match.read(requests) == []

    return restore, partial(read_raw, appender.raw, 0, flat)


def restoring(report: Report, folder: Path, repeats: int) -> None:
    """Time the restore of 2,048 tokens into existing arrays."""
    restore, read = stored_prompt(folder)
    candidates = [
        Candidate("pread, 1 thread", read, limit=True),
        Candidate("read, verified, 1 thread", partial(restore, 1)),
        Candidate("read, verified, 2 threads", partial(restore, 2)),
    ]
    rows = measure(candidates, repeats)
    report.table(
        "restore 2,048 tokens: 224 MiB, warm", rows, note="1 thread at most 1.5, 2 at most 1.3"
    )


def looking_up(report: Report, folder: Path, repeats: int) -> None:
    """Time a match among many blocks, and the opening of their store."""
    log = PromptLog(folder / "looked-up", True)
    tokens = fill(log, STORED)[: BLOCKS * BLOCK]
    assert log.match(FINGERPRINT, tokens, BLOCK).length == len(tokens)
    log.close()
    stats = PromptLog(folder / "looked-up", False).stats()
    log = PromptLog(folder / "looked-up", False)
    candidates = [
        Candidate("match 2,048 tokens", partial(log.match, FINGERPRINT, tokens, BLOCK), at_most=50)
    ]
    title = f"{STORED:,} blocks stored, {stats['memory_bytes'] / STORED:.0f} bytes a block"
    report.table(title, measure(candidates, 20 * repeats, unit=1e-3), unit="us")
    opening = Candidate("open", partial(PromptLog, folder / "looked-up", False), at_most=50)
    report.table("open the same store", measure([opening], repeats))


def write_beside(folder: Path, ours: bool) -> None:
    """Append blocks until this process is terminated."""
    folder.mkdir()
    appender = Appender(folder, PromptLog(folder / "log", True))
    while True:
        (appender.append if ours else appender.append_raw)()
        if appender.tokens * len(appender.parts) * appender.parts[0].nbytes > 2 << 30:
            appender.log.prune(0, 60.0)
            appender.tokens = 0
        if appender.raw_end > 2 << 30:
            os.ftruncate(appender.raw, 0)
            appender.raw_end = 0


def beside_a_writer(report: Report, folder: Path, repeats: int) -> None:
    """Time a restore while another process appends: our writer, and a raw one, in turns."""
    restore, _ = stored_prompt(folder)
    rows: dict[str, Row] = {}
    for turn in range(6):
        name = "beside our writer" if turn % 2 else "beside a raw writer"
        place = folder / f"turn-{turn}"
        writer = multiprocessing.get_context("spawn").Process(
            target=write_beside, args=(place, bool(turn % 2)), daemon=True
        )
        writer.start()
        while not (place / "raw").exists():
            time.sleep(0.01)
        (row,) = measure([Candidate(name, partial(restore, 1))], repeats)
        assert writer.is_alive()
        writer.terminate()
        writer.join()
        shutil.rmtree(place)
        rows.setdefault(name, Row(name, [])).values.extend(row.values)
    title = "restore 224 MiB while another process appends"
    report.table(title, list(rows.values()), note="our writer at most 1.1 of a raw one")


PARTS_OF_REPORT: dict[str, Callable[[Report, Path, int], None]] = {
    "append": appending,
    "restore": restoring,
    "match": looking_up,
    "beside": beside_a_writer,
}


def main() -> None:
    """Print the tables."""
    parser = option_parser(__doc__, "3 repeats instead of 15", PARTS_OF_REPORT)
    options = parser.parse_args()
    report = Report("mlstate: prompt store", options.json, "prompts" if options.store else None)
    for name, part in PARTS_OF_REPORT.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                part(report, Path(folder), 3 if options.quick else 15)
    report.close()


if __name__ == "__main__":
    main()
