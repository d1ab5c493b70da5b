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

from typing import TYPE_CHECKING, Any

from .._common.arrays import assign
from .._common.set_module import set_module_of_exports
from ._arguments import ReduceOp, check_counts
from ._group_base import Engine, ProcessGroup
from ._local_group import LocalGroup
from ._work import Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._group_base import Call

__all__ = ["LocalGroup", "ProcessGroup", "ReduceOp", "SingleGroup", "Work"]

set_module_of_exports(globals())


class SingleGroup(Engine):
    """A group of one process: each operation returns the result for the arguments of this rank.

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
        assign(target, source)

    def _reduce_all(self, link: Any, source: Any, op: str, target: Any) -> None:
        assign(target, source)

    def _spread(self, link: Any, source: Any, rows: list[int], target: Any) -> None:
        assign(target, source)

    def _trade(
        self, link: Any, source: Any, sent: list[int], target: Any, wanted: list[int]
    ) -> None:
        check_counts("all_to_all", "out_counts", wanted, sum(sent), 1)
        assign(target, source)

    def _broadcast(self, link: Any, memory: Any, root: int) -> None:
        """Do nothing: the only rank is the root."""

    def _barrier(self, link: Any) -> None:
        """Do nothing: this is the only rank."""

    def _gather(self, link: Any, data: bytes, root: int | None) -> list[bytes]:
        return [data]
