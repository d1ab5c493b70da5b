"""Gradients across two ranks: mlstate's engines, gloo and MPI.

Each engine has two processes, which are started first and then take turns in a new random order
each round; the others sleep. A figure is the time of the slower rank, measured from a barrier. All
use the gradients of GPT-2 small, 148 parameters and 124 million elements, in warm memory: buffers
and results of the previous step are reused. The limit is a C loop that adds the same gradients in
shared memory, so that nothing is sent: each rank sums its half.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dist_rank import (
    DTYPES,
    LEAVES,
    WORLD,
    Tensors,
    gradients_one_by_one,
    serve,
    shapes_of,
    size_text,
)
from from_tests import import_from_tests
from harness import Run, main
from processes import Processes
from rows import Bar, EndedError, Lines, Row, Way, Ways

from mlstate.fsdp import GradientAccumulator

MICRO_BATCHES = 4
ENGINES = {"local": "LocalGroup", "gloo": "gloo", "mpich": "MPICH", "openmpi": "Open MPI"}
LIMIT = "limit: C add, memory that is shared"
HOOK = "mlstate LocalGroup: hook"
GLOO, MPICH = "gloo: 25 MB buckets", "MPICH: 25 MB buckets"
# engine and way of each line
LIMITS = {"NumPy add, memory that is shared": ("local", "limit numpy"), LIMIT: ("local", "limit")}
REDUCTIONS = {
    HOOK: ("local", "ours hook"),
    "mlstate LocalGroup: scatter_multiple": ("local", "ours"),
    "mlstate LocalGroup: a bucket each": ("local", "ours each"),
    "mlstate TorchGroup over gloo: hook": ("gloo", "ours hook"),
    "mlstate MPIGroup over MPICH: hook": ("mpich", "ours hook"),
    "mlstate MPIGroup over Open MPI: hook": ("openmpi", "ours hook"),
}
PEERS = {
    GLOO: ("gloo", "bucketed"),
    "gloo: per parameter": ("gloo", "each"),
    MPICH: ("mpich", "bucketed"),
    "MPICH: per parameter": ("mpich", "each"),
    "Open MPI: 25 MB buckets": ("openmpi", "bucketed"),
    "Open MPI: per parameter": ("openmpi", "each"),
}
Named = dict[str, tuple[str, str]]


class Jobs:
    """Two ranks for each engine that is installed; the gradients of one dtype."""

    def __init__(self, run: Run, engines: list[str], dtype: str) -> None:
        self.stack = ExitStack()
        # in memory if possible, because the limit's arrays are in this folder
        parent = "/dev/shm" if Path("/dev/shm").is_dir() else run.folder
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(dir=parent, prefix="bench-"))
        self.jobs: dict[str, Processes] = {}
        self.bits: dict[str, str] = {}  # by name of a line
        for engine in engines:
            try:
                job = self.stack.enter_context(start(engine, Path(folder)))
                job.ask("load", dtype, run.quick)
                self.jobs[engine] = job
            except EndedError as error:
                run.log(f"{ENGINES[engine]} is left out: {error}")

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def ways(self, named: Named) -> Ways:
        """Make the ways of the engines that run, and return them by name."""
        ways: Ways = {}
        for name, (engine, way) in named.items():
            if engine in self.jobs:
                ranks = self.jobs[engine].ask("make", way)
                self.bits[name] = max(
                    (rank["bits"] for rank in ranks), key=lambda text: text != "same"
                )
                figures = {"extra MiB": max(rank["mib"] for rank in ranks)}
                call = partial(time_step, self.jobs[engine], way, figures)
                ways[name] = Way(call, measures_itself=True)
        return ways

    def show_bits(self, lines: Lines) -> list[str]:
        """Add a column with the bits of the results."""
        for name, text in self.bits.items():
            if text and name in lines:
                lines[name].extra["bits"] = text
        return []


def start(engine: str, folder: Path) -> Processes:
    """Start the ranks of an engine."""
    job = f"bench-dist-{os.getpid()}-{engine}"
    arguments = [(engine, job, rank, folder) for rank in range(WORLD)]
    if engine in ("local", "gloo"):
        return Processes(serve, arguments)
    mpi_jobs = import_from_tests("mpi_jobs")
    if mpi_jobs is None or mpi_jobs.home(engine) is None:
        raise EndedError("it is not installed (see tools/mpi.sh)")
    launcher = partial(mpi_jobs.command, engine, WORLD)
    return Processes(serve, arguments, variables=mpi_jobs.environment(engine), launcher=launcher)


def time_step(job: Processes, way: str, figures: dict[str, float]) -> dict[str, float]:
    """Reduce once; the slower rank counts."""
    return {"ms": max(job.ask("time", way))} | figures


# ---- parts ----


def reducing(run: Run) -> Iterator[Row]:
    """Compare reduce-scatters of gradients that exist."""
    for dtype in DTYPES:
        with Jobs(run, list(ENGINES), dtype) as jobs:
            limits = LIMITS if dtype == "f32" else {LIMIT: LIMITS[LIMIT]}
            yield Row(
                f"reduce-scatter: {size_text(run.quick, dtype)}",
                jobs.ways(REDUCTIONS),
                jobs.ways(PEERS),
                jobs.ways(limits),
                [
                    Bar(HOOK, 1.3, LIMIT),
                    Bar(HOOK, 8, GLOO, faster=True),
                    Bar(HOOK, 2, MPICH, faster=True),
                ],
                base=GLOO,
                note="bits: against float32 sums in the order of ranks; extra MiB: first call, "
                "a rank",
                judge=jobs.show_bits,
            )


def stepping(run: Run) -> Iterator[Row]:
    """Compare steps of several micro-batches, whose sum is in the order of ranks or a tree."""
    engines = ["local", "gloo"]
    for dtype in DTYPES:
        with Jobs(run, engines, dtype) as jobs:
            by_ranks = {f"{ENGINES[e]}: order='rank'": (e, "ours step") for e in engines}
            in_tree = {f"{ENGINES[e]}: order='tree'": (e, "ours step, tree") for e in engines}
            yield Row(
                f"a step of {LEAVES} micro-batches: {size_text(run.quick, dtype)}",
                jobs.ways(in_tree),
                {},
                jobs.ways(by_ranks),
                [Bar(a, 1.15, b) for a, b in zip(in_tree, by_ranks, strict=True)],
                base=next(iter(by_ranks)),
                note="each micro-batch is reduce-scattered, and the parts of a rank are added up",
            )


# ---- micro-batches, in this process ----


def cloning(batches: list[Any], clone: Callable[[Any], Any]) -> Any:
    """The specification's way: a clone for each micro-batch, and a sum of clones at the end."""
    batches_by_name: dict[str, list[Any]] = {}
    for batch in batches:
        for name, gradient in batch.items():
            batches_by_name.setdefault(name, []).append(clone(gradient))
    sums = {}
    for name, gradients in batches_by_name.items():
        total = clone(gradients[0])
        for gradient in gradients[1:]:
            total += gradient
        sums[name] = total
    return sums


def summing(batches: list[Tensors]) -> Any:
    """Clone the first gradients and add to them, as torch's autograd does."""
    sums = {name: gradient.clone() for name, gradient in batches[0].items()}
    for batch in batches[1:]:
        for name, gradient in batch.items():
            sums[name].add_(gradient)
    return sums


def accumulate(accumulator: GradientAccumulator, batches: list[Any]) -> Any:
    for batch in batches:
        accumulator.add_gradients(batch)
    return accumulator.get_and_clear_gradients()


def accumulating(run: Run) -> Iterator[Row]:
    """Compare ways to add up four micro-batches of the whole model; the first part.

    The time of clones depends on malloc: in a new process their pages are new, which takes twice as
    long as with a heap that has grown.
    """
    torch.set_num_threads(1)
    shapes = shapes_of(run.quick)
    pair = [dict(gradients_one_by_one(n, shapes, torch.float32)) for n in range(2)]
    batches = pair * (MICRO_BATCHES // 2)
    arrays = [{name: t.numpy() for name, t in batch.items()} for batch in batches]
    in_place, over_arrays = GradientAccumulator(MICRO_BATCHES), GradientAccumulator(MICRO_BATCHES)
    in_tree = GradientAccumulator(MICRO_BATCHES, order="tree")
    sums = accumulate(in_place, batches)
    for name, expected in cloning(batches, torch.clone).items():
        if not torch.equal(sums[name], expected):
            raise RuntimeError(f"{name}: sums differ")
    count = sum(t.numel() for t in batches[0].values())
    clones, name = "clone per micro-batch (torch)", "mlstate.fsdp.GradientAccumulator"
    yield Row(
        f"{MICRO_BATCHES} micro-batches of float32 gradients, {count / 1e6:.0f} M elements each",
        {
            name: partial(accumulate, in_place, batches),
            "mlstate, NumPy arrays": partial(accumulate, over_arrays, arrays),
            "mlstate, order='tree'": partial(accumulate, in_tree, batches),
        },
        {
            clones: partial(cloning, batches, torch.clone),
            "clone per micro-batch (NumPy)": partial(cloning, arrays, np.copy),
            "running sum, torch: clone, add_": partial(summing, batches),
        },
        bars=[Bar(name, 8, clones, faster=True)],
        note="memory by the C library as it is set up, in a process that did nothing else before; "
        "mlstate's with norm and finite report",
    )


if __name__ == "__main__":
    main(
        __doc__,
        "dist",
        "mlstate: gradients across ranks",
        {"accumulator": accumulating, "reduce": reducing, "step": stepping},
        quick="a small model, two rounds",
        rounds=(5, 2),
    )
