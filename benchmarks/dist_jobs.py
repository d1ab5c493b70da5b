"""The jobs of `bench_dist.py`: two ranks for each engine, which take turns and end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from from_tests import import_from_tests

import mlstate

HERE = Path(__file__).resolve().parent
WORLD = 2
NAMES = {"local": "LocalGroup", "gloo": "gloo", "mpich": "MPICH", "openmpi": "Open MPI"}


def rank_environment(**variables: str) -> dict[str, str]:
    """Return the variables of a rank's process: it finds mlstate, and torch uses one thread."""
    paths = [str(Path(mlstate.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def start_process(command: list[str], environment: dict[str, str], log: Any) -> Any:
    """Start a process in a new session; its output goes to the file `log`."""
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


class JobError(Exception):
    """A rank failed, ended, or took too long; the job has ended."""


def reason_against(engine: str) -> str:
    """Why an engine cannot take part; empty if it can."""
    if engine in ("local", "gloo"):
        return ""
    mpi_jobs = import_from_tests("mpi_jobs")
    if mpi_jobs is None or mpi_jobs.home(engine) is None:
        return f"{NAMES[engine]} is not installed (see tools/mpi.sh): its lines are left out"
    return ""


class Job:
    """Two processes that wait for commands; a context manager that ends them.

    Parameters
    ----------
    engine : str
        "local", "gloo", "mpich" or "openmpi".
    folder : Path
        For sockets and shared memory.
    seconds : float
        For each command.
    """

    def __init__(self, engine: str, folder: Path, seconds: float) -> None:
        self.engine = engine
        self.seconds = seconds
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: dict[int, Connection] = {}
        self.ranks: list[int] = []  # process ids: under mpiexec each rank has its own session
        self.log = folder / f"{engine}.log"
        job = f"bench-dist-{os.getpid()}-{engine}"
        address = str(folder / f"{engine}.socket")
        with Listener(address, "AF_UNIX") as listener:
            try:
                self._start(job, address, folder)
                self._meet(listener)
            except BaseException:
                self.close()
                raise

    def _start(self, job: str, address: str, folder: Path) -> None:
        script = str(HERE / "dist_rank.py")
        environment = rank_environment()
        rest = [job, "0", address, str(folder)]
        commands = []
        if self.engine in ("local", "gloo"):
            for rank in range(WORLD):
                rest[1] = str(rank)
                commands.append([sys.executable, script, self.engine, *rest])
        else:
            mpi_jobs = import_from_tests("mpi_jobs")
            environment = mpi_jobs.environment(self.engine)
            commands.append(mpi_jobs.command(self.engine, WORLD, script, self.engine, *rest))
        with self.log.open("wb") as log:
            for command in commands:
                self.processes.append(start_process(command, environment, log))

    def _meet(self, listener: Listener) -> None:
        """Wait for both ranks, as long as their processes live."""
        deadline = time.monotonic() + self.seconds
        listener._listener._socket.settimeout(0.5)  # type: ignore[attr-defined]
        while len(self.pipes) < WORLD:
            try:
                pipe = listener.accept()
            except TimeoutError:
                if time.monotonic() > deadline or any(p.poll() is not None for p in self.processes):
                    raise JobError(f"{NAMES[self.engine]} did not start: {self._tail()}") from None
                continue
            rank, process = pipe.recv()
            self.pipes[rank] = pipe
            self.ranks.append(process)
            pipe.recv()  # it is ready for commands

    def _tail(self) -> str:
        """The end of the ranks' output."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:].strip()

    def ask(self, command: str, *arguments: Any) -> list[Any]:
        """Send a command to both ranks, and return their answers."""
        deadline = time.monotonic() + self.seconds
        try:
            for pipe in self.pipes.values():
                pipe.send((command, arguments))
            return [self._answer(self.pipes[rank], deadline) for rank in range(WORLD)]
        except (OSError, EOFError, JobError) as error:
            self.close()
            reason = str(error) if isinstance(error, JobError) else f"a rank ended: {self._tail()}"
            raise JobError(f"{NAMES[self.engine]}, {command} {arguments}: {reason}") from None

    def _answer(self, pipe: Connection, deadline: float) -> Any:
        if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
            raise JobError(f"not done after {self.seconds:g} s")
        good, answer = pipe.recv()
        if not good:
            raise JobError(str(answer))
        return answer

    def close(self) -> None:
        """End both processes in any state."""
        for pipe in self.pipes.values():
            pipe.close()  # a rank that waits for a command ends
        self.pipes.clear()
        end = time.monotonic() + 3
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0.1))
        stuck = any(process.poll() is None for process in self.processes)
        for process in self.processes:
            if process.poll() is None:
                process.terminate()  # mpiexec ends its ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(3)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # the session of the process, children included
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for rank in self.ranks if stuck else []:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(rank, signal.SIGKILL)
        self.processes.clear()
        self.ranks.clear()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
