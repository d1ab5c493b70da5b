"""Groups of MPI: jobs of two to four ranks, with MPICH and with Open MPI."""

import functools
import os
import signal
import subprocess
import sys
import time

import mpi_jobs
import mpi_ranks
import numpy as np
import pytest
from group_scenarios import SCENARIOS
from needs import needs

from mlstate import CollectiveError
from mlstate.integrations.mpi import MPIGroup
from mlstate.testing import run_ranks

# The ranks import this file, so it does not import torch, which takes seconds and some jobs omit.
pytestmark = [needs("torch"), needs("ml_dtypes"), pytest.mark.timeout(400)]

SECONDS = 300.0  # of a job; jobs take a few, and many times that while others use the cores
WORKING = [*SCENARIOS, *mpi_ranks.HOOKS, *mpi_ranks.OWN]
PLAIN = [name for name in mpi_ranks.OWN if "tensors" not in name]


@pytest.fixture(scope="module", params=mpi_jobs.ENGINES)
def engine(request):
    mpi_jobs.skip_if_missing(request.param)
    return request.param


def run(monkeypatch, engine, ranks, names):
    """Run scenarios in one job; return the outcomes by name of each rank."""
    mpi_jobs.put_in_path(monkeypatch, engine)
    outcomes = functools.partial(mpi_ranks.outcomes, names=names)
    return run_ranks(ranks, outcomes, "mpi", timeout=SECONDS)


def check(ranks, names):
    wrong = [
        f"{name}, rank {rank}: {done[name]}"
        for name in names
        for rank, done in enumerate(ranks)
        if done[name] != "ok"
    ]
    assert not wrong, "\n".join(wrong)


# MPI ranks wait busily, so three of them on two cores are slow: only one engine runs them.
# `test_more_ranks_than_cores_agree` runs some scenarios on four ranks of each engine.
JOBS = list(zip(mpi_jobs.ENGINES, ("3", "2"), strict=True))


@pytest.fixture(scope="module", params=JOBS, ids="-".join)
def worked(request):
    """One job for all scenarios."""
    engine, ranks = request.param
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run(monkeypatch, engine, int(ranks), [*WORKING, *mpi_ranks.FAILURES])


@pytest.mark.parametrize("name", WORKING)
def test_ranks_agree(worked, name):
    check(worked, [name])


@pytest.mark.parametrize("name", mpi_ranks.FAILURES)
def test_a_failure_is_an_error_on_every_rank(worked, name):
    check(worked, [name])


def test_more_ranks_than_cores_agree(engine, monkeypatch):
    check(run(monkeypatch, engine, 4, PLAIN), PLAIN)


@pytest.mark.parametrize("level", ["serialized", "funneled"])
def test_async_needs_an_mpi_for_threads(engine, level, monkeypatch):
    monkeypatch.setenv("MPI4PY_RC_THREAD_LEVEL", level)
    mpi_jobs.put_in_path(monkeypatch, engine)
    function = mpi_ranks.with_fewer_threads_operations_are_done_at_once
    run_ranks(2, function, "mpi", timeout=SECONDS)


def be_killed(group):
    group.barrier()
    if group.rank == group.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        group.all_reduce(np.zeros(9), timeout=200)


def test_a_killed_rank_takes_the_job_down(engine, monkeypatch):
    began = time.monotonic()
    mpi_jobs.put_in_path(monkeypatch, engine)
    with pytest.raises(CollectiveError, match="ended with exit status"):
        run_ranks(2, be_killed, "mpi", timeout=SECONDS)
    assert time.monotonic() - began < 100


UNCAUGHT = """
import numpy as np
from mpi4py import MPI
from mlstate.integrations.mpi import MPIGroup
group = MPIGroup()
if group.rank == 0:
    group.barrier(timeout=0.3)  # raises, which `python -m mpi4py` turns into an abort
MPI.COMM_WORLD.Recv(np.zeros(1), source=0)  # for ever
"""


def test_an_uncaught_error_under_mpi4py_ends_the_job(engine):
    status, _, err = mpi_jobs.run(engine, 2, "-m", "mpi4py", "-c", UNCAUGHT)
    assert status != 0
    assert "barrier on rank 0: not done after 0.3 s" in err
    assert f"not done after {mpi_jobs.LIMIT_SECONDS} s" not in err


def test_a_process_without_mpiexec_is_a_job_of_one(engine):
    code = "import doctest, mlstate.integrations.mpi as m; print(doctest.testmod(m))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env=mpi_jobs.environment(engine), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "failed=0" in done.stdout and "attempted=3" in done.stdout, done.stdout + done.stderr


def test_mpi4py_must_be_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r"pip install 'mlstate\[mpi\]'"):
        MPIGroup()
