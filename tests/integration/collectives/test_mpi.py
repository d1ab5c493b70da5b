"""Groups of MPI: jobs of two to four ranks, with MPICH and with Open MPI."""

import ast
import json
import time
from pathlib import Path

import mpi_jobs
import pytest

pytest.importorskip("torch", reason="ranks exchange tensors, too")
pytest.importorskip("ml_dtypes", reason="ranks compare bfloat16 in NumPy")

LIMIT = 400  # seconds; jobs take a few, and many times that while others use the cores
RANKS = Path(__file__).with_name("mpi_ranks.py")
LISTS = ("SHARED", "HOOKS")


def scenarios():
    """Names of the shared scenarios and of those in mpi_ranks.py, in the file's order."""
    tree = ast.parse(RANKS.read_text(encoding="utf-8"))
    shared, separate = [], []
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in LISTS:
            shared += ast.literal_eval(node.value)
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            separate.append(node.name)
    first = separate.index("a_rank_that_does_not_come_is_named")
    last = separate.index("with_fewer_threads_operations_are_done_at_once")
    return shared, separate[:first], separate[first:last]


SHARED, OWN, FAILURES = scenarios()
WORKING = SHARED + OWN
# Importing torch in four processes takes long on two cores.
PLAIN = [name for name in OWN if name != "tensors_that_were_written_to_have_a_new_version"]


@pytest.fixture(scope="module", params=mpi_jobs.ENGINES)
def engine(request):
    mpi_jobs.skip_if_missing(request.param)
    return request.param


def run(engine, ranks, names, **variables):
    """Run scenarios in one job; return the outcomes by name and rank, and the output."""
    status, out, err = mpi_jobs.run(engine, ranks, str(RANKS), *names, **variables)
    outcomes = {}
    for line in out.splitlines():
        if line.startswith("["):
            name, rank, outcome = json.loads(line)
            outcomes[name, rank] = outcome
    return outcomes, f"exit {status}\n{out[-1000:]}\n{err[-3000:]}"


def check(outcomes, log, names, ranks):
    wrong = [
        f"{name}, rank {rank}: {outcomes.get((name, rank))}"
        for name in names
        for rank in range(ranks)
        if outcomes.get((name, rank)) != "ok"
    ]
    assert not wrong, "\n".join([*wrong, log])


# MPI ranks wait busily, so three of them on two cores are slow: only one engine runs them.
# `test_more_ranks_than_cores_agree` runs some scenarios on four ranks of each engine.
JOBS = list(zip(mpi_jobs.ENGINES, ("3", "2"), strict=True))


@pytest.fixture(scope="module", params=JOBS, ids="-".join)
def worked(request):
    """One job for all scenarios: each failure has its own group."""
    name, ranks = request.param[0], int(request.param[1])
    mpi_jobs.skip_if_missing(name)
    return run(name, ranks, WORKING + FAILURES), ranks


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("name", WORKING)
def test_ranks_agree(worked, name):
    (outcomes, log), ranks = worked
    check(outcomes, log, [name], ranks)


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_an_error_on_every_rank(worked, name):
    (outcomes, log), ranks = worked
    check(outcomes, log, [name], ranks)


def test_jobs_end_well(worked):
    (_, log), _ = worked
    assert log.startswith("exit 0\n"), log


@pytest.mark.timeout(LIMIT)
def test_more_ranks_than_cores_agree(engine):
    outcomes, log = run(engine, 4, PLAIN)
    check(outcomes, log, PLAIN, 4)
    assert log.startswith("exit 0\n"), log


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("level", ["serialized", "funneled"])
def test_async_needs_an_mpi_for_threads(engine, level):
    names = ["with_fewer_threads_operations_are_done_at_once"]
    outcomes, log = run(engine, 2, names, MLSTATE_TEST_MPI_LEVEL=level)
    check(outcomes, log, names, 2)


@pytest.mark.timeout(LIMIT)
def test_a_killed_rank_takes_the_job_down(engine):
    began = time.monotonic()
    status, out, err = mpi_jobs.run(engine, 2, str(RANKS), "a_killed_rank_takes_the_job_down")
    assert status != 0, out + err
    assert "not done after" not in err
    assert '"ok"' not in out
    assert time.monotonic() - began < LIMIT / 4


@pytest.mark.timeout(LIMIT)
def test_an_uncaught_error_under_mpi4py_ends_the_job(engine):
    name = "an_uncaught_error_under_mpi4py_ends_the_job"
    status, _, err = mpi_jobs.run(engine, 2, "-m", "mpi4py", str(RANKS), name)
    assert status != 0
    assert "barrier on rank 0: not done after 0.3 s" in err
    assert f"not done after {mpi_jobs.LIMIT_SECONDS} s" not in err


@pytest.mark.timeout(LIMIT)
def test_a_process_without_mpiexec_is_a_job_of_one(engine):
    import subprocess
    import sys

    code = "import doctest, mlstate.integrations.mpi as m; print(doctest.testmod(m))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env=mpi_jobs.environment(engine), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "failed=0" in done.stdout and "attempted=3" in done.stdout, done.stdout + done.stderr


def test_mpi4py_must_be_there(monkeypatch):
    import sys

    from mlstate.integrations.mpi import MPIGroup

    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r"pip install 'mlstate\[mpi\]'"):
        MPIGroup()
