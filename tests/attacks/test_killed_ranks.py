"""A rank is killed at a random moment: the others report it, and no resource remains.

MLSTATE_FAULTS sets the number of runs, MLSTATE_FAULTS_SEED the random moments: see
amounts.py.
"""

import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import pytest
from amounts import SEED, amount

from mlstate import CollectiveError
from mlstate.collectives import LocalGroup
from mlstate.collectives._local_rendezvous import _socket_address

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc for what is left"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]

RUNS = amount(10, 40, 200)
MEETING_SECONDS = 1.0  # how long ranks wait for one that was killed before it joined
LIMIT = 30.0
MOST = 1 << 20  # bytes of an array: larger than the shared memory


def work(name, rank, world, seed, pipe):
    """Make one operation after the other, the same on all ranks, until one fails."""
    generator = np.random.default_rng(seed)
    began = time.monotonic()
    joined = False
    try:
        group = LocalGroup.join(
            name, rank, world, timeout=MEETING_SECONDS, operation_timeout=2 * LIMIT
        )
        joined = True
        pipe.send("joined")
        while True:
            array = np.ones(int(generator.integers(1, MOST // 8)) * world)
            called = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]
            which = called[int(generator.integers(5))]
            began = time.monotonic()
            output = getattr(group, which)(array)
            assert output[0] == (world if "reduce" in which else 1)
            if generator.integers(3) == 0:
                group.gather_bytes(bytes(int(generator.integers(0, MOST))))
    except CollectiveError as error:
        pipe.send((joined, str(error), time.monotonic() - began))
    except BaseException as error:
        pipe.send((joined, f"unexpected: {error!r}", time.monotonic() - began))


def one_run(number):
    """Kill one of two to four ranks; return the reports of the others by rank, and the victim."""
    chance = random.Random(f"{SEED} {number}")
    world = chance.randint(2, 4)
    victim, delay = chance.randrange(world), chance.choice([0.01, 0.1]) * chance.random()
    meets = chance.random() < 0.7  # otherwise the rank is most likely killed before it joins
    name = f"killed {os.getpid()} {number}"
    context = multiprocessing.get_context("fork")
    processes, pipes = [], {}
    for rank in range(world):
        parent_pipe, child_pipe = context.Pipe(duplex=False)
        with child_pipe:
            process = context.Process(target=work, args=(name, rank, world, number, child_pipe))
            process.start()
        processes.append(process)
        pipes[parent_pipe] = rank
    try:
        victim_pipe = next(pipe for pipe, rank in pipes.items() if rank == victim)
        if meets and victim_pipe.poll(LIMIT):
            victim_pipe.recv()
        time.sleep(delay)
        os.kill(processes[victim].pid, signal.SIGKILL)
        return name, victim, reports_of(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


def reports_of(pipes):
    """The reports of each rank before it ended; none if it hangs."""
    reports, end = {}, time.monotonic() + LIMIT
    waiting = dict(pipes)
    while waiting and time.monotonic() < end:
        for pipe in wait(list(waiting), 1.0):
            rank = waiting[pipe]
            try:
                reports[rank] = pipe.recv()
            except EOFError:
                reports.setdefault(rank, None)
                del waiting[pipe]
    return reports | dict.fromkeys(waiting.values(), "hangs")


def complaints(number, victim, reports):
    """Complaints about one run."""
    others = [report for rank, report in reports.items() if rank != victim]
    all_met = all(isinstance(report, tuple) and report[0] for report in others)
    for rank, report in sorted(reports.items()):
        if rank == victim:
            continue
        if not isinstance(report, tuple):
            yield f"run {number}: rank {rank} {report or 'said nothing'}; rank {victim} was killed"
            continue
        _, text, seconds = report
        if all_met and f"rank {victim} is gone" not in text:
            yield f"run {number}: rank {rank} blames another than {victim}: {text}"
        if text.startswith("unexpected") or seconds > LIMIT / 2:
            yield f"run {number}: rank {rank} after {seconds:.1f} s: {text}"


def open_resources():
    """Descriptors and mapped memory of this process, by kind."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(descriptor.readlink()))
        except FileNotFoundError:
            continue
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return sorted(links), maps.count("mlstate-group")


@pytest.mark.timeout(60 + 3 * RUNS)
def test_a_rank_that_is_killed_at_any_moment_is_named():
    before, problems, met = open_resources(), [], 0
    for number in range(RUNS):
        name, victim, reports = one_run(number)
        problems += complaints(number, victim, reports)
        met += any(isinstance(report, tuple) and report[0] for report in reports.values())
        if _socket_address(name)[1:] in Path("/proc/net/unix").read_text(encoding="utf-8"):
            problems.append(f"run {number}: the meeting place is left")
    assert problems == []
    assert open_resources() == before
    assert met, "no run came as far as to meet"
