"""Checks of integers, and the exceptions for caches, states and models that do not fit."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from ..errors import CapacityError, CompatibilityError


def incompatible(text: str, name: str | None, expected: object, got: object) -> CompatibilityError:
    """Return the exception for caches, states or models that do not match."""
    error = CompatibilityError(text)
    error.name, error.expected, error.got = name, str(expected), str(got)
    return error


def capacity_error(
    text: str, expected: object, got: object, name: str | None = None
) -> CapacityError:
    """Return the exception for a number of tokens or positions that is out of range."""
    error = CapacityError(text)
    error.name, error.expected, error.got = name, str(expected), str(got)
    return error


def tokens_error(tokens: int, size: int, remedy: str, name: str | None = None) -> CapacityError:
    """Return the exception for more tokens than a cache, or its entry `name`, has positions."""
    entry = "" if name is None else f"{name}: "
    text = f"{entry}{tokens} tokens do not fit into {size} positions: {remedy}"
    return capacity_error(text, f"0..{size}", tokens, name)


def as_integer(name: str, value: Any) -> int:
    """Return an argument as an int; a bool is not accepted."""
    if not isinstance(value, bool | np.bool_):  # NumPy before 2.3 has an index of a bool
        try:
            return index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, got {type(value).__name__}")


def as_count(name: str, value: object, least: int = 0) -> int:
    """Return the argument `name` as an int of at least `least`, or raise."""
    number = as_integer(name, value)
    if number < least:
        text = f"{name} must be at least {least}, got {number}"
        raise capacity_error(text, f"{least} or more", number)
    if number >= 1 << 63:
        raise capacity_error(f"{name} does not fit into 64 bits: {number}", "64 bits", number)
    return number


def as_counts(name: str, values: object, least: int = 0) -> tuple[int, ...]:
    """Return a sequence of numbers as a tuple of int."""
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name} must be a sequence of integers, got {type(values).__name__}")
    return tuple(as_count(f"{name}[{i}]", value, least) for i, value in enumerate(values))
