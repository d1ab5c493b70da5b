"""Callbacks of the caller, whose exceptions are not errors of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

Progress: TypeAlias = "Callable[[int], object] | None"  # called with the bytes since the last call
# called with a function that returns the number of all bytes
CountedProgress: TypeAlias = "Callable[[Callable[[], int]], AbstractContextManager[Progress]]"


class _CallbackError(Exception):
    """Carries an exception of a callback past handlers of its class."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class ProgressErrors:
    """A block that raises the exceptions of a progress callback unchanged.

    Handlers inside the block, such as of the OSError of a damaged file, do not handle them. The
    block must call the callback that ``with`` returns.
    """

    def __init__(self, progress: Callable[[int], object] | None) -> None:
        """Prepare the block; None: no callback."""
        self._progress = progress

    def __enter__(self) -> Callable[[int], object] | None:
        return None if self._progress is None else self._call

    def _call(self, count: int) -> object:
        assert self._progress is not None
        try:
            return self._progress(count)
        except Exception as error:
            raise _CallbackError(error) from None

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, _CallbackError):
            context = error.error.__context__
            try:
                raise error.error
            finally:
                error.error.__context__ = context
