"""`Snapshot`: a moment that a `CacheState` can go back to; public through `mlstate.kv`."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, NoReturn

from .._common.arrays import (
    is_torch,
    names_sharing_memory,
    overlaps_itself,
    shares_elements,
)
from .._common.set_module import set_module
from .._common.text import bytes_text
from ._cache_spec import CacheEntry, CacheSpec, entry_error
from ._copies import copied_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping


class History:
    """How far the length of a `CacheState` fell since each of its snapshots.

    If it fell below the length at a snapshot, other tokens may be in the positions of that one.
    """

    __slots__ = ("_lows", "_taken")

    def __init__(self) -> None:
        self._taken = 0
        # Number of the newest snapshot at that time, and the lowest length from it until now; both
        # increase along the list. `advance` never lowers the length and adds no item.
        self._lows: list[tuple[int, int]] = []

    def take(self) -> int:
        """Count a new snapshot, and return its number, from 1 on."""
        self._taken += 1
        return self._taken

    def note_length(self, length: int) -> None:
        """Record `length`, the current number of tokens, which may be lower than before."""
        # A low that is not higher than earlier ones replaces them.
        while self._lows and self._lows[-1][1] >= length:
            self._lows.pop()
        if not self._lows or self._lows[-1][0] < self._taken:
            self._lows.append((self._taken, length))

    def lowest_since(self, number: int) -> int | None:
        """Return the lowest length since the snapshot `number`, or None if none was recorded."""
        return next((length for snapshot, length in self._lows if snapshot >= number), None)


@set_module("mlstate.kv")
class Snapshot:
    """A moment that a `CacheState` can go back to; `CacheState.snapshot` returns one.

    Attributes
    ----------
    length : int
        Number of tokens of the cache at that moment.
    nbytes : int
        Bytes of the copied arrays.

    Notes
    -----
    A snapshot belongs to its `CacheState`. It cannot be copied or pickled.
    """

    __slots__ = ("_arrays", "_history", "_identity", "_number", "length", "nbytes")

    length: int
    nbytes: int
    _arrays: dict[str, object]
    _history: History  # of its state
    _identity: object  # of the arrays of its state
    _number: int

    def __init__(self) -> None:
        raise TypeError("a Snapshot is created by CacheState.snapshot")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Snapshot cannot be copied or pickled, because it belongs to one CacheState: copy or "
            "pickle the CacheState"
        )

    def __repr__(self) -> str:
        size = bytes_text(self.nbytes)
        return f"Snapshot({self.length:,} tokens, {len(self._arrays):,} arrays copied: {size})"


def is_copied(entry: CacheEntry) -> bool:
    """Return whether a snapshot copies an entry, because later tokens overwrite earlier ones."""
    return entry.kind not in ("full", "quantized")


def new_snapshot(
    spec: CacheSpec, arrays: dict[str, object], length: int, history: History, identity: object
) -> Snapshot:
    """Return a snapshot with copies of those arrays that later tokens overwrite.

    `spec`, `arrays`, `length`, `history`: the attributes of the cache. `identity`: an object that
    the cache replaces together with its arrays, to detect an outdated snapshot.
    """
    changing = {name: arrays[name] for e in spec if is_copied(e) for name in e.arrays}
    snapshot = object.__new__(Snapshot)
    snapshot.length = length
    snapshot._arrays = copied_arrays(changing)
    snapshot.nbytes = sum(entry.nbytes for entry in spec if is_copied(entry))
    snapshot._history, snapshot._identity = history, identity
    snapshot._number = history.take()
    return snapshot


def check_writable(entry: CacheEntry, array: Any) -> None:
    """Raise CompatibilityError unless all elements of an entry's array can be overwritten.

    Reasons are a read-only array, and elements that share memory, as in an expanded tensor.
    """
    if is_torch(array):
        if array.device.type == "meta":
            text = "a meta tensor has no data to restore"
            raise entry_error(entry.name, text, "data", "meta")
        kind, is_readonly = "tensor", False
    else:
        kind, is_readonly = "array", not array.flags.writeable
    text = "the array is read-only, so it is not restored"
    if not is_readonly and overlaps_itself(array):
        text = f"elements of the {kind} share memory, so they cannot be restored"
    elif not is_readonly:
        return
    raise entry_error(entry.name, text, "a writable array", "another array")


def check_separate(arrays: Mapping[str, Any]) -> None:
    """Raise CompatibilityError if two arrays share elements: writing one would change the other."""
    names = sorted(names_sharing_memory(arrays))
    for first, second in combinations(names, 2):
        if shares_elements(arrays[first], arrays[second]):
            text = f"its elements are those of {second!r}, too, so they cannot be written"
            raise entry_error(first, text, "separate memory", "shared memory")
