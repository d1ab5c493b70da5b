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

from .._common.arrays import is_torch
from ._arguments import ReduceOp, check_counts
from ._group_base import Engine
from ._local_group import LocalGroup
from ._work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._group_base import Call

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


class SingleGroup(Engine):
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

    _rank = 0
    _world_size = 1

    def __init__(self) -> None:
        self._ended = ""

    def __repr__(self) -> str:
        return f"SingleGroup({self._ended})"

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

    def _run(self, call: Call, task: Callable[[], Any]) -> Any:
        result = task()
        if not call.async_op:
            return result
        work = Work(call.name, 0)
        work.set_result(result)
        return work

    def _perform(self, call: Call, perform: Callable[[Any], Any]) -> Any:
        return perform(None)

    def _source(self, operation: str, array: Any, *, reduced: bool) -> Any:
        return array

    def _target(self, operation: str, place: Any, *, reduced: bool) -> Any:
        return place

    def _put(self, target: Any, place: Any) -> None:
        """Nothing: a target is its place."""

    def _reduce_rows(self, link: Any, source: Any, rows: list[int], op: str, target: Any) -> None:
        _copy(source, target)

    def _reduce_all(self, link: Any, source: Any, op: str, target: Any) -> None:
        _copy(source, target)

    def _spread(self, link: Any, source: Any, rows: list[int], target: Any) -> None:
        _copy(source, target)

    def _trade(
        self, link: Any, source: Any, sent: list[int], target: Any, wanted: list[int]
    ) -> None:
        check_counts("all_to_all", "out_counts", wanted, sum(sent), 1)
        _copy(source, target)

    def _broadcast(self, link: Any, memory: Any, root: int) -> None:
        """Nothing: the one rank is the root."""

    def _barrier(self, link: Any) -> None:
        """Nothing: every rank is here."""

    def _gather(self, link: Any, data: bytes, root: int | None) -> list[bytes]:
        return [data]


def _copy(source: Any, target: Any) -> None:
    """Fill an array with what a reduction over one rank is: the same elements."""
    if is_torch(target):
        target.copy_(source)
    else:
        target[...] = source
