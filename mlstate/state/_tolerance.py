"""Compare two states within a tolerance; see `diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .._common.arguments import check_number
from .._common.arrays import is_torch
from .._common.backend import TensorBackend, backend_of
from .._common.dtypes import as_numbers

if TYPE_CHECKING:
    from .._types import NDArray

_BLOCK = 1 << 20  # elements that are compared at the same time

Outside = tuple[int, int, int, float, float]


def check_tolerances(rtol: float, atol: float) -> tuple[float, float]:
    """Return both tolerances as floats; raise ValueError unless they are 0 or more."""
    tolerances = check_number("rtol", rtol), check_number("atol", atol)
    for name, value in zip(("rtol", "atol"), tolerances, strict=True):
        if not value >= 0:
            raise ValueError(f"{name} must be 0 or more, got {value}")
    return tolerances


def _numbers(value: Any) -> NDArray:
    """Return the elements of an array or tensor in main memory, with a dtype that computes."""
    if is_torch(value):
        value = backend_of(value, TensorBackend).arrays_of({"": value})[""]
    array: NDArray = as_numbers(np.asarray(value))
    return array.reshape(-1)


def _exact_distance(a: NDArray, b: NDArray, rounded: NDArray) -> NDArray:
    """Return ``|a - b|`` of integers as float64.

    `rounded`: the difference of both as float64, which is wrong for close integers from 2**53 on.
    """
    first, second = a.astype(np.uint64), b.astype(np.uint64)  # modulo 2**64, as their difference
    exact = np.where(a > b, first - second, second - first)
    return np.where(rounded < 2.0**60, exact, rounded)


def outside(a: Any, b: Any, rtol: float, atol: float) -> Outside | None:
    """Return the fields of a `TensorChange` after its name; None if the tensors are close.

    `a`, `b`: arrays or tensors of the same number of elements. Elements are close if ``|a - b| <=
    atol + rtol * max(|a|, |b|)``, or both are NaN, or equal.
    """
    first, second = _numbers(a), _numbers(b)
    wide = np.complex128 if "c" in (first.dtype.kind, second.dtype.kind) else np.float64
    changed = nan = 0
    max_abs = max_rel = 0.0
    for start in range(0, first.size, _BLOCK):
        blocks = first[start : start + _BLOCK], second[start : start + _BLOCK]
        x, y = (block.astype(wide) for block in blocks)
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.where(x == y, 0.0, np.abs(x - y))
            if all(block.dtype.kind in "iu" for block in blocks):
                distance = _exact_distance(*blocks, distance)
            size = np.maximum(np.abs(x), np.abs(y))
            far = ~(distance <= atol + rtol * size) & ~(np.isnan(x) & np.isnan(y))
        lone = far & (np.isnan(x) | np.isnan(y))
        changed += int(np.count_nonzero(far))
        nan += int(np.count_nonzero(lone))
        rest = far & ~lone
        if rest.any():
            with np.errstate(invalid="ignore", divide="ignore"):
                relative = np.where(np.isinf(size), np.inf, distance / size)
            max_abs = max(max_abs, float(distance[rest].max()))
            max_rel = max(max_rel, float(relative[rest].max()))
    return (changed, first.size, nan, max_abs, max_rel) if changed else None
