"""`CacheState.snapshot`: which entries are copied, when it is outdated, checks of `restore`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from .._common.arrays import (
    is_same_memory,
    is_torch,
    overlaps_itself,
    pairs_sharing_elements,
)
from .._common.backend import TensorBackend, backend_of
from .._common.set_module import set_module
from .._common.text import bytes_text
from ._cache_spec import CacheEntry, CacheSpec, entry_error
from ._copies import copied_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ._cache_state import _Cache


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


@set_module("mlstate.kv.records")
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

    __slots__ = (
        "_arrays",
        "_history",
        "_identity",
        "_number",
        "_shifts",
        "_spec",
        "length",
        "nbytes",
    )

    length: int
    nbytes: int
    _arrays: dict[str, object]
    _history: History  # of its state
    _identity: object  # of the arrays of its state
    _number: int  # from `History.take`
    _shifts: dict[str, int]  # of the rings at that moment; with `_spec`, which may set next slots
    _spec: CacheSpec

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


def new_snapshot(cache: _Cache, history: History) -> Snapshot:
    """Return a snapshot of the content `cache` of a `CacheState`.

    It has copies of those arrays that later tokens overwrite. `history`: of the state.
    """
    snapshot = object.__new__(Snapshot)
    changing = [entry for entry in cache.spec if is_copied(entry)]
    names = [name for entry in changing for name in entry.arrays]
    snapshot._arrays = copied_arrays({name: cache.arrays[name] for name in names})
    snapshot.nbytes = sum(entry.nbytes for entry in changing)
    snapshot.length, snapshot._identity = cache.length, cache.identity
    snapshot._spec, snapshot._shifts = cache.spec, cache.shifts
    snapshot._history, snapshot._number = history, history.take()
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


def check_separate(arrays: Mapping[str, Any], values: Mapping[str, Any] | None = None) -> None:
    """Raise CompatibilityError if two arrays share elements: a write to one changes the other.

    `values`: arrays that will be written, by name. With them, arrays of the same elements are
    accepted if they get the same bytes.
    """
    for first, second in pairs_sharing_elements(dict(sorted(arrays.items()))):
        is_same = is_same_memory(arrays[first], arrays[second])
        if values is None or not is_same or _bytes_of(values[first]) != _bytes_of(values[second]):
            text = f"it shares elements with {second!r}, so it cannot be written"
            raise entry_error(first, text, "separate memory", "shared memory")


def _bytes_of(array: Any) -> bytes:
    """Return a copy of the elements of an array or CPU tensor, in C order."""
    if is_torch(array):
        array = backend_of(array, TensorBackend).arrays_of({"": array})[""]
    content: bytes = array.tobytes()
    return content
