"""`run_ranks`: results, errors, killed ranks, timeouts and warnings, with every engine."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import mpi_jobs
import numpy as np
import pytest
from needs import needs

from mlstate import CollectiveError
from mlstate.collectives import LocalGroup
from mlstate.testing import run_ranks

# Python 3.12 and later warn if a process with threads forks; pytest's watchdog is a thread
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

LONG = 60.0  # seconds, more than any test waits
GLOO = pytest.param("gloo", marks=[pytest.mark.torch, needs("torch")])
MPI = pytest.param("mpi", marks=pytest.mark.slow)
engines = pytest.mark.parametrize("engine", ["threads", GLOO, MPI])
processes = pytest.mark.parametrize("engine", [GLOO, MPI])


@pytest.fixture(autouse=True)
def mpi(request, monkeypatch):
    """An MPI of the tests in PATH, if the engine of the test is MPI."""
    if "engine" in request.fixturenames and request.getfixturevalue("engine") == "mpi":
        mpi_jobs.put_in_path(monkeypatch)


def total(group, scale=1):
    total = group.all_reduce(np.full(2, group.rank * scale))
    return group.rank, total.tolist(), os.getpid()


def fail(group, kind):
    """The last rank fails, the others wait for it."""
    if group.rank < group.world_size - 1:
        group.barrier()
    elif kind == "result":
        return threading.Lock()
    elif kind == "exit":
        sys.exit(3)
    raise KeyError("of the user")


def be_killed(group):
    """The last rank is killed; the others survive it."""
    group.barrier()
    if group.rank == group.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError):
        for _ in range(3):  # the rank may have sent all that the first barrier needs
            group.barrier()


def be_killed_and_survived_badly(group):
    be_killed(group)
    raise KeyError("of the survivor")


def never_return(group):
    if group.rank == 1:
        threading.Event().wait(LONG)


def wait_for_the_last(group):
    if group.rank == 0:
        group.barrier()


def warn(group):
    warnings.warn(f"of {group.world_size} ranks", UserWarning, stacklevel=1)


def print_rank(group):
    print("printed by", group.rank)


def default_group_is_initialised(group):
    import torch.distributed as dist

    from mlstate.integrations.torch import TorchGroup

    assert (dist.get_rank(), dist.get_world_size()) == (group.rank, group.world_size)
    with TorchGroup() as default:
        assert default.gather_bytes(b"x") == [b"x"] * group.world_size
    return os.getpid()


def break_the_group(group):
    if group.rank == 0:
        with pytest.raises(CollectiveError):
            group.barrier(timeout=0.01)
    return os.getpid()


# ---- success ----


@engines
@pytest.mark.parametrize("world", [1, 3])
def test_results_come_back_in_rank_order(engine, world):
    results = run_ranks(world, functools.partial(total, scale=10), engine)
    expected = 10 * sum(range(world))
    assert [result[:2] for result in results] == [(r, [expected] * 2) for r in range(world)]
    assert len({pid for _, _, pid in results}) == (1 if engine == "threads" else world)


def test_threads_call_any_function():
    seen = []
    assert run_ranks(2, lambda group: seen.append(group)) == [None, None]
    assert all(isinstance(group, LocalGroup) and repr(group).endswith("closed)") for group in seen)


@pytest.mark.torch
@needs("torch")
def test_processes_of_gloo_are_kept_for_the_next_call_of_as_many_ranks():
    first = run_ranks(2, default_group_is_initialised, "gloo")
    assert run_ranks(2, default_group_is_initialised, "gloo") == first
    assert set(run_ranks(3, default_group_is_initialised, "gloo")).isdisjoint(first)


@pytest.mark.torch
@needs("torch")
def test_processes_with_a_broken_group_are_not_used_again():
    first = run_ranks(2, break_the_group, "gloo")
    assert set(run_ranks(2, default_group_is_initialised, "gloo")).isdisjoint(first)


@engines
def test_warnings_of_ranks_are_issued_here(engine):
    with pytest.warns(UserWarning, match="of 2 ranks"):
        run_ranks(2, warn, engine)


@engines
def test_output_of_ranks_is_printed_here(engine, capsys):
    run_ranks(2, print_rank, engine)
    assert {"printed by 0", "printed by 1"} <= set(capsys.readouterr().out.splitlines())


# ---- failures ----


@engines
def test_an_exception_of_a_rank_is_raised_with_its_rank(engine):
    with pytest.raises(KeyError, match="of the user") as caught:
        run_ranks(3, functools.partial(fail, kind="key"), engine)
    assert caught.value.__notes__[0].startswith("in rank 2")
    if engine != "threads":
        assert 'raise KeyError("of the user")' in caught.value.__notes__[0]


@processes
def test_a_result_that_cannot_be_pickled_names_the_rank(engine):
    with pytest.raises(CollectiveError, match=r"the result, .*cannot pickle .*lock") as caught:
        run_ranks(1, functools.partial(fail, kind="result"), engine)
    assert caught.value.rank == 0


@processes
def test_a_killed_rank_is_named(engine):
    with pytest.raises(CollectiveError, match=r"run_ranks on rank \d: its process") as caught:
        run_ranks(2, be_killed, engine)
    if engine == "gloo":
        assert caught.value.rank == 1
        assert "killed by SIGKILL" in str(caught.value)
        assert not hasattr(caught.value, "__notes__")  # the others returned


@pytest.mark.torch
@needs("torch")
def test_errors_of_the_ranks_that_survive_a_killed_one_are_notes():
    with pytest.raises(CollectiveError, match="killed by SIGKILL") as caught:
        run_ranks(3, be_killed_and_survived_badly, "gloo")
    notes = sorted(caught.value.__notes__)
    assert [note.splitlines()[0] for note in notes] == ["in rank 0:", "in rank 1:"]
    assert all("KeyError: 'of the survivor'" in note for note in notes)


@engines
def test_a_rank_that_does_not_return_is_named_and_ended(engine):
    began, children = time.monotonic(), set(multiprocessing.active_children())
    with pytest.raises(CollectiveError, match=r"not done after 1 s: ranks \[1\] were") as caught:
        run_ranks(2, never_return, engine, timeout=1)
    assert caught.value.rank == 1
    assert time.monotonic() - began < LONG
    assert set(multiprocessing.active_children()) <= children


@engines
def test_operations_of_the_group_end_after_the_timeout(engine):
    text = "not done after |rank 1 closed the group"
    with pytest.raises(CollectiveError, match=f"barrier on rank 0: ({text})"):
        run_ranks(2, wait_for_the_last, engine, timeout=1)


@pytest.mark.parametrize("engine", ["gloo", "mpi"])
def test_a_function_that_other_processes_cannot_import_is_refused(engine):
    with pytest.raises(TypeError, match="define it at the top of a module"):
        run_ranks(2, lambda group: None, engine)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((2, 3), TypeError, "function must be callable"),
        ((2, total, "nccl"), ValueError, '"threads", "gloo" or "mpi"'),
        ((0, total, "gloo"), ValueError, "world_size must be at least 1"),
        ((65, total), ValueError, "64"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        run_ranks(*arguments)


def test_missing_mpiexec_is_an_error(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CollectiveError, match="no mpiexec in PATH"):
        run_ranks(2, total, "mpi")


PROGRAM = """
import os
from mlstate.testing import run_ranks

def pid(group):
    return os.getpid()

if __name__ == "__main__":
    print(*run_ranks(2, pid, "gloo"))
    {end}
"""


@pytest.mark.torch
@needs("torch")
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc for processes that are left")
@pytest.mark.parametrize("end", ["", pytest.param("os.abort()", marks=pytest.mark.long)])
def test_ranks_end_with_the_program_that_started_them(end, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(end=end), encoding="utf-8")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=LONG)
    assert done.returncode == (-signal.SIGABRT if end else 0), done.stderr
    deadline = time.monotonic() + LONG
    while any(Path(f"/proc/{pid}").exists() for pid in done.stdout.split()):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.01)


def test_an_exception_of_all_ranks_names_none():
    def failing(group):
        raise ValueError("the same text")

    with pytest.raises(ValueError, match="the same text") as caught:
        run_ranks(3, failing)
    assert caught.value.__notes__ == ["in all ranks"]
