"""Checkpoints compared with safetensors, torch.save, torch DCP, np.savez and plain I/O.

``python benchmarks/bench_checkpoint.py [--quick] [--json] [--only PART] [--repeats N] [--folder
FOLDER]``; mlstate must be installed, torch and safetensors take part if they are.  PART is crc, or
a state (A or B) and an operation, as in ``A.save``.  Needs about 8 GB of disk and 16 GB of memory,
including the page cache; ``--quick`` uses states of a few MB and no rank processes, as a smoke
test. See docs/benchmarks.md.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import warnings
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_peers import Dcp, Library, Mlstate, libraries, serve
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
from harness import Run, main
from processes import Ranks
from rows import Bar, Lines, Row, Way, Ways, verdict

from mlstate import _core

MANY = 1000  # arrays; states with more skip the slowest ways
RAW_FILE = "raw: one file, pwrite + fsync"
RAW_DIRECT = "raw: one file, O_DIRECT + fsync"
RAW_FILES = "raw: a file each, pwrite + fsync"
RAW_FILES_DIRECT = "raw: a file each, O_DIRECT + fsync"
RAW_READ = "raw: one pread, touched memory"
MEMCPY = "memcpy, touched memory"
TWO_RANKS = "torch DCP, 2 ranks"
DURABLE = "mlstate.save (durable, checksums)"
LOAD, LOAD_VERIFIED = "mlstate.load, verify=False", "mlstate.load"
BARS = {
    "A": (
        Bar(DURABLE, 1.2, RAW_FILES),
        Bar(DURABLE, 1.2, RAW_FILES_DIRECT),
        Bar(DURABLE, 1.6, RAW_DIRECT),
        Bar(DURABLE, 3, Dcp.name, faster=True),
        Bar(DURABLE, 3, TWO_RANKS, faster=True),
    ),
    "B": (Bar(DURABLE, 2.5, RAW_FILE),),
}


# ---- CRC32C ----

CORE = Path(__file__).resolve().parent.parent / "csrc" / "core"
SETS = ("scalar", "avx2", "avx512", "neon")  # in the order of csrc/core/runtime/cpu_features.h
COMPILER_OPTIONS = ("-O2", "-std=c11", "-ffp-contract=off", "-D_GNU_SOURCE", "-fPIC", "-shared")
COPY, CHECKSUM = "memcpy, 1 thread", "core: CRC32C"
FUSED = "core: copy with CRC32C"
STORES = {"plain": 0, "stream1": 2}  # mls_store of csrc/core/runtime/cpu_store_choice.h
LEAST_GBS = 15.0


class Destination(ctypes.Structure):
    """The destination of csrc/core/runtime/cpu_store_choice.h."""

    _fields_ = (("bytes", ctypes.c_size_t), ("is_fresh", ctypes.c_bool))


class Kernels(ctypes.Structure):
    """The table of csrc/core/crc32c/crc32c.h."""

    _fields_ = (
        (
            "update",
            ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t),
        ),
        (
            "copy",
            ctypes.CFUNCTYPE(
                ctypes.c_uint32,
                ctypes.c_uint32,
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_int,
            ),
        ),
        ("copy_variants", ctypes.c_uint),
    )


def build(folder: Path) -> Any:
    """Compile the checksums; returns None if that is impossible."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or not CORE.is_dir():
        return None
    library = folder / "crc32c.so"
    names = ("runtime/cpu_features.c", "base/status.c", "runtime/cpu_store_choice.c")
    sources = [*sorted(CORE.glob("crc32c/crc32c*.c")), *(CORE / name for name in names)]
    options = (*COMPILER_OPTIONS, f"-I{CORE}")
    subprocess.run([compiler, *options, "-o", library, *sources], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.mls_crc_of.restype = ctypes.POINTER(Kernels)
    return loaded


def copier(library: Any, kernels: Any, forced: bytes | None) -> Any:
    """The core's copy with a checksum, with separate store choices."""
    choices, status = (ctypes.create_string_buffer(1 << 16) for _ in range(2))
    assert library.mls_store_choices_init(choices, forced, status) == 0
    library.mls_crc_copy.argtypes = (
        *(ctypes.c_void_p,) * 2,
        ctypes.c_uint32,
        *(ctypes.c_void_p,) * 2,
        ctypes.c_size_t,
        Destination,
    )

    def copy(to: int, at: int, size: int) -> None:
        library.mls_crc_copy(
            ctypes.byref(kernels), choices, 0, to, at, size, Destination(size, False)
        )

    return copy


def checksums(run: Run) -> Iterator[Row]:
    """Compare checksums and copies between touched memory."""
    mib = 1 if run.quick else 64
    source = np.random.default_rng(3).integers(0, 255, mib << 20, np.uint8, endpoint=True)
    target = np.ones_like(source)
    at, to, size = source.ctypes.data, target.ctypes.data, source.nbytes
    ways: Ways = {}
    if hasattr(_core, "crc32c"):
        ways["the extension: CRC32C"] = partial(_core.crc32c, source)
    library = build(run.folder)
    if library is None:
        run.log("copy with CRC32C is left out: it needs csrc/core and a C compiler")
    else:
        kernels = library.mls_crc_of(SETS.index(_core.cpu_name())).contents

        def two_passes() -> None:
            np.copyto(target, source)
            kernels.update(0, to, size)

        ways[CHECKSUM] = partial(kernels.update, 0, at, size)
        ways[FUSED] = partial(copier(library, kernels, None), to, at, size)
        for store, number in STORES.items():
            if kernels.copy_variants & 1 << number:
                ways[f"{FUSED}, {store}"] = partial(kernels.copy, 0, to, at, size, number)
        ways["memcpy, then core: CRC32C"] = two_passes

    def judge(lines: Lines) -> list[str]:
        if CHECKSUM not in lines or _core.cpu_name() != "avx512":
            return []
        milliseconds = size / LEAST_GBS * 1e-6
        label = f"{CHECKSUM}, {LEAST_GBS:g} GB/s with AVX-512"
        return [verdict(label, lines[CHECKSUM].median, milliseconds, " ms")]

    yield Row(
        f"CRC32C of {mib} MiB, {_core.cpu_name()}",
        ways,
        {"zlib.crc32": partial(zlib.crc32, source)},
        {COPY: partial(np.copyto, target, source)},
        [Bar(FUSED, 0.9, COPY, faster=True)],
        base="",
        nbytes=size,
        rounds=3,
        judge=judge,
    )


# ---- states ----


class Inputs:
    """A state, its bytes for raw calls, and everything that saves it."""

    def __init__(self, run: Run, letter: str) -> None:
        self.run, self.letter, self.stack = run, letter, ExitStack()
        self.state = STATES[letter](run.quick)
        self.raw = Raw(self.state)
        self.ours, *self.peers = (library(self.state) for library in libraries())
        self.ranks: Any = None
        if letter == "A" and any(isinstance(p, Dcp) for p in self.peers) and not run.quick:
            self.ranks = self.stack.enter_context(Ranks(serve, 2, letter, run.quick))

    def __enter__(self) -> Inputs:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()
        clear(self.run.folder)

    def row(self, label: str, *ways: Ways, bars: Any = (), **options: Any) -> Row:
        """Make a row; small states prove nothing."""
        size = bytes_of(self.state.values())
        title = f"{self.letter}: {label}, {len(self.state):,} arrays, {size / 1e6:,.0f} MB"
        bars = () if self.run.quick else bars
        return Row(title, *ways, bars=bars, nbytes=size, frees=False, **options)

    def store(self) -> None:
        """Save in every way, and read all files into the page cache."""
        self.raw.write_one(self.run.folder / "raw", durable=False)
        for library in (self.ours, *self.peers):
            library.save(self.run.folder / library.name)
        if self.ranks is not None:
            self.ranks.ask("save", self.run.folder / TWO_RANKS)
        if not self.run.quick:
            os.sync()
        for path in self.run.folder.iterdir():
            reload_page_cache(path)


def saving(run: Run, letter: str) -> Iterator[Row]:
    """Compare saves into an empty folder."""
    before = partial(clear if run.quick else clear_and_wait, run.folder)
    target = run.folder / "x"
    with Inputs(run, letter) as inputs:
        raw, ranks = inputs.raw, inputs.ranks
        calls: dict[str, Any] = {
            "raw: one file, pwrite": partial(raw.write_one, target, durable=False),
            RAW_FILES: partial(raw.write_each, target),
        }
        if takes_direct(run.folder):
            calls[RAW_DIRECT] = partial(raw.write_one, target, durable=True, direct=True)
            if len(raw.pieces) < MANY:
                calls[RAW_FILES_DIRECT] = partial(raw.write_each, target, direct=True)
        calls[RAW_FILE] = partial(raw.write_one, target, durable=True)
        limits = {MEMCPY: raw.copy} | {name: Way(call, before) for name, call in calls.items()}
        peers: Ways = {}
        for peer in inputs.peers:
            peers[peer.name] = Way(partial(peer.save, target), before)
            if not peer.durable:
                peers[f"{peer.name} + fsync"] = Way(partial(peer.save_durably, target), before)
        if ranks is not None:
            peers[TWO_RANKS] = Way(partial(ranks.ask, "save", target), before)
        saves = {DURABLE: Way(partial(inputs.ours.save, target), before)}
        bars = BARS[letter]
        yield inputs.row("save, disk", saves, peers, limits, bars=bars, base=Dcp.name)


def loading(run: Run, letter: str) -> Iterator[Row]:
    """Compare loads of everything into memory that the caller provides."""
    with Inputs(run, letter) as inputs:
        inputs.store()
        library: Mlstate = inputs.ours
        path = run.folder / library.name
        peers = {p.name: partial(p.load, run.folder / p.name) for p in inputs.peers}
        if inputs.ranks is not None:
            peers[TWO_RANKS] = partial(inputs.ranks.ask, "load", run.folder / TWO_RANKS)
        read = partial(inputs.raw.read_one, run.folder / "raw")
        yield inputs.row(
            "load, disk",
            {
                LOAD: partial(library.load, path),
                LOAD_VERIFIED: partial(library.load_verified, path),
                "mlstate.load(into=...)": partial(library.load_into, path),
            },
            peers,
            {MEMCPY: inputs.raw.copy, RAW_READ: read},
            bars=[Bar(LOAD, 1.15, RAW_READ), Bar(LOAD_VERIFIED, 1.3, LOAD)],
            base="safetensors",
            note="files in the system's cache, memory reused",
        )


def mapping(run: Run, letter: str) -> Iterator[Row]:
    """Compare mapping the files and touching every page."""

    def lazy(library: Library) -> Any:
        return partial(library.lazy, run.folder / library.name)

    with Inputs(run, letter) as inputs:
        inputs.store()
        yield inputs.row(
            "lazy load + touch of each page",
            {"mlstate.load(mmap=True)": lazy(inputs.ours)},
            {f"{peer.name}, mapped": lazy(peer) for peer in inputs.peers if peer.lazy},
            {"raw: mmap, touched": partial(inputs.raw.map_one, run.folder / "raw")},
            base="",
            note="files in the system's cache",
        )


OPERATIONS = {"save": saving, "load": loading, "map": mapping}

if __name__ == "__main__":
    keep_memory()
    warnings.filterwarnings("ignore", module="torch")
    main(
        __doc__,
        "checkpoint",
        "mlstate: checkpoints",
        {"crc": checksums}
        | {
            f"{letter}.{name}": partial(part, letter=letter)
            for letter in STATES
            for name, part in OPERATIONS.items()
        },
        quick="small states, one repeat",
        rounds=(5, 1),
    )
