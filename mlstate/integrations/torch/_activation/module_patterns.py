"""Selection of a model's blocks by name patterns."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def modules_named(module: Any, pattern: str) -> list[tuple[str, Any]]:
    """Return matching names and modules; patterns match part by part, and ``*`` one part."""
    parts = pattern.split(".")
    found = []
    for name, child in module.named_modules(remove_duplicate=False):
        mine = name.split(".")
        if name and len(mine) == len(parts) and all(map(fnmatchcase, mine, parts)):
            found.append((name, child))
    return found


def refuse_overlap(found: Sequence[tuple[str, Any]]) -> None:
    """Raise ValueError if a block is inside another one."""
    ids = {id(block): name for name, block in found}
    for name, block in found:
        for path, inner in block.named_modules() if hasattr(block, "named_modules") else ():
            if path and id(inner) in ids and inner is not block:
                raise ValueError(f"blocks overlap: {ids[id(inner)]} is inside {name}")
