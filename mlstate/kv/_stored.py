"""Caches in a checkpoint (``states=``): as plain values, back, and loaded into a given cache."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from .._common.arrays import is_torch
from .._common.backend import TensorBackend, backend_of
from .._common.changes import UndoLog
from .._common.dtypes import name_of
from ..errors import CompatibilityError, UnstorableError
from ._cache_spec import CacheEntry, CacheSpec
from ._cache_state import CacheState
from ._kv_state import KVState
from ._rolling import RollingKVState
from ._snapshot import check_separate, check_writable

_CLASSES: dict[str, type] = {cls.__name__: cls for cls in (KVState, RollingKVState, CacheState)}


def refuse_unstored(cache: Any, where: str) -> None:
    """Raise UnstorableError for a cache with content that `cache_values` does not return.

    An integration sets the reason as the attribute `_unstored` of its cache. `where`: place of the
    cache in the caller's data, which begins the message.
    """
    text = getattr(cache, "_unstored", "")
    if text:
        raise UnstorableError(f"{where}: {text}")


def cache_values(cache: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of a cache's class, and its content as values and arrays by name.

    `cache`: a `CacheState`, `KVState` or `RollingKVState`; of a subclass, the name is the one of
    its base. Its arrays are not copied, except the slots of a `RollingKVState`.
    """
    name = _class_name(cache)
    if isinstance(cache, CacheState):
        entries = [_entry_values(entry) for entry in cache.spec]
        return name, {"entries": entries, "arrays": dict(cache.arrays), "length": cache.length}
    if isinstance(cache, KVState):
        array, capacity, _, seq_axis = cache._content()
        return name, {"array": array, "capacity": capacity, "seq_axis": seq_axis}
    slots, _, sinks, seq_axis, oldest, next_position, evicted = cache._content()
    counts = {"oldest": oldest, "next_position": next_position, "evicted": evicted}
    return name, {"array": slots, "sinks": sinks, "seq_axis": seq_axis, **counts}


def _class_name(cache: Any) -> str:
    """Return the name in `_CLASSES` of a cache's class or of the base of that class.

    `from_cache` of an integration returns a subclass.
    """
    return next(name for name, cls in _CLASSES.items() if isinstance(cache, cls))


def _entry_values(entry: CacheEntry) -> dict[str, Any]:
    """Return the parameters of an entry that differ from their defaults, as plain values by name.

    `CacheEntry` takes them as keywords.
    """
    values = {each.name: getattr(entry, each.name) for each in fields(entry)}
    values["shape"] = list(entry.shape)
    defaults = {each.name: each.default for each in fields(entry)}
    return {name: value for name, value in values.items() if value != defaults[name]}


def cache_from_values(name: str, values: dict[str, Any]) -> Any:
    """Return a new cache from the class name and the `values` that `cache_values` returned.

    A `CacheState` uses their arrays, the other classes copy theirs. Raises KeyError, TypeError or
    ValueError if the values do not describe a cache, and MemoryError if its capacity cannot be
    reserved.
    """
    cls = _CLASSES[name]
    if cls is CacheState:
        spec = CacheSpec(CacheEntry(**entry) for entry in values["entries"])
        return CacheState(spec, values["arrays"], values["length"])
    array = values["array"]
    if not isinstance(array, np.ndarray):
        raise TypeError(f"the array of a {name} is a {type(array).__name__}")
    if cls is KVState:
        content = array, values["capacity"], array.dtype, values["seq_axis"]
    else:
        counts = (values[each] for each in ("oldest", "next_position", "evicted"))
        content = array, array.dtype, values["sinks"], values["seq_axis"], *counts
    cache: Any = object.__new__(cls)
    cache._restore(*content)
    return cache


def check_cache(target: Any, cache: Any, where: str) -> None:
    """Raise CompatibilityError unless the content of `cache` can be written into `target`.

    `cache`: one from a checkpoint. `where`: place of `target` in the caller's data, which begins
    the message. Raises UnstorableError for a target with content that checkpoints do not have.
    """
    refuse_unstored(target, where)
    of_target, of_cache = _facts_of(target), _facts_of(cache)
    for name in of_target:
        if of_target[name] != of_cache.get(name):
            text = f"the target has the {name} {of_target[name]}"
            raise _mismatch(where, text, of_target[name], of_cache.get(name))
    if isinstance(target, CacheState):
        if len(of_cache) != len(of_target):  # it has the target's entries, and others
            raise _mismatch(where, "another number of entries", len(of_target), len(of_cache))
        for entry in target.spec:
            for name in entry.arrays:
                check_writable(entry, target.arrays[name])
        check_separate(target.arrays, cache.arrays)
    elif isinstance(target, KVState) and cache.seq_length > target.capacity:
        text = f"call reserve({cache.seq_length}) before: the target has room for {target.capacity}"
        raise _mismatch(where, text, target.capacity, f"{cache.seq_length} positions")


def _mismatch(where: str, text: str, expected: Any, got: Any) -> CompatibilityError:
    error = CompatibilityError(f"{where}: {text}, the checkpoint has {got}")
    error.name, error.expected, error.got = where, expected, got
    return error


def _facts_of(cache: Any) -> dict[str, Any]:
    """Return properties of a cache by name: a cache that overwrites it in place must have the same.

    Of a `CacheState` these are the entries. The length of a `KVState` may differ.
    """
    facts: dict[str, Any] = {"class": _class_name(cache)}
    if isinstance(cache, CacheState):
        return facts | {f"entry {entry.name!r}": entry for entry in cache.spec}
    shape: list[int | str] = list(cache.shape)
    if isinstance(cache, KVState):
        shape[cache.seq_axis] = "any"
    else:
        facts["sinks"] = cache.sinks
    return facts | {"shape": shape, "axis": cache.seq_axis, "dtype": name_of(cache.dtype)}


def overwrite_cache(target: Any, cache: Any) -> None:
    """Write the content of `cache` into the arrays of `target`, and set its number of tokens.

    Call `check_cache` before. After an exception the target has no token.
    """
    if isinstance(target, CacheState):
        values = {
            name: _as_library_of(array, cache.arrays[name]) for name, array in target.arrays.items()
        }
        counts = cache._cache._asdict()
        del counts["arrays"], counts["identity"]  # those of the target stay
        target._overwrite(values, 0, **counts)
    elif isinstance(target, KVState):
        log = UndoLog("the cache was not loaded", "Create a new cache")
        log.note("the number of positions", partial(target.resize, 0))

        def write() -> None:
            target.resize(cache.seq_length)
            target.array[...] = cache.array

        log.run(write)
    else:
        slots, _, _, _, *counts = cache._content()
        target._buffer.fill(slots.astype(target.dtype, copy=False), *counts)


def _as_library_of(target: Any, source: Any) -> Any:
    """Return `source` as a torch tensor if `target` is one, else as a NumPy array; not copied."""
    if is_torch(source) == is_torch(target):
        return source
    backend = backend_of(target if is_torch(target) else source, TensorBackend)
    convert = backend.tensors_of if is_torch(target) else backend.arrays_of
    return convert({"": source})[""]
