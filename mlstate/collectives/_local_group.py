"""`LocalGroup`: ranks of one host over shared memory; `threads`, `join`, `from_env`, timeout."""

from __future__ import annotations

import os
import sys
from math import prod
from operator import index, methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._common.arguments import FLAG, check_type
from .._common.arrays import is_torch
from ..errors import CollectiveError, CompatibilityError
from ._arguments import check_timeout, dtype_name
from ._engine import Call, Engine, OperationQueue
from ._link import shares
from ._memory import bytes_of, core_reduction, reals_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .._types import Array

DEFAULT_SECONDS = 300.0

# Environment variables of launchers, for the rank, the number of ranks, and the number on this host
# (empty: unknown): torchrun, Open MPI, MPICH's hydra, Slurm.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_NTASKS", ""),  # srun's ranks per host are not a single number
)
# Variables that a launcher sets equally for all processes of a job; together they name the job.
_JOBS = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_PORT",
    "PMIX_NAMESPACE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)


def _check_numbers(operation: str, array: Any) -> None:
    """Raise CompatibilityError if the core cannot compute with the array's dtype.

    These are NumPy's dtypes of more than 64 bits, except complex128. `operation`: the name of the
    operation, for the error.
    """
    name = dtype_name(array)
    is_wide = not is_torch(array) and array.itemsize > 8 and name != "complex128"
    if is_wide or name in ("longdouble", "clongdouble"):
        text = f"{operation}: arithmetic is not supported for dtype {name}; convert the array first"
        raise CompatibilityError(text, name=operation, got=name)


def _lengths_of(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return a shape that the caller passed, an int or a sequence, as a tuple of int.

    Raises TypeError if it is neither, ValueError if a length is negative.
    """
    axes: Sequence[int]
    try:
        axes = (index(shape),)  # type: ignore[arg-type]
    except TypeError:
        axes = [index(n) for n in shape]  # type: ignore[union-attr]
    if any(n < 0 for n in axes):
        raise ValueError(f"empty: the shape {tuple(axes)} has a negative length")
    return tuple(axes)


class _Link:
    """The link of one operation; the core moves the bytes through the shared memory.

    It implements each operation itself, because threads copy large arrays from their addresses,
    and reductions read the slots of all ranks.
    """

    __slots__ = ("_call", "_core", "_rank", "_world_size")

    def __init__(self, group: LocalGroup, call: Call) -> None:
        self._core = group._link
        self._rank, self._world_size = group._rank, group._world_size
        # the last arguments of each call of the core: timeout in seconds, text that ranks compare
        self._call = group._timeout if call.seconds is None else call.seconds, call.text

    def reduce_scatter(self, source: Array, target: Array, rows: list[int], op: str) -> None:
        """Reduce `source` by `op` over the ranks into `target`; rank r gets ``rows[r]`` rows.

        It is reduced as a bucket of one array, so that all reductions use the same code of the
        core.
        """
        numbers, out = reals_of(source), reals_of(target)
        segment = numbers, tuple(shares(len(numbers), rows)), out
        kind, divisor = core_reduction(op, self._world_size)
        bucket = _core.bucket([segment], self._world_size, self._rank, kind, divisor)
        self.reduce_bucket(bucket, wants_norms=False)

    def reduce_bucket(self, bucket: _core.Bucket, *, wants_norms: bool) -> list[tuple[float, int]]:
        """Reduce a bucket of the core into its outputs, together with all ranks.

        With `wants_norms`, returns the sum of squares and the number of non-finite elements of each
        output, else an empty list.
        """
        return self._core.reduce_scatter(bucket, wants_norms, *self._call)

    def all_gather(self, source: Array, target: Array, rows: list[int]) -> None:
        target_bytes = bytes_of(target)
        sizes = shares(target_bytes.size, rows)
        self._core.all_gather(bytes_of(source), target_bytes, sizes, *self._call)

    def all_reduce(self, source: Array, target: Array, op: str) -> None:
        reduction = core_reduction(op, self._world_size)
        self._core.all_reduce(reals_of(source), reals_of(target), *reduction, *self._call)

    def all_to_all(
        self, source: Array, target: Array, sent: list[int], expected: list[int]
    ) -> None:
        """Send `sent[i]` rows to rank i, and receive `expected[i]` rows from it.

        `source` is copied first if it overlaps `target`.
        """
        source_bytes, target_bytes = bytes_of(source), bytes_of(target)
        if np.may_share_memory(source_bytes, target_bytes):
            source_bytes = source_bytes.copy()
        sizes = shares(source_bytes.size, sent)
        expected_sizes = shares(target_bytes.size, expected)
        self._core.all_to_all(source_bytes, sizes, target_bytes, expected_sizes, *self._call)

    def broadcast(self, memory: Any, root: int) -> None:
        self._core.broadcast(bytes_of(memory), root, *self._call)

    def barrier(self) -> None:
        self._core.barrier(*self._call)

    def gather_bytes(self, data: bytes, root: int | None) -> list[bytes] | None:
        return self._core.gather_bytes(data, -1 if root is None else root, *self._call)  # -1: all


class LocalGroup(Engine):
    """A group of processes or threads of one host, over shared memory.

    Create groups with `threads`, `run`, `from_env` or `join`, not with the constructor.

    Notes
    -----
    See `mlstate.collectives.ProcessGroup` for the methods. NumPy arrays and CPU tensors are used
    without a copy if they are C-contiguous, aligned and in native byte order. Others are copied
    once; tensors on a device are copied through main memory. Every dtype can be sent.
    Reductions need a dtype that the core supports. Sums are computed in rank order, so they have
    the same bits in every run, for any division into calls.

    The shared memory is about 1 MB per rank, for arrays of any size. It has no name in the file
    system, and the system frees it when the processes end.

    If the calls of ranks do not match, `CollectiveError` is raised on every rank. It lists what
    each rank called, and the group stays usable. After a timeout, an interruption (Ctrl-C),
    `abort`, or the end of a rank's process, the group cannot be used any more. Every rank then
    raises an error that names the rank at fault. File locks reveal the end of a process within
    tens of milliseconds, without heartbeats.

    One operation runs at a time; ``async_op=True`` runs it in a thread. A process that is forked
    later cannot use the group. If there are more ranks than processors, waiting ranks sleep at
    once. Otherwise they spin for about 40 microseconds first.

    Examples
    --------
    Two threads, each a rank:

    >>> import threading
    >>> import numpy as np
    >>> from mlstate.collectives import LocalGroup
    >>> first, second = LocalGroup.threads(2)
    >>> helper = threading.Thread(target=second.all_reduce, args=(np.ones(3),))
    >>> helper.start()
    >>> first.all_reduce(np.arange(3.0))
    array([1., 2., 3.])
    >>> helper.join()
    >>> first.close(), second.close()
    (None, None)
    """

    def __init__(self, link: _core.LocalLink, rank: int, world_size: int, timeout: float) -> None:
        """Wrap a link of the core; users call `threads`, `run`, `from_env` or `join` instead.

        `timeout`: seconds, for operations without a timeout. Raises TypeError if `link` is not a
        link of the core.
        """
        if not isinstance(link, _core.LocalLink):
            raise TypeError(
                "create a LocalGroup by LocalGroup.threads, run, from_env or join, not by its "
                "constructor"
            )
        self._link = link
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._ended = ""
        self._process = os.getpid()
        self._operations = OperationQueue("mlstate-local-group", rank)

    # ---- making groups ----

    @classmethod
    def threads(cls, world_size: int, *, timeout: float = DEFAULT_SECONDS) -> list[LocalGroup]:
        """Return a group whose ranks are threads of this process.

        Parameters
        ----------
        world_size : int
            Number of ranks, 1 to 64.
        timeout : float, default 300
            Timeout in seconds of operations without a ``timeout`` argument.

        Returns
        -------
        list of LocalGroup
            One object per rank. Each is used by one thread, which closes it.

        Raises
        ------
        ValueError
            If the number of ranks or the timeout is out of range.

        Examples
        --------
        >>> from mlstate.collectives import LocalGroup
        >>> LocalGroup.threads(3)
        [LocalGroup(rank 0 of 3), LocalGroup(rank 1 of 3), LocalGroup(rank 2 of 3)]
        """
        seconds = check_timeout(timeout) or DEFAULT_SECONDS
        links = _core.local_threads(world_size)
        return [cls(link, rank, len(links), seconds) for rank, link in enumerate(links)]

    @classmethod
    def join(
        cls,
        name: str,
        rank: int,
        world_size: int,
        *,
        timeout: float = 60.0,
        operation_timeout: float = DEFAULT_SECONDS,
    ) -> LocalGroup:
        """Join the other processes of a job on this host.

        Parameters
        ----------
        name : str
            Name of the job: equal on all ranks, and unique among this user's jobs.
        rank, world_size : int
            Rank of this process, from 0, and number of processes.
        timeout : float, default 60
            Seconds to wait for the other processes.
        operation_timeout : float, default 300
            Timeout in seconds of operations without a ``timeout`` argument.

        Returns
        -------
        LocalGroup

        Raises
        ------
        CollectiveError
            If a rank is missing after `timeout`, two processes pass the same rank, or the
            values of `world_size` differ.
        OSError
            If rank 0 cannot create the socket at which the ranks meet.
        ValueError
            If a number is out of range.

        Notes
        -----
        Processes connect through an abstract socket on Linux (so within one network namespace).
        On other systems they use a socket file in the folder for temporary files, which is
        removed when all ranks have joined. Processes of other users are refused.

        Examples
        --------
        >>> from mlstate.collectives import LocalGroup
        >>> with LocalGroup.join("a job of one", 0, 1) as group:
        ...     group.gather_bytes(b"here")
        [b'here']
        """
        check_type("LocalGroup.join: name", name, str)
        join_seconds = check_timeout(timeout) or 60.0
        seconds = check_timeout(operation_timeout) or DEFAULT_SECONDS
        _core.local_measure(world_size)  # raises if world_size is out of range
        if isinstance(rank, FLAG) or not hasattr(rank, "__index__"):
            raise TypeError(f"LocalGroup.join: rank must be an int, got {type(rank).__name__}")
        if not 0 <= rank < world_size:
            raise ValueError(
                f"LocalGroup.join: rank {rank} is not in the range 0 to {world_size - 1}; ranks "
                "count from 0"
            )
        from ._local_rendezvous import meet

        rank, world_size = int(rank), int(world_size)
        return cls(meet(name, rank, world_size, join_seconds), rank, world_size, seconds)

    @classmethod
    def from_env(
        cls, *, timeout: float = 60.0, operation_timeout: float = DEFAULT_SECONDS
    ) -> LocalGroup:
        """Join the group that a launcher describes in environment variables.

        ``RANK`` and ``WORLD_SIZE`` (torchrun), or the variables of mpirun or srun, give the rank.
        ``MLSTATE_JOB`` names the job. If it is not set, variables that the launcher sets equally
        for its processes do: ``TORCHELASTIC_RUN_ID``, ``MASTER_PORT`` and others.

        Parameters
        ----------
        timeout, operation_timeout : float
            See `join`.

        Returns
        -------
        LocalGroup

        Raises
        ------
        CollectiveError
            If a variable is missing or invalid. See also `join`.

        Examples
        --------
        >>> import os
        >>> from mlstate.collectives import LocalGroup
        >>> os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MLSTATE_JOB": "example"}
        >>> with LocalGroup.from_env() as group:
        ...     group
        LocalGroup(rank 0 of 1)
        >>> for name in ("RANK", "WORLD_SIZE", "MLSTATE_JOB"):
        ...     del os.environ[name]
        """
        name, rank, world_size = _read_launcher_variables(os.environ)
        return cls.join(
            name, rank, world_size, timeout=timeout, operation_timeout=operation_timeout
        )

    @staticmethod
    def run(
        function: Callable[..., Any],
        world_size: int,
        *args: object,
        start_method: str | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a function in several new processes that form a group, and return the results.

        Parameters
        ----------
        function : callable
            Called as ``function(group, *args)`` in each process. With the start methods
            ``spawn`` and ``forkserver`` it must be importable.
        world_size : int
            Number of processes.
        *args
            Further arguments, equal in all processes.
        start_method : {"fork", "spawn", "forkserver"}, optional
            See `multiprocessing.get_context`. Default: Python's default.
        timeout : float, optional
            Seconds after which the processes are ended. Default: no limit.

        Returns
        -------
        list
            Results of the function, in rank order.

        Raises
        ------
        Exception
            The exception of the rank that failed first, with its traceback as a note.
        CollectiveError
            If a process died (the error has its signal), or the timeout expired.
        ValueError
            If `world_size` is not 1 to 64, or `timeout` or `start_method` is not allowed.

        Notes
        -----
        All processes have ended when this returns or raises, also after Ctrl-C.

        Examples
        --------
        >>> from mlstate.collectives import LocalGroup
        >>> def rank_of(group, base):
        ...     return base + group.rank
        >>> LocalGroup.run(rank_of, 2, 10, start_method="fork")
        [10, 11]
        """
        from ._local_launch import run

        _core.local_measure(world_size)  # raises if world_size is out of range
        return run(LocalGroup.join, function, world_size, args, start_method, timeout)

    # ---- description ----

    def __repr__(self) -> str:
        ended = self._ended or self._link.ended()
        return f"LocalGroup(rank {self._rank} of {self._world_size}{', ' if ended else ''}{ended})"

    # ---- arrays ----

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float64) -> Any:
        """Return a new array or tensor in main memory, with arbitrary contents.

        It is an ordinary array in this rank's memory. The operations of the group also accept
        any other array.

        Parameters
        ----------
        shape : int or sequence of int
            Shape of the array.
        dtype : numpy.dtype or torch.dtype, default float64
            Dtype of its elements. A torch dtype returns a tensor.

        Returns
        -------
        numpy.ndarray or torch.Tensor
            A new C-contiguous array. It may outlive the group.

        Raises
        ------
        MemoryError
            If there is not enough memory.
        TypeError
            If elements of `dtype` are Python objects.
        ValueError
            If a length is negative.
        CollectiveError
            If the group is closed.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import LocalGroup
        >>> def work(group):
        ...     gradient = group.empty((2, 3), np.float32)
        ...     gradient[...] = group.rank + 1
        ...     return group.reduce_scatter(gradient)
        >>> LocalGroup.run(work, 2, start_method="fork")[1]
        array([[3., 3., 3.]], dtype=float32)
        """
        self._check_open("empty")
        lengths = _lengths_of(shape)
        is_tensor = type(dtype).__module__ == "torch"
        item_dtype = dtype if is_tensor else np.dtype(dtype)
        size = prod(lengths) * item_dtype.itemsize
        if size > sys.maxsize:  # NumPy would raise ValueError
            raise MemoryError(f"empty: {size} bytes for the shape {lengths} of {item_dtype}")
        if is_tensor:
            import torch

            try:
                return torch.empty(lengths, dtype=item_dtype)
            except RuntimeError as error:  # torch has no exception type for out of memory
                raise MemoryError(f"empty: {size} bytes for the shape {lengths}: {error}") from None
        if item_dtype.hasobject:
            raise TypeError(f"empty: elements of dtype {item_dtype} are objects, expected numbers")
        return np.empty(lengths, item_dtype)

    # ---- call order ----

    def _perform(self, call: Call, perform: Callable[[Any], Any]) -> Any:
        """Perform an operation over a new link; its CollectiveError gets this rank."""
        try:
            return perform(_Link(self, call))
        except CollectiveError as error:
            error.rank = self._rank
            raise

    def _source(self, operation: str, array: Array, *, reduced: bool) -> Any:
        if reduced:
            _check_numbers(operation, array)
        return super()._source(operation, array, reduced=reduced)

    def _reduce_bucket(
        self, bucket: _core.Bucket, text: str, timeout: float | None
    ) -> list[tuple[float, int]]:
        """Reduce a bucket of the core into its outputs, as one operation without copies of arrays.

        The bucket has arrays, and memory for this rank's part of each. Returns the sum of squares
        and the number of non-finite elements of each output. `text`, a description of the
        operation, must be equal on all ranks. `timeout`: seconds; None: the group's.
        `mlstate.fsdp` calls this if a group has it.
        """
        seconds = None if timeout is None else check_timeout(timeout)
        call = Call("reduce_scatter", seconds, False, text)
        partials: list[tuple[float, int]] = self._submit(
            call, methodcaller("reduce_bucket", bucket, wants_norms=True)
        )
        return partials

    # ---- end of the group ----

    def abort(self) -> None:
        """Make the operations of all ranks fail, including running ones.

        Examples
        --------
        >>> from mlstate.collectives import LocalGroup
        >>> (group,) = LocalGroup.threads(1)
        >>> group.abort()
        >>> group
        LocalGroup(rank 0 of 1, rank 0 aborted the group)
        """
        self._link.abort()

    def close(self) -> None:
        """Wait for queued operations, and leave the group; later calls do nothing.

        Operations of other ranks that need this rank fail at once.

        Examples
        --------
        >>> from mlstate.collectives import LocalGroup
        >>> (group,) = LocalGroup.threads(1)
        >>> group.close()
        >>> group
        LocalGroup(rank 0 of 1, closed)
        """
        if not self._ended and self._process == os.getpid():
            self._operations.join()
        self._ended = "closed"
        self._link.close()


# ---- launchers ----


def _read_launcher_variables(variables: Mapping[str, str]) -> tuple[str, int, int]:
    """Return the job's name, this rank and the number of ranks, from launcher variables.

    `variables`: the environment. Raises CollectiveError if one is missing or invalid, or if the job
    has ranks on other hosts.
    """
    for names in _LAUNCHERS:
        rank_name, size_name, local_size_name = names
        if rank_name in variables and size_name in variables:
            break
    else:
        missing = [name for name in _LAUNCHERS[0][:2] if name not in variables]
        raise CollectiveError(
            f"LocalGroup.from_env: {' and '.join(missing)} not set; start the processes by "
            "torchrun or mpirun, or use LocalGroup.run or LocalGroup.join"
        )
    try:
        rank, world_size = int(variables[rank_name]), int(variables[size_name])
    except ValueError:
        raise CollectiveError(
            f"LocalGroup.from_env: {rank_name}={variables[rank_name]!r} and "
            f"{size_name}={variables[size_name]!r} must be numbers"
        ) from None
    # without the number on this host, all ranks are taken to be on it
    local_size = variables.get(local_size_name, str(world_size))
    if local_size != str(world_size):
        raise CollectiveError(
            f"LocalGroup.from_env: {world_size} ranks, {local_size} of them on this host; "
            "LocalGroup connects only ranks of one host: use TorchGroup or MPIGroup"
        )
    if not 0 <= rank < world_size:
        raise CollectiveError(
            f"LocalGroup.from_env: {rank_name}={rank} is not a rank of {size_name}={world_size}"
        )
    job = variables.get("MLSTATE_JOB") or " ".join(
        f"{name}={variables[name]}" for name in _JOBS if name in variables
    )
    if not job:
        raise CollectiveError(
            "LocalGroup.from_env: the job has no name; set MLSTATE_JOB to a name that all ranks "
            "share and no other job uses, or TORCHELASTIC_RUN_ID or MASTER_PORT"
        )
    return f"from_env {job}", rank, world_size
