"""States of ranks connected by MPI or shared memory; torch.distributed has other tests."""

from pathlib import Path

import collect_ranks
import pytest
from thread_team import run_in_threads

from mlstate.collectives import LocalGroup

pytestmark = pytest.mark.timeout(120)

RANKS = Path(__file__).with_name("collect_ranks.py")
EXPECTED = ["0 ok", "1 ok", "2 ok"]


@pytest.mark.parametrize("engine", ["mpich", "openmpi"])
def test_states_are_collected_over_mpi(engine):
    mpi_jobs = pytest.importorskip("mpi_jobs", reason="starts jobs of MPI")
    mpi_jobs.skip_if_missing(engine)
    status, out, err = mpi_jobs.run(engine, 3, str(RANKS))
    assert sorted(out.splitlines()) == EXPECTED, f"exit {status}\n{out}\n{err}"
    assert status == 0, err


def test_states_are_collected_over_shared_memory():
    outcomes = LocalGroup.run(collect_ranks.collect, 3, start_method="spawn", timeout=60)
    assert outcomes == EXPECTED


def test_states_of_threads_are_collected():
    groups = LocalGroup.threads(3, timeout=30)

    def work(rank):
        with groups[rank]:
            return collect_ranks.collect(groups[rank])

    assert run_in_threads(work, 3) == EXPECTED
