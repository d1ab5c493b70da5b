"""CRC32C of mlstate's core, alone and while copying, for `bench_checkpoint.py`.

The extension has no function that copies with a checksum, so this compiles the core's source with
the options of a release, if the source and a C compiler are available.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import Run
from rows import Bar, Lines, Row, Ways, verdict

from mlstate import _core

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
