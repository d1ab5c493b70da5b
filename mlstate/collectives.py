"""Operations across the processes of one job.

`ProcessGroup` is what mlstate needs of an engine that connects processes: any object with
these methods will do. `SingleGroup` is the world of one process, `LocalGroup` connects the
processes or threads of one host; torch.distributed is adapted by
`mlstate.integrations.torch.TorchGroup`.

All ranks of a group call the same operations in the same order. Arrays are NumPy arrays or
torch tensors; none takes part in autograd. The input is never changed, unless it is ``out``
too.

Examples
--------
>>> import numpy as np
>>> from mlstate.collectives import ReduceOp, SingleGroup
>>> group = SingleGroup()
>>> group.all_reduce(np.arange(3.0), op=ReduceOp.MEAN)
array([0., 1., 2.])
>>> group.gather_bytes(b"ready")
[b'ready']
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ._arrays import is_torch
from ._collective_args import (
    ReduceOp,
    check_array,
    check_bytes,
    check_counts,
    check_op,
    check_root,
    check_rows,
    check_timeout,
    failed,
    result_of,
)
from ._local_group import LocalGroup
from ._work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["LocalGroup", "ProcessGroup", "ReduceOp", "SingleGroup", "Work"]


@runtime_checkable
class ProcessGroup(Protocol):
    """What connects the processes of a job; engines need not derive from it.

    Attributes
    ----------
    rank : int
        Number of this process, from 0.
    world_size : int
        Number of processes.

    Notes
    -----
    Every operation has two keywords besides those below. ``timeout`` is in seconds; None
    means the engine's own. When it passes, or another rank fails, the operation raises
    `CollectiveError` with its name and rank, and the group is of no use any more. With
    ``async_op=True`` the operation returns a `Work` at once; operations of one group take
    place in the order in which they were called.

    ``out`` is where the result goes: an array of the result's shape and dtype, with any
    strides, of the same kind as the input (NumPy or torch). It is returned. Without it the
    result is a new contiguous array, never the input. `out` may be the input itself where the
    shapes are equal; it must not overlap it otherwise.

    Rows are the elements along the first dimension. ``counts`` says how many rows belong to
    each rank, the same sequence on every rank; without it they are divided equally.

    Sums are made in the order of ranks, in float32 for 16-bit and 8-bit floating-point
    dtypes, and rounded once: the same bits on every engine that promises this.

    Examples
    --------
    >>> from mlstate.collectives import ProcessGroup, SingleGroup
    >>> isinstance(SingleGroup(), ProcessGroup)
    True
    """

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes."""
        ...

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
        """Reduce arrays of one shape, and return the rows that belong to this rank."""
        ...

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
        ...

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
        ...

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

        `out_counts` says how many rows come from each rank. Both differ from rank to rank,
        and both are given, or neither.
        """
        ...

    def broadcast(
        self,
        array: Any,
        *,
        root: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Copy the array of rank `root` into that of every other rank, and return it."""
        ...

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until every rank is here."""
        ...

    def gather_bytes(
        self,
        data: bytes,
        *,
        root: int | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the bytes of all ranks, of any lengths, as a list in the order of ranks.

        Every rank gets the list, or rank `root` alone and the others None.
        """
        ...

    def abort(self) -> None:
        """Make the operations of this group fail, here and, as far as it can, elsewhere."""
        ...

    def close(self) -> None:
        """Give back what the group holds; closing again does nothing."""
        ...


class SingleGroup:
    """A group of one process: every operation returns what this process gave.

    Arguments are checked as every group checks them, so that code which runs on one process
    does not fail for its arguments on two.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.collectives import SingleGroup
    >>> with SingleGroup() as group:
    ...     group.rank, group.world_size, group.all_gather(np.arange(2))
    (0, 1, array([0, 1]))
    """

    __slots__ = ("_ended",)

    def __init__(self) -> None:
        self._ended = ""

    def __enter__(self) -> SingleGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SingleGroup({self._ended})"

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    def _run(self, operation: str, timeout: Any, async_op: bool, prepare: Callable[[], Any]) -> Any:
        """Check that the group is open, then let `prepare` check and make the result."""
        check_timeout(timeout)
        if self._ended:
            raise failed(operation, 0, f"this group was {self._ended}; make a new one")
        result = prepare()
        if not async_op:
            return result
        work = Work(operation, 0)
        work.set_result(result)
        return work

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
        """Return a copy of the array: all rows belong to this rank.

        Parameters
        ----------
        array : array
            With at least one dimension.
        op : ReduceOp or str, default "sum"
            Checked against the dtype.
        out : array, optional
            Where the result goes; may be `array` itself.
        counts : sequence of int, optional
            One number, that of the rows.
        timeout : float, optional
            Seconds; nothing here takes any.
        async_op : bool, default False
            Return a `Work` that is done.

        Returns
        -------
        array or Work
            New, or `out`.

        Raises
        ------
        CompatibilityError
            `op` is not defined for the dtype, or `counts` or `out` do not fit.
        CollectiveError
            The group was closed.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().reduce_scatter(np.ones((2, 1)), counts=[2]).shape
        (2, 1)
        """
        name = "reduce_scatter"

        def prepare() -> Any:
            plain = check_array(name, array)
            check_op(name, op, plain)
            check_counts(name, "counts", counts, check_rows(name, plain), 1)
            return _copied(name, plain, out)

        return self._run(name, timeout, async_op, prepare)

    def all_gather(
        self,
        array: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return a copy of the array.

        Parameters
        ----------
        array : array
            With at least one dimension.
        out, counts, timeout, async_op
            As for `reduce_scatter`.

        Returns
        -------
        array or Work
            New, or `out`.

        Raises
        ------
        CompatibilityError, CollectiveError
            As `reduce_scatter`.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().all_gather(np.arange(3))
        array([0, 1, 2])
        """
        name = "all_gather"

        def prepare() -> Any:
            plain = check_array(name, array)
            check_counts(name, "counts", counts, check_rows(name, plain), 1)
            return _copied(name, plain, out)

        return self._run(name, timeout, async_op, prepare)

    def all_reduce(
        self,
        array: Any,
        *,
        op: ReduceOp | str = ReduceOp.SUM,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return a copy of the array.

        Parameters
        ----------
        array : array
            Of any shape.
        op, out, timeout, async_op
            As for `reduce_scatter`.

        Returns
        -------
        array or Work
            New, or `out`.

        Raises
        ------
        CompatibilityError, CollectiveError
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

        def prepare() -> Any:
            plain = check_array(name, array)
            check_op(name, op, plain)
            return _copied(name, plain, out)

        return self._run(name, timeout, async_op, prepare)

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
        """Return a copy of the array: this rank sends itself all of it.

        Parameters
        ----------
        array : array
            With at least one dimension.
        out, timeout, async_op
            As for `reduce_scatter`.
        counts, out_counts : sequence of int, optional
            One number each, that of the rows. Both or neither.

        Returns
        -------
        array or Work
            New, or `out`.

        Raises
        ------
        CompatibilityError, CollectiveError
            As `reduce_scatter`.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().all_to_all(np.arange(3), counts=[3], out_counts=[3])
        array([0, 1, 2])
        """
        name = "all_to_all"

        def prepare() -> Any:
            plain = check_array(name, array)
            rows = check_rows(name, plain)
            if (counts is None) != (out_counts is None):
                raise ValueError(f"{name}: give both counts and out_counts, or neither")
            check_counts(name, "counts", counts, rows, 1)
            check_counts(name, "out_counts", out_counts, rows, 1)
            return _copied(name, plain, out)

        return self._run(name, timeout, async_op, prepare)

    def broadcast(
        self,
        array: Any,
        *,
        root: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the array itself, which is root's.

        Parameters
        ----------
        array : array
            Of any shape.
        root : int, default 0
            0, the one rank.
        timeout, async_op
            As for `reduce_scatter`.

        Returns
        -------
        array or Work
            `array`.

        Raises
        ------
        ValueError
            `root` is no rank.
        CollectiveError
            The group was closed.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().broadcast(np.zeros(2))
        array([0., 0.])
        """
        name = "broadcast"

        def prepare() -> Any:
            check_array(name, array)
            check_root(name, root, 1)
            return array

        return self._run(name, timeout, async_op, prepare)

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Return at once: every rank is here.

        Parameters
        ----------
        timeout, async_op
            As for `reduce_scatter`.

        Returns
        -------
        None or Work

        Examples
        --------
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().barrier()
        """
        return self._run("barrier", timeout, async_op, lambda: None)

    def gather_bytes(
        self,
        data: bytes,
        *,
        root: int | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the bytes in a list.

        Parameters
        ----------
        data : bytes, bytearray or memoryview
            Anything with a buffer is taken as bytes.
        root : int, optional
            0, the one rank, or None.
        timeout, async_op
            As for `reduce_scatter`.

        Returns
        -------
        list of bytes, or Work

        Raises
        ------
        TypeError, ValueError
            `data` has no buffer, or `root` is no rank.
        CollectiveError
            The group was closed.

        Examples
        --------
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().gather_bytes(b"ok", root=0)
        [b'ok']
        """
        name = "gather_bytes"

        def prepare() -> list[bytes]:
            if root is not None:
                check_root(name, root, 1)
            return [check_bytes(name, data)]

        return self._run(name, timeout, async_op, prepare)

    def abort(self) -> None:
        """End the group; later operations raise `CollectiveError`.

        Examples
        --------
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().abort()
        """
        self._ended = "aborted"

    def close(self) -> None:
        """End the group; later operations raise `CollectiveError`.

        Examples
        --------
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().close()
        """
        self._ended = self._ended or "closed"


def _copied(operation: str, array: Any, out: Any) -> Any:
    """Return what a reduction over one rank is: the same elements, elsewhere."""
    place = result_of(operation, out, tuple(array.shape), array)
    if is_torch(place):
        place.copy_(array)
    else:
        place[...] = array
    return place if out is None else out
