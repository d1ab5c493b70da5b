"""Ranks of an MPI job: `mpiexec` starts this module as each rank, for one call of `run_ranks`.

`python -m mlstate.testing._mpi_job SOCKET` receives a function from the caller of `run_ranks`, and
sends the message of the rank back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING, Any

from ..collectives._local_launch import RankProcess, encode_message, message_of
from ..errors import CollectiveError
from ._function_call import (
    FunctionReference,
    answer_of,
    collect_results,
    results_with_warnings,
)

if TYPE_CHECKING:
    from collections.abc import Callable

START_SECONDS = 60.0  # for all ranks to start
END_SECONDS = 10.0  # for mpiexec to end after its ranks

# Allow more ranks than processors, and root in a container; other libraries ignore the variables.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE",
}


class Job(subprocess.Popen[bytes]):
    """An mpiexec, with the methods of a process that `RankProcess` calls."""

    def join(self, timeout: float | None) -> None:
        """Wait for the end, at most `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)

    @property
    def exitcode(self) -> int | None:
        """The exit status, None before the end."""
        return self.poll()


def run_mpi(world_size: int, function: Callable[..., Any], seconds: float) -> list[Any]:
    """Implement `run_ranks` for MPI: run a job of the ``mpiexec`` in PATH."""
    reference = FunctionReference.of(function)
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None:
        raise CollectiveError("run_ranks: there is no mpiexec in PATH; install MPICH or Open MPI")
    paths = [os.environ.get("PYTHONPATH", ""), *sys.path]
    environment = os.environ | OPEN_MPI | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with (
        tempfile.TemporaryDirectory(prefix="mlstate-ranks-") as folder,
        tempfile.TemporaryFile() as output,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        address = f"{folder}/socket"
        listener.bind(address)
        listener.listen(world_size)
        command = [mpiexec, "-n", str(world_size), sys.executable, "-m", __name__, address]
        job = Job(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            ranks = _accept_ranks(listener, job, world_size)
            for rank in ranks:
                rank.pipe.send((reference, seconds))
            answers = collect_results(ranks, seconds)
            job.join(END_SECONDS)
        finally:
            for method in (job.terminate, job.kill):  # mpiexec ends its ranks
                if job.poll() is None:
                    method()
                    job.join(END_SECONDS)
            output.seek(0)
            sys.stdout.write(output.read().decode(errors="replace"))
    return results_with_warnings(answers)


def _accept_ranks(listener: socket.socket, job: Job, world_size: int) -> list[RankProcess]:
    """Return the ranks of a job when all have connected; raise CollectiveError if one does not."""
    deadline = time.monotonic() + START_SECONDS
    listener.settimeout(0.1)
    pipes: dict[int, Connection] = {}
    while len(pipes) < world_size:
        try:
            peer, _ = listener.accept()
            peer.setblocking(True)
            pipe = Connection(peer.detach())
            pipes[pipe.recv()] = pipe
        except TimeoutError:
            if job.poll() is None and time.monotonic() < deadline:
                continue
            missing = sorted(set(range(world_size)) - pipes.keys())
            raise CollectiveError(
                f"run_ranks: ranks {missing} did not start within {START_SECONDS:g} s; exit status "
                f"of mpiexec: {job.poll()}"
            ) from None
    return [RankProcess(rank, job, pipe) for rank, pipe in sorted(pipes.items())]  # type: ignore[arg-type]


def main() -> None:
    """Be one rank: call the function of the parent."""
    from mpi4py import MPI

    from ..integrations.mpi import MPIGroup

    with Client(sys.argv[1]) as pipe:
        pipe.send(MPI.COMM_WORLD.Get_rank())
        function, seconds = pipe.recv()
        group = MPIGroup(timeout=seconds)
        message = message_of(lambda: answer_of(function, group))
        if message[0] != "result":
            group.abort()  # so that no rank waits for this one
        with contextlib.suppress(MPI.Exception):  # MPICH keeps one with unmatched messages
            group.close()
        pipe.send_bytes(encode_message(message))


if __name__ == "__main__":
    main()
