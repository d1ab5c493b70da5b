"""`SingleGroup`: a group of one process, each result from this rank's own arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._common.arrays import assign
from ._arguments import check_counts
from ._engine import Engine
from ._work import Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from .._types import Array
    from ._engine import Call


class _Link:
    """A link to no other rank. Memory is an array of any kind and shape."""

    def reduce_scatter(self, source: Array, target: Array, rows: list[int], op: str) -> None:
        assign(target, source)

    def all_gather(self, source: Array, target: Array, rows: list[int]) -> None:
        assign(target, source)

    def all_reduce(self, source: Array, target: Array, op: str) -> None:
        assign(target, source)

    def all_to_all(
        self, source: Array, target: Array, sent: list[int], expected: list[int]
    ) -> None:
        """Copy the source to the target.

        `sent`, `expected`: the number of rows, in a list of one. Raises CompatibilityError if they
        differ.
        """
        check_counts("all_to_all", "out_counts", expected, sum(sent), 1)
        assign(target, source)

    def broadcast(self, memory: Any, root: int) -> None:
        """Do nothing: the only rank is the root."""

    def barrier(self) -> None:
        """Do nothing: this is the only rank."""

    def gather_bytes(self, data: bytes, root: int | None) -> list[bytes]:
        return [data]


_LINK = _Link()


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
        """Run a task at once, without a lock, as a single rank needs no order.

        Returns its result, or a finished `Work` if the call is asynchronous.
        """
        result = task()
        if not call.async_op:
            return result
        work = Work(call.name, 0)
        work.set_result(result)
        return work

    def _perform(self, call: Call, perform: Callable[[Any], Any]) -> Any:
        return perform(_LINK)

    # memory is the array itself, on any device, with its shape
    def _check_out(self, operation: str, out: Array) -> None:
        """Accept each tensor: torch copies to it, also to a sparse or conjugated one."""

    def _source(self, operation: str, array: Array, *, reduced: bool) -> Any:
        return array

    def _target(self, operation: str, place: Array, *, reduced: bool) -> Any:
        return place

    def _put(self, target: Any, place: Any) -> None:
        """Do nothing: the target is the place."""
