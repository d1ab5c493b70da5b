"""A move of a KV cache from integers to floats or back: converted by NumPy, after a range check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .. import _core
from .._common.arrays import is_torch, shares_elements
from .._common.dtypes import FLOATS, INTEGERS, as_numbers, dtype_name, ml_dtype, name_of
from ._axis import along, sequence_axis

if TYPE_CHECKING:
    from .._types import Array, NDArray
    from ._move import KVMove


def converts(source: str, target: str) -> bool:
    """Return whether NumPy must convert `source` to `target`, because one of them is an integer.

    Both are names of dtypes. The core converts between floats only. Equal dtypes, and dtypes that
    are neither floats nor integers, are false too.
    """
    both = {source, target}  # one name if they are equal
    return len(both) == 2 and bool(both & INTEGERS) and both <= INTEGERS | FLOATS


def result_dtype(dtype: object, out: Array) -> str:
    """Return the name of the dtype of `out`, or of `dtype` if `out` is None; "" if unknown."""
    if out is not None:
        return str(name_of(out.dtype)) if hasattr(out, "dtype") else ""
    return dtype_name(dtype)  # the core raises the error if there is none


def convert_source(source: NDArray, move: KVMove, out: Array) -> NDArray:
    """Return `source`, or if only NumPy can convert it, its tokens in the result's dtype.

    The tokens are the first `move.position` positions; None: all. `out`: memory for the result,
    whose dtype replaces `move.dtype`; None: a new result. Nothing is written to it. Raises
    ValueError if a token does not fit the dtype, or if `out` shares memory with `source`; before a
    conversion also the core's errors for a move that does not fit.
    """
    target = result_dtype(move.dtype, out)
    if not converts(name_of(source.dtype), target):
        return source
    _core.kv_check(source.shape, move)
    if out is not None and not is_torch(out) and shares_elements(source, out):
        raise ValueError("out shares memory with source_state: pass another buffer")
    axis = sequence_axis(source.shape, move.seq_axis)
    return convert_tokens(source[along(axis, None, move.position)], target)


def convert_tokens(tokens: NDArray, target: str) -> NDArray:
    """Return the array `tokens` as the dtype named `target`; raise ValueError if one is too large.

    Floats become integers by truncation toward zero; NaN does not fit. Integers become floats by
    rounding, which fails only beyond the range of float16.
    """
    name, tokens = name_of(tokens.dtype), as_numbers(tokens)
    if target in FLOATS:
        with np.errstate(over="ignore"):  # overflow is checked below
            converted = tokens.astype(ml_dtype(target) if target == "bfloat16" else target)
        fits = target != "float16" or bool(np.isfinite(converted).all())
    else:
        info = np.iinfo(target)
        if name in INTEGERS:
            integers = tokens
            fits = not tokens.size or (
                int(tokens.min()) >= int(info.min) and int(tokens.max()) <= int(info.max)
            )
        else:  # the largest value plus one is exact as a float; comparisons with NaN are false
            integers = np.trunc(tokens.astype(np.float64))
            fits = bool(((integers >= float(info.min)) & (integers < float(info.max) + 1)).all())
        converted = integers.astype(target) if fits else tokens
    if not fits:
        raise ValueError(
            f"source_state has tokens that are NaN or out of the range of {target}, and {name} "
            f"does not convert to {target} then: clip them first"
        )
    return converted
