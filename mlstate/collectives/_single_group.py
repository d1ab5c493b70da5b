"""A group of one process; public through `mlstate.collectives`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._common.arrays import assign
from ._arguments import check_counts
from ._engine import Engine, OperationQueue
from ._link import ExchangeLink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._engine import Call


class _Link(ExchangeLink):
    """A link to no other rank: its exchange is empty. Memory is an array of any shape."""

    rank = 0
    world_size = 1

    def exchange(self, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        """Do nothing."""

    def bytes_of(self, flat: Any) -> Any:
        return flat

    def reduce(self, parts: Sequence[Any], op: str, out: Any) -> None:
        assign(out, parts[0])

    def all_to_all(self, source: Any, target: Any, sent: list[int], expected: list[int]) -> None:
        check_counts("all_to_all", "out_counts", expected, sum(sent), 1)
        super().all_to_all(source, target, sent, expected)

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

    __slots__ = ("_ended", "_operations")

    _rank = 0
    _world_size = 1

    def __init__(self) -> None:
        self._ended = ""
        self._operations = OperationQueue("mlstate-single-group", 0)

    def __getstate__(self) -> tuple[None, dict[str, str]]:
        return None, {"_ended": self._ended}

    def __setstate__(self, state: tuple[None, dict[str, str]]) -> None:
        SingleGroup.__init__(self)
        self._ended = state[1]["_ended"]

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

    def _runs_at_once(self, call: Call) -> bool:
        return True

    def _perform(self, call: Call, perform: Callable[[Any], Any]) -> Any:
        return perform(_LINK)

    # the array itself, on any device, with its shape
    def _source(self, operation: str, array: Any, *, reduced: bool) -> Any:
        return array if array.ndim else array.reshape(1)

    def _target(self, operation: str, place: Any, *, reduced: bool) -> Any:
        return place if place.ndim else place.reshape(1)

    def _put(self, target: Any, place: Any) -> None:
        """Do nothing: the target is the place."""
