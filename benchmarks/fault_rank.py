"""One rank of `fault_table.py`: makes a fault in each run, and reports the result.

``python fault_rank.py ENGINE FAULT RUNS FOLDER`` with ``RANK`` and ``WORLD_SIZE`` (threads and MPI
need neither). Rank r writes a line of JSON for each run into FOLDER/rank-r.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlstate import CollectiveError
from mlstate.collectives import LocalGroup
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit

WORLD = 3
ODD = 1  # the rank with the fault
SECONDS = 3.0  # limit of an operation
# the other packages require multiples of 3
SHAPES = {"a": (4, 3), "b": (4, 3), "c": (9,), "d": (5, 3)}
LEFT_OUT = "left out"  # the faulty rank's report of a run without it
LATER = 1_000_000  # offset of the run that tests whether the group is usable
KILLED_BYTES = 24 << 20  # of the gradient in whose reduction a rank is killed

Gradients = dict[str, Any]


# ---- gradients and expected results ----


def gradients_of(rank: int, run: int) -> Gradients:
    """Small integers, which add exactly, different for each rank, run and parameter."""
    generator = np.random.default_rng([rank, run])
    return {
        name: generator.integers(1, 100, shape).astype(np.float32) for name, shape in SHAPES.items()
    }


def expected_parts(rank: int, run: int) -> Gradients:
    """This rank's parts of the sums."""
    parts = {}
    for name, shape in SHAPES.items():
        total = sum(gradients_of(r, run)[name] for r in range(WORLD)).reshape(-1)
        share = -(-int(np.prod(shape)) // WORLD)
        parts[name] = total[rank * share : (rank + 1) * share]
    return parts


def judge(parts: Gradients, rank: int, run: int) -> dict[str, str]:
    """Whether the part of each parameter is right, wrong, NaN or absent."""
    verdicts = {}
    for name, expected in expected_parts(rank, run).items():
        part = parts.get(name)
        if part is None:
            verdicts[name] = "absent"
        elif part.tobytes() == expected.tobytes():
            verdicts[name] = "right"
        else:
            verdicts[name] = "NaN" if np.isnan(part).any() else "wrong"
    return verdicts


# ---- the faults: input of the faulty rank ----


def swapped(gradients: Gradients) -> Gradients:
    """Return the dict with its first two items swapped."""
    first, second, *rest = gradients
    return {name: gradients[name] for name in (second, first, *rest)}


def exchanged(gradients: Gradients) -> Gradients:
    """Return the dict with the first two gradients under each other's names."""
    return {**gradients, "a": gradients["b"], "b": gradients["a"]}


def spoilt(gradients: Gradients, fault: str) -> Gradients:
    """Return the dict that the faulty rank passes."""
    if fault in ("order", "order of calls"):
        return swapped(gradients)
    if fault == "contents":
        return exchanged(gradients)
    changed = dict(gradients)
    if fault in ("missing gradient", "missing call"):
        del changed["b"]
    elif fault == "dtype":
        changed["b"] = changed["b"].astype(np.float64)
    elif fault == "shape":
        changed["b"] = np.ones((5, 3), np.float32)
    elif fault == "NaN":
        changed["b"][0, 0] = np.nan
    return changed


def kill_soon() -> None:
    """Kill this process in a moment: in the middle of the next operation."""
    threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGKILL)).start()


# ---- mlstate ----


class Ours:
    """Gradients reduced by mlstate, on a group of any engine."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank = int(group.rank)
        self.hook = FSDPBackwardHook(FSDP(group, timeout=SECONDS))

    def units(self, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, FSDPShardingUnit]:
        return {n: FSDPShardingUnit(n, s, "float32", self.rank) for n, s in shapes.items()}

    def reduce(self, gradients: Gradients, fault: str = "") -> Gradients:
        """Reduce with the fault, and return the parts, even if an error is raised."""
        units = self.units()
        self.parts = units
        if fault in ("order of calls", "missing call"):
            error: CollectiveError | None = None
            for name, gradient in gradients.items():
                try:
                    self.hook.scatter_gradient(units[name], gradient)
                except CollectiveError as caught:  # the other calls are made all the same
                    error = error or caught
            if error is not None:
                raise error
        else:
            self.hook.scatter_multiple(units, gradients)
        return self.kept()

    def kept(self) -> Gradients:
        """The parts stored in the units."""
        return {name: unit.local_gradient for name, unit in self.parts.items()}

    def be_killed(self) -> None:
        """Reduce until an error is raised; the faulty rank is killed meanwhile."""
        shapes = {"a": (KILLED_BYTES // 4,)}
        gradients = {"a": np.ones(shapes["a"], np.float32)}
        while True:
            self.hook.scatter_multiple(self.units(shapes), gradients)

    def sees(self, run: int, passed: Gradients) -> str:
        """Call `verify_gradients`, with the gradients under their correct names."""
        right = gradients_of(self.rank, run)
        report = self.hook.verify_gradients(self.parts, unreduced=right)
        return " ".join(mismatch.parameter for mismatch in report.mismatches)


# ---- other packages ----


class RawGloo:
    """Each gradient by torch.distributed's reduce-scatter, in the order of arrival."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def reduce(self, gradients: Gradients, fault: str = "") -> Gradients:
        parts: Gradients = {}
        self.parts = parts
        for name, gradient in gradients.items():
            parts[name] = self.scatter(np.ascontiguousarray(gradient).reshape(-1))
        return parts

    def scatter(self, flat: np.ndarray) -> np.ndarray:
        import torch
        import torch.distributed as dist

        out = np.empty(flat.size // WORLD, flat.dtype)
        dist.reduce_scatter_tensor(torch.from_numpy(out), torch.from_numpy(flat))
        return out

    def kept(self) -> Gradients:
        return getattr(self, "parts", {})

    def be_killed(self) -> None:
        while True:
            self.reduce({"a": np.ones(KILLED_BYTES // 4 // WORLD * WORLD, np.float32)})


class RawMPI(RawGloo):
    """Each gradient by MPI's reduce-scatter, in the order of arrival."""

    def scatter(self, flat: np.ndarray) -> np.ndarray:
        from mpi4py import MPI

        out = np.empty(flat.size // WORLD, flat.dtype)
        MPI.COMM_WORLD.Reduce_scatter_block(flat, out)
        return out


# ---- one run ----


def error_class(error: BaseException) -> str:
    """Whether an error names the faulty rank, a parameter, both, or neither."""
    text = str(error)
    detail = text.partition(": ")[2] or text  # without the speaker's "on rank ..."
    rank = f"rank {ODD}" in detail
    parameter = any(f"'{name}'" in detail for name in SHAPES)
    named = [label for label, is_named in (("rank", rank), ("parameter", parameter)) if is_named]
    return f"error names {' and '.join(named)}" if named else "error names no rank"


def wait_for_others(folder: Path, run: int) -> None:
    """Wait until all other ranks have reported the run; for ever, if they hang."""
    mark = f'{{"run": {run}, '
    paths = [folder / f"rank-{rank}" for rank in range(WORLD) if rank != ODD]
    while not all(path.exists() and mark in path.read_text(encoding="utf-8") for path in paths):
        time.sleep(0.05)


def one_run(
    peer: Any, fault: str, run: int, folder: Path, log: Callable[[dict[str, Any]], None]
) -> bool:
    """Make the fault once and report; returns whether another run makes sense."""
    odd = peer.rank == ODD
    report: dict[str, Any] = {"run": run, "rank": peer.rank, "said": "", "seen": None}
    if odd and fault in ("skipped step", "no call"):
        if fault == "no call":
            wait_for_others(folder, run)
        log({**report, "outcome": LEFT_OUT, "parts": {}, "usable": usable(peer, run + LATER)})
        return False
    if fault == "killed rank":
        if odd:
            log({**report, "outcome": LEFT_OUT, "parts": {}, "usable": False})
            kill_soon()
        try:
            peer.be_killed()
        except BaseException as error:
            report |= {"outcome": error_class(error), "said": str(error)[:400], "parts": {}}
        log({**report, "usable": usable(peer, run)})
        return False
    gradients = gradients_of(peer.rank, run)
    passed = spoilt(gradients, fault) if odd else gradients
    try:
        parts = peer.reduce(passed, fault)
        report["outcome"] = "no error"
    except BaseException as error:
        report |= {"outcome": error_class(error), "said": str(error)[:400]}
        parts = peer.kept()
    report["parts"] = judge(parts, peer.rank, run)
    # report early, in case the rest does not return
    log({**report, "usable": None})
    if fault == "contents" and hasattr(peer, "sees") and report["outcome"] == "no error":
        report["seen"] = peer.sees(run, passed)
    report["usable"] = usable(peer, run + LATER)
    log(report)
    return bool(report["usable"])


def usable(peer: Any, run: int) -> bool:
    """Whether the group still reduces correctly."""
    try:
        parts = peer.reduce(gradients_of(peer.rank, run))
    except BaseException:
        return False
    return set(judge(parts, peer.rank, run).values()) == {"right"}


def all_runs(peer: Any, fault: str, runs: range, folder: Path) -> None:
    """Run as long as the group is usable."""
    with (folder / f"rank-{peer.rank}").open("a", encoding="utf-8") as file:
        (folder / f"here-{peer.rank}").touch()

        def write_report(report: dict[str, Any]) -> None:
            file.write(json.dumps(report) + "\n")
            file.flush()

        for run in runs:
            if not one_run(peer, fault, run, folder, write_report):
                break


# ---- engines ----


def of_threads(fault: str, runs: range, folder: Path) -> None:
    """Run ranks as threads."""

    def work(group: LocalGroup) -> None:
        with group:
            all_runs(Ours(group), fault, runs, folder)

    groups = LocalGroup.threads(WORLD)
    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def peer_of(engine: str, folder: Path) -> Any:
    """Join the group of an engine, or of another package."""
    if engine == "processes":
        return Ours(LocalGroup.from_env())
    if engine in ("gloo", "raw gloo"):
        warnings.simplefilter("ignore")  # warnings about torch's internals
        from datetime import timedelta

        import torch.distributed as dist

        rank = int(os.environ["RANK"])
        store = dist.FileStore(str(folder / "store"), WORLD)  # type: ignore[attr-defined]
        limit = timedelta(seconds=SECONDS if engine.startswith("raw") else 30 * SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=limit)
        if engine == "raw gloo":
            return RawGloo(rank)
        from mlstate.integrations.torch import TorchGroup

        return Ours(TorchGroup())
    from mpi4py import MPI

    if engine.startswith("raw"):
        return RawMPI(MPI.COMM_WORLD.rank)
    from mlstate.integrations.mpi import MPIGroup

    return Ours(MPIGroup(timeout=SECONDS))


def main() -> None:
    """Run the command line, and exit without waiting for other ranks."""
    engine, fault, first, last, folder = sys.argv[1:]
    runs, place = range(int(first), int(last)), Path(folder)
    if engine == "threads":
        of_threads(fault, runs, place)
    else:
        peer = peer_of(engine, place)
        all_runs(peer, fault, runs, place)
    sys.stdout.flush()
    if "mpi" in engine:  # a rank that exits normally waits for the others in MPI_Finalize
        (place / f"done-{peer.rank}").touch()
    else:
        os._exit(0)


if __name__ == "__main__":
    main()
