"""Processes that wait for commands, as the ranks of a benchmark do between their turns."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

END_SECONDS = 20


class Spawned:
    """New processes, each with a pipe, that do what they are told at the same time.

    Each calls `serve` with its pipe and its arguments; that ends in `answer`.
    """

    def __init__(self, serve: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes, self.pipes = [], []
        for own in arguments:
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, *own), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)
        self.answers()

    def ask(self, command: str, *arguments: Any) -> list[Any]:
        """Tell all the same, and return what each answers."""
        for pipe in self.pipes:
            pipe.send((command, arguments))
        return self.answers()

    def answers(self) -> list[Any]:
        found = []
        for rank, pipe in enumerate(self.pipes):
            try:
                good, value = pipe.recv()
            except (EOFError, ConnectionError):
                good, value = False, "it has ended"
            if not good:
                raise RuntimeError(f"process {rank} failed: {value}")
            found.append(value)
        return found

    def close(self) -> None:
        """Let them end."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.close()
            process.join(END_SECONDS)
            if process.is_alive():
                process.kill()


def answer(pipe: Connection, commands: dict[str, Callable[..., Any]]) -> None:
    """Say that this process is ready, and do what the pipe says until it is closed."""
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
