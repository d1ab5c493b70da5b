"""`ProcessGroup`: what each operation does, and what a user-defined group must provide."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ._arguments import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Sequence


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
