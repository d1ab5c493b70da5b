"""Ranges of a tensor's elements as bytes, for messages between ranks; SHA-256 of replicas."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._common.arrays import assign, is_torch
from .._common.dtypes import text_of
from .._sharding.layout import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .._sharding.layout import Steps
    from .._types import Array, NDArray

PACKED = 1 << 20  # bytes of a non-contiguous array that are packed at a time


# ---- arrays of NumPy and torch ----


def array_of(value: Any) -> Any:
    """Return the elements of a state's value as an ndarray or a detached torch tensor.

    `value`: an array, a tensor, a `Shard` of one, or an object with ``__dlpack__``. Shares its
    memory.
    """
    if isinstance(value, Shard):
        value = value.array
    if is_torch(value):
        return value.detach()
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        return np.asarray(value)
    return np.from_dlpack(value)


def dtype_of(array: Any) -> str:
    """Return a dtype's name, the same for NumPy and torch and for both byte orders."""
    if is_torch(array):
        return str(array.dtype).removeprefix("torch.")
    return text_of(array.dtype)


def item_bytes(array: Any) -> int:
    """Return the size of one element of an array or tensor, in bytes."""
    return int(array.element_size() if is_torch(array) else array.dtype.itemsize)


# ---- parts ----


class Part:
    """A box of a tensor, and a range `begin` to `end` of the box's elements in C order.

    It is part `index` of a tensor of `shape` that is divided by the layout `steps`; None: not
    divided, so part 0 is the whole tensor. `starts` and `lengths` of the box are by axis.
    """

    __slots__ = ("begin", "end", "lengths", "starts")

    def __init__(self, steps: Steps | None, shape: tuple[int, ...], index: int) -> None:
        part = _core.layout_part(steps or (), shape, index)
        self.starts, self.lengths, self.begin, self.end, _ = part

    @property
    def count(self) -> int:
        """Number of elements of the part."""
        return self.end - self.begin

    def box_of(self, array: Any) -> Any:
        """Return a view of the box in an array of the tensor's shape."""
        pairs = zip(self.starts, self.lengths, strict=True)
        slices = [slice(start, start + length) for start, length in pairs]
        return array[(*slices, ...)]  # with `...`, NumPy returns an array for no axes too


# ---- ranges of elements ----


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[object, ...]]:
    """Split a range of elements in C order into boxes, at most two for each axis plus one.

    The range is from `begin` up to `end`, which is excluded, in an array of `shape`. Yields each
    box as an index of the array, in C order. Axes that the index omits at its end are whole.

    Examples
    --------
    >>> list(boxes((3, 4), 2, 9))
    [(0, slice(2, 4, None)), (slice(1, 2, None),), (2, slice(0, 1, None))]
    """
    if begin >= end:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])  # elements of one index of the first axis
    # the range begins `head` elements into row `first`, and ends `tail` elements into row `last`
    first, head = divmod(begin, inner)
    last, tail = divmod(end, inner)
    if head:
        head_end = inner if first < last else tail
        yield from ((first, *rest) for rest in boxes(shape[1:], head, head_end))
        first += 1
    if first < last:
        yield (slice(first, last),)
    if tail and first <= last:
        yield from ((last, *rest) for rest in boxes(shape[1:], 0, tail))


def _memory(array: Any) -> NDArray | None:
    """Return an array's memory as a flat uint8 view.

    None if it is not in main memory, or not its elements in C order and native byte order.
    """
    if is_torch(array):
        import torch

        if array.device.type != "cpu" or not array.is_contiguous():
            return None
        if array.is_conj() or array.is_neg():  # memory differs from the elements' values
            return None
        if not array.numel():
            return np.empty(0, np.uint8)
        flat: NDArray = array.as_strided((array.numel(),), (1,)).view(torch.uint8).numpy()
        return flat
    if not array.flags.c_contiguous or not array.dtype.isnative:
        return None
    return np.asarray(array).reshape(-1).view(np.uint8)


def _elements(array: Any, data: NDArray) -> Any:
    """Return the flat bytes `data` as elements of the dtype of `array`, in native byte order.

    A view, of NumPy or torch as `array`.
    """
    if is_torch(array):
        import torch

        return torch.from_numpy(data).view(array.dtype)
    return data.view(array.dtype.newbyteorder("="))


def _paired_views(array: Any, begin: int, end: int, data: NDArray) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of views that divide the elements `begin` to `end` of an array, in C order.

    One is of the array. The other has the same shape, and is of `data`, the elements' bytes.
    """
    if begin >= end:
        return
    elements = _elements(array, data)
    start = 0  # elements of `data` before the box
    for box in boxes(tuple(array.shape), begin, end):
        view = array[(*box, ...)]
        count = math.prod(view.shape)
        yield view, elements[start : start + count].reshape(view.shape)
        start += count


def memory_of(array: Array, begin: int, end: int) -> NDArray | None:
    """Return the memory of the elements `begin` to `end` as a byte view, to read or fill.

    None if they are not contiguous bytes in main memory.
    """
    data = _memory(array)
    size = item_bytes(array)
    return None if data is None else data[begin * size : end * size]


def bytes_of(array: Any, begin: int, end: int) -> NDArray:
    """Return the bytes of the elements `begin` to `end` in C order: a view, or a packed copy."""
    data = memory_of(array, begin, end)
    if data is None:
        data = np.empty((end - begin) * item_bytes(array), np.uint8)
        read_range(array, begin, end, data)
    return data


def read_range(array: Array, begin: int, end: int, data: NDArray) -> None:
    """Copy an array's elements `begin` to `end` in C order to `data`, bytes of equal size."""
    memory = memory_of(array, begin, end)
    if memory is not None:
        data[:] = memory
        return
    for view, elements in _paired_views(array, begin, end, data):
        assign(elements, view)


def write_range(array: Any, begin: int, end: int, data: NDArray) -> None:
    """Copy `data`, bytes of equal size, to an array's elements `begin` to `end` in C order."""
    memory = memory_of(array, begin, end)
    if memory is not None:
        memory[:] = data
        return
    for view, elements in _paired_views(array, begin, end, data):
        assign(view, elements)


def split_range(array: Array, count: int, most: int) -> Iterator[tuple[int, int]]:
    """Split `count` elements of an array into ranges of at most `most` bytes.

    Yields (begin, end) pairs; a range has at least one element.
    """
    step = max(1, most // max(1, item_bytes(array)))
    for begin in range(0, count, step):
        yield begin, min(count, begin + step)


def copy_part(part: Part, source: Any, target: Array) -> None:
    """Copy a part's elements from `source`, in C order, to their position in `target`.

    `source`: an array with the elements of the part, of any shape. `target`: the whole tensor.
    """
    box = part.box_of(target)
    memory = _memory(source)
    if memory is not None:
        write_range(box, part.begin, part.end, memory)
    elif part.count == math.prod(part.lengths):  # the part is the whole box
        assign(box, source.reshape(part.lengths))  # a view if possible
    else:  # in pieces, as packing all elements would need memory for them
        for begin, end in split_range(source, part.count, PACKED):
            data = bytes_of(source, begin, end)
            write_range(box, part.begin + begin, part.begin + end, data)


def digest(array: Any) -> str:
    """Return the SHA-256 of an array's elements in C order and native byte order, as hex digits."""
    import hashlib

    hashed = hashlib.sha256(usedforsecurity=False)
    for begin, end in split_range(array, math.prod(array.shape), PACKED):
        hashed.update(bytes_of(array, begin, end).data)
    return hashed.hexdigest()
