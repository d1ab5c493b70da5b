"""Processes that wait for commands, such as the ranks of a benchmark between their turns."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

END_SECONDS = 20


class Spawned:
    """New processes, each with a pipe, that run the same command at the same time.

    Each calls `serve` with its pipe and its arguments; `serve` must end in `answer`.
    """

    def __init__(self, serve: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes, self.pipes = [], []
        for process_arguments in arguments:
            parent_pipe, child_pipe = context.Pipe()
            process = context.Process(
                target=serve, args=(child_pipe, *process_arguments), daemon=True
            )
            process.start()
            child_pipe.close()
            self.processes.append(process)
            self.pipes.append(parent_pipe)
        self.answers()

    def ask(self, command: str, *arguments: Any) -> list[Any]:
        """Send the same command to all, and return their answers."""
        for pipe in self.pipes:
            pipe.send((command, arguments))
        return self.answers()

    def answers(self) -> list[Any]:
        replies = []
        for rank, pipe in enumerate(self.pipes):
            try:
                good, value = pipe.recv()
            except (EOFError, ConnectionError):
                good, value = False, "it has ended"
            if not good:
                raise RuntimeError(f"process {rank} failed: {value}")
            replies.append(value)
        return replies

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.close()
            process.join(END_SECONDS)
            if process.is_alive():
                process.kill()


class SpawnedRanks(Spawned):
    """The ranks of a job; `serve` gets the arguments, the rank, the world and where ranks meet."""

    def __init__(self, serve: Callable[..., None], world: int, *arguments: Any) -> None:
        self.folder = tempfile.TemporaryDirectory()
        meeting = f"file://{self.folder.name}/ranks"
        super().__init__(serve, [(*arguments, rank, world, meeting) for rank in range(world)])

    def close(self) -> None:
        super().close()
        self.folder.cleanup()


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
