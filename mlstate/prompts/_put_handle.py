"""`PutHandle`: the handle of an asynchronous put; a caller and the writing thread share no lock."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NoReturn

from .. import _core
from .._common.log import log
from .._common.set_module import set_module
from .._common.waiting import Waiters

if TYPE_CHECKING:
    from collections.abc import Callable


@set_module("mlstate.prompts")
class PutHandle:
    """An asynchronous put; `PromptStore.put` returns one.

    It has the methods of `concurrent.futures.Future`, for any thread. A signal handler may call
    them too.
    """

    __slots__ = ("__weakref__", "_callbacks", "_claim", "_outcome", "_waiters")

    def __init__(self) -> None:
        self._claim: dict[str, str] = {}  # "by": the thread that writes, or "cancel"
        self._outcome: tuple[int, BaseException | None] | None = None  # after the write
        self._callbacks: deque[Callable[[PutHandle], object]] = deque()
        self._waiters = Waiters()

    def result(self, timeout: float | None = None) -> int:
        """Wait for the put, and return the number of tokens that can be restored.

        Parameters
        ----------
        timeout : float, optional
            Longest wait in seconds. Default: no limit.

        Returns
        -------
        int
            As `PromptStore.put` returns it.

        Raises
        ------
        TimeoutError
            The put is not done in time; it continues.
        concurrent.futures.CancelledError
            The put was cancelled.
        StoreError
            The put failed.
        """
        error = self.exception(timeout)
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback refers to this frame
        assert self._outcome is not None
        return self._outcome[0]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the put, and return its error; None if it succeeded.

        Parameters
        ----------
        timeout : float, optional
            Longest wait in seconds. Default: no limit.

        Returns
        -------
        BaseException or None
            The error.

        Raises
        ------
        TimeoutError, concurrent.futures.CancelledError
            As for `result`.
        """
        if not self._waiters.wait_for(self.done, timeout):
            raise TimeoutError(f"the put is not done after {timeout} s; it continues")
        if self._outcome is None:
            from concurrent.futures import CancelledError

            raise CancelledError("the put was cancelled")
        return self._outcome[1]

    def done(self) -> bool:
        """Return whether the put has ended, or was cancelled."""
        return self._outcome is not None or self.cancelled()

    def running(self) -> bool:
        """Return whether the put is being written."""
        return bool(self._claim) and not self.done()

    def cancel(self) -> bool:
        """Cancel the put if it is not being written yet; return whether it is cancelled."""
        with _core.deferred_interrupts():
            is_new = not self._claim
            self._claim.setdefault("by", "cancel")  # one call in C: the first one decides
            if is_new and self.cancelled():
                self._notify()
        return self.cancelled()

    def cancelled(self) -> bool:
        """Return whether the put was cancelled."""
        return self._claim.get("by") == "cancel"

    def add_done_callback(self, call: Callable[[PutHandle], object]) -> None:
        """Call a function with this handle when the put is done; at once if it is done already.

        Parameters
        ----------
        call : callable
            It is called in the thread that writes. An error of it is logged.
        """
        self._callbacks.append(call)
        if self.done():
            self._notify()

    def start(self) -> bool:
        """Claim the put for the thread that writes; return False if it was cancelled."""
        return self._claim.setdefault("by", "thread") != "cancel"

    def finish(self, result: int, error: BaseException | None = None) -> None:
        """Set the result or the error, and wake the threads that wait."""
        self._claim.setdefault("by", "thread")
        self._outcome = result, error
        self._notify()

    def _notify(self) -> None:
        self._waiters.wake()
        while True:
            try:
                call = self._callbacks.popleft()
            except IndexError:  # all are called, some maybe by another thread
                return
            try:
                call(self)
            except Exception as error:
                log("ERROR", "a callback of an asynchronous put failed: %s", error)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PutHandle cannot be copied or pickled: a thread of this process writes")

    def __repr__(self) -> str:
        if self._outcome is not None:
            length, error = self._outcome
            return f"PutHandle({f'{length:,} tokens' if error is None else f'failed: {error}'})"
        state = "cancelled" if self.cancelled() else "running" if self._claim else "waiting"
        return f"PutHandle({state})"
