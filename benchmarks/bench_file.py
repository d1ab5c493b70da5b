"""One state file compared with safetensors and plain writes: see docs/benchmarks.md.

``python benchmarks/bench_file.py [--quick] [--json]``; mlstate must be installed, safetensors takes
part if it is.  Files go to the folder for temporary files (TMPDIR).
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from checkpoint_states import sync
from harness import Candidate, Report, add_rates, measure, option_parser
from optional import optional

import mlstate

safetensors = optional("safetensors.numpy")
TENSORS = 16
TENSOR_BYTES = 16 << 20


def write_raw(state: dict[str, np.ndarray], path: Path, durable: bool) -> None:
    """Write the bytes alone."""
    with path.open("wb", buffering=0) as file:
        for array in state.values():
            file.write(array.data)
        if durable:
            os.fsync(file.fileno())


def read_raw(path: Path, target: np.ndarray) -> None:
    """Read the bytes alone into memory that was touched before."""
    with path.open("rb", buffering=0) as file:
        view = memoryview(target)
        done = 0
        while done < target.size:
            done += file.readinto(view[done:])


def save_safetensors(state: dict[str, np.ndarray], path: Path, durable: bool) -> None:
    """Save as most programs do, or with the fsync that they omit."""
    safetensors.save_file(state, path)
    if durable:
        sync(path)


def saving(report: Report, state: dict[str, np.ndarray], folder: Path, repeats: int) -> None:
    """Time writing, with and without waiting for the disk."""
    candidates = [
        Candidate(
            "raw write + fsync", partial(write_raw, state, folder / "raw-sync", True), limit=True
        ),
        Candidate("raw write", partial(write_raw, state, folder / "raw", False)),
        Candidate(
            "mlstate.save_file (durable, checksums)",
            partial(mlstate.save_file, state, folder / "ours.safetensors"),
        ),
    ]
    if safetensors is not None:
        for name, durable in (("safetensors", False), ("safetensors + fsync", True)):
            path = folder / f"{name}.safetensors"
            call = partial(save_safetensors, state, path, durable)
            candidates.append(Candidate(name, call, baseline=durable))
    show(report, "save", candidates, repeats)


def loading(report: Report, state: dict[str, np.ndarray], folder: Path, repeats: int) -> None:
    """Time reading files from the page cache."""
    mlstate_file, raw = folder / "ours.safetensors", folder / "raw"
    mlstate.save_file(state, mlstate_file)
    write_raw(state, raw, False)
    target = np.ones(TENSORS * TENSOR_BYTES, np.uint8)
    candidates = [
        Candidate("raw read into touched memory", partial(read_raw, raw, target), limit=True),
        Candidate("mlstate.load_file", partial(mlstate.load_file, mlstate_file)),
        Candidate(
            "mlstate.load_file, verify=False",
            partial(mlstate.load_file, mlstate_file, verify=False),
        ),
        Candidate(
            "mlstate.load_file, mmap, verify=False",
            partial(mlstate.load_file, mlstate_file, mmap=True, verify=False),
        ),
    ]
    if safetensors is not None:
        candidates.append(
            Candidate("safetensors", partial(safetensors.load_file, mlstate_file), baseline=True)
        )
    show(report, "load, files in the system's cache", candidates, repeats)


def show(report: Report, title: str, candidates: list[Candidate], repeats: int) -> None:
    """Time and print, with the rate."""
    size = TENSORS * TENSOR_BYTES
    rows = add_rates(measure(candidates, repeats), size)
    report.table(f"{title}: {TENSORS} tensors, {size >> 20} MiB", rows)


def main() -> None:
    options = option_parser(__doc__, "3 repeats instead of 9").parse_args()
    report = Report.open("mlstate: one state file", "file", options)
    random = np.random.default_rng(1)
    state = {
        f"layer.{i}": random.standard_normal(TENSOR_BYTES // 4, np.float32) for i in range(TENSORS)
    }
    with tempfile.TemporaryDirectory() as folder:
        for part in (saving, loading):
            part(report, state, Path(folder), 3 if options.quick else 9)
    report.close()


if __name__ == "__main__":
    main()
