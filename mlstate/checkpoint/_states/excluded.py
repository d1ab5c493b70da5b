"""`exclude=` of a save: states that are not stored; a load keeps the target's own values there."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from .containers import children, rebuilt

if TYPE_CHECKING:
    from collections.abc import Iterable

EXCLUDED = object()  # in a decoded value, in place of one that was not stored


class Excluded:
    """Globs of names: of states and group values of optimizers, and paths of nested values."""

    def __init__(self, patterns: str | Iterable[str] | None) -> None:
        """Keep the patterns, sorted; raise TypeError unless they are str."""
        globs = [patterns] if isinstance(patterns, str) else [*(patterns or ())]
        if not all(isinstance(pattern, str) for pattern in globs):
            raise TypeError(f"exclude must be a str or several, got {patterns!r}")
        self.patterns = sorted(set(globs))  # in the same order on all ranks
        self._used: set[str] = set()

    def matches(self, name: str) -> bool:
        """Return whether a name is excluded, and note the patterns that match it."""
        from fnmatch import fnmatchcase

        used = {pattern for pattern in self.patterns if fnmatchcase(name, pattern)}
        self._used |= used
        return bool(used)

    @property
    def used(self) -> bytes:
        """For each pattern a byte: 1 if a name has matched it, else 0."""
        return bytes(pattern in self._used for pattern in self.patterns)

    def refuse_unused(self, used: Iterable[bytes]) -> None:
        """Raise ValueError for a pattern that no name has matched on any rank.

        `used`: of the ranks.
        """
        for pattern, *matched in zip(self.patterns, *used, strict=True):
            if not any(matched):
                raise ValueError(
                    f"exclude= has {pattern!r}, which matches no state of an optimizer, such as "
                    "'fc.weight.projector', no value of its groups, such as "
                    "'param_groups.0.helper', and no path in a nested state, such as "
                    "'scheduler.after'"
                )


NONE_EXCLUDED = Excluded(None)


def fill_excluded(value: Any, current: Any) -> Any:
    """Return a decoded value with the target's own values in place of those that were not stored.

    Without such a value in `current`, a dict lacks the key, and other containers have None.
    """
    inner = children(value)
    if inner is None:
        return value
    values = dict(children(current) or ())
    pairs = [
        (
            key,
            values.get(key, EXCLUDED) if each is EXCLUDED else fill_excluded(each, values.get(key)),
        )
        for key, each in inner
    ]
    if isinstance(value, dict):
        new = copy.copy(value)
        new.clear()
        for key, each in pairs:
            if each is not EXCLUDED:
                new[key] = each
        return new
    return rebuilt(value, [None if each is EXCLUDED else each for _, each in pairs])
