"""Ranks that are processes of this host: their rendezvous, shared memory and exit."""

import contextlib
import gc
import json
import multiprocessing
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import resource_tracker
from pathlib import Path

import local_ranks
import mpi_jobs
import numpy as np
import pytest
from group_model import inputs, raises, reduced, same_bits
from thread_team import run_in_threads

import mlstate
from mlstate import CollectiveError
from mlstate.collectives import LocalGroup, _local_rendezvous
from mlstate.collectives._local_rendezvous import _socket_address

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    # Python 3.12 and later warn if a process with threads forks; pytest's watchdog is a thread
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]

LIMIT = 60.0  # seconds: much longer than a busy machine needs
SOON = 10.0  # for events that take tens of milliseconds on an idle machine
METHODS = ["fork", "spawn"]
RANKS = Path(local_ranks.__file__)
LINUX = sys.platform == "linux"


def environment(**variables):
    """The variables for a process that imports the same mlstate, without a launcher's."""
    helpers = str(Path(mpi_jobs.__file__).parent)
    paths = [str(Path(mlstate.__file__).parents[1]), helpers, os.environ.get("PYTHONPATH", "")]
    launchers = (
        "RANK",
        "WORLD_SIZE",
        "OMPI_",
        "PMI",
        "SLURM_",
        "TORCHELASTIC",
        "MASTER_",
        "LOCAL_",
    )
    variables_kept = {
        name: value for name, value in os.environ.items() if not name.startswith(launchers)
    }
    return {**variables_kept, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}


def run(function, *args, world=3, method="fork"):
    return LocalGroup.run(function, world, *args, start_method=method, timeout=LIMIT)


# ---- leftover resources ----


def names_of(folder):
    return [path.name for path in Path(folder).iterdir()]


def open_resources():
    """The resources of this process, and files that a group might leave."""
    if not LINUX:
        return [], []
    kinds = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            kinds.append(str(descriptor.readlink()))
    temporary = ("mlstate-group", f"mlstate-{os.getuid()}-")  # other tests run at the same time
    folders = ("/dev/shm", tempfile.gettempdir())
    files = [name for folder in folders for name in names_of(folder) if name.startswith(temporary)]
    with Path("/proc/self/maps").open() as maps:
        files += [line for line in maps if "mlstate-group" in line]
    return sorted(kinds), sorted(files)


@pytest.fixture(autouse=True)
def check_no_resources_left(monkeypatch):
    """No test here leaves a process, descriptor, mapping, file or socket behind."""
    names = iter(range(1000))
    token = secrets.token_hex(8)
    monkeypatch.setattr(secrets, "token_hex", lambda n: f"{token}-{next(names)}")
    resource_tracker.ensure_running()  # it keeps running after the first spawned process
    children = set(multiprocessing.active_children())  # `run_ranks` keeps ranks of other tests
    before, threads = open_resources(), threading.active_count()
    yield
    assert set(multiprocessing.active_children()) == children
    gc.collect()
    assert open_resources() == before
    assert threading.active_count() == threads
    if LINUX:
        used = Path("/proc/net/unix").read_text()
        for number in range(next(names)):
            assert _socket_address(f"run-{os.getpid()}-{token}-{number}")[1:] not in used


# ---- success ----


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_rank_is_a_process_and_results_come_back_in_their_order(world, method):
    results = run(local_ranks.every_operation, 3, world=world, method=method)
    assert [rank for rank, _ in results] == list(range(world))
    assert len({process for _, process in results} | {os.getpid()}) == world + 1


def test_large_arrays_pass_in_pieces():
    total = reduced(inputs(2, local_ranks.LARGE, "float32"), "sum")
    first, second = run(local_ranks.arrays_larger_than_the_memory_that_is_shared, world=2)
    same_bits(first, total)
    assert second.size == 0


def test_ranks_may_run_nested_groups():
    assert run(local_ranks.nested_runs, world=2) == [0, 1]


def test_forked_children_are_refused():
    run(local_ranks.forked_children_are_refused, world=2)


def test_several_groups_at_once():
    def work(number):
        return run(local_ranks.every_operation, number + 1, world=2)

    results = run_in_threads(work, 3, seconds=LIMIT)
    assert [[rank for rank, _ in group_result] for group_result in results] == [[0, 1]] * 3
    assert len({process for group_result in results for _, process in group_result}) == 6


# ---- ranks that fail ----


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_of_a_rank_is_raised_with_its_traceback(method):
    with pytest.raises(KeyError, match="of the user") as caught:
        run(local_ranks.fail, 1, "key", method=method)
    (added,) = caught.value.__notes__
    assert added.startswith("in rank 1:\nTraceback")
    assert 'raise KeyError("of the user")' in added


def test_unpicklable_results_are_described():
    with pytest.raises(CollectiveError, match="OddError: of the user") as caught:
        run(local_ranks.fail, 2, "odd")
    assert caught.value.rank == 2
    with pytest.raises(CollectiveError, match=r"of_one_rank\.OwnError: of the user"):
        run(local_ranks.fail, 0, "module")
    with pytest.raises(CollectiveError, match="of type lock, cannot be sent") as caught:
        run(local_ranks.fail, 0, "result")
    assert caught.value.rank == 0


@pytest.mark.parametrize("kind", ["exit", "end"])
def test_rank_that_exits_is_named(kind):
    with pytest.raises(CollectiveError, match="3") as caught:
        run(local_ranks.fail, 1, kind)
    assert caught.value.rank == 1
    assert ("SystemExit: 3" if kind == "exit" else "exit status 3") in str(caught.value)


def test_run_over_its_timeout_is_ended(tmp_path):
    began = time.monotonic()
    with pytest.raises(CollectiveError, match=r"not done after 1 s: ranks \[0, 1\]"):
        LocalGroup.run(local_ranks.wait_for_ever, 2, tmp_path, start_method="fork", timeout=1)
    assert time.monotonic() - began < 1 + SOON


def killed(function, folder, *args, who, world=3, method="fork"):
    """Run ranks and kill one of them; return the reports of the others."""
    with pytest.raises(CollectiveError, match="killed by SIGKILL") as caught:
        run(function, str(folder), *args, world=world, method=method)
    assert caught.value.rank == who
    return {
        rank: (folder / f"rank{rank}").read_text().splitlines()
        for rank in range(world)
        if rank != who
    }


@pytest.mark.parametrize(
    ("name", "method"), [*((name, "fork") for name in local_ranks.OPERATIONS), ("barrier", "spawn")]
)
def test_a_rank_killed_in_an_operation_is_named_by_all_others(name, method, tmp_path):
    reports = killed(local_ranks.be_killed_in, tmp_path, name, who=1, method=method)
    for rank, (took, error, again, group) in reports.items():
        assert float(took) < SOON
        why = "rank 1 is gone: its process, "
        assert error.startswith(f"{name} on rank {rank}: {why}"), error
        assert error.endswith("has ended; the group is unusable: create a new one")
        assert why in again
        assert group.startswith(f"LocalGroup(rank {rank} of 3, {why}")


def test_a_rank_killed_while_it_waits_is_named_by_all_others(tmp_path):
    for took, error, *_ in killed(local_ranks.be_killed_while_waiting, tmp_path, who=1).values():
        assert float(took) < SOON
        assert "rank 1 is gone" in error


@pytest.mark.skipif(not LINUX, reason="looks at /proc whether the process stands still")
def test_stopped_rank_is_named_by_a_timeout(tmp_path):
    with pytest.raises(CollectiveError):
        run(local_ranks.be_stopped, str(tmp_path))
    reports = [(tmp_path / f"rank{rank}").read_text() for rank in (0, 2)]
    assert any("not done after 2 s: rank 1 " in text for text in reports), reports
    assert all("waiting for rank 1 in all_reduce" in text.splitlines()[-1] for text in reports), (
        reports
    )


def test_an_interrupted_rank_ends_the_operations_of_all(tmp_path):
    run(local_ranks.be_interrupted, str(tmp_path))
    reports = [(tmp_path / f"rank{rank}").read_text().splitlines() for rank in range(3)]
    assert reports[0][1:] == [
        "KeyboardInterrupt",
        "LocalGroup(rank 0 of 3, rank 0 was interrupted in all_gather)",
    ]
    for took, error, *_ in reports[1:]:
        assert float(took) < SOON
        assert "rank 0 was interrupted in all_gather" in error


# ---- Ctrl-C ----


def processes_of(group):
    """The live processes of a process group."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, belongs = path.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(belongs) == group and state != "Z":
            pids.append(int(path.parent.name))
    return pids


def wait_until(condition, label):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, label
        time.sleep(0.01)


@pytest.mark.skipif(not LINUX, reason="looks at /proc for processes that are left")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("whom", ["all", "parent", "parent, killed"])
def test_ctrl_c_and_a_killed_parent_leave_no_process(whom, method, tmp_path):
    process = subprocess.Popen(
        [sys.executable, str(RANKS), "wait", str(tmp_path), method],
        env=environment(), start_new_session=True, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_until((tmp_path / "rank0").exists, "the ranks did not start")
        if whom == "all":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGKILL if "killed" in whom else signal.SIGINT)
        _, output = process.communicate(timeout=LIMIT)
        assert process.returncode == (-signal.SIGKILL if "killed" in whom else 130), output
        # multiprocessing's resource tracker ends a moment after the process it served
        wait_until(lambda: not processes_of(process.pid), "a process is left")
    finally:
        if processes_of(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


# ---- joining by name, and by a launcher's variables ----


def joined(name, rank, world, timeout, pipe):
    try:
        with LocalGroup.join(name, rank, world, timeout=timeout) as group:
            pipe.send(group.gather_bytes(b"%d" % rank))
    except CollectiveError as error:
        pipe.send(str(error))


def join_all(name, claims, timeout=LIMIT):
    """Let a process join for each claim (rank, world); return their results or errors."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank, world in claims:
        parent_pipe, child_pipe = context.Pipe(duplex=False)
        with child_pipe:
            process = context.Process(target=joined, args=(name, rank, world, timeout, child_pipe))
            process.start()
        pipes.append(parent_pipe)
        processes.append(process)
    try:
        return [pipe.recv() if pipe.poll(LIMIT) else "nothing" for pipe in pipes]
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()


@pytest.mark.parametrize(
    ("claims", "text"),
    [
        ([(0, 2), (1, 3)], "rank 1 expects 3 ranks, rank 0 expects 2"),
        ([(0, 3), (1, 3), (1, 3)], "two processes of job .* claim to be rank 1"),
    ],
)
def test_claims_that_do_not_go_together_are_refused_by_all(claims, text):
    for message in join_all(f"claims {os.getpid()}", claims, SOON):
        assert re.search(text, message), message


@pytest.mark.skipif(not LINUX, reason="nothing tells the processes at a socket's other end")
def test_two_ranks_are_not_one_process():
    name, messages = f"one process {os.getpid()}", []

    def join(rank):
        messages.append(
            str(raises(CollectiveError, "", LocalGroup.join, name, rank, 2, timeout=SOON))
        )

    thread = threading.Thread(target=join, args=(1,), daemon=True)
    thread.start()
    join(0)
    thread.join(LIMIT)
    assert len(messages) == 2
    assert all("ranks 0 and 1 are one process; LocalGroup.threads" in text for text in messages)


def test_ranks_with_unknown_process_ids_meet(monkeypatch):
    """So they are outside of Linux, and in containers with a network but other process ids."""
    user = os.getuid()
    monkeypatch.setattr(_local_rendezvous, "_get_credentials", lambda peer: (0, user))
    everyone = [b"%d" % rank for rank in range(4)]
    name = f"unknown ids {os.getpid()}"
    assert join_all(name, [(rank, 4) for rank in range(4)]) == [everyone] * 4


def test_absent_rank_is_named():
    name = f"nobody {os.getpid()}"
    caught = raises(CollectiveError, "", LocalGroup.join, name, 0, 3, timeout=0.2)
    assert "ranks [1, 2] of job" in str(caught)
    assert "did not join within 0.2 s" in str(caught)
    caught = raises(CollectiveError, "", LocalGroup.join, name, 1, 3, timeout=0.2)
    assert f"rank 0 of job {name!r} did not start within 0.2 s" in str(caught)


@pytest.mark.parametrize("folder", ["missing", "x" * 200])
def test_error_has_the_address_at_which_rank_0_cannot_listen(folder, tmp_path, monkeypatch):
    address = str(tmp_path / folder / "socket")
    monkeypatch.setattr(_local_rendezvous, "_socket_address", lambda name: address)
    caught = raises(OSError, "", LocalGroup.join, "job", 0, 2, timeout=5)
    assert (caught.filename, bool(caught.errno)) == (address, True)


def test_a_name_can_be_used_again():
    for world in (1, 2, 1, 3):
        results = join_all(f"again {os.getpid()}", [(rank, world) for rank in range(world)])
        assert results == [[b"%d" % rank for rank in range(world)]] * world


def started(commands, **variables):
    """Run commands at once, each with its variables; return their lines of output."""
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            command,
            env=environment(**variables, **rank_variables),
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for command, rank_variables in commands
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return sorted(line for out, _ in outputs for line in out.splitlines())


def test_processes_started_by_hand_meet():
    ranks = [([sys.executable, str(RANKS)], {"RANK": str(rank)}) for rank in range(3)]
    lines = started(ranks, WORLD_SIZE="3", MLSTATE_JOB=f"by hand {os.getpid()}")
    assert lines == ["0 of 3 ok", "1 of 3 ok", "2 of 3 ok"]


@pytest.mark.torch
def test_processes_of_torchrun_meet():
    pytest.importorskip("torch", reason="torchrun is torch's")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    lines = started([([*command, "--nproc-per-node=2", str(RANKS)], {})], OMP_NUM_THREADS="1")
    assert lines == ["0 of 2 ok", "1 of 2 ok"]


@pytest.mark.parametrize("engine", mpi_jobs.ENGINES)
def test_processes_of_mpirun_meet(engine):
    mpi_jobs.skip_if_missing(engine)
    job = {"MLSTATE_JOB": f"{engine} {os.getpid()}"} if engine == "mpich" else {}
    status, out, err = mpi_jobs.run(engine, 2, str(RANKS), **job)
    assert (status, sorted(out.splitlines())) == (0, ["0 of 2 ok", "1 of 2 ok"]), err


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "RANK and WORLD_SIZE not set"),
        ({"RANK": "0"}, "WORLD_SIZE not set"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK='zero' and WORLD_SIZE='2' must be numbers"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not a rank of WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "the job has no name; set MLSTATE_JOB"),
        (
            {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "1"},
            "8 ranks, 4 of them on this host",
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMIX_NAMESPACE": "1"},
            "3 ranks, 1 of them on this host",
        ),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "2", "MLSTATE_JOB": "1"},
            "3 ranks, 2 of them on this host",
        ),
    ],
)  # fmt: skip
def test_invalid_variables_are_named(variables, text, monkeypatch):
    for name in list(os.environ):
        if name not in environment():
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CollectiveError, match=text):
        LocalGroup.from_env(timeout=1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((7, 0, 2), TypeError), (("job", 2, 2), ValueError), (("job", -1, 2), ValueError),
     (("job", 0, 0), ValueError), (("job", 0, 65), ValueError), (("job", 0.5, 1), TypeError),
     (("job", False, 1), TypeError), (("job", "0", 1), TypeError)],
)  # fmt: skip
def test_a_place_that_cannot_be_is_refused(arguments, error):
    with pytest.raises(error):
        LocalGroup.join(*arguments)


# ---- unknown clients ----


def speak(name, request):
    """Connect to the rendezvous as an unknown client, send this, and return the answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:

        def there():
            with contextlib.suppress(ConnectionRefusedError):
                stranger.connect(_socket_address(name))
                return True

        wait_until(there, "rank 0 does not listen")
        stranger.settimeout(LIMIT)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if request:
                socket.send_fds(stranger, [request], [stranger.fileno()])
            stranger.shutdown(socket.SHUT_WR)
            return stranger.recv(4096)
    return b""


@pytest.mark.skipif(not LINUX, reason="knows where the socket is, and how it refuses")
def test_unknown_clients_are_disconnected():
    """An unknown client at the rendezvous neither joins nor prevents others from joining."""
    name = f"stranger {os.getpid()}"
    context = multiprocessing.get_context("fork")
    parent_pipe, child_pipe = context.Pipe(duplex=False)
    with parent_pipe, child_pipe:
        first = context.Process(target=joined, args=(name, 0, 2, LIMIT, child_pipe))
        first.start()
        for request in (
            b"GET / HTTP/1.0\r\n\r\n",
            b"[]\n",
            b"x" * 10_000,
            b"",
            b"[" * 4000 + b"\n",
        ):
            assert speak(name, request) == b""
        for hello in ({}, {"version": 1}, {"rank": 1, "version": [], "world_size": 2}):
            assert speak(name, json.dumps(hello).encode() + b"\n") == b""
        for rank in (99, -1, 2, True, 1.0, None, "1", [1], 10**3000):
            hello = {"rank": rank, "version": 1, "world_size": 2}
            error = json.loads(speak(name, json.dumps(hello).encode() + b"\n"))["error"]
            assert error.startswith(f"rank {json.dumps(rank)[:40]} is not a rank of a group with ")
            assert error.endswith("world_size=2; pass an int from 0 to 1")
        descriptors = Path(f"/proc/{first.pid}/fd")
        descriptor_count = len(list(descriptors.iterdir()))
        for _ in range(20):  # descriptors sent by unknown clients are closed
            speak(name, b"{}\n")
        assert len(list(descriptors.iterdir())) <= descriptor_count + 1
        results = join_all(name, [(1, 2)])
        first.join(LIMIT)
        first.close()
        assert [parent_pipe.recv(), *results] == [[b"0", b"1"]] * 2


def test_forked_children_have_private_arrays():
    """A forked rank changes its own copy; only results are returned."""
    array = np.zeros(4)

    def add(group):
        array[:] += group.rank + 1
        return group.all_reduce(array)

    arrays = LocalGroup.run(add, 2, start_method="fork", timeout=LIMIT)
    assert [rank_array.tolist() for rank_array in arrays] == [[3.0] * 4] * 2
    assert array.tolist() == [0.0] * 4
