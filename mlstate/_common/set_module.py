"""Make public names report the module that users import them from."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any, ForwardRef, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Thing = TypeVar("Thing", bound="Callable[..., Any]")


def set_module(module: str) -> Callable[[Thing], Thing]:
    """Return a decorator that sets ``__module__`` of a class, its methods and nested classes.

    Pickles name a class or function by its module. A public name that is defined in a private
    file needs this decorator, so that pickles still load after the file is renamed. The
    decorator comes first, above `dataclass` and others. If several modules export the name, pass
    the one that documents it: never the top level, unless no other module exports the name.
    """

    def decorate(thing: Thing) -> Thing:
        _set_module_of(thing, thing.__module__, module)
        return thing

    return decorate


def _set_module_of(thing: Any, old: str, new: str) -> None:
    thing.__module__ = new
    if not isinstance(thing, type):
        return
    for name, hint in thing.__annotations__.items():  # resolve their names in the old module
        if isinstance(hint, str):
            thing.__annotations__[name] = ForwardRef(hint, module=old, is_class=True)
        elif isinstance(hint, ForwardRef):
            hint.__forward_module__ = old
    for member in vars(thing).values():
        member = getattr(member, "__func__", member)  # of a class method or static method
        if isinstance(member, FunctionType | type) and member.__module__ == old:
            _set_module_of(member, old, new)
