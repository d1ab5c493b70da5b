"""The interface of groups, and the base of all groups in `mlstate.collectives`.

A group derives from `Engine`, which implements the operations of `ProcessGroup`: they check
arguments and choose memory for results. The subclass adds memory access and data transfer.
User-defined groups need not derive from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from .._common.arguments import check_flags
from .._common.arrays import is_torch
from ._arguments import (
    ReduceOp,
    check_array,
    check_bytes,
    check_counts,
    check_op,
    check_own_rows,
    check_root,
    check_rows,
    check_timeout,
    check_writable,
    counts_of,
    failed,
    kind_of,
    result_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from ._operation_queue import OperationQueue


class Call(NamedTuple):
    """One call of an operation on this rank."""

    name: str
    seconds: float | None  # timeout; None for the group's own
    async_op: bool
    text: str = ""  # must be equal on every rank
    device: Any = None  # of a tensor
    rows: Sequence[list[int]] = ()  # sent to and expected from each rank, if these may differ


def shares(size: int, rows: Sequence[int]) -> list[int]:
    """Divide the size of a flat array, in elements or bytes, in proportion to `rows`."""
    total = sum(rows)
    width = size // total if total else 0
    return [n * width for n in rows]


@runtime_checkable
class ProcessGroup(Protocol):
    """Interface of a group of processes; implementations need not derive from it.

    Attributes
    ----------
    rank : int
        Rank of this process, from 0.
    world_size : int
        Number of ranks.

    Notes
    -----
    Every operation has two more keywords. ``timeout`` is in seconds; None means the group's own
    timeout. If it expires, or another rank fails, the operation raises `CollectiveError` with
    its name and rank, and the group cannot be used any more. With ``async_op=True`` the
    operation returns a `Work` at once. The operations of one group run in call order.

    ``out`` receives the result and is returned. It is an array of the result's shape and dtype,
    with any strides, of the same kind as the input (NumPy or torch). Without it, the result is a
    new contiguous array, never the input. If the shapes are equal, `out` may be the input
    itself. Otherwise it must not share memory with the input. Its elements must not share
    memory with one another.

    Rows are the elements along the first dimension. ``counts`` is the number of rows of each
    rank, the same sequence on every rank. Without it, the rows are divided equally.

    Sums are computed in rank order, in float32 for 16-bit and 8-bit floating-point dtypes, and
    rounded once. Groups that follow this rule return the same bits.

    Examples
    --------
    >>> from mlstate.collectives import ProcessGroup, SingleGroup
    >>> isinstance(SingleGroup(), ProcessGroup)
    True
    """

    __slots__ = ()

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

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
        """Reduce arrays of one shape, and return this rank's rows of the result.

        Parameters
        ----------
        array : array
            An array with at least one dimension; the same shape and dtype on every rank.
        op : ReduceOp or str, default "sum"
            The reduction; it must be defined for the dtype.
        out : array, optional
            Array for the result; may be `array` itself if the shapes are equal.
        counts : sequence of int, optional
            Number of rows of each rank, the same on every rank. Default: equal parts.
        timeout : float, optional
            Timeout in seconds. Default: the group's timeout.
        async_op : bool, default False
            Return a `Work` at once.

        Returns
        -------
        array or Work
            A new array, or `out`.

        Raises
        ------
        TypeError, ValueError
            If an argument has a wrong type or value.
        CompatibilityError
            If `op` is not defined for the dtype, or `counts` or `out` do not fit.
        CollectiveError
            If the group is closed, the timeout expires, or another rank fails.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().reduce_scatter(np.ones((2, 1)), counts=[2]).shape
        (2, 1)
        """

    def all_gather(
        self,
        array: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the rows of all ranks, concatenated in rank order; `array` has this rank's.

        Parameters
        ----------
        array : array
            An array with at least one dimension. The dtype and all other dimensions must be
            equal on every rank.
        out, counts, timeout, async_op
            See `reduce_scatter`. Without `counts`, every rank has as many rows as this one.

        Returns
        -------
        array or Work
            A new array, or `out`.

        Raises
        ------
        TypeError, ValueError, CompatibilityError, CollectiveError
            See `reduce_scatter`.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().all_gather(np.arange(3))
        array([0, 1, 2])
        """

    def all_reduce(
        self,
        array: Any,
        *,
        op: ReduceOp | str = ReduceOp.SUM,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce arrays of one shape, and return the whole result on every rank.

        Parameters
        ----------
        array : array
            An array of any shape; the same shape and dtype on every rank.
        op, out, timeout, async_op
            See `reduce_scatter`.

        Returns
        -------
        array or Work
            A new array, or `out`.

        Raises
        ------
        TypeError, ValueError, CompatibilityError, CollectiveError
            See `reduce_scatter`.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> gradient = np.ones(2)
        >>> SingleGroup().all_reduce(gradient, op="mean", out=gradient) is gradient
        True
        """

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
        """Send ``counts[r]`` rows to each rank r; return the rows received, in rank order.

        Parameters
        ----------
        array : array
            An array with at least one dimension. The dtype and all other dimensions must be
            equal on every rank.
        out, timeout, async_op
            See `reduce_scatter`.
        counts, out_counts : sequence of int, optional
            Number of rows to each rank, and from each rank. They may differ between ranks. Pass
            both or neither. Default: equal parts.

        Returns
        -------
        array or Work
            A new array, or `out`.

        Raises
        ------
        TypeError, ValueError, CompatibilityError, CollectiveError
            See `reduce_scatter`.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().all_to_all(np.arange(3), counts=[3], out_counts=[3])
        array([0, 1, 2])
        """

    def broadcast(
        self,
        array: Any,
        *,
        root: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Copy the array of rank `root` into the array of every other rank, and return it.

        Parameters
        ----------
        array : array
            An array of any shape; the same shape and dtype on every rank.
        root : int, default 0
            The rank whose array is sent.
        timeout, async_op
            See `reduce_scatter`.

        Returns
        -------
        array or Work
            `array`.

        Raises
        ------
        TypeError, ValueError
            If `root` is not a rank, or the array cannot be sent or is read-only.
        CollectiveError
            See `reduce_scatter`.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().broadcast(np.zeros(2))
        array([0., 0.])
        """

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until every rank has called this.

        Parameters
        ----------
        timeout, async_op
            See `reduce_scatter`.

        Returns
        -------
        None or Work

        Raises
        ------
        CollectiveError
            See `reduce_scatter`.

        Examples
        --------
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().barrier()
        """

    def gather_bytes(
        self,
        data: bytes,
        *,
        root: int | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the bytes of all ranks, of any lengths, as a list in rank order.

        Parameters
        ----------
        data : bytes, bytearray or memoryview
            The bytes of this rank; any object with a buffer is accepted.
        root : int, optional
            The only rank that gets the list; the others get None. Default: every rank gets it.
        timeout, async_op
            See `reduce_scatter`.

        Returns
        -------
        list of bytes, or None, or Work

        Raises
        ------
        TypeError, ValueError
            If `data` has no buffer, or `root` is not a rank.
        CollectiveError
            See `reduce_scatter`.

        Examples
        --------
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().gather_bytes(b"ok", root=0)
        [b'ok']
        """

    @abstractmethod
    def abort(self) -> None:
        """Make the operations of this group fail, on this rank and, if possible, on the others."""

    @abstractmethod
    def close(self) -> None:
        """Release the group's resources; later calls do nothing."""


class Engine(ProcessGroup, ABC):
    """The operations of a process group; base class of engines.

    An engine creates a `link` for each operation: its connection to the other ranks, with a
    deadline. Sources and targets are memory that the engine chooses for the elements of an
    array.
    """

    __slots__ = ()

    _rank: int
    _world_size: int
    _ended: str  # how the group ended, or empty
    _operations: OperationQueue

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        ended = f", {self._ended}" if self._ended else ""
        return f"{type(self).__name__}(rank {self._rank} of {self._world_size}{ended})"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

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
        name = "reduce_scatter"
        seconds = check_timeout(timeout)
        plain = check_array(name, array)
        kind = check_op(name, op, plain)
        rows = check_counts(name, "counts", counts, check_rows(name, plain), self.world_size)
        place = result_of(name, out, (rows[self.rank], *plain.shape[1:]), plain)
        source = self._source(name, plain, reduced=True)

        def move(link: Any, target: Any) -> None:
            self._reduce_rows(link, source, rows, kind, target)

        text = f"{kind} of {kind_of(plain)} in rows {rows}"
        call = Call(name, seconds, async_op, text, _device_of(plain))
        return self._fill(call, place, out, move, reduced=True)

    def all_gather(
        self,
        array: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        name = "all_gather"
        seconds = check_timeout(timeout)
        plain = check_array(name, array)
        rows = [check_rows(name, plain)] * self.world_size
        if counts is not None:
            rows = counts_of(name, "counts", counts, self.world_size)
            check_own_rows(name, plain, rows, self.rank)
        place = result_of(name, out, (sum(rows), *plain.shape[1:]), plain)
        source = self._source(name, plain, reduced=False)

        def move(link: Any, target: Any) -> None:
            self._spread(link, source, rows, target)

        text = f"{kind_of(plain)} in rows {rows}"
        call = Call(name, seconds, async_op, text, _device_of(plain))
        return self._fill(call, place, out, move, reduced=False)

    def all_reduce(
        self,
        array: Any,
        *,
        op: ReduceOp | str = ReduceOp.SUM,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        name = "all_reduce"
        seconds = check_timeout(timeout)
        plain = check_array(name, array)
        kind = check_op(name, op, plain)
        place = result_of(name, out, tuple(plain.shape), plain)
        source = self._source(name, plain, reduced=True)

        def move(link: Any, target: Any) -> None:
            self._reduce_all(link, source, kind, target)

        text = f"{kind} of {tuple(plain.shape)} {kind_of(plain)}"
        call = Call(name, seconds, async_op, text, _device_of(plain))
        return self._fill(call, place, out, move, reduced=True)

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
        name = "all_to_all"
        seconds = check_timeout(timeout)
        plain = check_array(name, array)
        rows = check_rows(name, plain)
        if (counts is None) != (out_counts is None):
            raise ValueError(f"{name}: give both counts and out_counts, or neither")
        sent = wanted = check_counts(name, "counts", counts, rows, self.world_size)
        if out_counts is not None:
            wanted = counts_of(name, "out_counts", out_counts, self.world_size)
        place = result_of(name, out, (sum(wanted), *plain.shape[1:]), plain)
        source = self._source(name, plain, reduced=False)

        def move(link: Any, target: Any) -> None:
            self._trade(link, source, sent, target, wanted)

        call = Call(name, seconds, async_op, kind_of(plain), _device_of(plain), (sent, wanted))
        return self._fill(call, place, out, move, reduced=False)

    def broadcast(
        self,
        array: Any,
        *,
        root: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        name = "broadcast"
        seconds = check_timeout(timeout)
        plain = check_array(name, array)
        start = check_root(name, root, self.world_size)
        sends = start == self.rank
        if not sends:
            check_writable(name, array, self.rank)
        reached = self._source if sends else self._target
        memory = reached(name, plain, reduced=False)

        def perform(link: Any) -> Any:
            self._broadcast(link, memory, start)
            if not sends:
                self._put(memory, plain)
            return array

        text = f"{tuple(plain.shape)} {kind_of(plain)} from {start}"
        return self._submit(Call(name, seconds, async_op, text, _device_of(plain)), perform)

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        return self._submit(Call("barrier", check_timeout(timeout), async_op), self._barrier)

    def gather_bytes(
        self,
        data: bytes,
        *,
        root: int | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        name = "gather_bytes"
        seconds = check_timeout(timeout)
        taken = check_bytes(name, data)
        end = None if root is None else check_root(name, root, self.world_size)

        def perform(link: Any) -> Any:
            return self._gather(link, taken, end)

        return self._submit(Call(name, seconds, async_op, f"to {end}"), perform)

    # ---- call order ----

    def _fill(
        self,
        call: Call,
        place: Any,
        out: Any,
        move: Callable[[Any, Any], None],
        *,
        reduced: bool,
    ) -> Any:
        """Submit an operation that fills `place`, a view of `out` if that is passed."""

        def perform(link: Any) -> Any:
            target = self._target(call.name, place, reduced=reduced)
            move(link, target)
            self._put(target, place)
            return place if out is None else out

        return self._submit(call, perform)

    def _submit(self, call: Call, perform: Callable[[Any], Any]) -> Any:
        """Run an operation after all earlier ones; `perform` receives its link."""
        check_flags(async_op=call.async_op)
        self._check_open(call.name)

        def task() -> Any:
            self._check_open(call.name)
            return self._perform(call, perform)

        return self._run(call, task)

    def _check_open(self, operation: str) -> None:
        """Raise CollectiveError if the group has ended."""
        if self._ended:
            raise failed(operation, self._rank, f"this group was {self._ended}; make a new one")

    def _run(self, call: Call, task: Callable[[], Any]) -> Any:
        """Run a task after all earlier ones; return its result, or a `Work`."""
        return self._operations.run(call.name, task, async_op=call.async_op)

    @abstractmethod
    def _perform(self, call: Call, perform: Callable[[Any], Any]) -> Any:
        """Create a link and perform an operation over it; the queue is locked."""

    # ---- memory ----

    @abstractmethod
    def _source(self, operation: str, array: Any, *, reduced: bool) -> Any:
        """Return memory with the elements of an array, which may be the array's own.

        If `reduced`, the elements must support arithmetic; otherwise this raises.
        """

    @abstractmethod
    def _target(self, operation: str, place: Any, *, reduced: bool) -> Any:
        """Return memory for the elements of `place`: its own or new."""

    @abstractmethod
    def _put(self, target: Any, place: Any) -> None:
        """Copy a filled target to its place, unless they share memory."""

    # ---- data transfer ----

    @abstractmethod
    def _reduce_rows(self, link: Any, source: Any, rows: list[int], op: str, target: Any) -> None:
        """Reduce sources; each rank r gets ``rows[r]`` rows of the result."""

    @abstractmethod
    def _reduce_all(self, link: Any, source: Any, op: str, target: Any) -> None:
        """Reduce sources; every rank gets the result."""

    @abstractmethod
    def _spread(self, link: Any, source: Any, rows: list[int], target: Any) -> None:
        """Fill the target with the sources of all ranks, ``rows[r]`` rows from rank r."""

    @abstractmethod
    def _trade(
        self, link: Any, source: Any, sent: list[int], target: Any, wanted: list[int]
    ) -> None:
        """Send ``sent[r]`` rows to each rank r, and receive ``wanted[r]``; memory may overlap."""

    @abstractmethod
    def _broadcast(self, link: Any, memory: Any, root: int) -> None:
        """Overwrite memory on all ranks with the memory of rank `root`."""

    @abstractmethod
    def _barrier(self, link: Any) -> None:
        """Wait until every rank has called this."""

    @abstractmethod
    def _gather(self, link: Any, data: bytes, root: int | None) -> list[bytes] | None:
        """Return the bytes of all ranks; None if there is a root and this rank is not it."""


def _device_of(array: Any) -> Any:
    return array.device if is_torch(array) else None
