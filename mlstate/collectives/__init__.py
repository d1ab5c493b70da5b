"""Collective operations across the processes of one job.

`ProcessGroup` is the interface that mlstate requires of a group: any object with these methods
works. `SingleGroup` is a group of one process. `LocalGroup` connects processes or threads of one
host. `mlstate.integrations.torch.TorchGroup` adapts torch.distributed.

All ranks of a group call the same operations in the same order. Arrays are NumPy arrays or
torch tensors; autograd does not record the operations. The input is never modified, unless it is
also passed as ``out``.

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
    itself. Otherwise it must not overlap the input.

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

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
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
        """Reduce arrays of one shape, and return this rank's rows of the result."""
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
        """Return the rows of all ranks, concatenated in rank order; `array` has this rank's."""
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
        """Reduce arrays of one shape, and return the whole result on every rank."""
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
        """Send ``counts[r]`` rows to each rank r; return the rows received, in rank order.

        `out_counts` is the number of rows from each rank. Both may differ between ranks. Pass
        both or neither.
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
        """Copy the array of rank `root` into the array of every other rank, and return it."""
        ...

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until every rank has called this."""
        ...

    def gather_bytes(
        self,
        data: bytes,
        *,
        root: int | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the bytes of all ranks, of any lengths, as a list in rank order.

        Every rank gets the list. With `root`, only that rank does, and the others get None.
        """
        ...

    def abort(self) -> None:
        """Make the operations of this group fail, on this rank and, if possible, on the others."""
        ...

    def close(self) -> None:
        """Release the group's resources; later calls do nothing."""
        ...


class SingleGroup(Engine):
    """A group of one process: each operation returns the result of its own arguments.

    It checks arguments as larger groups do, so that code that runs on one process does not
    fail on two because of an argument.

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
        """Do nothing: the target is the place."""

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
        """Do nothing: the only rank is the root."""

    def _barrier(self, link: Any) -> None:
        """Do nothing: this is the only rank."""

    def _gather(self, link: Any, data: bytes, root: int | None) -> list[bytes]:
        return [data]


def _copy(source: Any, target: Any) -> None:
    """Copy an array: the result of a reduction over one rank."""
    if is_torch(target):
        target.copy_(source)
    else:
        target[...] = source
