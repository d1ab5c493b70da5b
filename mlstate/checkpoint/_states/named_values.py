"""Paths and members of enums as JSON, without pickle.

A member of an enum is stored by name. It is restored only if the program has imported the enum's
module: no name of a file causes an import, and no code of the module is called, except that of a
`Flag` for a combination of its members.
"""

from __future__ import annotations

import sys
from enum import Enum, Flag
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import PurePath


@cache
def _path_classes() -> dict[str, type[PurePath]]:
    """Return the classes of pathlib by name; few programs that load keep paths in their states."""
    from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath

    return {cls.__name__: cls for cls in (PosixPath, WindowsPath, PurePosixPath, PureWindowsPath)}


def path_node(value: object) -> dict[str, Any] | None:
    """Return the JSON form of a path of pathlib; None for other values and for subclasses."""
    cls = type(value)
    if not cls.__module__.startswith("pathlib") or _path_classes().get(cls.__name__) is not cls:
        return None
    return {"$": "path", "class": cls.__name__, "value": str(value)}


def path_of(node: dict[str, Any]) -> Any:
    """Return a path; a concrete path of another system becomes one of this system."""
    from pathlib import Path

    cls = _path_classes()[node["class"]]
    return (Path if issubclass(cls, Path) else cls)(str(node["value"]))


def _imported_enum(module: str, name: str) -> type[Enum] | None:
    """Return the enum with the qualified name `name` of a module; None unless it is imported."""
    holder: object = sys.modules.get(module)
    for part in name.split("."):
        holder = getattr(holder, "__dict__", {}).get(part)
    return holder if isinstance(holder, type) and issubclass(holder, Enum) else None


def enum_node(value: object, where: str) -> dict[str, Any] | None:
    """Return the JSON form of an enum's member; None for other values.

    `where`: path of the value, for errors. Raises TypeError for a member that `enum_of` could not
    find.
    """
    if not isinstance(value, Enum):
        return None
    cls = type(value)
    node: dict[str, Any] = {"$": "enum", "module": cls.__module__, "class": cls.__qualname__}
    if _imported_enum(cls.__module__, cls.__qualname__) is not cls:
        raise TypeError(
            f"{where} is a member of {cls.__module__}.{cls.__qualname__}, an enum that is not "
            "defined at the top of its module: define it there, or store the member's name"
        )
    if cls.__members__.get(value.name or "") is value:
        return {**node, "name": value.name}
    # A combination of flags has no name.
    if isinstance(value, Flag) and type(value.value) is int:
        return {**node, "value": value.value}
    raise TypeError(f"{where} is {value!r}, which is not a member of its enum by name")


def enum_of(node: dict[str, Any]) -> Any:
    """Return the member of an enum from its JSON form; raise ImportError if it is not in memory.

    The caller must import the module: nothing in a file causes an import.
    """
    cls = _imported_enum(node["module"], node["class"])
    if cls is None:
        raise ImportError(
            f"the checkpoint holds a member of the enum {node['module']}.{node['class']}: import "
            f"{node['module']} before you load it",
            name=node["module"],
        )
    if "name" not in node:
        if not issubclass(cls, Flag) or type(node["value"]) is not int:
            raise TypeError(f"{node['value']!r} is not a combination of flags")
        return cls(node["value"])
    if node["name"] not in cls.__members__:
        name = f"{node['module']}.{node['class']}"
        raise ImportError(
            f"the checkpoint holds the member {node['name']!r}, which the enum {name} lacks: give "
            "it a member of this name before you load it",
            name=node["module"],
        )
    return cls.__members__[node["name"]]
