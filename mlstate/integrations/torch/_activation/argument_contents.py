"""Contents of a block's arguments, to notice changes before a recomputation."""

from __future__ import annotations

import enum
import random
import threading
from collections import OrderedDict, deque
from contextlib import suppress
from functools import cache, partial, partialmethod
from itertools import compress, count
from logging import Logger
from operator import length_hint
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from .tensors import version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

_DEPTH = 4  # containers and objects in one another: a cache, its layers, a layer, its attributes
_MOST_ITEMS = 256  # of a container whose items are read; of a larger one, only their number is
_MOST_VALUES = 1_000  # of all arguments
_ARRAY_BYTES = 4_096  # of the largest NumPy array whose elements are read

_CONTAINERS = (OrderedDict, dict, list, tuple, deque, set, frozenset)
_ITERABLES: tuple[Any, ...] = ([], (), range(0), {}, {}.values(), {}.items(), set())
_COUNTED = {type(reversed([])), *(type(iter(values)) for values in _ITERABLES)}  # iterators
_NESTED = {enumerate, filter, map, zip}  # iterators over others

_OPAQUE: tuple[type, ...] = (type, ModuleType, FunctionType, partial, enum.Enum, threading.local)
_OPAQUE += (Logger, PurePath)  # they cache values when they are read

_STATES: dict[type, Callable[[Any], Any]] = {  # of objects that are compared by one value
    # methods are new objects for each access
    MethodType: lambda method: (id(method.__func__), id(method.__self__)),
    BuiltinFunctionType: lambda method: (method.__name__, id(method.__self__)),
    count: repr,
    GeneratorType: lambda iterator: getattr(iterator.gi_frame, "f_lasti", -1),
    **dict.fromkeys(_COUNTED, length_hint),
    np.ndarray: lambda array: hash(array.tobytes()) if array.nbytes <= _ARRAY_BYTES else id(array),
    np.random.Generator: lambda source: hash(repr(source.bit_generator.state)),
    np.random.RandomState: lambda source: hash(
        (source.get_state()[1].tobytes(), *source.get_state()[2:])
    ),
    random.Random: lambda source: hash(source.getstate()),
}


@cache
def _value_types() -> frozenset[type]:
    """Return the types whose values are compared as they are."""
    import torch

    builtins = (bool, int, float, complex, str, type(None), type(Ellipsis))
    return frozenset({*builtins, torch.device, torch.dtype})


@cache
def _stores_in_instance(cls: type) -> bool:
    """Return whether descriptors of a class may store values as attributes: cached properties."""
    names = set(dir(cls))
    is_method = issubclass(cls, (classmethod, partialmethod)) or "__call__" in names
    return "__get__" in names and "__set__" not in names and not is_method


def slots_of(cls: type) -> list[str]:
    """Return the names of the attributes of a class and its bases that are slots."""
    # from the descriptors: a private name such as __items is another one in `__slots__`
    return [
        name
        for base in cls.__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType) and getattr(cls, name, None) is member
    ]


class ArgumentContents:
    """The contents of a block's arguments before its first run, without tensor arguments.

    Attributes and items are read four levels deep, tensors by identity and version. There are only
    weak references to the values, and no methods or properties of theirs are called. Modules and
    functions count by identity.
    """

    def __init__(self, arguments: Mapping[int | str, Any]) -> None:
        """Read the contents; `arguments`: as `arguments_to_compare` returns them."""
        self._before = _read_all(arguments)

    def changes(self, arguments: Mapping[int | str, Any]) -> list[str]:
        """Return the paths of all values that differ now, such as ``cache.layers[0].keys``."""
        paths: list[str] = []
        for name, (now, _) in _read_all(arguments).items():
            before, references = self._before.get(name, (None, []))
            path = name if isinstance(name, str) else f"argument {name + 1}"
            if before is not None and before != now:
                paths += _differences(before, now, path)
            elif any(reference() is None for reference in references):
                paths.append(path)  # another object may have the identity of one that has gone
        return paths


def arguments_to_compare(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    """Return the arguments by position or keyword that may change, but not tensors."""
    return {
        name: value
        for arguments in (enumerate(args), kwargs.items())
        for name, value in arguments
        if not _is_fixed(value) and not (type(value) is tuple and all(map(_is_fixed, value)))
    }


def _is_fixed(value: object) -> bool:
    """Return whether a value is plain or a tensor."""
    import torch

    return type(value) in _value_types() or issubclass(type(value), torch.Tensor)


def _read_all(arguments: Mapping[int | str, Any]) -> dict[int | str, tuple[Any, list[Any]]]:
    """Return, for each argument that can be read, its content and weak references."""
    import torch

    contents = {}
    reader = _Reader()
    with torch._C.DisableTorchFunction():
        for name, value in arguments.items():
            reader.references = []
            with suppress(Exception):  # as if another thread changes it
                (content,) = reader.read_all((value,), _DEPTH)
                contents[name] = content, reader.references
    reader.by_class.clear()  # a reference cycle
    return contents


class _Node(tuple[Any, ...]):
    """Content of a container or object: class, and keys and contents of items and of attributes."""

    __slots__ = ()


class _Reader:
    """Reads the contents of values: equal ones if nothing has changed."""

    def __init__(self) -> None:
        self.references: list[Any] = []
        self._room = _MOST_VALUES
        self._seen: set[int] = set()
        self._value_types = _value_types()
        self.by_class: dict[type, Callable[[Any, int], Any]] = {}

    def read_all(self, values: Iterable[Any], depth: int) -> tuple[Any, ...]:
        """Return the contents of values, to the given depth."""
        value_types, by_class = self._value_types, self.by_class
        return tuple(
            [
                value
                if (cls := type(value)) in value_types
                else (by_class.get(cls) or self._reader_of(cls))(value, depth)
                for value in values
            ]
        )

    def _reader_of(self, cls: type) -> Callable[[Any, int], Any]:
        """Return the function that reads values of a class, from the value and a depth."""
        import torch

        reader: Callable[[Any, int], Any] = self._identity
        if cls in _CONTAINERS:
            reader = partial(self._read_parts, cls, None, (), frozenset())
        elif issubclass(cls, torch.Tensor):
            reader = self._read_tensor
        elif cls in _STATES or cls is torch.Generator:
            reader = partial(_read_state, _STATES.get(cls, _torch_state))
        elif cls in _NESTED:
            reader = self._read_nested
        elif not issubclass(cls, (torch.nn.Module, *_OPAQUE)):
            kind = next((kind for kind in _CONTAINERS if issubclass(cls, kind)), None)
            tables = [vars(base) for base in cls.__mro__]
            table = next((table["__dict__"] for table in tables if "__dict__" in table), None)
            if type(table) not in (GetSetDescriptorType, MemberDescriptorType):  # a property
                table = None
            cached = {
                name
                for table in tables
                for name in compress(table, map(_stores_in_instance, map(type, table.values())))
            }
            slots = slots_of(cls)
            if kind or table or slots:
                reader = partial(self._read_parts, kind, table, slots, cached)
        self.by_class[cls] = reader
        return reader

    def _identity(self, value: Any, _: int) -> int:
        """Return the identity of a value, with a weak reference if its class supports these."""
        if type(value).__weakrefoffset__:
            self.references.append(ref(value))
        return id(value)

    def _read_tensor(self, value: Any, _: int) -> tuple[int, int]:
        self.references.append(ref(value))
        return id(value), version_of(value)

    def _read_nested(self, value: Any, depth: int) -> tuple[Any, ...]:
        """Return the contents of the iterators of another one."""
        return self.read_all(value.__reduce__()[1], depth)

    def _read_parts(
        self, kind: Any, table: Any, slots: Sequence[str], cached: Set[str], value: Any, depth: int
    ) -> Any:
        """Return the contents of a value's items and attributes.

        `kind`: its class of containers, or None. `table`: the descriptor of its ``__dict__``, or
        None. `cached`: names of cached properties, which are left out.
        """
        if depth == 0 or id(value) in self._seen:
            return self._identity(value, depth)
        if kind is not tuple:
            self._seen.add(id(value))
        keys: Any = ()
        parts: list[Any] = []
        if kind is not None:
            keys = kind.__len__(value)
            if keys <= min(_MOST_ITEMS, self._room):
                is_dict = issubclass(kind, dict)
                parts += kind.values(value) if is_dict else kind.__iter__(value)
                keys = tuple(map(self._key, kind.keys(value))) if is_dict else keys
        attributes = {} if table is None else table.__get__(value)
        if not cached.isdisjoint(attributes):
            attributes = {k: v for k, v in attributes.items() if k not in cached}
        if slots:
            attributes = {**attributes, **_slot_values(value, slots)}
        names = tuple(attributes)
        parts += attributes.values()
        self._room -= len(parts)
        if self._room < 0:
            return self._identity(value, depth), len(parts)
        return _Node((type(value).__name__, keys, names, self.read_all(parts, depth - 1)))

    def _key(self, key: Any) -> Any:
        """Return a key of a dict if it is plain, or a tuple of plain values; else its identity."""
        parts = key if type(key) is tuple else (key,)
        return key if self._value_types.issuperset(map(type, parts)) else id(key)


def _read_state(read: Callable[[Any], Any], value: Any, _: int) -> Any:
    return read(value)


def _torch_state(source: Any) -> int:
    return hash(source.get_state().numpy().tobytes())


def _slot_values(value: Any, slots: Sequence[str]) -> dict[str, Any]:
    """Return the attributes of an object that are slots and set."""
    attributes = {}
    for name in slots:
        with suppress(AttributeError):
            attributes[name] = object.__getattribute__(value, name)
    return attributes


def _differences(before: Any, now: Any, path: str) -> Iterator[str]:
    """Yield the paths of the values that differ between two contents; `path`: of both."""
    if not (type(before) is type(now) is _Node and before[0] == now[0]):
        yield path
        return
    parts_before, parts_now = _parts(before), _parts(now)
    common = parts_before.keys() & parts_now.keys()
    are_named = not isinstance(before[1], int) and not isinstance(now[1], int)
    if before[1:3] != now[1:3] and not (are_named and parts_before.keys() ^ parts_now.keys()):
        yield path  # another length or order
        return
    for label in {**parts_before, **parts_now}:
        if label not in common:
            yield path + label
        elif parts_before[label] != parts_now[label]:
            yield from _differences(parts_before[label], parts_now[label], path + label)


def _parts(node: _Node) -> dict[str, Any]:
    """Return the contents of items and attributes by label, such as ``[0]`` and ``.keys``."""
    _, keys, names, contents = node
    items = range(len(contents) - len(names)) if isinstance(keys, int) else keys
    labels = [*(f"[{key!r:.40}]" for key in items), *(f".{name}" for name in names)]
    return dict(zip(labels, contents, strict=True))
