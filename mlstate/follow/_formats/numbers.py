"""Deltas as the numbers of the changed elements, the content of most other formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import FormatError
from .._delta import Delta

if TYPE_CHECKING:
    from ..._types import NDArray

# The unit of a gap that adds its value to the next one, by dtype: see `Delta.gaps`.
_ESCAPES: dict[np.dtype[Any], int] = {np.dtype(np.uint8): 255, np.dtype(np.uint16): 65535}


def numbers_of(delta: Delta) -> NDArray:
    """Return the numbers of the changed elements in C order, ascending, as int64."""
    # A unit is an escape, which only adds to the gap, or the last unit before a changed element,
    # which counts this element too.
    ends = delta.gaps != _ESCAPES[delta.gaps.dtype]
    numbers: NDArray = np.cumsum(delta.gaps + ends.astype(np.int64))[ends] - 1
    return numbers


def delta_from_numbers(name: str, numbers: Any, values: Any, elements: int) -> Delta:
    """Return the delta of an array with `elements` elements.

    Parameters
    ----------
    name : str
        The array, for errors.
    numbers : array of int, shape (changed,)
        Numbers of the changed elements, in any order.
    values : array, shape (changed,)
        The changed elements.
    elements : int
        Elements of the array.

    Raises
    ------
    FormatError
        The arrays do not fit each other, or a number is out of range or occurs twice.
    """
    numbers, values = np.asarray(numbers), np.asarray(values)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or numbers.shape != values.shape:
        raise _error(name, f"has numbers {numbers.shape} of {numbers.dtype}, values {values.shape}")
    numbers = numbers.astype(np.int64)
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < elements:
        raise _error(name, f"changes elements beyond the last of {elements}")
    gaps = np.diff(numbers, prepend=-1) - 1
    if (gaps < 0).any():
        order = np.argsort(numbers)
        numbers, values = numbers[order], values[order]
        gaps = np.diff(numbers, prepend=-1) - 1
        if (gaps < 0).any():
            raise _error(name, "changes an element twice")
    encodings = (_units_of(gaps, dtype) for dtype in _ESCAPES)
    return Delta(elements, min(encodings, key=lambda units: units.nbytes), values)


def _units_of(gaps: NDArray, dtype: np.dtype[Any]) -> NDArray:
    """Return `gaps` as units of `dtype`: each is escapes (the largest value), then the rest."""
    escape = _ESCAPES[dtype]
    ends = np.cumsum(gaps // escape + 1)  # for each gap, the index after its last unit
    units = np.full(ends[-1] if len(ends) else 0, escape, dtype)
    units[ends - 1] = gaps % escape
    return units


def _error(name: str, text: str) -> FormatError:
    return FormatError(f"the delta of {name!r} {text}", name=name)
