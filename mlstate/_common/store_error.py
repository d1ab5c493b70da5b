"""Errors of files and objects: refused by a system or a store, or malformed."""

from __future__ import annotations

from typing import Any

from ..errors import FormatError, StoreError, StoreNotFoundError, StorePermissionError


def store_error(error: OSError, what: str, path: Any) -> StoreError:
    """Return an OSError as a StoreError, of the subclass for its errno; a StoreError unchanged."""
    if isinstance(error, StoreError):
        return error
    cls: Any = StoreError
    if isinstance(error, FileNotFoundError):
        cls = StoreNotFoundError
    elif isinstance(error, PermissionError):
        cls = StorePermissionError
    made = cls(error.errno, f"{what}: {error.strerror}", path)
    made.path = path
    return made  # type: ignore[no-any-return]


def format_error(text: str, path: Any) -> FormatError:
    """Return the error for a malformed file."""
    made = FormatError(text)
    made.path = path
    return made
