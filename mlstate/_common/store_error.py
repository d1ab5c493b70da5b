"""An OSError as `StoreError` of the class for its errno; `FormatError` of a malformed file."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import FormatError, StoreError, StoreNotFoundError, StorePermissionError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator


def store_error(error: OSError, action: str, path: str | os.PathLike[str]) -> StoreError:
    """Return an OSError as a StoreError, of the subclass for its errno.

    `action`: text such as "cannot read the file", at the start of the message. A StoreError is
    returned unchanged.
    """
    if isinstance(error, StoreError):
        return error
    cls = StoreError
    if isinstance(error, FileNotFoundError):
        cls = StoreNotFoundError
    elif isinstance(error, PermissionError):
        cls = StorePermissionError
    return cls(error.errno, f"{action}: {error.strerror}", path, path=path)


@contextmanager
def os_errors(action: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise an OSError of the block as `store_error` returns it."""
    try:
        yield
    except OSError as error:
        raise store_error(error, action, path) from None


def format_error(text: str, path: str | os.PathLike[str], name: str | None = None) -> FormatError:
    """Return the error for a malformed file, or its part `name`; `text` names the file itself."""
    return FormatError(text, path=path, name=name)
