"""The log of prompt stores, compared with raw files, safetensors and mlx-lm.

``python benchmarks/bench_prompts.py [--quick] [--json] [--only PART]``; the files are in the folder
for temporary files (TMPDIR). Peers that are not installed are left out.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from harness import Candidate, Report, Row, measure, met, option_parser, show
from prompt_peers import MlxCache, RawFile, Safetensors

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


class Aims:
    """The aims of all parts, and the figures that were measured."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float, str]] = []

    def add(self, name: str, figure: float, at_most: float, unit: str = "") -> None:
        """Note one figure."""
        self.rows.append((name, figure, at_most, unit))

    def judge(self, report: Report) -> None:
        """Print all of them."""
        report.log("\naim")
        report.judge(
            [
                f"{name:<56}{'at most ' + format(at_most, 'g') + unit:>16}"
                f"{show(figure) + unit:>12}  {met(figure <= at_most)}"
                for name, figure, at_most, unit in self.rows
            ]
        )


def make_parts() -> list[np.ndarray]:
    """Return the keys and values of 256 tokens."""
    part = np.random.default_rng(1).standard_normal(PART, np.float32).astype(np.float16)
    return [part.copy() for _ in range(PARTS)]


class Appender:
    """Appends blocks of a new prompt to a store."""

    def __init__(self, log: PromptLog, parts: list[np.ndarray]) -> None:
        self.log, self.parts = log, parts
        self.tokens = 0

    def append(self) -> None:
        """Store one block of a prompt that no other block begins with."""
        self.tokens += 1
        tokens = np.full(BLOCK, self.tokens, np.uint32)
        done = self.log.put(FINGERPRINT, tokens, BLOCK, [(0, BLOCK, b"", self.parts)], None, 60.0)
        assert done == [1]


def fill(log: PromptLog, count: int) -> np.ndarray:
    """Store `count` blocks without much payload; return the tokens of one prompt."""
    tokens = np.zeros(CHAIN * BLOCK, np.uint32)
    payload = [np.zeros(64, np.uint8)]
    for prompt in range(count // CHAIN):
        tokens = np.random.default_rng(prompt).integers(0, 150_000, CHAIN * BLOCK, np.uint32)
        records = [(0, (i + 1) * BLOCK, b"", payload) for i in range(CHAIN)]
        log.put(FINGERPRINT, tokens, BLOCK, records, None, 60.0)
    return tokens


def appending(report: Report, aims: Aims, folder: Path, repeats: int) -> None:
    """Time an append to an empty store and to one with many blocks."""
    parts = make_parts()
    raw = RawFile(folder, parts)
    empty = Appender(PromptLog(folder / "empty", True), parts)
    full = Appender(PromptLog(folder / "full", True), parts)
    fill(full.log, STORED)
    candidates = [
        Candidate("raw append + fdatasync", raw.append, limit=True),
        Candidate("put", empty.append),
        Candidate(f"put, {STORED:,} blocks stored", full.append),
    ]
    if find_spec("safetensors"):
        candidates.append(
            Candidate("safetensors save_file + fsync", Safetensors(folder, parts).append)
        )
    if find_spec("mlx_lm"):
        saved = MlxCache(folder, parts, 1)
        candidates.append(Candidate("mlx-lm save_prompt_cache + fsync", saved.save))
    rows = measure(candidates, repeats)
    report.table("append 256 tokens: 28 MiB", rows)
    for row in rows[1:3]:
        aims.add(f"{row.name}, times a raw append", row.limit_ratio or 0, 1.25)


Restore = Callable[[int], None]


def stored_prompt(folder: Path, parts: list[np.ndarray]) -> Restore:
    """Store 2,048 tokens; return a function that restores them."""
    log = PromptLog(folder / "restored", True)
    tokens = np.arange(BLOCKS * BLOCK, dtype=np.uint32)
    for block in range(BLOCKS):
        records = [(0, (block + 1) * BLOCK, b"", parts)]
        log.put(FINGERPRINT, tokens, BLOCK, records, None, 60.0)
    cache = [np.ones((8, 2 * BLOCKS * BLOCK, 128), np.float16) for _ in range(PARTS)]
    match = log.match(FINGERPRINT, tokens, BLOCK)
    requests = [
        (block, part, cache[part][:, block * BLOCK : (block + 1) * BLOCK])
        for block in range(BLOCKS)
        for part in range(PARTS)
    ]

    def restore(threads: int) -> None:
        mlstate.set_num_threads(threads)
        assert match.read(requests) == []

    return restore


def restoring(report: Report, aims: Aims, folder: Path, repeats: int) -> None:
    """Time the restore of 2,048 tokens into existing arrays."""
    parts = make_parts()
    restore = stored_prompt(folder, parts)
    raw = RawFile(folder, parts)
    flat = [np.ones(8 * BLOCKS * BLOCK * 128, np.float16) for _ in range(PARTS)]
    candidates = [
        Candidate("pread, 1 thread", partial(raw.read, flat), limit=True),
        Candidate("read, verified, 1 thread", partial(restore, 1)),
        Candidate("read, verified, 2 threads", partial(restore, 2)),
        Candidate("pread, 2 threads", partial(raw.read_in_threads, flat)),
    ]
    peers = [raw]
    if find_spec("safetensors"):
        files = Safetensors(folder, parts)
        peers.append(files)
        cache = [np.ones((8, 2 * BLOCKS * BLOCK, 128), np.float16) for _ in range(PARTS)]
        call = partial(files.read, cache, BLOCKS)
        candidates.append(Candidate("safetensors load_file, and a copy to the cache", call))
    if find_spec("mlx_lm"):
        saved = MlxCache(folder, parts, BLOCKS)
        saved.save()
        candidates.append(Candidate("mlx-lm load_prompt_cache, to new arrays", saved.load))
    for peer in peers:
        for _ in range(BLOCKS):
            peer.append()
    rows = measure(candidates, repeats)
    report.table("restore 2,048 tokens: 224 MiB, warm", rows)
    for row, at_most in zip(rows[1:3], (1.5, 1.3), strict=True):
        aims.add(f"{row.name}, times pread on 1 thread", row.limit_ratio or 0, at_most)


def looking_up(report: Report, aims: Aims, folder: Path, repeats: int) -> None:
    """Time a match among many blocks, and the opening of their store."""
    log = PromptLog(folder / "looked-up", True)
    tokens = fill(log, STORED)[: BLOCKS * BLOCK]
    assert log.match(FINGERPRINT, tokens, BLOCK).length == len(tokens)
    log.close()
    log = PromptLog(folder / "looked-up", False)
    match = Candidate("match 2,048 tokens", partial(log.match, FINGERPRINT, tokens, BLOCK))
    (matching,) = measure([match], 20 * repeats, unit=1e-3)
    match.name += ", processor time"
    rows = measure([match], 20 * repeats, unit=1e-3, clock=time.thread_time_ns)
    report.table(f"{STORED:,} blocks stored", [matching, *rows], unit="us")
    opening = Candidate("open", partial(PromptLog, folder / "looked-up", False))
    scanning = Candidate(
        "open without its index file",
        partial(PromptLog, folder / "looked-up", False),
        partial((folder / "looked-up" / "index").unlink, missing_ok=True),
    )
    rows = measure([opening], repeats)
    rows += measure([scanning], min(repeats, 5))
    report.table("open the same store", rows)
    aims.add("match of 2,048 tokens", matching.median, 50, " us")
    aims.add(f"open, {STORED:,} blocks", rows[0].median, 50, " ms")
    aims.add("index in memory, a block", log.stats()["memory_bytes"] / STORED, 100, " B")


def write_beside(folder: Path, ours: bool) -> None:
    """Append blocks until this process is terminated."""
    folder.mkdir()
    parts = make_parts()
    appender = Appender(PromptLog(folder / "log", True), parts)
    raw = RawFile(folder, parts)
    for turn in range(1 << 30):
        (appender if ours else raw).append()
        if turn % 73 == 72:  # 2 GiB
            appender.log.prune(0, 60.0)
            os.ftruncate(raw.file, 0)
            raw.end = 0


def beside_a_writer(report: Report, aims: Aims, folder: Path, repeats: int) -> None:
    """Time a restore while another process appends: our writer, and a raw one, in turns."""
    restore = stored_prompt(folder, make_parts())
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
    report.table("restore 224 MiB while another process appends", list(rows.values()))
    raw, ours = rows.values()
    aims.add("restore beside our writer, times beside a raw one", ours.median / raw.median, 1.1)


PARTS_OF_REPORT: dict[str, Callable[[Report, Aims, Path, int], None]] = {
    "append": appending,
    "restore": restoring,
    "match": looking_up,
    "beside": beside_a_writer,
}


def main() -> None:
    """Print the tables."""
    options = option_parser(__doc__, "3 repeats instead of 15", PARTS_OF_REPORT).parse_args()
    report = Report.open("mlstate: prompt store", "prompts", options)
    aims = Aims()
    for name, part in PARTS_OF_REPORT.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                part(report, aims, Path(folder), 3 if options.quick else 15)
    aims.judge(report)
    report.close()


if __name__ == "__main__":
    main()
