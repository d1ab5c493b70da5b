"""`copy` and pickle of cache classes and their subclasses; names of one array stay shared."""

from __future__ import annotations

import copyreg
from typing import Any

from .._common.arrays import copy_of, is_torch


class CopiedByValue:
    """Base of cache classes: pickles have the content, and the attributes that a subclass added.

    A cache class derives from it directly and overrides `_content`. Loading does not call the
    constructor of a subclass, which may have other parameters.
    """

    __slots__ = ()

    def _content(self) -> tuple[object, ...]:
        """Return the arguments of `_restore`."""
        raise NotImplementedError

    def _restore(self, *content: object) -> None:
        """Set everything but added attributes. Default: call the constructor of the cache class."""
        _cache_class(self).__init__(self, *content)  # type: ignore[misc]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a class without constructor arguments, and what `__setstate__` takes."""
        state = self._content(), attributes_of(self)
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]

    def __setstate__(self, state: Any) -> None:
        content, attributes = state
        self._restore(*content)
        set_attributes(self, attributes)


def _cache_class(instance: object) -> type:
    """Return the class of `instance`, or its base, that derives from `CopiedByValue` directly.

    A subclass of a cache class does not derive from it directly.
    """
    return next(cls for cls in type(instance).__mro__ if CopiedByValue in cls.__bases__)


def attributes_of(instance: object) -> dict[str, Any]:
    """Return the attributes of `instance` by name, without the slots of its cache class.

    So they are those that a subclass, or its caller, added.
    """
    # the attributes as a dict or None, and if slots are set, a pair of these and of the slots
    state: Any = object.__getstate__(instance)
    members, slots = state if isinstance(state, tuple) else (state, None)
    own_slots = set(getattr(_cache_class(instance), "__slots__", ()))
    added = {name: value for name, value in (slots or {}).items() if name not in own_slots}
    return {**(members or {}), **added}


def set_attributes(instance: object, attributes: dict[str, object]) -> None:
    """Set attributes by name on `instance`, also if its class forbids it, as frozen classes do."""
    for name, value in attributes.items():
        object.__setattr__(instance, name, value)


def _memory_of(array: Any) -> tuple[object, ...]:
    """Return what identifies the elements of an array: equal for two views of the same ones."""
    if is_torch(array):
        return array.device, array.data_ptr(), array.shape, array.stride(), array.dtype
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype


def shared_arrays(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays, with one object for all names whose elements are the same.

    So copies of them share their elements too. Tensors that are part of an autograd graph are
    detached, because torch does not copy them deeply.
    """
    objects: dict[tuple[Any, ...], Any] = {}
    for array in arrays.values():
        is_result = is_torch(array) and not array.is_leaf
        objects.setdefault(_memory_of(array), array.detach() if is_result else array)
    return {name: objects[_memory_of(array)] for name, array in arrays.items()}


def copied_arrays(arrays: dict[str, object]) -> dict[str, Any]:
    """Return copies of arrays by name; names whose arrays have the same elements get one copy."""
    shared = shared_arrays(arrays)
    by_id = {id(array): array for array in shared.values()}  # each object once
    copies = {key: copy_of(array) for key, array in by_id.items()}
    return {name: copies[id(array)] for name, array in shared.items()}
