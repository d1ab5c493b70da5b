"""The ranks of test_hosts.py, on one of two hosts.

`python host_ranks.py gloo RANK RANKS NAME...` finds the others through MASTER_ADDR, and `mpiexec
... python host_ranks.py mpi NAME...` through MPI. Each rank prints one line of JSON for each
scenario: its name, the rank, the result or the error, the host.
"""

import hashlib
import json
import socket
import sys
import time
import traceback
import warnings

import group_scenarios
import numpy as np
from group_model import Scenarios, inputs, reduced, same_bits

from mlstate import CollectiveError

LARGE = 3 << 20  # elements of float32 from each rank

SCENARIOS = Scenarios(group_scenarios.SCENARIOS)
scenario = SCENARIOS.add


@scenario
def large_sums(group):
    """A reduce-scatter whose parts must cross the cable; returns a digest of this rank's part."""
    everyones = inputs(group.world_size, LARGE, "float32")
    part = group.reduce_scatter(everyones[group.rank])
    length = LARGE // group.world_size
    expected = reduced(everyones, "sum")[group.rank * length :][:length]
    same_bits(part, expected)
    return hashlib.sha256(part.tobytes()).hexdigest()


@scenario
def a_cut_cable_is_an_error(group):
    """Ranks reduce until the cable between the hosts is cut; each must raise. Returns the error."""
    group.barrier()
    report("ready", group.rank, "")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        began = time.monotonic()
        try:
            group.all_reduce(np.zeros(1000), timeout=2.0)
        except CollectiveError as error:
            assert time.monotonic() - began < 15
            return str(error)
    raise AssertionError("nobody cut the cable")


def report(name, rank, outcome):
    """One write a line, because launchers interleave the output of ranks."""
    sys.stdout.write(json.dumps([name, rank, outcome, socket.gethostname()]) + "\n")
    sys.stdout.flush()


def over_gloo(rank, world, names):
    """Run scenarios as one rank of torch.distributed."""
    from datetime import timedelta

    import torch.distributed as dist

    from mlstate.integrations.torch import TorchGroup

    dist.init_process_group(
        "gloo", rank=int(rank), world_size=int(world), timeout=timedelta(seconds=100)
    )
    with TorchGroup() as group:
        perform(group, names)
    if "a_cut_cable_is_an_error" not in names:  # it leaves gloo in the middle of an operation
        dist.destroy_process_group()


def over_mpi(*names):
    """Run scenarios as one rank of MPI."""
    from mlstate.integrations.mpi import MPIGroup

    with MPIGroup(timeout=100) as group:
        perform(group, names)


def perform(group, names):
    import fsdp_torch_ranks

    scenarios = SCENARIOS | fsdp_torch_ranks.SCENARIOS
    for name in names:
        try:
            outcome = scenarios[name](group) or "ok"
        except BaseException:
            outcome = traceback.format_exc()
        report(name, group.rank, outcome)


def main():
    engine, *arguments = sys.argv[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about torch's internals
        if engine == "gloo":
            over_gloo(arguments[0], arguments[1], arguments[2:])
        else:
            over_mpi(*arguments)


if __name__ == "__main__":
    main()
