"""One rank of torch.distributed over gloo, for tests: a process that runs scenarios.

A file of ranks marks its functions with `scenario` and ends with ``main()``. rank_jobs.py starts it
as `python FILE STORE RANK RANKS SCENARIO...`.
"""

import contextlib
import json
import sys
import traceback
import warnings
from datetime import timedelta

SCENARIOS = {}


def scenario(function):
    """Mark a function that every rank calls with its group."""
    SCENARIOS[function.__name__] = function
    return function


def print_outcome(name, outcome):
    """Print the outcome of a scenario."""
    print(json.dumps({name: outcome}), flush=True)


def main(default=False, warn="ignore", check=False, timeout_seconds=30):
    """Run scenarios as one rank; print one line of JSON for each: "ok" or the error.

    They use a new group, or torch's default group. Warnings are ignored, because torch's wrappers
    warn about themselves, or are errors.
    """
    warnings.simplefilter(warn)
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
        timeout=timedelta(seconds=timeout_seconds),
    )
    group = TorchGroup(None if default else dist.new_group(), check=check)
    for name in names:
        try:
            with warnings.catch_warnings():
                SCENARIOS[name](group)
            outcome = "ok"
        except BaseException:
            outcome = traceback.format_exc()
        print_outcome(name, outcome)
        if outcome != "ok":
            break  # the other ranks may wait for this one
    group.close()
    with contextlib.suppress(RuntimeError):  # if a scenario broke the group
        dist.destroy_process_group()
