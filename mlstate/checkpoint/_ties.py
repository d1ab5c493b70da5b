"""Names of a load that fill one memory, such as tied weights: their stored bytes must be equal.

Equal bytes need one read. Which names share memory is found by _load/targets.py.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._common.arrays import memory_image, memory_key
from .._common.converted import converted, is_converted
from .._common.dtypes import FLOATS, name_of, numpy_dtype
from .._common.staged_targets import tied_error
from .._sharding.layout import Layout, Steps
from ._states.containers import equal_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .._types import NDArray
    from ._load.loader import Loader
    from ._records import TensorRecord
    from ._sources.protocol import How

    # Shape of the whole tensor; then steps and index, or begin and end of a range of elements.
    Place = tuple[tuple[int, ...], Steps | int, int]

_PIECE_BYTES = 16 << 20  # of each of the two tensors that are compared
_MOST_STEPS = 4  # of a layout


class TiedName(NamedTuple):
    """A name to load into memory that another name has too."""

    where: str  # text of the target in errors
    section: int  # number
    row: TensorRecord  # of the stored tensor
    target: Any  # the memory
    place: Place  # the part of the tensor that it receives


def refuse_other_bytes(loader: Loader, memories: list[list[TiedName]]) -> None:
    """Raise CompatibilityError if the names of one memory have different bytes in a checkpoint.

    `memories`: the names of each, in the order of the load. Bytes are compared after ``rename`` and
    ``cast``: by stored checksums if these decide it, else by reading pieces of both tensors.
    """
    tied = {each.row[:2] for names in memories for each in names}
    checksums: dict[Any, dict[int, str]] = {}  # of the parts, by section and key
    for section, key, part, _, _, _, _, _, crc32c, *_ in loader.source.index.shards():
        if (section, key) in tied and crc32c is not None:
            checksums.setdefault((section, key), {})[part] = crc32c
    for names in memories:
        for first, second in pairwise(names):
            if not _is_equal(loader, first, second, checksums):
                error = tied_error(
                    first.where,
                    second.where,
                    "load one of them by names=, map one to another target by rename=, or pass a "
                    "tensor for each",
                )
                error.path = loader.folder
                raise error


def _is_equal(
    loader: Loader, first: TiedName, second: TiedName, checksums: dict[Any, dict[int, str]]
) -> bool:
    """Return whether a load of two names leaves the same bytes in the memory that they share."""
    pair, place = (first, second), first.place
    is_one_view = memory_key(first.target) == memory_key(second.target)
    pieces = [(place, second.place)]
    if is_one_view and place == second.place:
        # by checksums of all parts, if dtype, shape and layout are the same
        sums = [checksums.get(each.row[:2], {}) for each in pair]
        is_whole = len(sums[0]) == len(sums[1]) == first.row.layout.parts
        if first.row[4:7] == second.row[4:7] and is_whole:
            if sums[0] == sums[1]:
                return True
            if place[1] == () and first.row.dtype == name_of(first.target.dtype):
                return False
        pieces = [(piece, piece) for piece in _pieces(place, first.row.dtype)]
    # else other shapes or orders of axes: no piece of one is a piece of the other
    for places in pieces:
        left, right = (_read(loader, *each) for each in zip(pair, places, strict=True))
        if not is_one_view:
            left, right = memory_image(first.target, left), memory_image(second.target, right)
        if not equal_values(left, right):
            return False
    return True


def _pieces(place: Place, dtype: str) -> Iterator[Place]:
    """Yield places of at most `_PIECE_BYTES` that together are `place`, if its layout allows it."""
    shape, cut, last = place
    items = max(1, _PIECE_BYTES // numpy_dtype(dtype).itemsize)
    if cut == ():
        cut, last = 0, prod(shape)  # the whole tensor is a range of elements
    if isinstance(cut, int):
        for begin in range(cut, last, items):
            yield shape, begin, min(begin + items, last)
        return
    part = Layout(cut).shape(shape, last)
    count = -(-prod(part) // items)
    if count <= 1 or cut[-1][0] == "flat" or len(cut) == _MOST_STEPS:
        yield place
        return
    axis = part.index(max(part))
    count = min(count, part[axis])
    for number in range(count):
        yield shape, (*cut, (axis, count)), last * count + number


def _read(loader: Loader, each: TiedName, place: Place) -> NDArray:
    """Return the elements of a part of a tensor as a new array, in the dtype of the target."""
    (shape, cut, last), row = place, each.row
    part = (last - cut,) if isinstance(cut, int) else Layout(cut).shape(shape, last)
    array = np.empty(part, numpy_dtype(row.dtype))
    how: How = {"verify": loader.how["verify"], "into": {row.key: array}}
    loader.source.read(each.section, [row.key], [place], **how)
    dtype = name_of(each.target.dtype)
    is_cast = dtype in FLOATS and is_converted(row.dtype, dtype)
    return converted(array, dtype) if is_cast else array
