"""`Work`: the handle of an operation with `async_op=True`: `wait`, `done`, its result or error."""

from __future__ import annotations

from typing import Any

from .. import _core
from .._common.waiting import Waiters
from ._arguments import check_timeout, failed


class Work:
    """An operation that was started with ``async_op=True``.

    Parameters
    ----------
    operation : str
        Name of the operation, for errors.
    rank : int
        The rank that started it.

    Notes
    -----
    Groups create these objects, and complete them with `set_result` or `set_error`. Any thread
    may wait. Do not modify the arrays of the operation until it is done.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.collectives import SingleGroup
    >>> work = SingleGroup().all_reduce(np.ones(2), async_op=True)
    >>> work.wait(timeout=5.0), work.done()
    (array([1., 1.]), True)
    """

    __slots__ = ("_error", "_is_done", "_result", "_waiters", "operation", "rank")

    def __init__(self, operation: str, rank: int) -> None:
        """Create the handle of an operation that has not ended yet; parameters as for the class."""
        self.operation: str = operation
        self.rank: int = rank
        self._waiters = Waiters()
        self._is_done = False
        self._result: Any = None
        self._error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the operation is done, and return its result.

        Parameters
        ----------
        timeout : float, optional
            Longest wait in seconds. Default: wait until the operation ends. The operation has
            its own ``timeout``.

        Returns
        -------
        object
            The result that the operation returns without ``async_op``; the same for each call.

        Raises
        ------
        CollectiveError
            If the operation failed, or is not done in time. In the latter case it continues, and
            the caller may wait again.

        Examples
        --------
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().barrier(async_op=True).wait()
        """
        if not self._waiters.wait_for(self.done, check_timeout(timeout)):
            raise failed(
                self.operation,
                self.rank,
                f"not done after {timeout} s of waiting; it continues: wait again, or abort the "
                "group",
            )
        if self._error is None:
            return self._result
        try:
            raise self._error
        finally:
            del self  # avoid a reference cycle between traceback and error

    def done(self) -> bool:
        """Return whether the operation has ended, with a result or an error.

        Returns
        -------
        bool
            True if `wait` would return or raise at once.

        Examples
        --------
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().barrier(async_op=True).done()
        True
        """
        return self._is_done

    def set_result(self, result: object) -> None:
        """Complete the operation with a result, which `wait` returns.

        Parameters
        ----------
        result : object
            Result of the operation.

        Examples
        --------
        >>> from mlstate.collectives import Work
        >>> work = Work("barrier", rank=0)
        >>> work.set_result(None)
        >>> work.done()
        True
        """
        self._complete(result, None)

    def set_error(self, error: BaseException) -> None:
        """Complete the operation with an error, which `wait` raises.

        Parameters
        ----------
        error : BaseException
            The error.

        Examples
        --------
        >>> from mlstate import CollectiveError
        >>> from mlstate.collectives import Work
        >>> work = Work("barrier", rank=0)
        >>> work.set_error(CollectiveError("rank 1 is gone"))
        >>> work.wait()
        Traceback (most recent call last):
        mlstate.errors.CollectiveError: rank 1 is gone
        """
        self._complete(None, error)

    def _complete(self, result: object, error: BaseException | None) -> None:
        with _core.deferred_interrupts():
            self._result, self._error, self._is_done = result, error, True
            self._waiters.wake()
