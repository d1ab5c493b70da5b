"""A rank is killed at a random moment: the others report it, and no resource remains.

MLSTATE_FAULTS sets the number of runs, MLSTATE_FAULTS_SEED the random moments: see
fault_harness.py.
"""

import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import fault_harness
import numpy as np
import pytest

from mlstate import CollectiveError
from mlstate.collectives import LocalGroup
from mlstate.collectives._local_rendezvous import _socket_address

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc for what is left"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]

RUNS = fault_harness.amount(10, 40, 200)
SEED = int(os.environ.get("MLSTATE_FAULTS_SEED", "20"))
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
            found = getattr(group, which)(array)
            assert found[0] == (world if "reduce" in which else 1)
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
        here, there = context.Pipe(duplex=False)
        with there:
            process = context.Process(target=work, args=(name, rank, world, number, there))
            process.start()
        processes.append(process)
        pipes[here] = rank
    try:
        own = next(pipe for pipe, rank in pipes.items() if rank == victim)
        if meets and own.poll(LIMIT):
            own.recv()
        time.sleep(delay)
        os.kill(processes[victim].pid, signal.SIGKILL)
        return name, victim, told_by(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


def told_by(pipes):
    """The reports of each rank before it ended; none if it hangs."""
    told, end = {}, time.monotonic() + LIMIT
    waiting = dict(pipes)
    while waiting and time.monotonic() < end:
        for pipe in wait(list(waiting), 1.0):
            rank = waiting[pipe]
            try:
                told[rank] = pipe.recv()
            except EOFError:
                told.setdefault(rank, None)
                del waiting[pipe]
    return told | dict.fromkeys(waiting.values(), "hangs")


def complaints(number, victim, told):
    """Complaints about one run."""
    others = [said for rank, said in told.items() if rank != victim]
    all_met = all(isinstance(said, tuple) and said[0] for said in others)
    for rank, said in sorted(told.items()):
        if rank == victim:
            continue
        if not isinstance(said, tuple):
            yield f"run {number}: rank {rank} {said or 'said nothing'}; rank {victim} was killed"
            continue
        _, text, seconds = said
        if all_met and f"rank {victim} is gone" not in text:
            yield f"run {number}: rank {rank} blames another than {victim}: {text}"
        if text.startswith("unexpected") or seconds > LIMIT / 2:
            yield f"run {number}: rank {rank} after {seconds:.1f} s: {text}"


def held():
    """Descriptors and mapped memory of this process, by kind."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(descriptor.readlink()))
        except FileNotFoundError:
            continue
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return sorted(found), maps.count("mlstate-group")


@pytest.mark.timeout(60 + 3 * RUNS)
def test_a_rank_that_is_killed_at_any_moment_is_named():
    before, found, met = held(), [], 0
    for number in range(RUNS):
        name, victim, told = one_run(number)
        found += complaints(number, victim, told)
        met += any(isinstance(said, tuple) and said[0] for said in told.values())
        if _socket_address(name)[1:] in Path("/proc/net/unix").read_text(encoding="utf-8"):
            found.append(f"run {number}: the meeting place is left")
    assert found == []
    assert held() == before
    assert met, "no run came as far as to meet"
