"""What `names=` means: tensors, layers, globs."""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

GLOB = re.compile(r"[*?\[]")


def listed_names(names: str | Iterable[str] | None) -> list[str] | None:
    """Return what was given as `names`, one or several, as a list."""
    if names is None:
        return None
    if not hasattr(names, "__iter__"):
        raise TypeError(f"names must be a str or several, got {type(names).__name__}")
    listed = [names] if isinstance(names, str) else list(names)
    for name in listed:
        if not isinstance(name, str):
            raise TypeError(f"names must be str, got {type(name).__name__}")
    return listed


def _glob(name: str, state: bool) -> re.Pattern[str]:
    """What matches a glob, and states of what matches."""
    import fnmatch

    suffix = r"(?:\.[^.]*)?" if state else ""
    glob = re.sub(r"\\[Zz]$", "", fnmatch.translate(name))
    return re.compile(rf"(?s:{glob}{suffix})\Z")


def _called(ordered: list[str], name: str) -> list[str]:
    """Keys of that very name, and of the layer of that name, out of sorted ones."""
    at = bisect_left(ordered, name)
    found = ordered[at : at + 1] if ordered[at : at + 1] == [name] else []
    # "/" comes next to "."
    return found + ordered[bisect_left(ordered, f"{name}.") : bisect_left(ordered, f"{name}/")]


class Names:
    """Names that were asked for, and how each is meant among the tensors that there are.

    A name is that of a tensor, or of a layer: what goes on with a dot. Where nothing of either
    section has that very name, it may be a glob.

    Parameters
    ----------
    listed : list of str or None
        The names; None means everything.
    *sections : list of str
        Keys of all sections that there are.
    """

    def __init__(self, listed: list[str] | None, *sections: list[str]) -> None:
        self.listed = listed
        globs = list(filter(GLOB.search, listed or ()))
        ordered = [sorted(keys) for keys in sections if globs]
        self._globs = {name for name in globs if not any(_called(o, name) for o in ordered)}

    def select(self, keys: list[str], section: int) -> tuple[list[str], set[str]]:
        """Return those of some keys that are meant, and the names that mean any of them."""
        if self.listed is None:
            return keys, set()
        ordered = sorted(keys)
        chosen: set[str] = set()
        used = set()
        for name in self.listed:
            if name in self._globs:
                found = list(filter(_glob(name, section == 1).match, keys))
            else:
                found = _called(ordered, name)
            if found:
                used.add(name)
                chosen.update(found)
        return list(filter(chosen.__contains__, keys)), used
