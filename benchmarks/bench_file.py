"""One state file compared with safetensors and plain writes: see docs/benchmarks.md.

``python benchmarks/bench_file.py [--quick] [--json]``; mlstate must be installed, safetensors takes
part if it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from checkpoint_states import Raw, sync
from harness import Run, main
from optional import optional
from rows import Row, Ways

import mlstate

safetensors = optional("safetensors.numpy")
TENSORS = 16
TENSOR_BYTES = 16 << 20
SIZE = TENSORS * TENSOR_BYTES


def make_state() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        f"layer.{i}": random.standard_normal(TENSOR_BYTES // 4, np.float32) for i in range(TENSORS)
    }


def saving(run: Run) -> Iterator[Row]:
    """Compare writing, with and without waiting for the disk."""
    state, folder = make_state(), run.folder
    raw = Raw(state)
    peers: Ways = {}
    if safetensors is not None:
        path = folder / "peer.safetensors"
        save = partial(safetensors.save_file, state, path)
        peers["safetensors + fsync"] = lambda: (save(), sync(path))
        peers["safetensors"] = save
    yield Row(
        f"save: {TENSORS} tensors, {SIZE >> 20} MiB",
        {
            "mlstate.save_file (durable, checksums)": partial(
                mlstate.save_file, state, folder / "ours.safetensors"
            )
        },
        peers,
        {
            "raw write": partial(raw.write_one, folder / "raw", durable=False),
            "raw write + fsync": partial(raw.write_one, folder / "raw-sync", durable=True),
        },
        nbytes=SIZE,
    )


def loading(run: Run) -> Iterator[Row]:
    """Compare reading files from the page cache."""
    state, path = make_state(), run.folder / "ours.safetensors"
    raw = Raw(state)
    mlstate.save_file(state, path)
    raw.write_one(run.folder / "raw", durable=False)
    load = partial(mlstate.load_file, path)
    yield Row(
        f"load, files in the system's cache: {TENSORS} tensors, {SIZE >> 20} MiB",
        {
            "mlstate.load_file": load,
            "mlstate.load_file, verify=False": partial(load, verify=False),
            "mlstate.load_file, mmap, verify=False": partial(load, mmap=True, verify=False),
        },
        {} if safetensors is None else {"safetensors": partial(safetensors.load_file, path)},
        {"raw read into touched memory": partial(raw.read_one, run.folder / "raw")},
        nbytes=SIZE,
    )


if __name__ == "__main__":
    parts = {"save": saving, "load": loading}
    main(__doc__, "file", "mlstate: one state file", parts, quick="3 repeats instead of 9")
