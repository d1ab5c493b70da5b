"""Garbage collection after a commit of many ranks: each rank deletes its own files.

The index of a rank names only files of that rank, and only the same rank's index of a later root
may name the same files. So each rank finds its garbage in its own indexes, without reading the
indexes of other ranks.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ... import _core
from ..._common.store_error import format_error
from ...errors import FormatError
from . import folder as _folder
from .manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Iterable

_OURS = "mlstate "  # prefix of `writer` if file names follow this scheme


class Generation(NamedTuple):
    """A save that a root names or named."""

    generation: str
    world_size: int


def read_all_roots(folder: str) -> list[Manifest]:
    """Return all roots of a folder, without duplicate generations.

    Raises FormatError if another program wrote a root: the needed files are unknown then.
    """
    found: dict[str, Manifest] = {}
    for name in (*(root.path for root in _folder.list_roots(folder)), _folder.MANIFEST):
        with suppress(FileNotFoundError):
            manifest = _folder.read_manifest(folder, name)
            if not manifest.writer.startswith(_OURS):
                raise FormatError(f"{folder}/{name}: written by {manifest.writer[:80]!r}")
            found[manifest.generation] = manifest
    return list(found.values())


def generations_to_delete(
    before: Iterable[Manifest], now: Iterable[Manifest]
) -> dict[str, list[Generation]]:
    """Return the deleted and the kept generations, as a message to all ranks."""
    worlds = {m.generation: m.world_size for m in before}
    kept = {m.generation: m.world_size for m in now}
    gone = {name: world for name, world in worlds.items() if name not in kept}
    return {
        "gone": [Generation(*one) for one in gone.items()],
        "kept": [Generation(*one) for one in kept.items()],
    }


def _index_files(folder: str, which: Generation, rank: int) -> tuple[str, set[str]]:
    """Return the path of one rank's index, and the files that the index names."""
    path = f"index/{which.generation}.{rank}.json"
    data = _folder.read_bytes(folder, path)
    merged = _core.MergedIndex((data,), (os.path.join(folder, path),))
    [(generation, said, world_size, *_)] = merged.heads()
    if (generation, said, world_size) != (which.generation, rank, which.world_size):
        text = f"{path}: the index of another checkpoint"
        raise format_error(text, os.path.join(folder, path))
    return path, set(merged.files())


def delete_generations(folder: str, manifests: list[Manifest]) -> None:
    """Delete the files of deleted roots that no other root needs, of all ranks."""
    plan = generations_to_delete(manifests, read_all_roots(folder))
    delete_own_files(folder, 0, 1, plan["gone"], plan["kept"])


def delete_own_files(
    folder: str, rank: int, world_size: int, gone: list[Generation], kept: list[Generation]
) -> list[str]:
    """Delete a rank's files of deleted generations; low ranks also handle missing ranks.

    A rank that does not exist in the current group is handled by the rank with its number
    modulo `world_size`. If an index cannot be read, no file of its rank is deleted.
    """
    deleted = []
    worlds = [which.world_size for which in gone]
    for mine in range(rank, max(worlds, default=0), world_size):
        needed: set[str] = set()
        for which in kept:
            if mine < which.world_size:
                needed |= _index_files(folder, which, mine)[1]
        dead: list[str] = []
        for which in gone:
            if mine < which.world_size:
                path, files = _index_files(folder, which, mine)
                dead += sorted(files - needed)
                dead.append(path)
        own = f"-{mine}.safetensors"
        dead = [name for name in dict.fromkeys(dead) if name.endswith((own, ".json"))]
        deleted += _folder.remove_files(folder, dead)
    # no later save looks for files that reappear after a power failure
    for part in sorted({os.path.dirname(name) for name in deleted}):
        _folder.sync(folder, part)
    return deleted
