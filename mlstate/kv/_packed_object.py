"""Objects of unknown classes as one array of bytes, if tensors and plain values are all they hold.

The array has the length of the header (8 bytes, little-endian), the header (JSON), and the elements
of the tensors. Each part is padded to 16 bytes. Nothing is stored that cannot be restored exactly:
`pack` restores the object from its bytes, and compares.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._common.arrays import is_torch, names_sharing_memory
from .._common.dtypes import EXTENSIONS, name_of, stored_dtype
from ._arguments import incompatible

if TYPE_CHECKING:
    from collections.abc import Callable

PART = "whole"  # the last part of the entry's name, and its role
_SCALARS = (type(None), bool, int, float, str)
_ALIGNED = 16


class Kept(NamedTuple):
    """A value that belongs to the target and is only compared, such as the config of a model."""

    digest: str


class Header(NamedTuple):
    """What a packed object is, apart from the elements of its tensors."""

    class_name: str
    constants: dict[str, Any]  # numbers and texts that the constructor sets, by path
    values: Any  # see `_describe`
    arrays: list[tuple[str, tuple[int, ...]]]  # dtypes and shapes
    end: int  # offset of the first array

    @property
    def sequences(self) -> int:
        """Number of sequences: the first axis of the tensors, except of vectors and numbers."""
        return max((shape[0] for _, shape in self.arrays if len(shape) > 1), default=1)


def class_name(instance: object) -> str:
    """Return the full name of an object's class."""
    cls = type(instance)
    return f"{cls.__module__}.{cls.__qualname__}"


def map_leaves(value: Any, convert: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return new containers with the results of `convert` for path and value of each item."""
    if type(value) not in (dict, list, tuple):
        return convert(path, value)
    items = value.items() if type(value) is dict else enumerate(value)
    pairs = [(k, map_leaves(v, convert, f"{path}.{k}" if path else str(k))) for k, v in items]
    return dict(pairs) if type(value) is dict else type(value)(item for _, item in pairs)


def leaves_of(value: Any) -> dict[str, Any]:
    """Return the items that are not containers by path, such as ``"counts.indexer"``."""
    leaves: dict[str, Any] = {}
    map_leaves(value, leaves.__setitem__)
    return leaves


def pack(values: Any, name: str, constants: dict[str, Any], where: str) -> Any:
    """Return the bytes of an object as one array, or raise CompatibilityError with the class.

    `values`: attributes by name, or a list. Arrays are of NumPy or torch, all on one device; the
    result is an array of the same library on this device. `name`: see `class_name`. `where`: of
    the object, for errors, such as "layer 3".
    """
    arrays: dict[int, Any] = {}  # by identity: an array under two names is one array afterwards
    refuse = _Refusal(where, name, set())
    tree = _describe(values, "", arrays, refuse)
    found = list(arrays.values())
    if names_sharing_memory(dict(enumerate(found))):
        raise refuse("tensors", "share memory, which the restored ones would not")
    devices = {str(each.device) for each in found if is_torch(each)}
    if len(devices) > 1:
        raise refuse("tensors", f"are on several devices: {', '.join(sorted(devices))}")
    for path, value in leaves_of(values).items():
        if type(value).__name__ == "device" and {str(value)} != devices:
            raise refuse(path, f"is {value}, and not the device of the tensors")
    facts = [[name_of(each.dtype), list(each.shape)] for each in found]
    head = json.dumps({"class": name, "constants": constants, "values": tree, "arrays": facts})
    text = np.frombuffer(head.encode(), np.uint8)
    size = np.array([len(text)], "<u8").view(np.uint8)
    whole = _joined([_padded(np.concatenate([size, text])), *map(_bytes_of, found)], found)
    if not _is_restored(whole, values, where):
        raise refuse("content", "is not restored bit for bit")
    return whole


def header_of(whole: Any, where: str) -> Header:
    """Return the header of a packed object; raise CompatibilityError for other bytes."""
    if is_torch(whole):
        if whole.device.type == "meta":
            raise incompatible(f"{where}: a meta tensor has no data", where, "data", "meta")
        size = int(whole[:8].cpu().numpy().view("<u8")[0])
        text = whole[8 : 8 + size].cpu().numpy().tobytes()
    else:
        size = int(whole[:8].view("<u8")[0])
        text = whole[8 : 8 + size].tobytes()
    try:
        facts = json.loads(text)
        arrays = [(str(dtype), tuple(map(int, shape))) for dtype, shape in facts["arrays"]]
        return Header(
            facts["class"], facts["constants"], facts["values"], arrays, _end_of(8 + size)
        )
    except (ValueError, KeyError, TypeError) as error:
        text = f"{where}: the bytes are not of a packed object ({error!r})"
        raise incompatible(text, where, "a packed object", "other bytes") from error


def unpack(whole: Any, where: str) -> Any:
    """Return the values that `pack` was given, with new arrays of the library of `whole`.

    A `Kept` value is None. Raises CompatibilityError for bytes that are not of `pack`.
    """
    header = header_of(whole, where)
    arrays, start = [], header.end
    try:
        for dtype, shape in header.arrays:
            count = int(np.prod(shape, dtype=np.int64)) * _numpy_dtype(dtype).itemsize
            part = whole[start : start + count]
            part = part.clone() if is_torch(part) else part.copy()
            arrays.append(part.view(_dtype_like(whole, dtype)).reshape(shape))
            start = _end_of(start + count)
        return _build(header.values, arrays, whole)
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError, AttributeError) as error:
        text = f"{where}: the bytes are not of a packed object ({error!r})"
        raise incompatible(text, where, "a packed object", "other bytes") from error


class _Refusal(NamedTuple):
    """Returns errors about an object, with the name of its class."""

    where: str
    class_name: str
    containers: set[int]  # by identity: those that were described

    def __call__(self, path: str, text: str) -> Exception:
        name = self.class_name.rpartition(".")[2]
        message = f"{self.where} is a {name}, which is an unknown class, and its {path} {text}"
        place = self.where.removeprefix("layer ")
        return incompatible(message, place, "a known class, or tensors and numbers only", name)


def _describe(value: Any, path: str, arrays: dict[int, Any], refuse: _Refusal) -> Any:
    """Return JSON for a value: a list of kind and content, or a number, text or null itself.

    Adds tensors to `arrays`. Raises CompatibilityError for objects of other classes.
    """
    cls = type(value)
    if cls in _SCALARS:
        return value
    if cls is Kept:
        return ["kept"]
    if cls in (dict, list, tuple) and value:
        if id(value) in refuse.containers:
            raise refuse(path.lstrip("."), "is the same object as another value")
        refuse.containers.add(id(value))
    if cls is dict and all(type(key) in (str, int) for key in value):
        pairs = [[k, _describe(v, f"{path}.{k}", arrays, refuse)] for k, v in value.items()]
        return ["dict", pairs]
    if cls in (list, tuple):
        items = enumerate(value)
        return [cls.__name__, [_describe(v, f"{path}.{i}", arrays, refuse) for i, v in items]]
    if cls is np.ndarray or _is_plain_tensor(value):
        arrays.setdefault(id(value), value)
        return ["array", list(arrays).index(id(value))]
    if cls.__module__ == "torch" and cls.__name__ in ("device", "dtype"):
        return [cls.__name__, str(value).removeprefix("torch.")]
    raise refuse(path.lstrip("."), f"is of type {cls.__name__}: this value would be lost")


def _is_plain_tensor(value: Any) -> bool:
    """Return whether this is a dense tensor with data, and not of a subclass."""
    if not is_torch(value):
        return False
    import torch

    is_dense = value.layout is torch.strided and not value.is_quantized
    return bool(type(value) is torch.Tensor and is_dense and value.device.type != "meta")


def _build(tree: Any, arrays: list[Any], whole: Any) -> Any:
    """Return the value that `_describe` returned `tree` for."""
    if not isinstance(tree, list):
        return tree
    kind, *rest = tree
    if kind == "dict":
        return {key: _build(item, arrays, whole) for key, item in rest[0]}
    if kind in ("list", "tuple"):
        items = [_build(item, arrays, whole) for item in rest[0]]
        return items if kind == "list" else tuple(items)
    if kind == "array":
        return arrays[rest[0]]
    if kind == "device":
        return whole.device
    return _dtype_like(whole, rest[0]) if kind == "dtype" else None


def _is_restored(whole: Any, values: Any, where: str) -> bool:
    """Return whether `unpack` restores `values` bit for bit, with the same arrays shared."""
    new, old = leaves_of(unpack(whole, where)), leaves_of(values)
    return new.keys() == old.keys() and all(_is_same(new[path], old[path]) for path in old)


def _is_same(new: Any, old: Any) -> bool:
    if type(old) is Kept:
        return True
    if is_torch(old) or isinstance(old, np.ndarray):
        is_alike = name_of(new.dtype) == name_of(old.dtype) and new.shape == old.shape
        return bool(is_alike and (_bytes_of(new) == _bytes_of(old)).all())
    return type(new) is type(old) and (new == old or new != new)


def _end_of(offset: int) -> int:
    return -(-offset // _ALIGNED) * _ALIGNED


def _padded(array: Any) -> Any:
    """Return a vector of bytes with zeros behind it, up to a multiple of the alignment."""
    missing = _end_of(len(array)) - len(array)
    if not is_torch(array):
        return np.concatenate([array, np.zeros(missing, np.uint8)])
    from torch.nn.functional import pad

    return pad(array, (0, missing))


def _bytes_of(array: Any) -> Any:
    """Return the elements of an array as a padded vector of bytes; a copy."""
    if is_torch(array):
        import torch

        plain = array.detach().resolve_conj().resolve_neg().contiguous()
        return _padded(plain.reshape(-1).view(torch.uint8))
    return _padded(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _joined(parts: list[Any], like: list[Any]) -> Any:
    """Return vectors behind each other, in the library and on the device of `like`."""
    if not any(is_torch(each) for each in like):
        return np.concatenate(parts)
    import torch

    parts[0] = torch.from_numpy(parts[0]).to(like[0].device)
    return torch.cat(parts)


def _numpy_dtype(name: str) -> Any:
    return stored_dtype(name) if name in EXTENSIONS else np.dtype(name)


def _dtype_like(whole: Any, name: str) -> Any:
    """Return a dtype of the library of `whole`."""
    if not is_torch(whole):
        return _numpy_dtype(name)
    import torch

    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    return dtype
