"""Arrays of NumPy and torch tensors, without importing torch."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..errors import MLStateError
from .backend import TensorBackend, backend_of, imported_backends
from .dtypes import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .._types import Array, NDArray


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


def _memory_of(array: Any) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """Return address, item bytes, shape and strides in bytes, as `_core.memory_overlap` takes them.

    `array`: a NumPy array, or a strided tensor. An address of 0 is unknown, as of a meta tensor.
    Items without bytes, such as those of an empty text dtype, count as 1 byte.
    """
    if is_torch(array):
        item = array.element_size()
        strides = tuple([item * stride for stride in array.stride()])
        try:
            address = array.data_ptr()
        except RuntimeError:  # under torch.func, and some subclasses
            address = 0
        return address, item, tuple(array.shape), strides
    address = array.__array_interface__["data"][0]
    return address, max(array.itemsize, 1), array.shape, array.strides


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
    has_addresses = left[0] != 0 and right[0] != 0  # meta tensors have none
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
    if not _has_memory(array) or _size_of(array) == 0:
        return (id(array),)
    facts: tuple[object, ...]
    if is_torch(array):
        if str(array.layout) != "torch.strided" or array.is_nested or array.is_quantized:
            return (id(array),)
        # one memory may have a conjugate or negative view
        facts = array.dtype, array.device, array.is_conj(), array.is_neg()
    else:
        facts = array.dtype.str, text_of(array.dtype)
    memory = _memory_of(array)
    return (*memory, *facts) if memory[0] != 0 else (id(array),)


def names_sharing_memory(arrays: Mapping[str, Any]) -> set[str]:
    """Return the names of arrays whose range of addresses meets the range of another array.

    Such arrays may still have no element in common. Values that are not arrays, and arrays without
    elements or with an unknown address, are left out.
    """
    ranges = []
    for name, array in arrays.items():
        if not _has_memory(array) or _size_of(array) == 0:
            continue
        address, item, shape, strides = _memory_of(array)
        if address:
            steps = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
            low = address + sum(step for step in steps if step < 0)
            ranges.append((low, address + item + sum(step for step in steps if step > 0), name))
    sharing: set[str] = set()
    end, last = 0, ""
    for low, high, name in sorted(ranges):
        if low < end:
            sharing |= {last, name}
        if high > end:
            end, last = high, name
    return sharing


def _has_memory(*arrays: Any) -> bool:
    return all(is_torch(array) or isinstance(array, np.ndarray) for array in arrays)


def _size_of(array: Any) -> int:
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


def refuse_masked(name: object, value: object) -> None:
    """Raise TypeError for a masked array: its mask would be lost. `name`: in the state."""
    if isinstance(value, np.ma.MaskedArray):
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
    fast: tuple[type, ...] = (np.ndarray,)
    if torch is not None and not every:
        fast = np.ndarray, torch.Tensor, torch.nn.Parameter
    for name, value in state.items():
        if type(value) in fast:
            continue
        refuse_masked(name, getattr(value, "array", value))
        tensor = value if is_torch(value) else getattr(value, "array", None)
        if tensor is not None and is_torch(tensor) and type(tensor) not in fast:
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
