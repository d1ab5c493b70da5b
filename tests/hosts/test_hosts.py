"""Groups whose ranks are on two hosts: `make test-hosts` creates the hosts and runs this file.

Sums must have the same bits as on one host, and the traffic must be visible on the cable: if an
engine used shared memory, the test would prove nothing.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import child
import mpi_jobs
import pytest
from host_ranks import LARGE

if not os.environ.get("MLSTATE_HOSTS"):
    pytest.skip("needs two hosts: make test-hosts makes them, as root", allow_module_level=True)

HERE = Path(__file__).parent
ENTER, RANKS = str(HERE / "enter.sh"), str(HERE / "host_ranks.py")
A, B = "mls-a", "mls-b"
LIMIT = 250
PORTS = iter(range(29500, 29999))

# Variables that make each engine use the network; each item is the engine and its variables.
ENGINES = {
    "gloo": ("gloo", {"GLOO_SOCKET_IFNAME": "veth0", "TP_SOCKET_IFNAME": "veth0"}),
    "mpich-ucx": ("mpich", {}),
    "mpich-ofi": ("mpich", {"MPIR_CVAR_CH4_NETMOD": "ofi"}),
    "openmpi": ("openmpi", {}),
}
SCENARIOS = [
    "rows_are_scattered_and_gathered",
    "rows_go_to_each_rank",
    "bytes_of_any_length_are_gathered",
    "async_operations_keep_their_order",
    "scattered_gradients_are_sums_in_the_order_of_ranks",
    "states_are_gathered_and_sent_back",
    "a_tied_transformer_with_frozen_parameters",
    "unused_parameters_are_named_or_zero",
    "a_gradient_that_is_not_finite_is_named",
]
pytestmark = pytest.mark.timeout(LIMIT + 50)


# ---- jobs ----


def start(host, command, **variables):
    """Start a command on a host."""
    return subprocess.Popen(
        [ENTER, host, shlex.join(command)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **variables},
    )  # fmt: skip


def commands(engine, places, names):
    """(host, command, variables) of each process or launcher."""
    library, variables = ENGINES[engine]
    world = len(places)
    if library == "gloo":
        common = {
            **variables,
            **child.PATHS,
            "MASTER_ADDR": places[0],
            "MASTER_PORT": str(next(PORTS)),
            "OMP_NUM_THREADS": "1",
        }
        call = [sys.executable, RANKS, "gloo"]
        return [
            (host, [*call, str(rank), str(world), *names], common)
            for rank, host in enumerate(places)
        ]
    slots = ",".join(f"{host}:{places.count(host)}" for host in dict.fromkeys(places))
    command = mpi_jobs.command(library, world, RANKS, "mpi", *names)
    environment = mpi_jobs.environment(library)
    environment["PYTHONPATH"] += os.pathsep + child.PATHS["PYTHONPATH"]
    if library == "mpich":
        command[1:1] = ["-launcher", "ssh", "-launcher-exec", ENTER, "-hosts", slots]
    else:
        command[1:1] = ["--prtemca", "plm_ssh_agent", ENTER, "--host", slots]
        command[1:1] = [part for name in ("PYTHONPATH", "MPI4PY_LIBMPI") for part in ("-x", name)]
    return [(places[0], command, {**environment, **variables})]


class Job:
    """Processes that run scenarios; the job kills them when it is left."""

    def __init__(self, engine, places, *names):
        self.places = places
        self.processes = [
            start(host, command, **variables)
            for host, command, variables in commands(engine, places, names)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()

    def results(self):
        """Wait; return the report of each rank for each scenario, and the other output."""
        deadline, outcomes, log = time.monotonic() + LIMIT, {}, ""
        for process in self.processes:
            out, err = process.communicate(timeout=max(1, deadline - time.monotonic()))
            log += f"exit {process.returncode}\n{out[-3000:]}\n{err[-3000:]}"
            for line in out.splitlines():
                if line.startswith('["'):  # lines of libraries start differently
                    name, rank, outcome, host = json.loads(line)
                    outcomes[name, rank] = outcome
                    assert host == self.places[rank], f"rank {rank} is on {host}\n{log}"
        return outcomes, log


def run(engine, places, *names):
    with Job(engine, places, *names) as job:
        return job.results()


@pytest.fixture(params=ENGINES, scope="module")
def engine(request):
    library = ENGINES[request.param][0]
    if library == "gloo":
        pytest.importorskip("torch", reason="gloo is torch's")
    else:
        mpi_jobs.skip_if_missing(library, "make test-hosts")
    return request.param


# ---- the cable ----


def carried():
    """Bytes sent from host a to host b, and back."""
    process = start(A, ["ip", "-j", "-s", "link", "show", "veth0"])
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    counters = json.loads(out)[0]["stats64"]
    return counters["tx"]["bytes"], counters["rx"]["bytes"]


def set_cable(state):
    process = start(A, ["ip", "link", "set", "veth0", state])
    assert process.communicate(timeout=20)[1] == ""


# ---- tests ----


@pytest.mark.parametrize("places", [(A, B), (A, B, B)], ids=len)
def test_ranks_of_two_hosts_pass_all_scenarios(engine, places):
    outcomes, log = run(engine, places, *SCENARIOS)
    for name in SCENARIOS:
        for rank in range(len(places)):
            outcome = outcomes.get((name, rank))
            assert outcome == "ok", f"{name}, {rank}: {outcome}\n{log}"


@pytest.fixture(scope="module")
def sums():
    """The digests of an engine's sums on that many hosts, and the bytes on the cable."""
    cached = {}

    def sums_of(engine, places):
        if (engine, places) not in cached:
            before = carried()
            outcomes, log = run(engine, places, "large_sums")
            moved = [after - was for after, was in zip(carried(), before, strict=True)]
            digests = [outcomes.get(("large_sums", rank), "") for rank in range(len(places))]
            assert all(len(digest) == 64 for digest in digests), f"{digests}\n{log}"
            cached[engine, places] = digests, moved
        return cached[engine, places]

    return sums_of


def test_traffic_crosses_the_link_and_sums_match_one_host(engine, sums):
    least = 1 * 2 * LARGE * 4 // 3  # bytes each way: each rank's part from each other rank
    one_host, two_hosts = sums(engine, (A, A, A)), sums(engine, (A, B, B))
    assert one_host[0] == two_hosts[0]
    assert min(two_hosts[1]) >= least, two_hosts[1]
    assert max(one_host[1]) < least / 20, one_host[1]
    print(
        f"{engine}: {two_hosts[1]} bytes there and back, {least} needed; on one host {one_host[1]}"
    )


def test_all_engines_make_the_same_bits(sums):
    installed = [name for name, (of, _) in ENGINES.items() if of == "gloo" or mpi_jobs.home(of)]
    assert len({json.dumps(sums(name, (A, B, B))[0]) for name in installed}) == 1


def test_a_cut_cable_is_an_error_on_every_rank(engine):
    """The test reconnects the cable afterwards, because launchers use it too."""
    with Job(engine, (A, B, B), "a_cut_cable_is_an_error") as job:
        assert any(line.startswith('["ready"') for line in job.processes[0].stdout)
        try:
            set_cable("down")
            time.sleep(8)
        finally:
            set_cable("up")
        outcomes, log = job.results()
    for rank in range(3):
        outcome = str(outcomes.get(("a_cut_cable_is_an_error", rank)))
        assert outcome.startswith(f"all_reduce on rank {rank}: "), f"{outcome}\n{log}"


LOCAL = """
import sys
from mlstate import CollectiveError
from mlstate.collectives import LocalGroup
try:
    LocalGroup.from_env(timeout=float(sys.argv[1]))
except CollectiveError as error:
    print(error)
"""


@pytest.mark.parametrize("states_hosts", [True, False])
def test_a_local_group_over_two_hosts_is_refused(states_hosts):
    """If the launcher sets LOCAL_WORLD_SIZE, joining fails at once; otherwise it times out."""
    variables = {"WORLD_SIZE": "2", "MASTER_PORT": "29499", "PYTHONPATH": str(HERE.parents[1])}
    if states_hosts:
        variables["LOCAL_WORLD_SIZE"] = "1"
    call = [sys.executable, "-c", LOCAL, "100" if states_hosts else "2"]
    jobs = [start(host, call, RANK=str(rank), **variables) for rank, host in enumerate((A, B))]
    outputs = [process.communicate(timeout=60)[0] for process in jobs]
    for text in outputs:
        if states_hosts:
            assert (
                "2 ranks, 1 of them on this host; LocalGroup connects only ranks of one host"
                in text
            )
        else:
            assert "on this host" in text, outputs
