"""`__module__` of public names: the module that users import them from."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any, ForwardRef, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Thing = TypeVar("Thing", bound="Callable[..., Any]")


def set_module(module: str) -> Callable[[Thing], Thing]:
    """Return a decorator that sets ``__module__`` of a class, its methods and nested classes.

    A public name needs this decorator if other code can import its private file before, or
    without, the public module: `set_module_of_exports` sets all others. The decorator comes first,
    above `dataclass` and others. If several modules export the name, pass the one that documents
    it: never the top level, unless no other module exports the name.
    """

    def decorate(thing: Thing) -> Thing:
        _set_module_of(thing, thing.__module__, module)
        return thing

    return decorate


def set_module_of_exports(namespace: dict[str, Any]) -> None:
    """Set ``__module__`` of the objects that a public module imports and lists in ``__all__``.

    Pickles name a class or function by its module. They still load after a private file is
    renamed, because they name the public module. Call this after the imports, with `globals`.
    """
    module = namespace["__name__"]
    for name in namespace["__all__"]:
        thing = namespace.get(name)  # None if the module loads it on first use
        if getattr(thing, "__module__", module) != module:
            _set_module_of(thing, thing.__module__, module)


def _set_module_of(thing: Any, old: str, new: str) -> None:
    """Make a class or function, and its members, appear as defined in the module `new`.

    `old`: the module that defines it; members of other modules stay.
    """
    thing.__module__ = new
    if not isinstance(thing, type):
        return
    # type hints that are texts are resolved in the module that defines them
    for name, hint in thing.__annotations__.items():
        if isinstance(hint, str):
            thing.__annotations__[name] = ForwardRef(hint, module=old, is_class=True)
        elif isinstance(hint, ForwardRef):
            hint.__forward_module__ = old
    for member in vars(thing).values():
        member = getattr(member, "__func__", member)  # of a class method or static method
        if isinstance(member, FunctionType | type) and member.__module__ == old:
            _set_module_of(member, old, new)
