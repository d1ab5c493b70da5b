"""The containers of nested values: list the values in one, and make another of the same class.

All code that walks values uses this table, so that what a save accepts, a comparison and a load
know too. A *record* is a named tuple or an object of a dataclass. A *wrapper* is a tensor of a
subclass that torch's protocol ``__tensor_flatten__`` divides into plain tensors, its parts.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._common.arrays import is_torch
from ..._common.backend import backend_of
from ..._sharding.backend import ShardBackend
from ..._sharding.layout import Shard
from ...errors import CompatibilityError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CONTAINERS = (dict, list, tuple, set, frozenset, deque)


class UnknownRecordError(Exception):
    """A target has no record of a stored class."""


def field_names(value: object) -> tuple[str, ...] | None:
    """Return the names of a record's fields; None for a class and for other values."""
    cls = type(value)
    if isinstance(value, tuple):
        return cls._fields if hasattr(cls, "_fields") and hasattr(cls, "_make") else None
    if not hasattr(cls, "__dataclass_fields__") or isinstance(value, CONTAINERS):
        return None
    from dataclasses import fields

    return tuple(field.name for field in fields(value))  # type: ignore[arg-type]


def is_wrapper(value: Any) -> bool:
    """Return whether a value is a wrapper; torch's own classes, such as DTensor, are none."""
    cls = type(value)
    is_other = hasattr(cls, "__tensor_flatten__") and not cls.__module__.startswith("torch.")
    return is_other and is_torch(value) and not hasattr(value, "device_mesh")


def local_wrapper(value: Any) -> Any:
    """Return this rank's part of a DTensor if it is a wrapper; None for other values."""
    local = getattr(value, "_local_tensor", None) if is_torch(value) else None
    return local if is_wrapper(local) else None


def wrapper_of(value: Any, where: str, ranks: int) -> Any:
    """Return a wrapper, or this rank's part of a DTensor that is one; None for other values.

    `ranks`: number of those that each store their part; 0: none can. Raises ValueError, with the
    path `where`, if others have parts.
    """
    if is_wrapper(value):
        return value
    part = local_wrapper(value) if ranks else None
    if part is not None:
        _require_ranks(where, value.device_mesh.size(), ranks)
    return part


def rank_part(value: Any, name: str, ranks: int) -> Any:
    """Return a DTensor as the `Shard` of this rank, and any other value as it is.

    `name`: for errors. `ranks`: number of those that each store their part; 0: not known. Raises
    ValueError if others have parts, and TypeError for a sharding that cannot be stored.
    """
    if not (is_torch(value) and hasattr(value, "device_mesh")):
        return value
    part = backend_of(value, ShardBackend).part_of(name, value)
    if isinstance(part, Shard) and ranks:
        _require_ranks(repr(name), part.layout.parts, ranks)
    return part


def _require_ranks(where: str, parts: int, ranks: int) -> None:
    """Raise ValueError if a tensor, at the path `where`, has more `parts` than `ranks` save."""
    if parts > ranks:
        raise parts_error(where, parts, ranks)


def parts_error(where: str, parts: int, ranks: int) -> ValueError:
    """Return the error for a tensor on `parts` ranks, at the path `where`, if only `ranks` save."""
    return ValueError(
        f"{where} is spread over {parts} ranks, and {ranks} "
        f"{'takes' if ranks == 1 else 'take'} part: pass group= with all ranks that have a part, "
        "and make this call on each of them"
    )


def new_wrapper(cls: Any, parts: dict[str, Any], meta: Any, size: Any, stride: Any) -> Any:
    """Return a wrapper of its parts by name; `meta`: what ``__tensor_flatten__`` returned last."""
    return cls.__tensor_unflatten__(parts, meta, size, stride)


def children(value: Any) -> Sequence[tuple[Any, Any]] | None:
    """Return the values in a container, each with its key, index or field; None for other values.

    A field that a record lacks is left out.
    """
    if isinstance(value, Mapping):
        return [*value.items()]
    if is_wrapper(value):
        return [(name, getattr(value, name)) for name in value.__tensor_flatten__()[0]]
    if (local := local_wrapper(value)) is not None:
        return [("local", local)]
    names = field_names(value)
    if names is None:
        return [*enumerate(value)] if isinstance(value, CONTAINERS) else None
    if isinstance(value, tuple):
        return [*zip(names, value, strict=True)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def new_record(cls: type, fields: Mapping[str, Any]) -> Any:
    """Return a record of `cls`; none of its code runs. `fields`: all values, by name."""
    if issubclass(cls, tuple):
        return tuple.__new__(cls, fields.values())
    record = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(record, name, value)
    return record


def rebuilt(value: Any, values: Sequence[Any]) -> Any:
    """Return a container like `value` with other values in it, in the order of `children`."""
    if isinstance(value, Mapping):
        new: Any = copy.copy(value)  # keeps attributes, and the factory of a defaultdict
        for key, each in zip([*value], values, strict=True):
            new[key] = each  # not `update`, which counts in a Counter
        return new
    if is_wrapper(value):
        names, meta = value.__tensor_flatten__()
        parts = dict(zip(names, values, strict=True))
        return new_wrapper(type(value), parts, meta, value.size(), value.stride())
    if local_wrapper(value) is not None:
        return divided_like(value, values[0])
    names = field_names(value)
    if names is not None:
        return new_record(type(value), dict(zip(names, values, strict=True)))
    return deque(values, value.maxlen) if type(value) is deque else type(value)(values)


def divided_like(tensor: Any, local: Any) -> Any:
    """Return a DTensor with the division of another one; `local`: this rank's part."""
    cls = sys.modules["torch.distributed.tensor"].DTensor
    options = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    return cls.from_local(local, tensor.device_mesh, tensor.placements, **options)


def mapped(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return a container with the results of `change(key, value)`; any other value as it is."""
    inner = children(value)
    return value if inner is None else rebuilt(value, [change(*pair) for pair in inner])


def walk(value: Any) -> Iterator[Any]:
    """Yield a value and all values in it, each container once: it may contain itself."""
    stack = [value]
    seen: dict[int, Any] = {}
    while stack:
        value = stack.pop()
        yield value
        if type(value) in (bool, int, float, str, bytes, np.ndarray) or id(value) in seen:
            continue
        inner = children(value)
        if inner is not None:
            seen[id(value)] = value
            stack += [each for _, each in inner]


def equal_values(first: Any, second: Any) -> bool:
    """Return whether nested values are equal and have equal types; NaN equals NaN.

    Objects that cannot be compared are equal only to themselves.
    """
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if is_wrapper(first) and not equal_values(
        *(t.__tensor_flatten__()[1] for t in (first, second))
    ):
        return False
    is_tensor = is_torch(first) and not is_wrapper(first) and local_wrapper(first) is None
    if is_tensor or isinstance(first, np.ndarray | np.generic):
        return _equal_arrays(first, second)
    if isinstance(first, set | frozenset):
        return bool(first == second)
    return _equal_children(first, second)


def _equal_children(first: Any, second: Any) -> bool:
    """Return whether two values of one class, not arrays, are equal, with all values in them."""
    left, right = children(first), children(second)
    if left is None or right is None:
        try:
            return bool(first == second or (first != first and second != second))
        except (RuntimeError, TypeError, ValueError):  # such as of arrays of other libraries
            return False
    pairs = dict(right)
    return (
        len(left) == len(right)
        and getattr(first, "maxlen", None) == getattr(second, "maxlen", None)
        and all(key in pairs and equal_values(each, pairs[key]) for key, each in left)
    )


def _equal_arrays(first: Any, second: Any) -> bool:
    """Return whether arrays of one class have equal bits, dtypes, shapes and flags.

    Sparse, nested and meta tensors, and tensors of subclasses, are equal only to themselves.
    """
    if not is_torch(first):
        same = first.dtype == second.dtype and first.shape == second.shape
        return bool(same and first.tobytes() == second.tobytes())
    facts = [(t.dtype, t.shape, t.requires_grad, str(t.layout)) for t in (first, second)]
    is_plain = facts[0][3] == "torch.strided" and not (first.is_meta or first.is_nested)
    if facts[0] != facts[1] or not is_plain or hasattr(first, "__tensor_flatten__"):
        return False
    torch = sys.modules["torch"]
    flat = [t.detach().cpu().contiguous().as_strided((t.numel(),), (1,)) for t in (first, second)]
    return bool(torch.equal(*(t.view(torch.uint8) for t in flat)))


def known_classes(value: Any) -> dict[str, type]:
    """Return the classes of records and wrappers in a value, and torch's safe ones, by full name.

    torch's are those that ``torch.serialization.add_safe_globals`` was called with.
    """
    torch = sys.modules.get("torch")
    safe = () if torch is None else torch.serialization.get_safe_globals()
    classes = {full_name(cls): cls for cls in safe if isinstance(cls, type)}
    for each in walk(value):
        if is_wrapper(each):
            classes |= known_classes(each.__tensor_flatten__()[1])
        if is_wrapper(each) or field_names(each) is not None:
            classes[full_name(type(each))] = type(each)
    return classes


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def copy_of_wrapper(value: Any) -> Any:
    """Return a copy of a wrapper in new memory; many lack the operation ``clone``."""
    return mapped(
        value, lambda _, part: copy_of_wrapper(part) if is_wrapper(part) else part.clone()
    )


def refuse_other_parts(new: Any, current: Any, name: str) -> None:
    """Raise CompatibilityError if a loaded wrapper differs from the target's own in its division.

    Such are another class, block size or type of codes. `name`: of the tensor.
    """
    if not is_wrapper(new) or not is_wrapper(current):
        return
    (got, expected) = (
        (
            full_name(type(each)),
            each.__tensor_flatten__()[1],
            [tuple(p.shape) for _, p in children(each) or ()],
        )
        for each in (new, current)
    )
    if not equal_values(got, expected):
        text = (
            f"{name!r} is stored as {got[0]} with {got[1]} and parts of {got[2]}, the target has "
            f"{expected[0]} with {expected[1]} and parts of {expected[2]}: create the target with "
            "the saved class and block size"
        )
        raise CompatibilityError(text, name=name, expected=str(expected), got=str(got))


def class_named(node: Mapping[str, Any], classes: Mapping[str, type]) -> type:
    """Return the class of a wrapper's JSON form; raise UnknownRecordError unless it is known."""
    name = f"{node['module']}.{node['class']}"
    if name not in classes:
        raise UnknownRecordError(
            f"the checkpoint holds a tensor of {name}, which the target lacks: import its library, "
            "or call torch.serialization.add_safe_globals([class]), before the load"
        )
    return classes[name]


def record_of(node: Mapping[str, Any], fields: dict[str, Any], classes: Mapping[str, type]) -> Any:
    """Return the record of a JSON form with the values `fields`, of one of the target's `classes`.

    Raises UnknownRecordError if the target has no record of the stored class and fields.
    """
    name = f"{node['module']}.{node['class']}"
    cls = classes.get(name)
    if (
        cls is not None
        and {*fields} == {*_fields_of(cls)}
        and issubclass(cls, tuple) == (node["form"] == "tuple")
    ):
        return new_record(cls, {field: fields[field] for field in _fields_of(cls)})
    reason = "has no value of this class" if cls is None else "has other fields"
    raise UnknownRecordError(
        f"the checkpoint holds a record of {name} with {', '.join(fields) or 'no fields'}, and the "
        f"target {reason}: pass a target that holds one, such as an optimizer after one step, or "
        "load without into=, which returns a tuple or a dict"
    )


def _fields_of(cls: type) -> Sequence[str]:
    if issubclass(cls, tuple):
        return cls._fields  # type: ignore[attr-defined, no-any-return]
    from dataclasses import fields

    return [field.name for field in fields(cls)]  # type: ignore[arg-type]
