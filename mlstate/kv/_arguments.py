"""Checks of integers, and making of `CapacityError` and `CompatibilityError`, for KV caches."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from ..errors import CapacityError, CompatibilityError


def incompatible(text: str, name: str | None, expected: object, got: object) -> CompatibilityError:
    """Return a CompatibilityError with the message `text`, for caches or models that do not match.

    `name`: the state or array that differs, or None. `expected`, `got`: the facts that do not
    match, both kept as text.
    """
    return CompatibilityError(text, name=name, expected=str(expected), got=str(got))


def capacity_error(
    text: str, expected: object, got: object, name: str | None = None
) -> CapacityError:
    """Return a CapacityError with the message `text`, for a number that is out of range.

    `expected`: the range; `got`: the number; both kept as text. `name`: the argument, state or
    entry that it belongs to, or None.
    """
    return CapacityError(text, name=name, expected=str(expected), got=str(got))


def tokens_error(tokens: int, size: int, remedy: str, name: str | None = None) -> CapacityError:
    """Return the error for `tokens` tokens in a cache of `size` positions; it ends with `remedy`.

    `name`: the entry of the cache that is too short; None: the whole cache.
    """
    entry = "" if name is None else f"{name}: "
    text = f"{entry}{tokens} tokens do not fit into {size} positions: {remedy}"
    return capacity_error(text, f"0..{size}", tokens, name)


def as_integer(name: str, value: Any) -> int:
    """Return `value`, the argument `name`, as an int; raise TypeError for a bool or no integer."""
    if not isinstance(value, bool | np.bool_):  # NumPy before 2.3 has an index of a bool
        try:
            return index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, got {type(value).__name__}")


def as_count(name: str, value: object, least: int = 0) -> int:
    """Return `value`, the argument `name`, as an int from `least` to ``2**63 - 1``.

    Raises TypeError if it is not an integer, and CapacityError if it is out of range.
    """
    number = as_integer(name, value)
    if number < least:
        text = f"{name} must be at least {least}, got {number}"
        raise capacity_error(text, f"{least} or more", number)
    if number >= 1 << 63:
        raise capacity_error(f"{name} does not fit into 64 bits: {number}", "64 bits", number)
    return number


def as_counts(name: str, values: object, least: int = 0) -> tuple[int, ...]:
    """Return `values`, the argument `name`, as a tuple; its items are checked as by `as_count`."""
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name} must be a sequence of integers, got {type(values).__name__}")
    return tuple(as_count(f"{name}[{i}]", value, least) for i, value in enumerate(values))
