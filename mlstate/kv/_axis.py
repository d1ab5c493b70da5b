"""The sequence axis of a KV cache, and slices along it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _core
from ._arguments import as_integer, incompatible

if TYPE_CHECKING:
    from collections.abc import Sequence


def sequence_axis(shape: Sequence[int], seq_axis: int, label: str = "source_state") -> int:
    """Return the sequence axis of a cache, counted from 0, or raise the core's error.

    `label` names the cache in errors. torch.compile can trace this function if the axis is valid.
    """
    rank = len(shape)
    if type(seq_axis) is int and 2 <= rank <= 8 and -rank <= seq_axis < rank:
        return seq_axis % rank
    return _core.kv_axis(tuple(shape), seq_axis, label)


def valid_axis(seq_axis: int) -> int:
    """Return a sequence axis as an int, or raise if no cache of 2 to 8 dimensions has it."""
    number = as_integer("seq_axis", seq_axis)
    if not -8 <= number < 8:
        text = f"seq_axis {number} is outside -8..7: a cache has 2 to 8 dimensions"
        raise incompatible(text, None, "-8..7", number)
    return number


def along(axis: int, start: int | None, stop: int | None = None) -> tuple[slice, ...]:
    """Return the index of the positions from `start` to `stop` of an axis counted from 0."""
    return (slice(None),) * axis + (slice(start, stop),)


def with_length(shape: Sequence[Any], axis: int, length: int) -> tuple[int, ...]:
    """Return a shape with another length of an axis counted from 0."""
    return (*shape[:axis], length, *shape[axis + 1 :])
