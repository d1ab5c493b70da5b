"""`names=`: tensors chosen by name, layer or glob; error for a name without a match."""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

GLOB = re.compile(r"[*?\[]")


def listed_names(names: str | Iterable[str] | None) -> list[str] | None:
    """Return the caller's `names`, one or several, as a list; None for None.

    Raises TypeError for names that are not str.
    """
    if names is None:
        return None
    if not hasattr(names, "__iter__"):
        raise TypeError(f"names must be a str or a sequence of str, got {type(names).__name__}")
    listed = [names] if isinstance(names, str) else list(names)
    for name in listed:
        if not isinstance(name, str):
            raise TypeError(f"names must be str, got {type(name).__name__}")
    return listed


def _compile_glob(name: str, state: bool) -> re.Pattern[str]:
    """Return a pattern for keys that match the glob `name`.

    `state`: match also keys that continue such a key with a dot and the name of a state.
    """
    import fnmatch

    # `translate` ends its pattern with \Z or \z, which the suffix must precede.
    suffix = r"(?:\.[^.]*)?" if state else ""
    glob = re.sub(r"\\[Zz]$", "", fnmatch.translate(name))
    return re.compile(rf"(?s:{glob}{suffix})\Z")


def _find_named(ordered: list[str], name: str) -> list[str]:
    """Return the key with exactly this name and the keys of the layer with this name.

    `ordered`: all keys, sorted.
    """
    at = bisect_left(ordered, name)
    exact = ordered[at : at + 1] if ordered[at : at + 1] == [name] else []
    # "/" is the successor of "."
    return exact + ordered[bisect_left(ordered, f"{name}.") : bisect_left(ordered, f"{name}/")]


class Names:
    """The requested names, resolved against the existing tensors.

    A name is a tensor, or a layer: the keys that continue the name with a dot. If neither
    section has such a key, the name may be a glob. `listed` is None to select everything;
    `sections` are all existing keys, by section.
    """

    def __init__(self, listed: list[str] | None, *sections: list[str]) -> None:
        """Find out which of the listed names are globs; the class describes the parameters."""
        self.listed = listed
        globs = list(filter(GLOB.search, listed or ()))
        ordered = [sorted(keys) for keys in sections if globs]
        self._globs = {name for name in globs if not any(_find_named(o, name) for o in ordered)}

    def select(self, keys: list[str], section: int) -> tuple[list[str], set[str]]:
        """Return the selected ones of `keys`, and the listed names that select at least one.

        `section`: 1 for the optimizer, whose states are selected by globs of parameters too.
        Without listed names, all keys are selected and the second result is empty.
        """
        if self.listed is None:
            return keys, set()
        ordered = sorted(keys)
        chosen: set[str] = set()
        used = set()
        for name in self.listed:
            if name in self._globs:
                matches = list(filter(_compile_glob(name, section == 1).match, keys))
            else:
                matches = _find_named(ordered, name)
            if matches:
                used.add(name)
                chosen.update(matches)
        return list(filter(chosen.__contains__, keys)), used


ALL_NAMES = Names(None)
