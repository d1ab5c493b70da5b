"""What all engines of `mlstate.collectives` do around the moving of bytes.

An engine derives from `Engine`, which has the operations of a `ProcessGroup`: they check what
they are given and decide what goes where. The engine adds how memory is reached and how bytes
travel. A group of a user's own need not derive from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

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

    from ._operation_queue import Turns


class Call(NamedTuple):
    """An operation as this rank calls it.

    Attributes
    ----------
    name : str
        Of the operation.
    seconds : float or None
        Its timeout, None for the engine's own.
    async_op : bool
        Whether to return a `Work`.
    text : str
        What every rank must say alike.
    device : torch.device or None
        Where a tensor lies.
    rows : sequence of list of int
        Rows that this rank sends to each rank, and that it expects of each, where ranks differ.
    """

    name: str
    seconds: float | None
    async_op: bool
    text: str = ""
    device: Any = None
    rows: Sequence[list[int]] = ()


def shares(size: int, rows: Sequence[int]) -> list[int]:
    """Divide a flat array of this size, in elements or bytes, as its rows are divided."""
    total = sum(rows)
    width = size // total if total else 0
    return [n * width for n in rows]


class Engine(ABC):
    """The operations of a process group, for engines to derive from.

    A `link` below is what an engine makes for one operation: its way to the other ranks, and
    when time is up. Sources and targets are memory of the engine's choice that holds the
    elements of an array.

    Examples
    --------
    >>> from mlstate.collectives._group_base import Engine
    >>> from mlstate.collectives import SingleGroup
    >>> issubclass(SingleGroup, Engine)
    True
    """

    __slots__ = ()

    _rank: int
    _world_size: int
    _ended: str  # how, or empty
    _turns: Turns

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        ended = f", {self._ended}" if self._ended else ""
        return f"{type(self).__name__}(rank {self._rank} of {self._world_size}{ended})"

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
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
        """Reduce arrays of one shape, and return the rows that belong to this rank.

        Parameters
        ----------
        array : array
            With at least one dimension; the same shape and dtype on every rank.
        op : ReduceOp or str, default "sum"
            How elements become one; it must be defined for the dtype.
        out : array, optional
            Where the result goes; may be `array` itself where the shapes are equal.
        counts : sequence of int, optional
            Rows of each rank, the same on every rank. Default: equal parts.
        timeout : float, optional
            Seconds. Default: the group's own.
        async_op : bool, default False
            Return a `Work` at once.

        Returns
        -------
        array or Work
            New, or `out`.

        Raises
        ------
        TypeError, ValueError
            An argument makes no sense.
        CompatibilityError
            `op` is not defined for the dtype, or `counts` or `out` do not fit.
        CollectiveError
            The group was closed, time was up, or another rank failed.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().reduce_scatter(np.ones((2, 1)), counts=[2]).shape
        (2, 1)
        """
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
        """Return the rows of all ranks in the order of ranks; this rank's are `array`.

        Parameters
        ----------
        array : array
            With at least one dimension; those after it, and the dtype, are the same on every
            rank.
        out, counts, timeout, async_op
            As for `reduce_scatter`. Without `counts` every rank has as many rows as this one.

        Returns
        -------
        array or Work
            New, or `out`.

        Raises
        ------
        TypeError, ValueError, CompatibilityError, CollectiveError
            As `reduce_scatter`.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().all_gather(np.arange(3))
        array([0, 1, 2])
        """
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
        """Reduce arrays of one shape, and return the same result on every rank.

        Parameters
        ----------
        array : array
            Of any shape, the same on every rank, as the dtype is.
        op, out, timeout, async_op
            As for `reduce_scatter`.

        Returns
        -------
        array or Work
            New, or `out`.

        Raises
        ------
        TypeError, ValueError, CompatibilityError, CollectiveError
            As `reduce_scatter`.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> gradient = np.ones(2)
        >>> SingleGroup().all_reduce(gradient, op="mean", out=gradient) is gradient
        True
        """
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
        """Send each rank its rows, ``counts[rank]`` of them; return those that others sent.

        Parameters
        ----------
        array : array
            With at least one dimension; those after it, and the dtype, are the same on every
            rank.
        out, timeout, async_op
            As for `reduce_scatter`.
        counts, out_counts : sequence of int, optional
            Rows to each rank, and from each; they differ from rank to rank. Both or neither:
            then equal parts.

        Returns
        -------
        array or Work
            New, or `out`.

        Raises
        ------
        TypeError, ValueError, CompatibilityError, CollectiveError
            As `reduce_scatter`.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().all_to_all(np.arange(3), counts=[3], out_counts=[3])
        array([0, 1, 2])
        """
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
        """Copy the array of rank `root` into that of every other rank, and return it.

        Parameters
        ----------
        array : array
            Of any shape, the same on every rank, as the dtype is.
        root : int, default 0
            The rank whose array it is.
        timeout, async_op
            As for `reduce_scatter`.

        Returns
        -------
        array or Work
            `array`.

        Raises
        ------
        TypeError, ValueError
            `root` is no rank, or the array cannot be sent, or written to.
        CollectiveError
            As `reduce_scatter`.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().broadcast(np.zeros(2))
        array([0., 0.])
        """
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
        """Wait until every rank is here.

        Parameters
        ----------
        timeout, async_op
            As for `reduce_scatter`.

        Returns
        -------
        None or Work

        Raises
        ------
        CollectiveError
            As `reduce_scatter`.

        Examples
        --------
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().barrier()
        """
        return self._submit(Call("barrier", check_timeout(timeout), async_op), self._barrier)

    def gather_bytes(
        self,
        data: bytes,
        *,
        root: int | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the bytes of all ranks, of any lengths, as a list in the order of ranks.

        Parameters
        ----------
        data : bytes, bytearray or memoryview
            Anything with a buffer is taken as bytes.
        root : int, optional
            The rank that gets the list, and the others None. Default: every rank gets it.
        timeout, async_op
            As for `reduce_scatter`.

        Returns
        -------
        list of bytes, or None, or Work

        Raises
        ------
        TypeError, ValueError
            `data` has no buffer, or `root` is no rank.
        CollectiveError
            As `reduce_scatter`.

        Examples
        --------
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().gather_bytes(b"ok", root=0)
        [b'ok']
        """
        name = "gather_bytes"
        seconds = check_timeout(timeout)
        taken = check_bytes(name, data)
        end = None if root is None else check_root(name, root, self.world_size)

        def perform(link: Any) -> Any:
            return self._gather(link, taken, end)

        return self._submit(Call(name, seconds, async_op, f"to {end}"), perform)

    @abstractmethod
    def abort(self) -> None:
        """Make the operations of this group fail, here and, as far as it can, elsewhere."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the group holds; closing again does nothing."""

    # ---- one after the other ----

    def _fill(
        self,
        call: Call,
        place: Any,
        out: Any,
        move: Callable[[Any, Any], None],
        *,
        reduced: bool,
    ) -> Any:
        """Submit an operation that fills `place`, over which `out` lies if it was given."""

        def perform(link: Any) -> Any:
            target = self._target(call.name, place, reduced=reduced)
            move(link, target)
            self._put(target, place)
            return place if out is None else out

        return self._submit(call, perform)

    def _submit(self, call: Call, perform: Callable[[Any], Any]) -> Any:
        """Run an operation after those that were called before it; `perform` gets its link."""
        self._check_open(call.name)

        def task() -> Any:
            self._check_open(call.name)
            return self._perform(call, perform)

        return self._run(call, task)

    def _check_open(self, operation: str) -> None:
        """Refuse to begin with anything in a group that has ended."""
        if self._ended:
            raise failed(operation, self._rank, f"this group was {self._ended}; make a new one")

    def _run(self, call: Call, task: Callable[[], Any]) -> Any:
        """Run a task in its turn, and return what it returns, or a `Work`."""
        return self._turns.run(call.name, task, async_op=call.async_op)

    @abstractmethod
    def _perform(self, call: Call, perform: Callable[[Any], Any]) -> Any:
        """Make a link and perform an operation over it; the turn is held."""

    # ---- memory ----

    @abstractmethod
    def _source(self, operation: str, array: Any, *, reduced: bool) -> Any:
        """Return memory with the elements of an array, which may be the array's own.

        It is to compute with where it is `reduced`: what cannot be is refused here.
        """

    @abstractmethod
    def _target(self, operation: str, place: Any, *, reduced: bool) -> Any:
        """Return memory for the elements of `place`, its own or new."""

    @abstractmethod
    def _put(self, target: Any, place: Any) -> None:
        """Copy a filled target to its place, unless it is there."""

    # ---- how bytes travel ----

    @abstractmethod
    def _reduce_rows(self, link: Any, source: Any, rows: list[int], op: str, target: Any) -> None:
        """Reduce sources; rank r gets ``rows[r]`` rows of the result."""

    @abstractmethod
    def _reduce_all(self, link: Any, source: Any, op: str, target: Any) -> None:
        """Reduce sources; every rank gets the result."""

    @abstractmethod
    def _spread(self, link: Any, source: Any, rows: list[int], target: Any) -> None:
        """Fill the target with the sources of all ranks, ``rows[r]`` rows of rank r."""

    @abstractmethod
    def _trade(
        self, link: Any, source: Any, sent: list[int], target: Any, wanted: list[int]
    ) -> None:
        """Send ``sent[r]`` rows to each rank r, and get ``wanted[r]``; both may be one memory."""

    @abstractmethod
    def _broadcast(self, link: Any, memory: Any, root: int) -> None:
        """Overwrite memory with that of `root`."""

    @abstractmethod
    def _barrier(self, link: Any) -> None:
        """Wait for every rank."""

    @abstractmethod
    def _gather(self, link: Any, data: bytes, root: int | None) -> list[bytes] | None:
        """Return the bytes of all ranks; None where this rank is not the root."""


def _device_of(array: Any) -> Any:
    return array.device if is_torch(array) else None
