"""Copies and pickles of cache classes: by value, with the class and attributes of a subclass."""

from __future__ import annotations

import copyreg
from typing import Any

from .._common.arrays import copy_of, is_torch


def reduce_instance(instance: Any, base: type, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the result of `__reduce__`: a call of `base`, or the state of a subclass.

    `base` accepts the arguments. The constructor of a subclass may differ, so it is not called:
    `__setstate__` receives the arguments and the attributes.
    """
    if type(instance) is base:
        return base, arguments
    return reduce_by_state(instance, base, arguments)


def reduce_by_state(instance: Any, base: type, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the result of `__reduce__` for a class whose `__setstate__` sets everything."""
    state = (arguments, attributes_of(instance, base))
    return copyreg.__newobj__, (type(instance),), state  # type: ignore[attr-defined]


def attributes_of(instance: Any, base: type) -> dict[str, Any]:
    """Return the attributes that a subclass of `base` or its caller added."""
    state: Any = object.__getstate__(instance)
    members, slots = state if isinstance(state, tuple) else (state, None)
    own = set(getattr(base, "__slots__", ()))
    added = {name: value for name, value in (slots or {}).items() if name not in own}
    return {**(members or {}), **added}


def set_attributes(instance: Any, attributes: dict[str, Any]) -> None:
    """Set the attributes of another instance."""
    for name, value in attributes.items():
        object.__setattr__(instance, name, value)


def _memory_of(array: Any) -> tuple[Any, ...]:
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


def copied_arrays(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return copies by name; names that share their elements get one copy."""
    shared = shared_arrays(arrays)
    copies = {id(array): copy_of(array) for array in {id(a): a for a in shared.values()}.values()}
    return {name: copies[id(array)] for name, array in shared.items()}
