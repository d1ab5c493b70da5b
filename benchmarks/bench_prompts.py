"""The log of prompt stores, compared with raw files, safetensors and mlx-lm.

``python benchmarks/bench_prompts.py [--quick] [--json] [--only PART]``. Peers that are not
installed are left out.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from checkpoint_states import sync
from harness import Run, main
from processes import Processes
from rows import Bar, Row, Way, Ways, verdict

import mlstate
from mlstate._core import PromptLog

BLOCK = 256
PART = (8, BLOCK, 128)  # (heads, tokens, head_dim) of float16: 512 KiB
PARTS = 2 * 28  # K and V of each layer: 28 MiB a block
BLOCKS = 8  # of the prompt that is restored: 2,048 tokens, 224 MiB
STORED = 100_000
CHAIN = 1_000  # blocks of each stored prompt


# ---- peers ----

STEP = 1 << 20  # bytes of one system call that reads


def sync_with_name(path: Path) -> None:
    """Make a file and its name durable."""
    sync(path)
    sync(path.parent)


class RawFile:
    """One file; its end receives the arrays."""

    name = "raw file"

    def __init__(self, folder: Path, parts: list[np.ndarray]) -> None:
        self.parts = parts
        self.file = os.open(folder / "raw", os.O_RDWR | os.O_CREAT, 0o666)
        self.end = 0

    def append(self) -> None:
        """Write the bytes with few system calls, and sync."""
        end = self.end
        for start in range(0, len(self.parts), 2):
            end += os.pwritev(self.file, self.parts[start : start + 2], end)
        os.fdatasync(self.file)
        self.end = end

    def read_in_threads(self, targets: list[np.ndarray]) -> None:
        """Read as `read` does, half of the arrays in another thread."""
        half = len(targets) // 2
        offset = sum(target.nbytes for target in targets[:half])
        other = Thread(target=self.read, args=(targets[half:], offset))
        other.start()
        self.read(targets[:half])
        other.join()

    def read(self, targets: list[np.ndarray], offset: int = 0) -> None:
        """Read bytes into existing arrays, in the steps that the system likes."""
        for target in targets:
            view = memoryview(target).cast("B")
            done = 0
            while done < len(view):
                done += os.preadv(self.file, [view[done : done + STEP]], offset + done)
            offset += done


class Safetensors:
    """One file for each 256 tokens."""

    name = "safetensors"

    def __init__(self, folder: Path, parts: list[np.ndarray]) -> None:
        self.folder = folder / "safetensors"
        self.folder.mkdir()
        self.tensors = {f"{i // 2}.{'kv'[i % 2]}": part for i, part in enumerate(parts)}
        self.count = 0

    def append(self) -> None:
        """Save one more file, and sync."""
        from safetensors.numpy import save_file

        path = self.folder / f"{self.count}.safetensors"
        save_file(self.tensors, path)
        sync_with_name(path)
        self.count += 1

    def read(self, cache: list[np.ndarray], blocks: int) -> None:
        """Load files and copy them to their positions of a cache."""
        from safetensors.numpy import load_file

        for block in range(blocks):
            loaded = load_file(self.folder / f"{block}.safetensors")
            for target, name in zip(cache, self.tensors, strict=True):
                tokens = loaded[name].shape[1]
                target[:, block * tokens : (block + 1) * tokens] = loaded[name]


class MlxCache:
    """The file of `save_prompt_cache`, which holds all tokens: it cannot be appended to."""

    name = "mlx-lm"

    def __init__(self, folder: Path, parts: list[np.ndarray], blocks: int) -> None:
        self.folder, self.count = folder, 0
        self.cache = self._cache_of(parts, blocks)

    @staticmethod
    def _cache_of(parts: list[np.ndarray], blocks: int) -> list[Any]:
        import mlx.core as mx
        from mlx_lm.models.cache import KVCache

        cache = []
        for i in range(0, len(parts), 2):
            layer = KVCache()
            keys, values = (
                mx.array(np.concatenate([p] * blocks, 1)[None]) for p in parts[i : i + 2]
            )
            layer.update_and_fetch(keys, values)
            mx.eval(layer.keys, layer.values)
            cache.append(layer)
        return cache

    def save(self) -> None:
        """Save the cache to a new file, and sync."""
        from mlx_lm.models.cache import save_prompt_cache

        self.count += 1
        save_prompt_cache(str(self._path()), self.cache)
        sync_with_name(self._path())

    def _path(self) -> Path:
        return self.folder / f"cache-{self.count}.safetensors"

    def load(self) -> None:
        """Load the cache into new arrays; mlx reads them when they are used."""
        import mlx.core as mx
        from mlx_lm.models.cache import load_prompt_cache

        mx.eval([layer.state for layer in load_prompt_cache(str(self._path()))])


def make_parts() -> list[np.ndarray]:
    """Return the keys and values of 256 tokens."""
    part = np.random.default_rng(1).standard_normal(PART, np.float32).astype(np.float16)
    return [part.copy() for _ in range(PARTS)]


def make_cache() -> list[np.ndarray]:
    """Return an existing cache, twice as long as the prompt that is restored."""
    return [np.ones((8, 2 * BLOCKS * BLOCK, 128), np.float16) for _ in range(PARTS)]


class Store:
    """A log with blocks of 256 tokens."""

    def __init__(self, folder: Path, writable: bool = True) -> None:
        self.log = PromptLog(folder, writable)
        self.count = 0

    def put_blocks(self, tokens: np.ndarray, payloads: list[Any], first: int = 0) -> Any:
        """Store the payload of each block of a prompt, from the block `first` on."""
        records = [(0, (first + i + 1) * BLOCK, b"", each) for i, each in enumerate(payloads)]
        return self.log.put(b"benchmark", tokens, BLOCK, records, None, 60.0)

    def match_tokens(self, tokens: np.ndarray) -> Any:
        return self.log.match(b"benchmark", tokens, BLOCK)

    def append_new(self, parts: list[np.ndarray]) -> None:
        """Store one block of a prompt that no other block begins with."""
        self.count += 1
        assert self.put_blocks(np.full(BLOCK, self.count, np.uint32), [parts]) == [1]

    def fill(self) -> np.ndarray:
        """Store many blocks without much payload; return the tokens of one prompt."""
        payloads = [[np.zeros(64, np.uint8)]] * CHAIN
        for prompt in range(STORED // CHAIN):
            tokens = np.random.default_rng(prompt).integers(0, 150_000, CHAIN * BLOCK, np.uint32)
            self.put_blocks(tokens, payloads)
        return tokens


def appending(run: Run) -> Iterator[Row]:
    """Compare an append to an empty store and to one with many blocks."""
    parts, folder = make_parts(), run.folder
    empty, full = Store(folder / "empty"), Store(folder / "full")
    full.fill()
    ways = {
        "put": partial(empty.append_new, parts),
        f"put, {STORED:,} blocks stored": partial(full.append_new, parts),
    }
    peers: Ways = {}
    if find_spec("safetensors"):
        peers["safetensors save_file + fsync"] = Safetensors(folder, parts).append
    if find_spec("mlx_lm"):
        peers["mlx-lm save_prompt_cache + fsync"] = MlxCache(folder, parts, 1).save
    raw = "raw append + fdatasync"
    yield Row(
        "append 256 tokens: 28 MiB",
        ways,
        peers,
        {raw: RawFile(folder, parts).append},
        [Bar(name, 1.25, raw) for name in ways],
        base="",
    )


def stored_prompt(folder: Path, parts: list[np.ndarray]) -> Callable[[int], None]:
    """Store 2,048 tokens; return a function that restores them."""
    store = Store(folder / "restored")
    tokens = np.arange(BLOCKS * BLOCK, dtype=np.uint32)
    for block in range(BLOCKS):
        store.put_blocks(tokens, [parts], block)
    cache, match = make_cache(), store.match_tokens(tokens)
    requests = [
        (block, part, cache[part][:, block * BLOCK : (block + 1) * BLOCK])
        for block in range(BLOCKS)
        for part in range(PARTS)
    ]

    def restore(threads: int) -> None:
        mlstate.threads.set_num_threads(threads)
        assert match.read(requests) == []

    return restore


def restoring(run: Run) -> Iterator[Row]:
    """Compare the restore of 2,048 tokens into existing arrays."""
    parts, folder = make_parts(), run.folder
    restore, raw = stored_prompt(folder, parts), RawFile(folder, parts)
    flat = [np.ones(8 * BLOCKS * BLOCK * 128, np.float16) for _ in range(PARTS)]
    peers: Ways = {"pread, 2 threads": partial(raw.read_in_threads, flat)}
    stores: list[Any] = [raw]
    if find_spec("safetensors"):
        files = Safetensors(folder, parts)
        stores.append(files)
        call = partial(files.read, make_cache(), BLOCKS)
        peers["safetensors load_file, and a copy to the cache"] = call
    if find_spec("mlx_lm"):
        saved = MlxCache(folder, parts, BLOCKS)
        saved.save()
        peers["mlx-lm load_prompt_cache, to new arrays"] = saved.load
    for store in stores:
        for _ in range(BLOCKS):
            store.append()
    single, double = "read, verified, 1 thread", "read, verified, 2 threads"
    yield Row(
        "restore 2,048 tokens: 224 MiB, warm",
        {single: partial(restore, 1), double: partial(restore, 2)},
        peers,
        {"pread, 1 thread": partial(raw.read, flat)},
        [Bar(single, 1.5, "pread, 1 thread"), Bar(double, 1.3, "pread, 1 thread")],
        base="",
    )


def looking_up(run: Run) -> Iterator[Row]:
    """Measure a match among many blocks, and the opening of their store."""
    folder = run.folder / "looked-up"
    store = Store(folder)
    tokens = store.fill()
    store.log.close()
    store = Store(folder, False)
    title, many = f"{STORED:,} blocks stored", {"unit": "us", "rounds": 20}
    for blocks, bars in ((BLOCKS, [50]), (64, [])):
        prompt = tokens[: blocks * BLOCK]
        assert store.match_tokens(prompt).length == len(prompt)
        name = f"match {len(prompt):,} tokens"
        match = {name: partial(store.match_tokens, prompt)}
        yield Row(title, match, bars=[Bar(name, most) for most in bars], **many)
        match = {f"{name}, processor time": match[name]}
        yield Row(f"{title}, processor time", match, clock=time.thread_time_ns, **many)
    scan = Way(partial(Store, folder, False), partial((folder / "index").unlink, missing_ok=True))
    memory = store.log.stats()["memory_bytes"] / STORED
    yield Row(
        "open the same store",
        {"open": partial(Store, folder, False)},
        bars=[Bar("open", 50)],
        judge=lambda lines: [verdict("index in memory, a block", memory, 100, " B")],
    )
    yield Row("scan the same store", {"open without its index file": scan}, rounds=1 / 3)


def serve_writer(pipe: Connection, place: str) -> None:
    """Append blocks of mlstate, or of a raw file, until this process is ended."""
    folder, parts = Path(place), make_parts()
    store, raw = Store(folder / "log"), RawFile(folder, parts)
    pipe.send((True, None))
    append = partial(store.append_new, parts) if folder.name == "ours" else raw.append
    for turn in range(1 << 30):
        append()
        if turn % 73 == 72:  # 2 GiB
            store.log.prune(0, 60.0)
            os.ftruncate(raw.file, 0)
            raw.end = 0


def restore_during_appends(restore: Callable[[int], None], folder: Path) -> dict[str, float]:
    """Restore several times while another process appends to a folder; return the median."""
    folder.mkdir()
    seconds = []
    with Processes(serve_writer, [(str(folder),)]) as writer:
        for _ in range(9):
            start = time.perf_counter()
            restore(1)
            seconds.append(time.perf_counter() - start)
        assert writer.processes[0].poll() is None
    shutil.rmtree(folder)
    return {"ms": 1e3 * float(np.median(seconds))}


def during_appends(run: Run) -> Iterator[Row]:
    """Compare a restore while another process appends: our writer, and a raw one, in turns."""
    restore = stored_prompt(run.folder, make_parts())
    own_name, raw_name = "beside our writer", "beside a raw writer"
    own_way, raw_way = (
        {
            name: Way(
                partial(restore_during_appends, restore, run.folder / place), measures_itself=True
            )
        }
        for name, place in ((own_name, "ours"), (raw_name, "raw"))
    )
    yield Row(
        "restore 224 MiB while another process appends",
        own_way,
        raw_way,
        bars=[Bar(own_name, 1.1, raw_name)],
        rounds=1 / 3,
    )


if __name__ == "__main__":
    parts = {"append": appending, "restore": restoring, "match": looking_up}
    main(
        __doc__,
        "prompts",
        "mlstate: prompt store",
        parts | {"beside": during_appends},
        quick="3 repeats instead of 15",
        rounds=(15, 3),
    )
