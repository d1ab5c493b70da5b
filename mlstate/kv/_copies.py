"""Copies and pickles of cache classes: by value, with the class and attributes of a subclass."""

from __future__ import annotations

import copyreg
from typing import Any


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
