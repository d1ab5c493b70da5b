"""`seq_axis`: check of the sequence axis of a KV cache, and slices along it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _core
from ._arguments import as_integer, incompatible

if TYPE_CHECKING:
    from collections.abc import Sequence


def sequence_axis(shape: Sequence[int], seq_axis: int, label: str = "source_state") -> int:
    """Return `seq_axis` of a cache of `shape`, counted from 0.

    A negative `seq_axis` counts from the last axis. `label` names the cache in errors. Raises
    CompatibilityError if the shape does not have 2 to 8 dimensions and this axis, and TypeError if
    it is not an integer. torch.compile can trace this function if the axis is valid.
    """
    rank = len(shape)
    if type(seq_axis) is int and 2 <= rank <= 8 and -rank <= seq_axis < rank:
        return seq_axis % rank
    return _core.kv_axis(tuple(shape), seq_axis, label)


def valid_axis(seq_axis: int) -> int:
    """Return `seq_axis` as an int; a negative one stays negative.

    Raises CompatibilityError if no cache of 2 to 8 dimensions has this axis, and TypeError if it is
    not an integer.
    """
    number = as_integer("seq_axis", seq_axis)
    if not -8 <= number < 8:
        text = f"seq_axis {number} is outside -8..7: a cache has 2 to 8 dimensions"
        raise incompatible(text, None, "-8..7", number)
    return number


def along(axis: int, start: int | None, stop: int | None = None) -> tuple[slice, ...]:
    """Return the index that selects `start` to `stop` of `axis`, counted from 0; None: no limit."""
    return (slice(None),) * axis + (slice(start, stop),)


def with_length(shape: Sequence[Any], axis: int, length: int) -> tuple[int, ...]:
    """Return `shape` with `length` as the length of `axis`, which is counted from 0."""
    return (*shape[:axis], length, *shape[axis + 1 :])
