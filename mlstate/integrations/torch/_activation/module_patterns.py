"""Blocks of a torch model by name patterns such as ``layers.*``; nested blocks are refused."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def modules_named(module: torch.nn.Module, pattern: str) -> list[tuple[str, object]]:
    """Return names and modules whose names match a pattern, such as ``layers.*``.

    Parts between dots are matched one by one, and ``*`` matches a whole part or a piece of one.
    """
    parts = pattern.split(".")
    matches = []
    for name, child in module.named_modules(remove_duplicate=False):
        own_parts = name.split(".")
        if name and len(own_parts) == len(parts) and all(map(fnmatchcase, own_parts, parts)):
            matches.append((name, child))
    return matches


def refuse_overlap(blocks: Sequence[tuple[str, object]]) -> None:
    """Raise ValueError if a block is inside another one; `blocks`: names and blocks."""
    ids = {id(block): name for name, block in blocks}
    for name, block in blocks:
        for path, inner in block.named_modules() if hasattr(block, "named_modules") else ():
            if path and id(inner) in ids and inner is not block:
                raise ValueError(f"blocks overlap: {ids[id(inner)]} is inside {name}")
