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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import Candidate, Report, Row, add_rates, met
from turns import take_turns

from mlstate import _core

CORE = Path(__file__).resolve().parent.parent / "csrc" / "core"
SETS = ("scalar", "avx2", "avx512", "neon")  # in the order of csrc/core/runtime/cpu_features.h
COMPILER_OPTIONS = ("-O2", "-std=c11", "-ffp-contract=off", "-D_GNU_SOURCE", "-fPIC", "-shared")
COPY, CHECKSUM = "memcpy, 1 thread", "core: CRC32C"
FUSED, TWO_PASSES = "core: copy with CRC32C", "memcpy, then core: CRC32C"
STORES = {"plain": 0, "stream1": 2}  # mls_store of csrc/core/runtime/cpu_store_choice.h
AIM_GBS, AIM_SHARE = 15.0, 0.9


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


def candidates(folder: Path, mib: int) -> list[Candidate]:
    """Checksums and copies of this many MiB, between touched memory."""
    source = np.random.default_rng(3).integers(0, 255, mib << 20, np.uint8, endpoint=True)
    target = np.ones_like(source)
    at, to, size = source.ctypes.data, target.ctypes.data, source.nbytes
    candidate_list = [
        Candidate(COPY, partial(np.copyto, target, source), limit=True),
        Candidate("zlib.crc32", partial(zlib.crc32, source)),
    ]
    if hasattr(_core, "crc32c"):
        candidate_list.append(Candidate("the extension: CRC32C", partial(_core.crc32c, source)))
    library = build(folder)
    if library is None:
        return candidate_list
    kernels = library.mls_crc_of(SETS.index(_core.cpu_name())).contents

    def two_passes() -> None:
        np.copyto(target, source)
        kernels.update(0, to, size)

    return [
        *candidate_list,
        Candidate(CHECKSUM, partial(kernels.update, 0, at, size)),
        Candidate(FUSED, partial(copier(library, kernels, None), to, at, size)),
        *(
            Candidate(f"{FUSED}, {store}", partial(kernels.copy, 0, to, at, size, number))
            for store, number in STORES.items()
            if kernels.copy_variants & 1 << number
        ),
        Candidate(TWO_PASSES, two_passes),
    ]


def verdicts(rows: list[Row], mib: int) -> list[str]:
    """Return the verdicts."""
    speeds = {row.name: (mib << 20) / row.median * 1e-6 for row in rows}
    if FUSED not in speeds:
        return ["copy with CRC32C: not measured, it needs csrc/core and a C compiler"]
    speed, share = speeds[CHECKSUM], speeds[FUSED] / speeds[COPY]
    text = f"copy with CRC32C >= {AIM_SHARE:g}x the speed of memcpy: {share:.2f}"
    verdict_lines = [f"{text}, {met(share >= AIM_SHARE)}"]
    if _core.cpu_name() == "avx512":
        text = f"CRC32C >= {AIM_GBS:g} GB/s with AVX-512: {speed:.1f}"
        verdict_lines.append(f"{text}, {met(speed >= AIM_GBS)}")
    return verdict_lines


def measure_crc(report: Report, folder: Path, quick: bool) -> list[str]:
    """Time and print; return the verdicts."""
    mib = 1 if quick else 64
    rows = take_turns(candidates(folder, mib), 1 if quick else 15)
    add_rates(rows, mib << 20, digits=1)
    report.table(f"CRC32C of {mib} MiB, {_core.cpu_name()}", rows)
    return verdicts(rows, mib)
