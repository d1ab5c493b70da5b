"""An operation that goes on by itself; public through `mlstate.collectives`."""

from __future__ import annotations

from typing import Any

from .._common.set_module import set_module
from ._arguments import check_timeout, failed


@set_module("mlstate.collectives")
class Work:
    """An operation that was started with ``async_op=True``.

    Parameters
    ----------
    operation : str
        Its name, for errors.
    rank : int
        The rank that started it.

    Notes
    -----
    Groups make these, and finish them by `set_result` or `set_error`. Any thread may wait.
    Leave the arrays of the operation alone until it is done.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.collectives import SingleGroup
    >>> work = SingleGroup().all_reduce(np.ones(2), async_op=True)
    >>> work.wait(timeout=5.0), work.done()
    (array([1., 1.]), True)
    """

    __slots__ = ("_error", "_finished", "_result", "operation", "rank")

    def __init__(self, operation: str, rank: int) -> None:
        import threading  # loaded by nothing that `import mlstate` needs

        self.operation = operation
        self.rank = rank
        self._finished = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the operation is done, and return its result.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most. Default: until the operation ends, which its own
            ``timeout`` bounds.

        Returns
        -------
        object
            What the operation returns without ``async_op``; the same at every call.

        Raises
        ------
        CollectiveError
            The operation failed, or is not done in time. In the latter case it goes on, and
            can be waited for again.

        Examples
        --------
        >>> from mlstate.collectives import SingleGroup
        >>> SingleGroup().barrier(async_op=True).wait()
        """
        if not self._finished.wait(check_timeout(timeout)):
            raise failed(
                self.operation,
                self.rank,
                f"not done after {timeout} s of waiting; it goes on: wait again, or abort the "
                "group",
            )
        if self._error is None:
            return self._result
        try:
            raise self._error
        finally:
            del self  # the traceback must not hold what holds the error

    def done(self) -> bool:
        """Tell whether the operation has ended, well or not.

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
        return self._finished.is_set()

    def set_result(self, result: Any) -> None:
        """Finish: let `wait` return this.

        Parameters
        ----------
        result : object
            What the operation returns.

        Examples
        --------
        >>> from mlstate.collectives import Work
        >>> work = Work("barrier", rank=0)
        >>> work.set_result(None)
        >>> work.done()
        True
        """
        self._result = result
        self._finished.set()

    def set_error(self, error: BaseException) -> None:
        """Finish: let `wait` raise this.

        Parameters
        ----------
        error : BaseException
            What went wrong.

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
        self._error = error
        self._finished.set()
