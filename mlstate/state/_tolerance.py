"""`rtol=` and `atol=` of `diff`: elements that count as equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .._common.arguments import check_number
from .._common.arrays import is_torch
from .._common.backend import TensorBackend, backend_of
from .._common.dtypes import as_numbers
from .._sharding.layout import Shard

if TYPE_CHECKING:
    from .._types import NDArray

_BLOCK = 1 << 20  # elements that are compared at the same time

# The fields of a `TensorChange` after its name.
Change = tuple[int, int, int, float, float]


def check_tolerances(rtol: float, atol: float) -> tuple[float, float]:
    """Return both tolerances as floats; raise ValueError unless they are 0 or more."""
    tolerances = check_number("rtol", rtol), check_number("atol", atol)
    for name, value in zip(("rtol", "atol"), tolerances, strict=True):
        if not value >= 0:
            raise ValueError(f"{name} must be 0 or more, got {value}")
    return tolerances


def _numbers(value: Any) -> NDArray:
    """Return the elements of an array or tensor in main memory, with a dtype that computes."""
    if isinstance(value, Shard):
        value = value.array
    if is_torch(value):
        value = backend_of(value, TensorBackend).arrays_of({"": value})[""]
    array: NDArray = as_numbers(np.asarray(value))
    return array.reshape(-1)


def _distances(x: NDArray, y: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Return the distances of the elements, and both arrays, as float64 or complex128.

    Distances of integers below 2**63 are exact before they are rounded to float64.
    """
    wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
    wide_x, wide_y = x.astype(wide), y.astype(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.where(wide_x == wide_y, 0.0, np.abs(wide_x - wide_y))
    if x.dtype.kind in "iu" and y.dtype.kind in "iu":
        # negative numbers wrap modulo 2**64, and so do the differences, which are then exact
        a, b = x.astype(np.uint64), y.astype(np.uint64)
        distance = np.where(distance < 2.0**63, np.where(x > y, a - b, b - a), distance)
    return distance, wide_x, wide_y


def change_beyond(a: Any, b: Any, rtol: float, atol: float) -> Change | None:
    """Return how two tensors differ beyond a tolerance; None if all elements are close.

    `a`, `b`: arrays or tensors of the same number of elements. Elements are close if ``|a - b| <=
    atol + rtol * max(|a|, |b|)`` and both are finite, or both are NaN, or equal.
    """
    first, second = _numbers(a), _numbers(b)
    changed = nan = 0
    max_abs = max_rel = 0.0
    for start in range(0, first.size, _BLOCK):
        distance, x, y = _distances(first[start : start + _BLOCK], second[start : start + _BLOCK])
        with np.errstate(invalid="ignore", over="ignore"):
            magnitude = np.maximum(np.abs(x), np.abs(y))
            distance[np.isinf(magnitude) & (x != y)] = np.inf
            is_within = np.isfinite(magnitude) & (distance <= atol + rtol * magnitude)
            is_close = (distance == 0) | is_within
            is_changed = ~is_close & ~(np.isnan(x) & np.isnan(y))
        is_nan_once = is_changed & (np.isnan(x) | np.isnan(y))  # NaN on exactly one side
        changed += int(np.count_nonzero(is_changed))
        nan += int(np.count_nonzero(is_nan_once))
        is_measured = is_changed & ~is_nan_once
        if is_measured.any():
            with np.errstate(invalid="ignore", divide="ignore"):
                relative = np.where(np.isinf(magnitude), np.inf, distance / magnitude)
            max_abs = max(max_abs, float(distance[is_measured].max()))
            max_rel = max(max_rel, float(relative[is_measured].max()))
    return (changed, first.size, nan, max_abs, max_rel) if changed else None
