"""Processes that wait for commands, such as the ranks of a benchmark between their turns.

``python processes.py ADDRESS MODULE FUNCTION`` is such a process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from rows import Action, EndedError, Way

import mlstate

START_SECONDS = 120.0
END_SECONDS = 5.0


def rank_environment(**variables: str) -> dict[str, str]:
    """Return the variables of a rank's process: it finds mlstate, and torch uses one thread."""
    paths = [str(Path(mlstate.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def start_process(command: list[str], environment: dict[str, str], log: Any) -> Any:
    """Start a process in a new session, with its output in the file `log`."""
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def end(processes: list[Any]) -> None:
    """End processes and their children, in any state."""
    for process in processes:
        if process.poll() is None:
            process.terminate()  # mpiexec ends its ranks
    deadline = time.monotonic() + END_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0.02))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the session of the process
        process.wait()


class Processes:
    """New processes, each with a pipe, that run the same command at the same time.

    Parameters
    ----------
    serve : function of a module of this folder
        Each process calls it with its pipe and its arguments; it must end in `answer`.
    arguments : sequence of tuples
        For each process. With `launcher`, any process may get any of them.
    variables : dict, optional
        More environment variables.
    launcher : function, optional
        Turns the arguments of Python into one command that starts all processes, such as mpiexec.
    """

    def __init__(
        self,
        serve: Callable[..., None],
        arguments: Sequence[tuple[Any, ...]],
        *,
        variables: dict[str, str] | None = None,
        launcher: Callable[..., list[str]] | None = None,
    ) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="bench-")
        self.log = Path(self.folder.name) / "log"
        self.pipes: list[Connection] = []
        self.ranks: list[int] = []  # process ids: under mpiexec each rank has its own session
        self.processes: list[Any] = []
        address = f"{self.folder.name}/socket"
        module = Path(serve.__code__.co_filename).stem
        script = [__file__, address, module, serve.__name__]
        commands = [[sys.executable, *script]] * len(arguments)
        if launcher is not None:
            commands = [launcher(*script)]
        with Listener(address, "AF_UNIX") as listener, self.log.open("wb") as log:
            listener._listener._socket.settimeout(0.5)  # type: ignore[attr-defined]
            try:
                for command in commands:
                    environment = rank_environment(**(variables or {}))
                    self.processes.append(start_process(command, environment, log))
                for of_process in arguments:
                    self.accept(listener).send(of_process)
                self.answers()
            except BaseException:
                self.close()
                raise

    def accept(self, listener: Listener) -> Connection:
        """Wait for the next process, as long as all live."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                pipe = listener.accept()
            except TimeoutError:
                if time.monotonic() > deadline or any(p.poll() is not None for p in self.processes):
                    raise EndedError(f"processes did not start: {self.tail()}") from None
                continue
            self.pipes.append(pipe)
            self.ranks.append(pipe.recv())
            return pipe

    def tail(self) -> str:
        """The end of the processes' output."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:].strip()

    def ask(self, command: str, *arguments: Any) -> list[Any]:
        """Send the same command to all, and return their answers; a failure ends all."""
        try:
            for pipe in self.pipes:
                pipe.send((command, arguments))
            return self.answers()
        except (OSError, EOFError):
            raise EndedError(f"{command}: a process has ended: {self.tail()}") from None

    def answers(self) -> list[Any]:
        replies = []
        for number, pipe in enumerate(self.pipes):
            good, value = pipe.recv() if pipe.poll(START_SECONDS) else (False, "no answer")
            if not good:
                raise EndedError(f"process {number} failed: {value}")
            replies.append(value)
        return replies

    def close(self) -> None:
        """End the processes in any state."""
        for pipe in self.pipes:
            pipe.close()  # a process that waits for a command ends
        deadline = time.monotonic() + END_SECONDS
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.02))
        stuck = any(process.poll() is None for process in self.processes)
        end(self.processes)
        for rank in self.ranks if stuck else []:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(rank, signal.SIGKILL)
        self.folder.cleanup()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Ranks(Processes):
    """The ranks of a job; `serve` gets the arguments, the rank, the world and where ranks meet."""

    def __init__(self, serve: Callable[..., None], world: int, *arguments: Any) -> None:
        self.meeting = tempfile.TemporaryDirectory(prefix="bench-")
        place = f"file://{self.meeting.name}/ranks"
        super().__init__(serve, [(*arguments, rank, world, place) for rank in range(world)])

    def close(self) -> None:
        super().close()
        self.meeting.cleanup()


def answer(pipe: Connection, commands: dict[str, Callable[..., Any]]) -> None:
    """Report that this process is ready, and run commands from the pipe until it is closed."""
    pipe.send((True, None))
    while True:
        try:
            command, arguments = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            pipe.send((True, commands[command](*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc(limit=-4)))


def answer_times(pipe: Connection, call_of: Callable[[str], Action], repeats: int = 1) -> None:
    """Answer "time" with the mean milliseconds of `repeats` calls of a case, on one thread."""
    mlstate.threads.set_num_threads(1)
    calls: dict[str, Action] = {}

    def measure(case: str) -> dict[str, float]:
        if case not in calls:
            calls.clear()
            calls[case] = call_of(case)
        start = time.perf_counter_ns()
        for _ in range(repeats):
            calls[case]()
        return {"ms": (time.perf_counter_ns() - start) * 1e-6 / repeats}

    answer(pipe, {"time": measure})


def timed_in(process: Processes, case: str) -> Way:
    """Return the way that is timed in a process which runs `answer_times`."""
    return Way(lambda: process.ask("time", case)[0], measures_itself=True)


def main() -> None:
    address, module, function = sys.argv[1:]
    with Client(address, "AF_UNIX") as pipe:
        pipe.send(os.getpid())
        getattr(importlib.import_module(module), function)(pipe, *pipe.recv())
    if "mpi4py" not in sys.modules:
        os._exit(0)  # MPI has files to remove; otherwise nothing is left to wait for


if __name__ == "__main__":
    main()
