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
from .._sharding.layout import Layout, Steps, part_of_cutting
from ._folder.names import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .._types import NDArray
    from ._load.loader import Loader
    from ._sections import Section
    from ._sources.protocol import How

    # Shape of the whole tensor; then steps and index, or begin and end of a range of elements.
    Place = tuple[tuple[int, ...], Steps | int, int]

_PIECE_BYTES = 16 << 20  # of each of the two tensors that are compared
_MOST_STEPS = 4  # of a layout


class TiedName(NamedTuple):
    """A name to load into memory that another name has too."""

    section: Section
    name: str
    target: Any  # the memory
    place: Place | None  # the part that it receives; None: the one that the load requests

    @property
    def where(self) -> str:
        """The target's text in errors."""
        return f"{self.section.label}[{self.name!r}]"


class _Stored(NamedTuple):
    """The facts that the index has about a stored tensor."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    layout: Steps
    axes: tuple[int | None, ...] | None
    checksums: dict[int, str]  # of all parts; {} if a part has none or was not listed


def refuse_other_bytes(loader: Loader, memories: list[list[TiedName]]) -> None:
    """Raise CompatibilityError if the names of one memory have different bytes in a checkpoint.

    `memories`: the names of each, in the order of the load. Bytes are compared after ``rename`` and
    ``cast``: by stored checksums if these decide it, else by reading pieces of both tensors.
    """
    stored = _stored_tensors(loader, [name for names in memories for name in names])
    for names in memories:
        for first, second in pairwise(names):
            if not _is_equal(loader, first, second, stored):
                error = tied_error(
                    first.where,
                    second.where,
                    "load one of them by names=, map one to another target by rename=, or pass a "
                    "tensor for each",
                )
                error.path = loader.folder
                raise error


def _stored_tensors(loader: Loader, names: list[TiedName]) -> dict[tuple[int, str], _Stored]:
    """Return the stored tensors of `names` by section and name, as an id and a str."""
    names_by_key = {}
    for each in names:
        [key] = each.section.keys([each.name])
        names_by_key[SECTIONS[each.section.number], key] = (id(each.section), each.name)
    checksums: dict[tuple[str, str], dict[int, str]] = {}
    for section, key, part, _, _, _, _, _, crc32c, *_ in loader.source.index.shards():
        if (section, key) in names_by_key and crc32c is not None:
            checksums.setdefault((section, key), {})[part] = crc32c
    stored = {}
    for section, key, _, _, dtype, shape, layout, axes, *_ in loader.source.index.tensors():
        if (section, key) in names_by_key:
            sums = checksums.get((section, key), {})
            is_complete = len(sums) == prod(parts for _, parts in layout)
            stored[names_by_key[section, key]] = _Stored(
                key, dtype, tuple(shape), layout, axes, sums if is_complete else {}
            )
    return stored


def _is_equal(
    loader: Loader, first: TiedName, second: TiedName, stored: dict[tuple[int, str], _Stored]
) -> bool:
    """Return whether a load of two names leaves the same bytes in the memory that they share."""
    tensors = [stored[id(each.section), each.name] for each in (first, second)]
    places = [_place_of(loader, *each) for each in zip((first, second), tensors, strict=True)]
    is_one_view = memory_key(first.target) == memory_key(second.target)
    if is_one_view and places[0] == places[1]:
        same_form = tensors[0][1:4] == tensors[1][1:4]  # dtype, shape, layout
        if same_form and tensors[0].checksums and tensors[1].checksums:
            if tensors[0].checksums == tensors[1].checksums:
                return True
            is_cast = tensors[0].dtype != name_of(first.target.dtype)
            if places[0][1] == () and not is_cast:
                return False
        pieces = [(piece, piece) for piece in _pieces(places[0], tensors[0].dtype)]
    else:  # other shapes or orders of axes: no piece of one is a piece of the other
        pieces = [(places[0], places[1])]
    for pair in pieces:
        left, right = (
            _read(loader, each, tensor, place)
            for each, tensor, place in zip((first, second), tensors, pair, strict=True)
        )
        if not is_one_view:
            left, right = memory_image(first.target, left), memory_image(second.target, right)
        if left.dtype != right.dtype or not np.array_equal(_bytes_of(left), _bytes_of(right)):
            return False
    return True


def _place_of(loader: Loader, each: TiedName, tensor: _Stored) -> Place:
    """Return the part of the stored `tensor` that a name receives."""
    if each.place is not None:
        return each.place
    cutting = loader.request.cutting
    return tensor.shape, *part_of_cutting(cutting, len(tensor.shape), tensor.layout, tensor.axes)


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


def _read(loader: Loader, each: TiedName, tensor: _Stored, place: Place) -> NDArray:
    """Return the elements of a part of a tensor as a new array, in the dtype of the target."""
    shape, cut, last = place
    part = (last - cut,) if isinstance(cut, int) else Layout(cut).shape(shape, last)
    array = np.empty(part, numpy_dtype(tensor.dtype))
    how: How = {"verify": loader.how["verify"], "into": {tensor.key: array}}
    loader.source.read(each.section.number, [tensor.key], [place], **how)
    dtype = name_of(each.target.dtype)
    is_cast = dtype in FLOATS and is_converted(tensor.dtype, dtype)
    return converted(array, dtype) if is_cast else array


def _bytes_of(array: NDArray) -> NDArray:
    """Return the bytes of a packed array."""
    return array.reshape(-1).view(np.uint8)
