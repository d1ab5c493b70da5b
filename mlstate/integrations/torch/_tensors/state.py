"""`from_torch`, `to_torch`: arrays over tensors' memory and back; tied memory; refused tensors."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ...._common.arrays import (
    memory_key,
    overlaps_itself,
    refuse_given_away,
    refuse_masked,
)
from ...._common.dtypes import label_of, name_of, stored_dtype
from ....errors import CompatibilityError, UnstorableError
from .dtypes import SHARED, VIEWED, torch_has

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ...._types import NDArray, NumpyDType


# ---- tensors to arrays ----


@cache
def _dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes of this torch that mlstate's files can name."""
    import torch

    return frozenset(getattr(torch, name) for name in SHARED | VIEWED.keys() if torch_has(name))


def _unstorable(name: str, label: str, reason: str, tensor: torch.Tensor) -> UnstorableError:
    """Return the error for the tensor `name`; `reason`: why it cannot be stored, and a remedy.

    `label`: replaces the name in the message, or "".
    """
    text = f"{label or repr(name)} is {reason}"
    return UnstorableError(text, name=name, got=name_of(tensor.dtype))


def refuse_unstorable(name: str, tensor: torch.Tensor, label: str = "") -> None:
    """Raise UnstorableError if a tensor cannot be stored; DTensors are refused too.

    `name`: of the tensor. `label`: replaces the name in the message.
    """
    reason = explain_unsupported_tensor(tensor)
    if not reason and tensor.device.type == "meta":
        reason = (
            "a tensor on torch's meta device: it has no elements: call to_empty(device=) on the "
            "module first"
        )
    if reason:
        raise _unstorable(name, label, reason, tensor)


def state_dict_of(module: torch.nn.Module) -> Mapping[str, Any]:
    """Return a module's ``state_dict()``.

    Raises UnstorableError with the name of a parameter that is lazy, which torch refuses, or that
    DeepSpeed's ZeRO has divided among the ranks, which leaves an empty tensor in the module.
    """
    import torch

    # a program with such parameters has imported deepspeed
    for name, parameter in module.named_parameters() if "deepspeed" in sys.modules else ():
        whole = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if whole != tuple(parameter.shape):
            raise UnstorableError(
                f"{name!r} of shape {whole} is divided among the ranks by DeepSpeed's ZeRO: call "
                "this in a block of `with deepspeed.zero.GatheredParameters(list(module."
                "parameters()), modifier_rank=0):` on every rank"
            )
    try:
        return module.state_dict()
    except (RuntimeError, ValueError):
        for named in (module.named_parameters(), module.named_buffers()):
            for name, tensor in named:
                if torch.nn.parameter.is_lazy(tensor):
                    refuse_unstorable(name, tensor)
        raise


def table_value(table: Any, key: str) -> Any:
    """Return a value of a module's dict of parameters or buffers; None if it lacks the key.

    A scripted module's is not a dict: it has no `get`.
    """
    return table[key] if key in table else None  # noqa: SIM401


def restore_table(table: Any, content: Mapping[str, object]) -> None:
    """Give a module's dict of parameters or buffers its former content.

    A scripted module's is not a dict: its keys cannot change, and replaced values are set.
    """
    if isinstance(table, dict):
        table.clear()
        table.update(content)
        return
    for key, value in content.items():
        if table[key] is not value:
            table[key] = value


def explain_unsupported_tensor(tensor: torch.Tensor) -> str:
    """Return why a tensor is not plain memory, with a remedy; empty if it is.

    Tensors on a device or on ``meta`` may be plain too: their memory is not looked at.
    """
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        kind = f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
        if torch.nn.parameter.is_lazy(tensor):
            return f"{kind}, without a shape yet: run the module once before taking its state"
        if hasattr(tensor, "full_tensor"):
            return f"{kind}: store its full_tensor(), or a Shard of each rank's to_local()"
        return f"{kind}: store the plain tensors that it is made of"
    if tensor.is_nested:
        return "a nested tensor: store the tensors that unbind() gives, each under a name"
    if tensor.layout != torch.strided:
        return f"{tensor.layout}: store its to_dense(), or its indices and values"
    if tensor.is_quantized:
        return f"quantized ({tensor.dtype}): store its dequantize(), or int_repr() and the scales"
    if tensor.is_conj():
        return "a view that is conjugated when read: store its resolve_conj()"
    if tensor.is_neg():
        return "a view that is negated when read: store its resolve_neg()"
    if tensor.dtype not in _dtypes():
        return (
            f"{name_of(tensor.dtype)}, for which mlstate's files have no name: store it as "
            "integers, by tensor.view(torch.uint8)"
        )
    if tensor.device.type != "cpu":
        return ""
    try:
        tensor.data_ptr()
    except RuntimeError:
        return "without its own memory: take the state outside torch.func and torch.vmap"
    return ""


def _view_as_array(tensor: torch.Tensor) -> NDArray:
    """Return an array over the memory of a plain CPU tensor.

    It is read-only if elements overlap in memory, as after ``expand()``. A dtype that NumPy lacks
    becomes one of ml_dtypes, or without that package labelled integers.
    """
    import torch

    dtype = name_of(tensor.dtype)
    if dtype in SHARED:
        array: NDArray = tensor.numpy()
    else:
        array_dtype = stored_dtype(dtype)
        array = tensor.view(getattr(torch, VIEWED[dtype])).numpy().view(array_dtype)
    # A write to an element that overlaps others would change these too.
    if not array.flags.c_contiguous and overlaps_itself(array):
        array.flags.writeable = False
    return array


def _array_of(name: str, value: Any) -> Any:
    """Return the array or tensor for `value`, the entry `name` of torch's state dict.

    Tensors on a device, and meta tensors, are returned detached; NumPy arrays as they are. Raises
    TypeError for a value of another type, and UnstorableError for a tensor that is not plain
    memory; both name the entry.
    """
    import torch

    if isinstance(value, np.ndarray | np.generic):
        return value
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name!r} is a {type(value).__name__}, not a tensor: remove it from the state first, "
            "and store it separately"
        )
    reason = explain_unsupported_tensor(value)
    if reason:
        raise _unstorable(name, "", reason, value)
    detached = value.detach()
    return detached if detached.device.type != "cpu" else _view_as_array(detached)


def arrays_of(state: torch.nn.Module | Mapping[str, object]) -> dict[str, Any]:
    """Return NumPy arrays over the memory of torch tensors; see `StateDict.from_torch`.

    NumPy arrays are returned unchanged. One tensor under two names is one array. Arrays over
    expanded tensors are read-only. Tensors on a device, or on ``meta``, are returned detached.
    Raises ValueError if a `TieredState` has moved the elements of a tensor to a file.
    """
    import torch

    if isinstance(state, torch.nn.Module):
        state = state_dict_of(state)
    if not isinstance(state, Mapping):
        raise TypeError(
            "from_torch takes a torch.nn.Module or a mapping of str to tensors, "
            f"got {type(state).__name__}"
        )
    refuse_given_away(tensors := dict(state))
    arrays_by_id: dict[int, object] = {}
    arrays = {}
    for name, value in tensors.items():
        if id(value) not in arrays_by_id:
            arrays_by_id[id(value)] = _array_of(name, value)
        arrays[name] = arrays_by_id[id(value)]
    return arrays


# ---- arrays to tensors ----


def device_of(device: str | torch.device | int) -> torch.device:
    """Return the device that a user named; raise ValueError if torch knows no such device."""
    import torch

    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is not a device of torch: {error}") from None


class _Writable:
    """Array interface of an array's memory, without the read-only flag.

    torch has no such flag: it shares read-only arrays too, but warns each time.
    """

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, owner: Any, interface: dict[str, Any], address: int) -> None:
        """Present `interface`, an array interface, at `address`; `owner` keeps the memory alive."""
        self.owner = owner
        self.__array_interface__ = {**interface, "data": (address, False)}


def _address(array: NDArray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _extent(array: NDArray) -> tuple[int, int]:
    """Return the addresses of an array's first byte and after its last; strides must be >= 0."""
    start = _address(array)
    if array.flags.c_contiguous or array.size == 0:
        return start, start + array.nbytes
    steps = zip(array.shape, array.strides, strict=True)
    return start, start + sum((size - 1) * step for size, step in steps) + array.itemsize


def clusters(arrays: Mapping[str, NDArray]) -> Iterator[tuple[int, int, list[str]]]:
    """Yield start, end and names of groups of arrays whose ranges of addresses overlap.

    Start and end are addresses. Each array is in one group; an array that overlaps no other is
    alone in one. Strides must not be negative.
    """
    address_ranges = sorted((*_extent(array), name) for name, array in arrays.items())
    start = end = -1
    names: list[str] = []
    for low, high, name in address_ranges:
        if low >= end and names:
            yield start, end, names
            names = []
        if not names:
            start, end = low, high
        names.append(name)
        end = max(end, high)
    if names:
        yield start, end, names


def _is_viewed(dtype: NumpyDType) -> bool:
    # 2: a dtype of another package, here ml_dtypes; faster than comparing names of dtypes.
    return dtype.isbuiltin == 2 or bool(label_of(dtype))


def _view_integers(array: NDArray) -> NDArray:
    """Return a view with a dtype that torch and NumPy both have."""
    return array.view(VIEWED[name_of(array.dtype)]) if _is_viewed(array.dtype) else array


def tensor_over(array: NDArray) -> torch.Tensor:
    """Return a tensor over the memory of a `sharable` array, writable even if the array is not."""
    import torch

    integers = _view_integers(array)
    if not integers.flags.writeable:
        integers = np.asarray(_Writable(integers, integers.__array_interface__, _address(integers)))
    tensor = torch.from_numpy(integers)
    dtype = array.dtype
    return tensor.view(getattr(torch, name_of(dtype))) if _is_viewed(dtype) else tensor


def _make_sharing_tensors(start: int, end: int, arrays: list[NDArray]) -> list[torch.Tensor]:
    """Return tensors of one storage over overlapping arrays, so that torch sees them as tied.

    `start`, `end`: addresses of the memory that the arrays cover together. The distance of each
    array from `start` must be a multiple of its item size, because torch counts it in items.
    """
    import torch

    interface = {"version": 3, "typestr": "|u1", "shape": (end - start,)}
    storage = torch.from_numpy(np.asarray(_Writable(arrays, interface, start))).untyped_storage()
    tensors = []
    for array in arrays:
        empty = torch.empty(0, dtype=getattr(torch, name_of(array.dtype)), device="cpu")
        offset = (_address(array) - start) // array.itemsize
        strides = [step // array.itemsize for step in array.strides]
        tensors.append(empty.set_(storage, offset, array.shape, strides))
    return tensors


def share(arrays: Mapping[str, NDArray], *, pack: bool = False) -> dict[str, torch.Tensor]:
    """Return tensors by name over arrays that are `sharable`; overlapping arrays share one storage.

    Overlapping arrays whose distances are not multiples of their item sizes get separate storages
    over the same memory. `pack`: copy an array with gaps between its elements if no other array
    shares its memory, since a file would contain the gaps.
    """
    tensors: dict[str, torch.Tensor] = {}
    # One object under several names is one tensor.
    first_name = {id(array): name for name, array in reversed(list(arrays.items()))}
    distinct = {name: arrays[name] for name in first_name.values()}
    for start, end, names in clusters(distinct):
        members = [distinct[name] for name in names]
        if len(members) > 1 and all(
            (_address(array) - start) % array.itemsize == 0 for array in members
        ):
            shared_tensors = _make_sharing_tensors(start, end, members)
        elif pack and len(members) == 1 and end - start > members[0].nbytes:
            shared_tensors = [tensor_over(members[0].copy())]
        else:
            shared_tensors = [tensor_over(array) for array in members]
        tensors.update(zip(names, shared_tensors, strict=True))
    return {name: tensors[first_name[id(array)]] for name, array in arrays.items()}


def sharable(array: NDArray) -> bool:
    """Return whether torch can share the memory: byte order, strides and alignment fit."""
    return (
        array.dtype.isnative
        and array.flags.aligned
        and all(step >= 0 and step % array.itemsize == 0 for step in array.strides)
    )


def _dtype_error(name: str, dtype: object) -> CompatibilityError:
    """Return the error for the array `name` with a dtype that torch lacks."""
    text = (
        f"{name!r} is {dtype}, for which torch has no dtype: convert it, or take it out of "
        "the state first"
    )
    return CompatibilityError(text, name=name, got=str(dtype))


def move_tensor(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Return a tensor on a device, as ``torch.load(map_location=)`` does: a leaf of its kind.

    A Parameter stays one, and `requires_grad` stays. The tensor itself is returned if it is on the
    device already, or on ``meta``.
    """
    import torch

    if tensor.device.type == "meta":  # it has no elements to move
        return tensor
    moved = tensor.detach().to(device)
    if moved.device == tensor.device:
        return tensor
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved.requires_grad_(tensor.requires_grad)


def tensors_of(state: Mapping[str, object], *, copy: bool = False) -> dict[str, torch.Tensor]:
    """Return torch tensors over the memory of arrays; see `StateDict.to_torch`.

    Arrays of other libraries with ``__dlpack__`` are accepted too. One array under two names is
    one tensor. Without `copy`, overlapping arrays share one storage; with it, they are separated,
    unless they have the same elements, such as tied weights.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, NDArray] = {}
    tensors_by_key: dict[object, torch.Tensor] = {}
    arrays_by_key: dict[object, NDArray] = {}
    checked: set[str] = set()
    entries = dict(state)
    for name, value in entries.items():
        key = memory_key(value) if copy else (id(value),)
        if isinstance(value, torch.Tensor) or (
            not isinstance(value, np.ndarray | np.generic) and hasattr(value, "__dlpack__")
        ):
            if key not in tensors_by_key:
                tensor = (
                    value
                    if isinstance(value, torch.Tensor)
                    else torch.utils.dlpack.from_dlpack(value)
                ).detach()
                tensors_by_key[key] = tensor.clone() if copy else tensor
            tensors[name] = tensors_by_key[key]
            continue
        refuse_masked(name, value)
        if key not in arrays_by_key:
            array = np.asarray(value)
            dtype = name_of(array.dtype)  # labelled integers equal plain ones
            if dtype not in checked:
                if not torch_has(dtype):
                    raise _dtype_error(name, label_of(array.dtype) or array.dtype)
                checked.add(dtype)
            if copy or not sharable(array):
                array = array.astype(array.dtype.newbyteorder("="), order="K", copy=True)
            arrays_by_key[key] = array
        arrays[name] = arrays_by_key[key]
    tensors.update(share(arrays))
    return {name: tensors[name] for name in entries}
