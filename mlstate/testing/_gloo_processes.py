"""Ranks that are processes connected by gloo, kept for the next call of `run_ranks`."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util  # before `atexit.register`: it waits for processes at exit
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..collectives._local_launch import RankProcess, end_processes
from ._function_call import FunctionReference, collect_results, results_with_warnings
from ._gloo_rank import JOIN_SECONDS, output_path, serve

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

# The process that forks the ranks imports these modules first, which takes seconds.
PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",  # of optimizers
    "pytest",  # of most functions
    "mlstate.integrations.torch",
]


class GlooProcesses:
    """Processes for the functions of one module; they end after the first error."""

    def __init__(self, world_size: int, key: tuple[str, int]) -> None:
        """Start a process for each rank, and wait until all have joined.

        `key`: the module, and the number of this process, whose children may not use the ranks.
        Raises CollectiveError, which names the rank, if one did not.
        """
        self.key = key
        self.is_usable = False  # by the next call
        self._folder = tempfile.TemporaryDirectory(prefix="mlstate-ranks-")
        self._printed = [0] * world_size  # bytes of the ranks' output that were printed here
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        try:
            for rank in range(world_size):
                pipe, child_pipe = context.Pipe()
                arguments = rank, world_size, self._folder.name, dict(os.environ), child_pipe
                process = context.Process(target=serve, args=arguments, name=f"gloo-rank-{rank}")
                self._pipes.append(pipe)
                self._processes.append(process)
                process.start()
                child_pipe.close()  # so that the pipe breaks when the process ends
            self._collect(JOIN_SECONDS)
        except BaseException:
            self.close()
            raise

    def _collect(self, seconds: float) -> list[Any]:
        """Return the results that the ranks send, and print their output; or raise an error."""
        processes = zip(self._processes, self._pipes, strict=True)
        ranks = [RankProcess(rank, *process) for rank, process in enumerate(processes)]
        try:
            return collect_results(ranks, seconds)
        finally:
            self._print_output()

    def call(self, function: FunctionReference, seconds: float) -> list[Any]:
        """Call a function on all ranks, and return the results or raise the first error."""
        self.is_usable = False
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # `_collect` finds out why
                pipe.send((function, seconds))
        answers = self._collect(seconds)
        self.is_usable = all(answer.is_intact for answer in answers)
        return results_with_warnings(answers)

    def _print_output(self) -> None:
        """Print the output of the ranks since the last call."""
        for rank, printed in enumerate(self._printed):
            path = Path(output_path(self._folder.name, rank))
            if path.exists():  # otherwise its process ended very early
                output = path.read_bytes()[printed:]
                self._printed[rank] += len(output)
                sys.stdout.write(output.decode(errors="replace"))

    def close(self) -> None:
        """End the processes: idle ones by closing their pipes, others at once."""
        for process in self._processes:
            if not self.is_usable and process.pid is not None and process.exitcode is None:
                process.terminate()
        for pipe in self._pipes:
            pipe.close()
        end_processes(self._processes)
        self._folder.cleanup()


_lock = threading.Lock()
_kept: dict[int, GlooProcesses] = {}  # by the number of ranks, all for the same module


def run_gloo(world_size: int, function: Callable[..., Any], seconds: float) -> list[Any]:
    """Implement `run_ranks` for gloo, with the processes of an earlier call if they fit."""
    reference = FunctionReference.of(function)
    key = reference.module, os.getpid()
    with _lock:
        if any(processes.key != key for processes in _kept.values()):
            end_kept_processes()
        if world_size not in _kept:
            _kept[world_size] = GlooProcesses(world_size, key)
        try:
            return _kept[world_size].call(reference, seconds)
        finally:
            if not _kept[world_size].is_usable:
                _kept.pop(world_size).close()


@atexit.register
def end_kept_processes() -> None:
    """End the processes that are kept for the next call, unless another process started them."""
    while _kept:
        _, processes = _kept.popitem()
        if processes.key[-1] == os.getpid():
            processes.close()
