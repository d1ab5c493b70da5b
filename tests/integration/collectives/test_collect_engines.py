"""States of ranks connected by MPI or shared memory; torch.distributed has other tests."""

import collect_ranks
import mpi_jobs
import pytest

from mlstate.collectives import LocalGroup
from mlstate.testing import run_ranks

pytestmark = pytest.mark.timeout(120)

EXPECTED = ["0 ok", "1 ok", "2 ok"]


@pytest.mark.parametrize("engine", ["mpich", "openmpi"])
def test_states_are_collected_over_mpi(engine, monkeypatch):
    mpi_jobs.put_in_path(monkeypatch, engine)
    assert run_ranks(3, collect_ranks.collect, "mpi") == EXPECTED


def test_states_are_collected_over_shared_memory():
    outcomes = LocalGroup.run(collect_ranks.collect, 3, start_method="spawn", timeout=60)
    assert outcomes == EXPECTED


def test_states_of_threads_are_collected():
    assert run_ranks(3, collect_ranks.collect) == EXPECTED
