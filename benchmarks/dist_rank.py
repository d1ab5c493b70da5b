"""One rank of `bench_dist.py`: `python dist_rank.py ENGINE JOB RANK ADDRESS FOLDER`.

It obeys commands of the benchmark from a socket, and sleeps in between. With MPI, the rank is
MPI's; the argument is ignored.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import warnings
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from checkpoint_states import keep_memory
from resident import forget_peak, peak, trim
from spawned import answer

SPIN_SECONDS = 0.002  # spin before a call, as a training loop would be busy


class Server:
    """The commands of a rank."""

    def __init__(self, rank: Any, ways: dict[str, Any]) -> None:
        self.rank = rank
        self.known = ways
        self.ways: dict[str, Any] = {}

    def load(self, dtype: str, quick: bool) -> None:
        """Make gradients, and drop all earlier ways."""
        self.drop()
        self.rank.load(dtype, quick)

    def drop(self) -> None:
        """Free all memory of a part."""
        for way in self.ways.values():
            way.close()
        self.ways.clear()
        self.rank.gradients = {}
        gc.collect()
        trim()

    def make(self, names: list[str]) -> dict[str, Any]:
        """Make ways, call each once, and return their memory and the bits of their results."""
        facts = {}
        for name in names:
            gc.collect()
            trim()
            before = forget_peak()
            way = self.ways[name] = self.known[name]()
            self.time(name)
            facts[name] = {"mib": peak() - before, "bits": way.check()}
            sent = getattr(way, "sent", None)
            if sent is not None:
                facts[name]["sent"] = sent()
        return facts

    def time(self, name: str) -> float:
        """Call a way at the same moment as the other rank; return milliseconds a step."""
        way = self.ways[name]
        way.before()
        gc.collect()
        gc.disable()
        end = time.perf_counter() + SPIN_SECONDS
        while time.perf_counter() < end:
            pass
        self.rank.local.barrier()
        start = time.perf_counter_ns()
        way.call()
        elapsed = time.perf_counter_ns() - start
        gc.enable()
        return elapsed * 1e-6


def start(engine: str, job: str, rank: int, folder: Path) -> Server:
    """Join all groups."""
    import torch
    from dist_ways import Rank, ways_of

    torch.set_num_threads(1)
    if engine == "gloo":
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/{job}", rank=rank, world_size=2
        )
    elif engine != "local":
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
    rank_object = Rank(engine, job, rank, folder)
    return Server(rank_object, ways_of(rank_object))


def main() -> None:
    engine, job, number, address, folder = sys.argv[1:]
    warnings.simplefilter("ignore")
    keep_memory()
    server = start(engine, job, int(number), Path(folder))
    with Client(address, "AF_UNIX") as pipe:
        pipe.send((server.rank.rank, os.getpid()))
        commands = {"load": server.load, "make": server.make, "time": server.time}
        answer(pipe, {**commands, "drop": server.drop})
    if engine in ("local", "gloo"):
        os._exit(0)  # MPI has files to remove; otherwise nothing is left to wait for


if __name__ == "__main__":
    main()
