"""Arrays of NumPy or torch: shared memory, overlap, copies, writes; masked or freed ones."""

from __future__ import annotations

import sys
from bisect import bisect_right
from contextlib import contextmanager
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from .. import _core
from ..errors import MLStateError
from .backend import TensorBackend, backend_of, imported_backends
from .dtypes import name_of, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .._types import Array, NDArray

_Name = TypeVar("_Name")


class _Memory(NamedTuple):
    """The memory of a strided array, as `_core.memory_overlap` takes it."""

    address: int  # of the element with index 0 on every axis; 0: unknown
    item_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes


class _Span(NamedTuple):
    """An array, and the range of addresses of its elements; spans sort by device and address."""

    device: str  # "" for main memory
    low: int  # first address
    high: int  # address after the last element
    number: int  # position among the arrays of the call
    memory: _Memory


def is_torch(candidate: object) -> bool:
    """Return whether this is a torch tensor; a tensor exists only if torch is imported."""
    if type(candidate) is np.ndarray:
        return False
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(candidate, torch.Tensor)


_CACHES = {
    ("mlstate.kv", "KVState"),
    ("mlstate.kv", "RollingKVState"),
    ("mlstate.kv", "CacheState"),
    ("mlstate.integrations._caches", "LaidOutState"),  # stored as a CacheState
}


def is_cache(candidate: object) -> bool:
    """Return whether this is a cache of mlstate, without importing it; not of a user's subclass."""
    cls = type(candidate)
    return (cls.__module__, cls.__name__) in _CACHES


def is_on_device(array: object) -> bool:
    """Return whether this is a torch tensor with elements outside main memory."""
    return is_torch(array) and array.device.type not in ("cpu", "meta")  # type: ignore[attr-defined]


def _memory_of(array: Any) -> _Memory:
    """Return the memory of a NumPy array or a strided tensor.

    The address is unknown, for example, of a meta tensor. Items without bytes, such as those of an
    empty text dtype, count as 1 byte.
    """
    if is_torch(array):
        item_bytes = array.element_size()
        strides = tuple([item_bytes * stride for stride in array.stride()])
        return _Memory(_address_of(array), item_bytes, tuple(array.shape), strides)
    return _Memory(*_core.array_memory(array))


def _address_of(tensor: Any) -> int:
    """Return the address of a tensor's first element; 0 if it is unknown."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:  # under torch.func, and some subclasses
        return 0


def dimension_order(array: Any) -> list[int] | None:
    """Return the order of dimensions in which an array is C-ordered, from outer to inner.

    None for C order itself, and for strides that do not permute it: elements with gaps, repeated
    ones, and reversed ones.
    """
    _, item_bytes, shape, strides = _memory_of(array)
    if len(shape) < 2 or 0 in shape:
        return None
    order = sorted(range(len(shape)), key=lambda axis: (-strides[axis], shape[axis] == 1, axis))
    expected = item_bytes
    for axis in reversed(order):
        if strides[axis] != expected:
            return None
        expected *= shape[axis]
    return None if order == sorted(order) else order


def with_order(array: Any, order: list[int] | None) -> Any:
    """Return a copy of an array whose dimensions are in memory in `order`; None: in C order."""
    order = order or [*range(array.ndim)]
    shape = [array.shape[axis] for axis in order]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    if is_torch(array):
        return array.new_empty(shape).copy_(array.permute(order)).permute(inverse)
    new = np.empty(shape, array.dtype)
    new[...] = array.transpose(order)
    return new.transpose(inverse)


def overlaps_itself(array: Any) -> bool:
    """Return whether elements of an array share memory, so that a write to one changes others.

    False for a tensor that is not strided.
    """
    if is_torch(array):
        if str(array.layout) != "torch.strided" or array.is_contiguous():
            return False
    elif array.flags.c_contiguous:
        return False
    return _core.memory_overlap(_memory_of(array), None)


def shares_elements(first: Array, second: Array) -> bool:
    """Return whether `first` and `second`, strided arrays of one device, share an element.

    Interleaved views, such as the even and odd columns of a matrix, share none. False if an address
    is unknown.
    """
    left, right = _memory_of(first), _memory_of(second)
    has_addresses = left.address != 0 and right.address != 0  # meta tensors have none
    return has_addresses and _core.memory_overlap(left, right)


def is_same_memory(first: Array, second: Array) -> bool:
    """Return whether two arrays have the same elements at the same addresses.

    True if the first has no elements.
    """
    if first is second or _size_of(first) == 0:
        return True
    return _has_memory(first, second) and _memory_of(first) == _memory_of(second)


def memory_key(array: Any) -> tuple[object, ...]:
    """Return a key that is equal for two arrays or tensors of the same elements in the same memory.

    It is valid while the arrays exist. Each object whose elements have no known address, such as an
    empty array or a meta tensor, has its own key.
    """
    if isinstance(array, np.ndarray):
        if array.size == 0:
            return (id(array),)
        dtype = array.dtype
        text = text_of(dtype) if dtype.names else name_of(dtype)  # names are cached
        return (*_core.array_memory(array), dtype.str, text)
    if not is_torch(array) or _size_of(array) == 0:
        return (id(array),)
    if str(array.layout) != "torch.strided" or array.is_nested or array.is_quantized:
        return (id(array),)
    memory = _memory_of(array)
    if not memory.address:
        return (id(array),)
    # one memory may have a conjugate or negative view
    return (*memory, array.dtype, array.device, array.is_conj(), array.is_neg())


def memory_range(array: Any) -> tuple[int, int] | None:
    """Return the first address of an array's elements and the address after the last one.

    None without an array, elements or a known address.
    """
    if type(array) is np.ndarray and array.flags.c_contiguous and array.size:
        address: int = _core.array_memory(array)[0]
        return address, address + array.nbytes
    if is_torch(array) and array.layout is sys.modules["torch"].strided and array.is_contiguous():
        address = _address_of(array)
        return (address, address + array.nbytes) if address and array.nbytes else None
    if not _has_memory(array) or _size_of(array) == 0:
        return None
    memory = _memory_of(array)
    return _range_of(memory) if memory.address else None


def _range_of(memory: _Memory) -> tuple[int, int]:
    """Return the first address of a memory, and the address after its last element."""
    address, item_bytes, shape, strides = memory
    # by axis: bytes from the first to the last index, negative for a negative stride
    extents = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    low = address + sum(extent for extent in extents if extent < 0)
    return low, address + item_bytes + sum(extent for extent in extents if extent > 0)


def memory_image(array: Any, values: NDArray) -> NDArray:
    """Return the bytes that the memory of `array` would have with other elements, by address.

    `values`: the elements, packed, with the dtype and number of elements of `array`. Gaps between
    the elements are zeros.
    """
    memory = _memory_of(array)
    low, high = _range_of(memory)
    raw = f"V{memory.item_bytes}"
    image = np.zeros(high - low, np.uint8)
    view = np.ndarray(memory.shape, raw, image.data, memory.address - low, memory.strides)
    view[...] = values.reshape(memory.shape).view(raw)
    return image


def names_sharing_memory(arrays: Mapping[_Name, Any]) -> set[_Name]:
    """Return the names of arrays whose range of addresses meets the range of another array.

    Such arrays may still have no element in common. Values that are not arrays, and arrays without
    elements or with an unknown address, are left out.
    """
    ranges = [
        (*addresses, number)
        for number, array in enumerate(arrays.values())
        if (addresses := memory_range(array)) is not None
    ]
    sharing: set[int] = set()
    end, last = 0, 0  # the highest address so far, and the array that has it
    for low, high, number in sorted(ranges):
        if low < end:
            sharing |= {last, number}
        if high > end:
            end, last = high, number
    return {name for number, name in enumerate(arrays) if number in sharing}


def pairs_sharing_elements(arrays: Mapping[_Name, Any]) -> Iterator[tuple[_Name, _Name]]:
    """Yield the pairs of names, each in the order of `arrays`, whose arrays share an element.

    Arrays with equal memory are yielded only with the first of these, which is compared for all.
    Values that are not strided arrays, or have no known address, are left out.
    """
    near = names_sharing_memory(arrays)
    arrays = {name: array for name, array in arrays.items() if name in near}
    names = list(arrays)
    first_numbers: dict[tuple[object, ...], int] = {}  # of the arrays, by device and memory
    spans: list[_Span] = []
    for number, array in enumerate(arrays.values()):
        memory = _memory_of(array)
        device = str(array.device) if is_on_device(array) else ""
        first = first_numbers.setdefault((device, *memory), number)
        if first != number:
            yield names[first], names[number]
            continue
        spans.append(_Span(device, *_range_of(memory), number, memory))
    spans.sort()
    cluster: list[_Span] = []  # spans whose ranges, together, leave no gap
    end = 0  # of the cluster
    for span in spans:
        if not cluster or span.device != cluster[0].device or span.low >= end:
            yield from _pairs_of_cluster(names, cluster)
            cluster, end = [], 0
        cluster.append(span)
        end = max(end, span.high)
    yield from _pairs_of_cluster(names, cluster)


def _pairs_of_cluster(names: list[_Name], cluster: list[_Span]) -> Iterator[tuple[_Name, _Name]]:
    """Yield the pairs of names that share an element, of arrays in one range of addresses.

    `names`: of all arrays of the call; spans have positions in it. The arrays to compare are those
    whose ranges meet: of addresses, or, for views of one matrix such as its columns, of addresses
    modulo the greatest common divisor of all strides.
    """
    if len(cluster) < 2:
        return
    # (begin, end, position in `cluster`), sorted; arrays whose intervals do not meet share nothing
    intervals = [(span.low, span.high, i) for i, span in enumerate(cluster)]
    blocks = [_block_of(span.memory) for span in cluster]
    step = gcd(*[divisor for _, divisor in blocks])
    if step and min(length for length, _ in blocks) < step:
        residues = []  # the same with addresses modulo `step`
        for i, (length, _) in enumerate(blocks):
            begin = cluster[i].low % step if length < step else 0
            end = begin + min(length, step)
            residues.append((begin, min(end, step), i))
            if end > step:  # goes on from 0
                residues.append((0, end - step, i))
        residues.sort()
        intervals = min(intervals, residues, key=_count_meeting)  # fewer pairs to compare
    compared: set[tuple[int, int]] = set()  # numbers of arrays; residues may meet twice
    active: list[tuple[int, int, int]] = []  # intervals that the next one may meet
    for interval in intervals:
        active = [other for other in active if other[1] > interval[0]]
        span = cluster[interval[2]]
        for *_, i in active:
            other = cluster[i]
            first, second = (span, other) if span.number < other.number else (other, span)
            pair = first.number, second.number
            if first is second or pair in compared:
                continue
            if span.low >= other.high or other.low >= span.high:
                continue
            compared.add(pair)
            if _core.memory_overlap(first.memory, second.memory):
                yield names[first.number], names[second.number]
        active.append(interval)


def _block_of(memory: _Memory) -> tuple[int, int]:
    """Return the bytes of a memory's contiguous blocks, and a divisor of all distances of these.

    The divisor of a single block is 0.
    """
    length = memory.item_bytes
    axes = zip(memory.shape, memory.strides, strict=True)
    divisor = 0
    for stride, size in sorted((abs(stride), size) for size, stride in axes if size > 1):
        if stride == length and not divisor:  # the axis extends the block
            length *= size
        else:
            divisor = gcd(divisor, stride)
    return length, divisor


def _count_meeting(intervals: list[tuple[int, int, int]]) -> int:
    """Return the number of pairs of sorted intervals that meet."""
    ends = sorted(end for _, end, _ in intervals)
    return sum(i - bisect_right(ends, begin) for i, (begin, *_) in enumerate(intervals))


def _has_memory(*arrays: Any) -> bool:
    """Return whether all arguments are NumPy arrays or torch tensors."""
    return all(is_torch(array) or isinstance(array, np.ndarray) for array in arrays)


def _size_of(array: Any) -> int:
    """Return the number of elements of an array or tensor."""
    return int(array.numel() if is_torch(array) else array.size)


def assign(target: Any, source: Any) -> None:
    """Copy the elements of `source` into `target`, of the same library and shape."""
    if is_torch(target):
        target.copy_(source)
    else:
        target[...] = source


def overwrite(target: Any, source: Any) -> None:
    """Copy elements as `assign` does, without autograd; torch inference tensors are accepted."""
    if is_torch(target):
        with sys.modules["torch"].inference_mode():
            target.copy_(source)
    else:
        target[...] = source


def overwrite_with_zeros(target: Any) -> None:
    """Set all elements to zero, without autograd; torch inference tensors are accepted."""
    if is_torch(target):
        with sys.modules["torch"].inference_mode():
            target.zero_()
    else:
        target[...] = 0


def copy_of(array: Any) -> Any:
    """Return a copy in new memory, of the same library, device, dtype and byte order."""
    if is_torch(array):
        return array.detach().clone()
    return np.array(array, subok=False)


def packed_array(array: NDArray) -> NDArray:
    """Return a C-contiguous, aligned array in native byte order: the array itself or a copy."""
    packed = np.require(array, requirements=["C", "A"])
    return packed.astype(packed.dtype.newbyteorder("="), copy=False)


def new_packed(array: Any, shape: tuple[int, ...]) -> Any:
    """Return a new array of the library and dtype of `array`, with undefined elements.

    It is packed, in main memory and in native byte order.
    """
    if is_torch(array):
        return array.new_empty(shape, device="cpu")
    return np.empty(shape, array.dtype.newbyteorder("="))


def refuse_given_away(state: Mapping[str, object]) -> None:
    """Raise ValueError for a torch tensor that a `TieredState` moved to a file: it is empty.

    `state`: tensors and other values by name.
    """
    if not any(backend.has_given_away() for backend in imported_backends(TensorBackend)):
        return
    for name, value in state.items():
        if is_torch(value) and backend_of(value, TensorBackend).is_given_away(value):
            raise ValueError(
                f"{name!r} is cold: its elements are in a file of a TieredState; promote it, or "
                "use the arrays that state_dicts() of that TieredState returns"
            )


def is_masked(value: object) -> bool:
    """Return whether a value is a masked array; numpy.ma, which is large, is not imported."""
    return isinstance(value, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ()))


def refuse_masked(name: object, value: object) -> None:
    """Raise TypeError for a masked array: its mask would be lost. `name`: in the state."""
    if is_masked(value):
        raise TypeError(
            f"{name!r} is a masked array, whose mask would be lost: pass its filled(), or its data "
            "and mask as two arrays"
        )


def refuse_unstorable(state: Mapping[str, object], *, every: bool = False) -> None:
    """Raise CompatibilityError for a torch tensor that cannot be stored, or a `Shard` of one.

    A masked array raises TypeError.

    `state`: tensors and other values by name. Unless `every`, only tensors of subclasses are
    examined: the core refuses the others.
    """
    torch = sys.modules.get("torch")
    skipped: tuple[type, ...] = (np.ndarray,)
    if torch is not None and not every:
        skipped = np.ndarray, torch.Tensor, torch.nn.Parameter
    for name, value in state.items():
        if type(value) in skipped:
            continue
        refuse_masked(name, getattr(value, "array", value))
        tensor = value if is_torch(value) else getattr(value, "array", None)
        if tensor is not None and is_torch(tensor) and type(tensor) not in skipped:
            backend_of(tensor, TensorBackend).refuse_unstorable(name, tensor)


@contextmanager
def named_refusals(*states: Mapping[str, object] | None) -> Iterator[None]:
    """Turn an error of torch about a tensor in the block into one that names the tensor.

    `states`: the tensors by name. If none of them is refused, the error is raised unchanged.
    """
    try:
        yield
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        if not isinstance(error, MLStateError):
            for state in states:
                refuse_unstorable(state or {}, every=True)
        raise


def write_into(out: Array, write: Callable[[Any], Any]) -> Any:
    """Call `write` to fill `out`, and return `out`.

    For a torch tensor, the integration records the write for autograd, and passes `write` a
    writable array. Raises TypeError for a masked array.
    """
    refuse_masked("out", out)
    if is_torch(out):
        return backend_of(out, TensorBackend).write_into_tensor(out, write)
    write(out)
    return out
