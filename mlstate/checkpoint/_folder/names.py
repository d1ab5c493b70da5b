"""Names of a checkpoint's files; files with other names are never changed or deleted."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

MANIFEST = "manifest.json"
LOCK = "lock"
SECTIONS = ("params", "optim_state", "states")
FOLDERS = (*SECTIONS, "index", "roots")
NEWER = "newer_values"  # in a manifest: mark of a state, group or value that version 2 lacks
MOST_SEQUENCE = (1 << 63) - 1  # of a save
_ROOT = re.compile(r"(\d{8}|[1-9]\d{8,18})\.([0-9a-f]{16})\.json\Z", re.ASCII)
_MARK = ".damaged"  # suffix of a mark, see checkpoint_files.py
_SHARD = re.compile(r".+\.[0-9a-f]{16}-\d+\.safetensors(\.tmp)?\Z", re.ASCII)
_INDEX = re.compile(r"[0-9a-f]{16}\.\d+\.json(\.tmp)?\Z", re.ASCII)
PATTERNS = {**dict.fromkeys(SECTIONS, _SHARD), "index": _INDEX}  # of the files of a save
TEMPORARY = re.compile(r"\.mlstate-[0-9a-f]{16}\.tmp(\.old)?\Z", re.ASCII)


class Root(NamedTuple):
    """A root under ``roots/``."""

    sequence: int
    generation: str
    path: str  # relative to the folder


def root_of(name: str) -> Root | None:
    """Return the root whose file in ``roots/`` has this name; None if no save writes the name."""
    match = _ROOT.match(name)
    if match is None or not 1 <= int(match[1]) <= MOST_SEQUENCE:
        return None
    return Root(int(match[1]), match[2], f"roots/{name}")


def mark_path(root: str) -> str:
    """Return the path of the mark for a damaged step, next to its root."""
    return root.removesuffix(".json") + _MARK


def orphaned_marks(names: Collection[str], roots: Collection[str]) -> list[str]:
    """Return the paths of marks of damaged steps whose root no longer exists.

    `names`: all files in ``roots/``. `roots`: the roots among them, such as
    ``00000001.0123456789abcdef.json``.
    """
    return [
        f"roots/{name}"
        for name in names
        if name.endswith(_MARK)
        and is_checkpoint_file("roots", name)
        and name.removesuffix(_MARK) + ".json" not in roots
    ]


def is_checkpoint_file(part: str, name: str) -> bool:
    """Return whether the file `name` in the subfolder `part` may be one that a save writes.

    `part`: "" for the folder itself, in which any name counts except the lock.
    """
    if part == "":  # manifests, temporary files, units of tiers
        return name not in {"", ".", "..", LOCK}
    if part == "roots":
        name = name.removesuffix(_MARK) + ".json" if name.endswith(_MARK) else name
        return root_of(name) is not None or TEMPORARY.match(name) is not None
    return part in PATTERNS and PATTERNS[part].match(name) is not None


def group_by_part(paths: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the files at `paths`, by their subfolder ("" for the folder itself)."""
    parts: dict[str, list[str]] = {}
    for path in paths:
        part, name = os.path.split(path)
        parts.setdefault(part, []).append(name)
    return parts
