"""States of ranks that MPI connects, with MPICH and with Open MPI."""

from pathlib import Path

import pytest

mpi_jobs = pytest.importorskip("mpi_jobs", reason="starts jobs of MPI")

RANKS = Path(__file__).with_name("collect_ranks.py")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("engine", mpi_jobs.ENGINES)
def test_states_are_gathered_and_sent_out(engine):
    if mpi_jobs.home(engine) is None:
        pytest.skip(f"{engine} is not installed; tools/mpi.sh does that for `make test`")
    status, out, err = mpi_jobs.run(engine, 3, str(RANKS))
    assert sorted(out.splitlines()) == ["0 ok", "1 ok", "2 ok"], f"exit {status}\n{out}\n{err}"
    assert status == 0, err
