"""Checkpoints of twelve kinds: read by mlstate and by the library that wrote them.

``python benchmarks/bench_kinds.py [--quick] [--json] [--store]``; mlstate must be installed, with
torch; each other library takes part if it is. The table's times are for files in the page cache.
Each whole read is followed by a read of every byte, because readers may map files. ``mlstate.load``
copies into memory and verifies the checksums that there are; with ``mmap=True, verify=False`` it
maps the file, as the readers of safetensors do. "1/8" is rank 3 of 8, with the share of the whole's
bytes that it reads. See docs/coming_from.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_states import read
from from_tests import import_from_tests
from harness import Run, main
from rows import Bar, Lines, Row, Ways, verdict

import mlstate

WIDTH, QUICK_WIDTH = 2048, 128
PEER, WHOLE, PART = "its own reader", "mlstate.load", "mlstate.load, 1/8"
MAPPED = "mlstate.load(mmap=True)"


def touch(state: dict[str, Any]) -> None:
    """Read every byte of the tensors."""
    for tensor in state.values():
        array = tensor.detach().numpy() if hasattr(tensor, "detach") else np.asarray(tensor)
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        flat[: flat.size // 8 * 8].view(np.uint64).max(initial=0)


def row_of(name: str, kind: Any, path: Path) -> Row:
    """Compare the readers of a checkpoint."""
    load = partial(mlstate.load, path)
    load_part = partial(load, rank=3, world_size=8, layout="rows")
    ways: Ways = {WHOLE: lambda: touch(dict(load().model)), PART: load_part}
    if kind.has_ranges:
        ways[MAPPED] = lambda: touch(dict(load(mmap=True, verify=False).model))
    size = sum(tensor.nbytes for tensor in load().model.values())

    def judge(lines: Lines) -> list[str]:
        before = read()
        load_part()  # mapped bytes are not counted
        share = (read() - before) / size
        for line in lines.values():
            line.extra["MB"] = f"{size / 1e6:.0f}"
        lines[PART].extra["read"] = f"{share:.3f}"
        label = f"{name}: reads of the bytes for 1/8 of the rows"
        return [verdict(label, share, 0.15) if kind.has_ranges else f"{label}: {share:.3f}"]

    bar = Bar(MAPPED if kind.has_ranges else WHOLE, 1.2, PEER)
    return Row(name, ways, {PEER: lambda: touch(kind.read(path))}, bars=[bar], judge=judge)


def reading(run: Run) -> Iterator[Row]:
    """Compare the readers of all kinds whose libraries are installed."""
    warnings.simplefilter("ignore")
    for name, kind in import_from_tests("checkpoint_kinds").KINDS.items():
        missing = kind.missing()
        if missing:
            run.log(f"\n{name}: {missing} is not installed")
            continue
        folder = run.folder / name.replace("'", "")
        folder.mkdir()
        yield row_of(name, kind, kind.write(folder, QUICK_WIDTH if run.quick else WIDTH))


if __name__ == "__main__":
    main(
        __doc__,
        "kinds",
        "Checkpoints of twelve kinds",
        {"read": reading},
        quick="small models",
        rounds=(7, 2),
    )
