"""A trillion parameters, shapes only, on up to 4,096 ranks: the reads and writes of one rank.

    PYTHONPATH=. python benchmarks/scale.py [--worlds 64 256 1024 4096] [--layers 61]

Only manifests and indexes are written; docs/scale.md describes the simulation. Each figure of time
and memory comes from a new process: the best of nine runs of the plan, and the increase of the peak
of its resident memory.
"""

import argparse
import platform
import tempfile
import time
from datetime import date
from pathlib import Path

from from_tests import import_from_tests
from processes import Processes, answer
from resident import forget_peak, peak

moe_model = import_from_tests("moe_model")


def one(operation, folder, world, across, layers, stacked, rank):
    """Time and memory of one plan, measured in this process."""
    moe = moe_model.Moe(world, across=across, layers=layers, stacked=stacked)
    states = moe.states(rank)  # a training job holds these anyway
    simulated = moe_model.Simulated.__new__(moe_model.Simulated)
    simulated.folder, simulated.moe = Path(folder), moe
    from mlstate.checkpoint import plan_save

    def plan():
        if operation == "save":
            return plan_save(*states, rank=rank, world_size=world)
        return simulated.plan_load(moe, rank)

    before, seconds = forget_peak(), []
    for _ in range(9):
        start = time.perf_counter()
        plan()
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds), "kib": (peak() - before) * 1024}


def serve(pipe):
    answer(pipe, {"one": one})


def measure(*arguments):
    """Run `one` in a new process."""
    with Processes(serve, [()]) as process:
        return process.ask("one", *arguments)[0]


def mib(count):
    return f"{count / 2**20:,.2f}"


def cells(world, layers, stacked, rank):
    """Counts, times and memory of one rank's plans: to save, to load, to reshard."""
    moe = moe_model.Moe(world, layers=layers, stacked=stacked)
    new = moe_model.Moe(world // 4 * 3, across=48, layers=layers, stacked=stacked)
    with tempfile.TemporaryDirectory() as folder:
        simulated = moe_model.Simulated.for_loads(Path(folder), moe, [(moe, rank), (new, rank)])
        save, load = moe.plan(rank), simulated.plan_load(moe, rank)
        reshard = simulated.plan_load(new, rank)
        timed = [
            measure("save", str(simulated), world, 64, layers, stacked, rank),
            measure("load", str(simulated), world, 64, layers, stacked, rank),
            measure("load", str(simulated), new.world, 48, layers, stacked, rank),
        ]
    return [
        f"{world:,}",
        mib(simulated.manifest_bytes),
        f"{save.shards:,}",
        f"{len(save.files):,}",
        f"{save.data_bytes / 1e9:.2f}",
        mib(save.index_bytes),
        f"{len(load.indexes):,}",
        f"{len(reshard.indexes):,}",
        f"{reshard.nbytes / 1e9:.2f}",
        *(f"{t['seconds'] * 1e3:,.0f}" for t in timed),
        *(f"{t['kib'] / 1024:,.0f}" for t in timed),
    ]


HEAD = [
    "ranks", "manifest MiB", "shards a rank", "files a rank", "GB a rank", "index MiB",
    "indexes read to load", "to reshard", "GB read to reshard", "ms to plan save", "load",
    "reshard", "peak MiB to plan save", "load", "reshard",
]  # fmt: skip


def head(layers):
    """The head of the table."""
    count = moe_model.Moe(64, layers=layers).count()
    return [
        f"{count:,} parameters, {date.today()}, {platform.machine()}, "
        f"{platform.system()}, Python {platform.python_version()}",
        "| " + " | ".join(HEAD) + " |",
        "| ---: " * len(HEAD) + "|",
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--separate", action="store_true", help="each expert by itself")
    options = parser.parse_args()
    print("\n".join(head(options.layers)))
    for world in options.worlds:
        texts = cells(world, options.layers, not options.separate, world // 3)
        print(f"| {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()
