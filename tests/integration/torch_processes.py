"""Processes of torch.distributed over gloo, for tests: each runs the same scenarios.

A file of ranks marks its functions with `scenario` and ends with ``main()``; the file of tests
starts its processes by `run_ranks`.
"""

import ast
import json
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import forked

import mlstate

LIMIT_SECONDS = 100
MODULES = forked.TORCH + forked.OPTIMIZERS
SCENARIOS = {}


def scenario(function):
    """Mark a function that every rank calls with its group."""
    SCENARIOS[function.__name__] = function
    return function


def scenarios(file):
    """Names of the functions that ranks run, in the file's order."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == "scenario" for d in node.decorator_list)
    ]


def run_ranks(file, world, names, store, limit_seconds=LIMIT_SECONDS, modules=MODULES):
    """Run scenarios on `world` processes; return each rank's outcomes by name, and its log.

    Every process has ended when this returns: those that take too long are killed.
    """
    paths = [str(Path(mlstate.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    arguments = [(store, rank, world, *names) for rank in range(world)]
    outcomes = []
    for status, out, err in forked.run(file, arguments, environment, limit_seconds, modules):
        found = {}
        for line in out.splitlines():
            if line.startswith("{"):
                found.update(json.loads(line))
        outcomes.append((found, f"exit {status}\n{err[-3000:]}"))
    return outcomes


def check(outcomes, name):
    """Fail with what a rank said, unless all are well."""
    for rank, (found, log) in enumerate(outcomes):
        assert found.get(name) == "ok", f"rank {rank}: {found.get(name)}\n{log}"
        assert log.startswith("exit 0"), log


def raises(error, text, call, *args, **keywords):
    """Call, and return the error whose message has the text."""
    try:
        call(*args, **keywords)
    except error as caught:
        assert text in str(caught), str(caught)
        return caught
    raise AssertionError(f"{call} raised nothing")


def main():
    """Run scenarios as one rank; print one line of JSON for each: "ok" or what went wrong."""
    import torch
    import torch.distributed as dist

    from mlstate.integrations.torch import TorchGroup

    torch.set_num_threads(1)
    store, rank, world, *names = sys.argv[1:]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, int(world)),
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=30),
    )
    group = TorchGroup(dist.new_group())
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch: its wrappers warn of themselves
                SCENARIOS[name](group)
            outcome = "ok"
        except BaseException:
            outcome = traceback.format_exc()
        print(json.dumps({name: outcome}), flush=True)
        if outcome != "ok":
            break  # the others may wait for this rank
    group.close()
    dist.destroy_process_group()
