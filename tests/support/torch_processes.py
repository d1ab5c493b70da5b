"""One process of torch.distributed over gloo, for tests: a rank, which runs scenarios.

A file of ranks marks its functions with `scenario` and ends with ``main()``. rank_jobs.py starts
it as `python FILE STORE RANK RANKS SCENARIO...`.
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


def tell(name, outcome):
    """Print what became of a scenario."""
    print(json.dumps({name: outcome}), flush=True)


def main(default=False, warn="ignore", check=False, timeout_seconds=30):
    """Run scenarios as one rank; print one line of JSON for each: "ok" or what went wrong.

    Their group is a new one, or torch's default group. Warnings are ignored, as torch's wrappers
    warn of themselves, or are errors.
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
        tell(name, outcome)
        if outcome != "ok":
            break  # the others may wait for this rank
    group.close()
    with contextlib.suppress(RuntimeError):  # of a group that a scenario broke
        dist.destroy_process_group()
