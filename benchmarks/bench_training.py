"""Training: asynchronous saves, tiers and compressed states.

``python benchmarks/bench_training.py [--quick] [--json] [--only PART] [--repeats N] [--folder
FOLDER]``; mlstate and torch must be installed.  PART is async, tiers or compress.  Needs about 3 GB
of disk and 10 GB of memory; ``--quick`` uses small states, as a smoke test. See docs/benchmarks.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from statistics import fmean

import numpy as np
from checkpoint_states import Arrays, bytes_of, clear, clear_and_wait, files_below, keep_memory
from harness import Run, main
from processes import Processes, Ranks
from rows import Bar, Lines, Row, Way, Ways
from training_rank import DCP, DCP_KEPT, MEMCPY, SAVE, SHARES, STAGED, serve
from training_tiers import moving
from training_words import Trained, train

import mlstate

WORLD = 2


def emptying(run: Run) -> partial[None]:
    """Return the call that empties the folder, and waits for the disk."""
    return partial(clear if run.quick else clear_and_wait, run.folder)


# ---- asynchronous saves ----


def way_of_ranks(run: Run, ranks: Processes, name: str) -> Way:
    """Let both ranks save; they are blocked until the slower one may change its state."""

    def save() -> dict[str, float]:
        answers = ranks.ask("time", name, run.folder / "x")
        staged, done = (max(times) for times in zip(*answers, strict=True))
        return {"ms": staged, "all of it": done}

    return Way(save, emptying(run), measures_itself=True)


def blocking(run: Run) -> Iterator[Row]:
    """Compare the times for which a save of two ranks blocks training.

    The state is Adam's m and v of 124 million parameters; each rank saves half of it.
    """
    with Ranks(serve, WORLD, "A", run.quick) as ranks:
        size = sum(ranks.ask("nbytes"))
        names = [SAVE, *(STAGED.format(share) for share in SHARES)]
        yield Row(
            f"time that a save blocks training: {WORLD} ranks over gloo, {size / 1e6:,.0f} MB",
            {name: way_of_ranks(run, ranks, name) for name in names},
            {name: way_of_ranks(run, ranks, name) for name in (DCP, DCP_KEPT)},
            {MEMCPY: way_of_ranks(run, ranks, MEMCPY)},
            () if run.quick else [Bar(STAGED.format(100), 1.2, MEMCPY)],
            note="both ranks at once, the slower one; all of it: until the checkpoint is on disk",
        )


# ---- compression ----


def compressing(run: Run) -> Iterator[Row]:
    """Train; compare saves and loads of the upper halves of the numbers with each codec."""
    trained = train(run.quick)
    run.log(f"\n{described(trained)}")
    state = {n: (a.view(np.uint32) >> 16).astype(np.uint16) for n, a in trained.moments.items()}
    target, loaded_folder = run.folder / "x", run.folder.with_name(f"{run.folder.name}-loaded")
    loaded_folder.mkdir()

    def savez(path: object) -> None:
        with open(path, "wb") as file:  # noqa: PTH123
            np.savez_compressed(file, **state)

    calls = {
        f"mlstate, sparse, {codec or 'no codec'}": (
            partial(mlstate.save, model=state, sparse=True, compress=codec),
            mlstate.load,
        )
        for codec in (None, "zlib", "zstd")
    }
    calls["np.savez_compressed"] = savez, lambda path: dict(np.load(path))
    ways: Ways = {}
    stored: dict[str, int] = {}
    for name, (save, load) in calls.items():
        path = loaded_folder / name
        save(path)
        files = files_below(path) if path.is_dir() else [path]
        stored[f"{name}, save"] = sum(file.stat().st_size for file in files)
        ways[f"{name}, save"] = Way(partial(save, target), emptying(run))
        ways[f"{name}, load"] = partial(load, path)

    def add_sizes(lines: Lines) -> list[str]:
        for name, nbytes in stored.items():
            lines[name].extra["MB stored"] = f"{nbytes / 1e6:.1f}"
        return []

    peers = {name: ways.pop(name) for name in list(ways) if name.startswith("np.")}
    try:
        yield Row(
            f"the same numbers as bfloat16, {bytes_of(state.values()) / 1e6:,.0f} MB, compressed",
            ways,
            peers,
            base="",
            note="save: into an empty folder, mlstate's are durable; load: cached",
            frees=False,
            judge=add_sizes,
        )
    finally:
        clear(loaded_folder)
        loaded_folder.rmdir()


def described(trained: Trained) -> str:
    """Describe the training, and the share of zero rows."""
    total = bytes_of(trained.moments.values())
    zero = 1 - non_zero_bytes(trained.moments) / total
    first, last = fmean(trained.losses[:10]), fmean(trained.losses[-10:])
    return (
        f"Adam's moments of an embedding of {trained.words:,} words, {total / 1e6:,.0f} MB: after "
        f"{trained.steps} steps (loss {first:.2f} to {last:.2f}) {zero:.1%} of the rows are zero"
    )


def non_zero_bytes(state: Arrays) -> int:
    """Bytes of the rows that are not all zero; -0.0 is not zero."""
    return sum(
        int(array.reshape(len(array), -1).view(np.uint8).any(1).sum()) * array[0].nbytes
        for array in state.values()
    )


if __name__ == "__main__":
    keep_memory()
    warnings.filterwarnings("ignore", module="torch")
    main(
        __doc__,
        "training",
        "mlstate: training",
        {"async": blocking, "tiers": moving, "compress": compressing},
        quick="small states, one repeat",
        rounds=(5, 1),
    )
