"""How a cache's entries are stored: which in blocks, which as snapshots; same entries required.

Entries of kind "full" and "quantized" are stored in blocks of tokens. All others, and the entries
of a layer with an opaque entry, which its tokens may depend on, are stored as snapshots: whole, at
one position. The stored form of an array has its sequence axis second to last, in C order, in
native byte order; a snapshot of a sliding entry has its tokens by increasing position.
"""

from __future__ import annotations

import hashlib
import json
from math import prod
from typing import TYPE_CHECKING, Any

from .._common.dtypes import numpy_dtype
from ..kv._arguments import incompatible
from ..kv._cache_spec import CacheEntry, CacheSpec, entry_error

if TYPE_CHECKING:
    from collections.abc import Iterable

_FACTS = ("name", "kind", "dtype", "sinks", "bits", "group")  # the same in all caches of a model
_OTHERS = ("layer", "role", "seq_axis", "window")  # these may differ
DIGEST_BYTES = 8  # of a `StoredSpec`


class StoredSpec:
    """The entries of the caches of one model, independent of their number of positions.

    Attributes
    ----------
    entries : tuple of CacheEntry
        All of them, sorted by name.
    blocks : tuple of CacheEntry
        Those that are stored in blocks.
    states : tuple of CacheEntry
        Those that are stored as snapshots.
    token_bytes : int
        Bytes of one token in all entries that are stored in blocks.
    digest : bytes
        Identifies what two caches must agree on; windows, the place of the sequence axis and
        `layers` are not part of it.
    layers : int or None
        Number of layers of the cache, also of those without an entry; None: unknown.
    """

    __slots__ = ("blocks", "digest", "entries", "layers", "states", "token_bytes")

    def __init__(self, spec: Iterable[CacheEntry], layers: int | None = None) -> None:
        """Divide the entries of a cache, `spec`, into blocks and states.

        If an opaque entry has no layer, all entries are states.
        """
        self.layers = layers
        spec = sorted(spec, key=lambda entry: entry.name)  # the same order for every engine
        opaque_layers = {e.layer for e in spec if e.kind == "opaque" and e.layer is not None}
        has_loose_opaque = any(e.kind == "opaque" and e.layer is None for e in spec)

        def is_in_blocks(entry: CacheEntry) -> bool:  # else as a snapshot
            is_positional = entry.kind in ("full", "quantized")
            return is_positional and not has_loose_opaque and entry.layer not in opaque_layers

        self.entries = tuple(spec)
        self.blocks = tuple(e for e in spec if is_in_blocks(e))
        self.states = tuple(e for e in spec if not is_in_blocks(e))
        self.token_bytes = sum(_token_bytes(e, name) for e in self.blocks for name in e.arrays)
        facts = [[getattr(e, name) for name in _FACTS] + [_stable_shape(e)] for e in spec]
        self.digest = hashlib.sha256(json.dumps(facts).encode()).digest()[:DIGEST_BYTES]

    def to_json(self) -> list[dict[str, Any]]:
        """Return the entries as JSON; their shapes are without the sequence axis."""
        return [
            {name: getattr(e, name) for name in (*_FACTS, *_OTHERS)}
            | {"shape": list(_inner_shape(e))}
            for e in self.entries
        ]

    @classmethod
    def from_json(cls, document: Any, layers: Any = None) -> StoredSpec:
        """Return the entries of a document of `to_json`; raise for a malformed one.

        `layers`: the stored number of layers; stores of earlier versions do not have it. The
        exceptions are KeyError, TypeError and ValueError.
        """
        if layers is not None and not (type(layers) is int and 0 <= layers < 1 << 31):
            raise ValueError(f"{layers!r} layers")
        return cls(CacheSpec([_entry_from(dict(each)) for each in document]), layers)

    def check_parts(self, listed: Any, length: int) -> int:
        """Return the bytes of the parts of a snapshot of `length` tokens, without those of blocks.

        A part is a stored piece of an array: the whole array, or a run of its tokens. `listed`:
        untrusted list with an item for each array of `states`: its name, the numbers of tokens of
        its parts (None for an array without a sequence), and its shape (None for one with a
        sequence). Raises ValueError or TypeError if it does not fit the entries.
        """
        arrays = [(e, name) for e in self.states for name in e.arrays]
        if not isinstance(listed, list) or len(listed) != len(arrays):
            raise ValueError(f"expected {len(arrays)} arrays")
        nbytes = 0
        for (entry, name), (stored_name, counts, shape) in zip(arrays, listed, strict=True):
            numbers = shape if entry.seq_axis is None else counts
            if stored_name != name or not all(type(n) is int and n >= 0 for n in numbers):
                raise ValueError(f"{name!r}: {stored_name!r}, {counts}, {shape}")
            if entry.seq_axis is None:
                nbytes += prod(numbers) * _item_bytes(entry, name)
            elif sum(numbers) > length:
                raise ValueError(f"{name!r}: {sum(numbers)} tokens of {length}")
            else:
                nbytes += _token_bytes(entry, name) * sum(numbers)
        return nbytes

    def check(self, spec: CacheSpec, holder: str) -> None:
        """Raise CompatibilityError unless `spec` has the same entries; windows may differ.

        `holder`: noun for the owner of `spec` in the message, such as "cache".
        """
        stored, passed = ({e.name: e for e in entries} for entries in (self.entries, spec))
        missing = [name for name in stored if name not in passed]
        strange = [name for name in passed if name not in stored]
        if missing or strange:
            text = f"lacks the entry {missing[0]!r}" if missing else f"also has {strange[0]!r}"
            name = (missing or strange)[0]
            raise incompatible(
                f"the {holder} {text}: the prompts of this model have {len(stored)} entries, and "
                f"the {holder} {len(passed)}",
                name,
                f"{len(stored)} entries",
                f"{len(passed)} entries",
            )
        for name, entry in passed.items():
            _check_entry(stored[name], entry, holder)


def _entry_from(facts: dict[str, Any]) -> CacheEntry:
    """Return the entry of an item of `to_json`, with one position; `facts` loses its shape."""
    shape, axis = [int(size) for size in facts.pop("shape")], facts["seq_axis"]
    if axis is not None:
        shape.insert(axis, 1)
    return CacheEntry(shape=tuple(shape), **facts)


def _inner_shape(entry: CacheEntry) -> tuple[int, ...]:
    """Return the shape of an entry without the sequence axis."""
    axis = entry.seq_axis
    return entry.shape if axis is None else (*entry.shape[:axis], *entry.shape[axis + 1 :])


def _item_bytes(entry: CacheEntry, name: str) -> int:
    return int(numpy_dtype(entry.arrays[name][1]).itemsize)


def _token_bytes(entry: CacheEntry, name: str) -> int:
    """Return the bytes of one token in the array `name` of an entry with a sequence."""
    shape, _ = entry.arrays[name]
    axis = entry.seq_axis or 0
    return prod((*shape[:axis], *shape[axis + 1 :])) * _item_bytes(entry, name)


def _stable_shape(entry: CacheEntry) -> tuple[int, ...] | None:
    """Return the part of a shape that is the same in all caches of a model; None if none is."""
    return None if entry.kind == "opaque" else _inner_shape(entry)


def _check_entry(stored: CacheEntry, entry: CacheEntry, holder: str) -> None:
    """Raise CompatibilityError unless `entry` agrees with the stored entry of the same name.

    `holder`: as for `StoredSpec.check`. The shape of an opaque entry may differ.
    """
    for fact in ("kind", "dtype", "sinks", "bits", "group"):
        expected, got = getattr(stored, fact), getattr(entry, fact)
        if expected != got:
            text = f"{fact} {got!r} in the {holder}, and {expected!r} in the prompts of this model"
            remedy = "pass another model= for it"
            if "quantized" in (got, expected):
                remedy = "pass the engine's quantized_kv_start=, or another model= for it"
            raise entry_error(entry.name, f"{text}: {remedy}", expected, got)
    expected_shape, got_shape = _stable_shape(stored), _stable_shape(entry)
    if expected_shape != got_shape:
        text = (
            f"shape {got_shape} without positions in the {holder}, {expected_shape} in the prompts"
        )
        raise entry_error(entry.name, f"{text} of this model", expected_shape, got_shape)
