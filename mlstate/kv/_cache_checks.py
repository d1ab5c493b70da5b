"""Checks of the arrays and the number of tokens of a `CacheState`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .._common.arrays import is_torch, refuse_masked
from .._common.dtypes import name_of
from .._common.text import shorten
from ._arguments import capacity_error, incompatible, tokens_error
from ._cache_spec import CacheEntry, CacheSpec, entry_error

if TYPE_CHECKING:
    from collections.abc import Mapping

_LISTED = 4  # names in an error


def check_names(spec: CacheSpec, arrays: Mapping[str, Any]) -> None:
    """Raise CompatibilityError unless the names of `arrays` are the names in the spec."""
    expected_entries = [(name, entry) for entry in spec for name in entry.arrays]
    missing = [(name, entry) for name, entry in expected_entries if name not in arrays]
    expected_names = {name for name, _ in expected_entries}
    strange = [str(name) for name in arrays if name not in expected_names]
    if not missing and not strange:
        return
    parts = []
    if missing:
        parts.append(f"the arrays lack {_names_text([name for name, _ in missing])}")
    if strange:
        parts.append(f"the spec does not have {_names_text(strange)}")
    layers = {entry.layer for name, entry in expected_entries if name in arrays} - {None}
    if missing and len(layers) != spec.layer_count:
        parts.append(f"the spec has {spec.layer_count} layers, the arrays {len(layers)}")
    name = missing[0][0] if missing else strange[0]
    expected, got = f"{len(expected_entries)} arrays", f"{len(arrays)} arrays"
    raise incompatible("; ".join(parts), name, expected, got)


def _names_text(names: list[str]) -> str:
    listed = ", ".join(repr(shorten(name, 100)) for name in names[:_LISTED])
    hidden = len(names) - _LISTED
    return listed + (f" and {hidden:,} more" if hidden > 0 else "")


def check_array(
    entry: CacheEntry, name: str, array: Any, shape: tuple[int, ...], dtype: str
) -> None:
    """Raise CompatibilityError for another shape or dtype name, TypeError if it is not an array."""
    refuse_masked(name, array)
    if not isinstance(array, np.ndarray) and not is_torch(array):
        raise TypeError(
            f"{name} must be a NumPy array or a torch tensor, got {type(array).__name__}"
        )
    got = tuple(array.shape)
    if len(got) != len(shape):
        text = f"the array has {len(got)} dimensions, shape {got}; the spec has {shape}"
        raise entry_error(name, text, shape, got)
    for axis, (size, expected) in enumerate(zip(got, shape, strict=True)):
        if size != expected:
            which = "the sequence axis" if axis == entry.seq_axis else "axis"
            text = f"{which} {axis} has length {size}, in the spec {expected}: shape {got}"
            raise entry_error(name, text, shape, got)
    if name_of(array.dtype) != dtype:
        text = f"the array is {name_of(array.dtype)}, in the spec {dtype}"
        raise entry_error(name, text, dtype, name_of(array.dtype))


def check_length(spec: CacheSpec, length: int) -> None:
    """Raise CapacityError unless every entry has `length` positions, or as many as its window."""
    for entry in spec:
        size = entry.seq_length
        if size is None or length <= size or (entry.window is not None and entry.window <= size):
            continue
        raise tokens_error(length, size, f"resize the cache to at least {length}", entry.name)


def refuse_negative(number: int) -> int:
    """Raise CapacityError for a negative number, which only `crop` of transformers accepts."""
    text = (
        f"n must be at least 0, got {number}: crop keeps the first n tokens; to drop {-number} "
        f"tokens, as crop of transformers does, use trim({-number})"
    )
    raise capacity_error(text, "0 or more", number)
