"""A `CacheState` into layers of mlx-lm: which layer takes which entries; checks, then writes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ... import _core
from ..._common.dtypes import name_of
from ..._common.text import count_text
from ...kv._arguments import incompatible
from ...kv._cache_spec import entry_error
from ...kv._packed_object import PART, class_name, header_of, leaves_of, map_leaves, unpack
from .._caches import UNWRITTEN, EntryPlan
from ._arrays import make_array
from ._layer_values import CLASSES, LayerClass, LayerValues
from ._live_layers import read_layer
from ._read_entries import Layout, layout_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...kv import CacheEntry, CacheState

# A class of layers with the other class's kind of entry: the state was quantized or dequantized.
_CLASS_AND_KIND_DIFFER = ({"KVCache", "quantized"}, {"QuantizedKVCache", "full"})


class Filler(EntryPlan):
    """Collects the writes that bring the tokens of a state into layers."""

    def __init__(self, state: CacheState) -> None:
        """Start without writes.

        Raises CompatibilityError unless all arrays of the state are NumPy's.
        """
        super().__init__(state)
        for name, array in self.arrays.items():
            if not isinstance(array, np.ndarray):
                text = f"{name}: mlx takes arrays of NumPy, not {type(array).__name__}"
                raise incompatible(text, name, "numpy.ndarray", type(array).__name__)

    def plan(self, layer: Any, index: int, layout: Layout | None) -> None:
        """Check that a layer fits the state, and plan the writes to it; nothing is written.

        `index`: of the layer in the cache. `layout`: of the layer that the state came from, or
        None.
        """
        where = str(index)
        self._plan(layer, read_layer(layer, where), where, layout)
        self.require_layer(where, index)

    def _plan(self, layer: Any, current: LayerValues, where: str, layout: Layout | None) -> None:
        """Do as `plan`, also for the children of a CacheList.

        `current` has the layer's values, and `where` is its place, such as "3.1". A `layout` of
        another class is ignored, unless its padding would be lost: then this raises
        CompatibilityError. So it does for a layer that is in the cache twice.
        """
        self.add_layer(layer, where)
        name = current.cls.name
        if layout is not None and layout.class_name != name:
            _refuse_padding(layout, name, where)
            layout = None
        if name == "CacheList":
            layouts = layouts_for(current.children, layout and layout.children, f"layer {where}")
            for i, child in enumerate(current.children):
                self._plan(layer.caches[i], child, f"{where}.{i}", layouts[i])
            return
        at = _Place(self, current, where, {} if layout is None else layout.options)
        plan = _PLANS[name] if current.cls.unknown is None else partial(_plan_packed, layer)
        self.layers.append((layer, plan(at)))


def layouts_for(
    layers: Sequence[Any], layouts: Sequence[Layout] | None, label: str
) -> Sequence[Layout | None]:
    """Return the layout of each layer, or None for each if `layouts` is None.

    Raises CompatibilityError if they differ in number; `label`: of the layers, for it.
    """
    if layouts is None:
        return [None] * len(layers)
    if len(layers) != len(layouts):
        count = count_text(len(layers), "layer")
        text = f"{label} has {count}, and the state comes from {len(layouts):,}"
        raise incompatible(text, None, len(layouts), len(layers))
    return layouts


def _refuse_padding(layout: Layout, name: str, where: str) -> None:
    """Raise CompatibilityError if a layer would lose the padding of a batch, which masks need.

    `layout`: of the source. `name`, `where`: class and place of the layer that would take its
    tokens.
    """
    if layout.has_padding:
        text = f"layer {where} is a {name}, and the sequences of the {layout.class_name} have"
        text += " different numbers of tokens or padding, which it does not store"
        raise incompatible(text, where, layout.class_name, name)


class _Place(NamedTuple):
    """A layer of mlx-lm that is being planned."""

    filler: Filler
    before: LayerValues  # the layer's values, which the writes replace
    where: str  # start of its entries' names, such as "3.1"
    options: Mapping[str, Any]  # of the layer that the state came from

    @property
    def length(self) -> int:
        """Number of tokens of the state."""
        return self.filler.length

    def both(self, kind: str) -> list[CacheEntry]:
        """Return the entries of keys and values, or [] if the state has no tokens for the layer.

        Raises CompatibilityError unless they are of the `kind`, and fit the arrays that the layer
        has.
        """
        filler, name = self.filler, self.before.cls.name
        entries = filler.both(self.where, name, kind)
        if not entries:
            filler.require_empty(self.where, not self.before.is_empty and self.before.tokens)
        for entry in entries:
            if len(entry.shape) != 4 or entry.seq_axis != 2:
                text = f"the array has shape {entry.shape} and sequence axis {entry.seq_axis}"
                raise entry_error(entry.name, text, "4 axes, the sequence is axis 2", entry.shape)
            if not self.before.is_empty:
                self._check_like(entry)
        return entries

    def _check_like(self, entry: CacheEntry) -> None:
        """Raise CompatibilityError unless the state's arrays of `entry` fit the layer's arrays.

        Shape and dtype must be equal; only the number of positions may differ.
        """
        for name, array in zip(entry.arrays, self._old_parts(entry), strict=True):
            new = self.filler.arrays[name]
            if (*array.shape[:2], array.shape[3]) != (*new.shape[:2], new.shape[3]):
                text = f"the array has shape {new.shape}, and layer {self.where} {array.shape}"
                raise entry_error(name, text, array.shape, new.shape)
            check_dtype(name, new, array, self.where)

    def _old_parts(self, entry: CacheEntry) -> tuple[Any, ...]:
        value = self.before.values[entry.name.rpartition(".")[2]]
        return value if isinstance(value, tuple) else (value,)

    def make_array(self, array: Any, entry: CacheEntry) -> Any:
        """Return an array of the state as an mlx array; `entry`: whose name errors have."""
        return make_array(array, entry.name)

    def whole_arrays(self, entries: list[CacheEntry]) -> dict[str, Any]:
        """Return the arrays of keys and values for mlx: all positions, in their stored order."""
        arrays = self.filler.arrays
        return {
            part: self.make_array(arrays[entry.name], entry)
            for part, entry in zip(("keys", "values"), entries, strict=True)
        }

    def ordered_tokens(self, entries: list[CacheEntry]) -> dict[str, Any]:
        """Return the tokens of `entries` (keys and values) for mlx, by increasing position.

        The tokens are copied unless they are one run of the array.
        """
        result = {}
        for part, entry in zip(("keys", "values"), entries, strict=True):
            array = self.filler.arrays[entry.name]
            # a slot without its token stays: mlx replaces the oldest position
            ring = self.filler.ring_of(entry)._replace(unwritten=0)
            runs = ring.runs()
            if len(runs) == 1:
                tokens = array[:, :, runs[0].start : runs[0].stop]
            else:
                tokens = _core.kv_ring_ordered(array, 2, ring.sinks, ring.length, ring.shift)
            result[part] = self.make_array(tokens, entry)
        return result

    def stored_tokens(self, entries: list[CacheEntry]) -> int:
        """Return the number of tokens that the arrays hold; a window may have evicted others."""
        return min(self.length, entries[0].seq_length or 0)


def check_dtype(name: str, new: Any, old: Any, where: str) -> None:
    """Raise CompatibilityError if the array `new` has another dtype than `old`, which it replaces.

    `name`: of the entry. `where`: place of the layer.
    """
    got, expected = name_of(new.dtype), name_of(old.dtype)
    if got != expected:
        text = f"the array is {got}, and the one of layer {where} {expected}"
        raise entry_error(name, text, expected, got)


def _plan_full(at: _Place) -> dict[str, Any]:
    """Return the new values of a KVCache; {} if the state has no tokens for it."""
    entries = at.both("full")
    return {**at.whole_arrays(entries), "offset": at.length} if entries else {}


def _plan_quantized(at: _Place) -> dict[str, Any]:
    """Return the new values of a QuantizedKVCache; {} if the state has no tokens for it.

    Raises CompatibilityError for other bits or group sizes.
    """
    entries, values = at.both("quantized"), at.before.values
    if not entries:
        return {}
    result: dict[str, Any] = {"offset": at.length}
    for part, entry in zip(("keys", "values"), entries, strict=True):
        got, expected = (entry.bits, entry.group), (values["bits"], values["group_size"])
        if got != expected:
            text = f"{got[0]} bits and groups of {got[1]} do not fit layer {at.where}"
            raise entry_error(entry.name, text, expected, got)
        arrays = (at.filler.arrays[name] for name in entry.arrays)
        result[part] = tuple([at.make_array(array, entry) for array in arrays])
    return result


def _require_newest(at: _Place, entries: list[CacheEntry], window: int, keep: int) -> None:
    """Raise CompatibilityError if a layer needs tokens that the state has evicted.

    `entries`: of keys and values. `window`: number of newest tokens that the layer needs. `keep`:
    number of first tokens that the layer never evicts; the state's must be equal if it has evicted
    any.
    """
    stored, length = at.stored_tokens(entries), at.length
    for entry in entries:
        unwritten = at.filler.ring_of(entry).unwritten
        is_replaced = unwritten and stored == window <= length  # the next token overwrites the slot
        if stored - (0 if is_replaced else unwritten) < min(length, window):
            text = f"layer {at.where} needs the last {min(length, window)} tokens, and has {stored}"
            raise entry_error(entry.name, f"{text}: older ones were evicted", window, stored)
        if entry.sinks != keep and stored < length:
            text = f"layer {at.where} keeps the first {keep} tokens, and the array {entry.sinks}"
            raise entry_error(entry.name, f"{text}: others were evicted", keep, entry.sinks)


def _ring_slots(at: _Place, entries: list[CacheEntry]) -> tuple[dict[str, Any], int, bool]:
    """Return keys and values in a ring of mlx, the slot of the next token, and whether it rotated.

    `entries`: of keys and values, not empty. The arrays keep their order if mlx would continue them
    correctly; else the tokens are brought into order, which copies them. "Rotated" means that the
    oldest token is not in the first slot after the sinks. Raises CompatibilityError if the layer
    needs tokens that were evicted.
    """
    window, keep = at.before.values["max_size"], at.before.values.get("keep", 0)
    _require_newest(at, entries, window, keep)
    ring, positions = at.filler.ring_of(entries[0]), entries[0].seq_length or 0
    is_ordered = ring.next_slot in (at.length, ring.sinks)
    slots = {at.filler.ring_of(entry).next_slot for entry in entries}
    # mlx cuts an array beyond the window at its next token, which must be in order and full.
    fits = positions <= window or (is_ordered and at.length >= positions)
    # without evicted tokens, the next slot is the end, or in a full array the one after the sinks
    if at.length <= positions:
        fits = fits and ring.next_slot in (at.length, keep if at.length == positions else -1)
    if len(slots) > 1 or not fits or (entries[0].sinks != keep and at.length > positions):
        return at.ordered_tokens(entries), at.stored_tokens(entries), False
    is_rotated = at.length > positions and ring.next_slot != keep
    slot = ring.next_slot if is_rotated else at.stored_tokens(entries)
    return at.whole_arrays(entries), slot, is_rotated


def _plan_rotating(at: _Place) -> dict[str, Any]:
    """Return the new values of a RotatingKVCache; {} if the state has no tokens for it."""
    entries = at.both("sliding")
    if not entries:
        return {}
    arrays, slot, _ = _ring_slots(at, entries)
    return {**arrays, "offset": at.length, "_idx": slot, **_unwritten(at, entries)}


def _unwritten(at: _Place, entries: list[CacheEntry]) -> dict[str, Any]:
    """Return the attribute of a layer whose ring has a slot without its token, or {}."""
    values: dict[str, Any] = {UNWRITTEN: None} if at.before.is_unwritten else {}
    is_unwritten = any(at.filler.ring_of(entry).unwritten for entry in entries)
    at.filler.note_unwritten(values, is_unwritten=is_unwritten)
    return values


def _plan_chunked(at: _Place) -> dict[str, Any]:
    """Return the new values of a ChunkedKVCache; {} if the state has no tokens for it.

    If tokens were evicted, the others are brought into order, and ``start_position`` is the number
    of evicted ones.
    """
    entries = at.both("sliding")
    if not entries:
        return {}
    at.filler.require_tokens(entries)
    _require_newest(at, entries, at.before.values["chunk_size"], 0)
    is_whole = all(at.filler.ring_of(entry).next_slot == at.length for entry in entries)
    arrays = at.whole_arrays(entries) if is_whole else at.ordered_tokens(entries)
    start = 0 if is_whole else at.length - at.stored_tokens(entries)
    return {**arrays, "offset": at.length, "start_position": start}


def _plan_states(at: _Place) -> dict[str, Any]:
    """Return the new values of an ArraysCache: its states, and the vectors of a batch.

    Raises CompatibilityError for another shape or dtype than a state that the layer has.
    """
    states: list[Any] = []
    for i, before in enumerate(at.before.values["cache"]):
        entry = at.filler.entry(
            at.where, at.before.cls.name, f"states.{i}", "recurrent", "conv", "opaque"
        )
        if entry is None:
            at.filler.require_empty(at.where, before is not None)
            states.append(None)
            continue
        array = at.filler.arrays[entry.name]
        if before is not None:
            if before.shape != array.shape:
                text = f"the array has shape {array.shape}, and layer {at.where} {before.shape}"
                raise entry_error(entry.name, text, before.shape, array.shape)
            check_dtype(entry.name, array, before, at.where)
        states.append(at.make_array(array, entry))
    vectors = {
        name: None if at.options.get(name) is None else _vector(at.options[name])
        for name in ("left_padding", "lengths")
    }
    return {"cache": states, **vectors}


def _vector(numbers: list[int]) -> Any:
    return make_array(np.array(numbers, np.int32), "left_padding")


def _batch_counters(at: _Place, entries: list[CacheEntry]) -> dict[str, Any]:
    """Return the vectors ``left_padding`` and ``offset`` of a batch, with an element per sequence.

    ``left_padding`` is the position of a sequence's first token in the array, which is negative
    after this token was evicted. ``offset`` is the number of tokens without the padding. `entries`:
    of keys and values. Raises CompatibilityError if the number of sequences differs.
    """
    first_positions, padding_counts = _sequence_paddings(at)
    sequences = entries[0].shape[0]
    if len(first_positions) != sequences:
        text = f"layer {at.where} has {len(first_positions)} sequences, and the array {sequences}"
        raise entry_error(entries[0].name, text, len(first_positions), sequences)
    evicted = at.length - at.stored_tokens(entries)  # tokens before the first one of the array
    return {
        "left_padding": _vector([position - evicted for position in first_positions]),
        "offset": _vector([at.length - count for count in padding_counts]),
    }


def _sequence_paddings(at: _Place) -> tuple[list[int], list[int]]:
    """Return the position of each sequence's first token, and the tokens its offset leaves out.

    Both count from the first position of the batch, even after it was evicted. A state that was
    not read from a batch, such as one of a checkpoint, gets the padding of the layer.
    """
    if "first" in at.options:
        return at.options["first"], at.options["padding"]
    # the layer may have evicted tokens, so its own `left_padding` does not count from the first
    current = layout_of(at.before, at.before.tokens or 0).options
    # a merge of full windows counts tokens in `offset` that the layer never had
    return current["first"], [max(count, 0) for count in current["padding"]]


def _plan_batch(at: _Place) -> dict[str, Any]:
    """Return the new values of a BatchKVCache; {} if the state has no tokens for it."""
    entries = at.both("full")
    if not entries:
        return {}
    return {**at.whole_arrays(entries), **_batch_counters(at, entries), "_idx": at.length}


def _plan_batch_rotating(at: _Place) -> dict[str, Any]:
    """Return the new values of a BatchRotatingKVCache; {} if the state has no tokens for it."""
    entries = at.both("sliding")
    if not entries:
        return {}
    arrays, slot, is_rotated = _ring_slots(at, entries)
    counters = {"_offset": at.length, "_idx": slot, "rotated": is_rotated}
    return {**arrays, **_batch_counters(at, entries), **counters, **_unwritten(at, entries)}


def _plan_packed(layer: Any, at: _Place) -> dict[str, Any]:
    """Return the new attributes of a layer of an unknown class; {} if the state has no tokens.

    Raises CompatibilityError for another class, or another number that its constructor got: a layer
    without tokens has no other numbers than these, so the layer must be empty.
    """
    name, values = at.before.cls.name, at.before.values
    entry = at.filler.entry(at.where, name, PART, "opaque")
    if entry is None or values[PART] is not None:
        at.filler.require_empty(at.where, entry is None and values[PART] is not None)
        if entry is None:
            return {}
        text = f"layer {at.where} is a {name}, which is an unknown class, and has tokens"
        raise incompatible(f"{text}: pass a new cache", at.where, "an empty layer", "tokens")
    packed, label = at.filler.arrays[entry.name], f"layer {at.where}"
    got, stored = class_name(layer), header_of(packed, label).class_name
    if got != stored:
        text = f"{label} is a {got}, and the array is of a {stored}"
        raise incompatible(text, at.where, stored, got)
    new = unpack(packed, label)
    leaves = leaves_of(new)
    for path, value in leaves_of(vars(layer)).items():
        if type(value) in (int, float, str) and value and leaves.get(path) != value:
            text = (
                f"{label} has {path}={value!r}, and the array is of one with {leaves.get(path)!r}"
            )
            raise incompatible(text, at.where, leaves.get(path), value)

    def make(_: str, value: Any) -> Any:
        return make_array(value, entry.name) if isinstance(value, np.ndarray) else value

    return dict(map_leaves(new, make))


# By class: checks the entries for the layer `at`, and returns its new attributes by name.
_PLANS = {
    "KVCache": _plan_full,
    "QuantizedKVCache": _plan_quantized,
    "RotatingKVCache": _plan_rotating,
    "ArraysCache": _plan_states,
    "ChunkedKVCache": _plan_chunked,
    "BatchKVCache": _plan_batch,
    "BatchRotatingKVCache": _plan_batch_rotating,
}


def empty_layer(layout: Layout, where: str, state: CacheState) -> LayerValues:
    """Return the values of a layer without tokens, of a layout's class.

    A KVCache becomes a QuantizedKVCache, or the reverse, if the state was quantized or dequantized.
    `where`: place of the layer.
    """
    name, options = layout.class_name, layout.options
    if name == "CacheList":
        parts = enumerate(layout.children)
        children = [empty_layer(child, f"{where}.{i}", state) for i, child in parts]
        return LayerValues(CLASSES[name], {}, children)
    if "unknown" in options:
        return LayerValues(LayerClass(name, {}, unknown=options["unknown"]), {PART: None}, [])
    entry = state.spec._by_name.get(f"{where}.keys")
    if entry is not None and {name, entry.kind} in _CLASS_AND_KIND_DIFFER:
        name = "QuantizedKVCache" if entry.kind == "quantized" else "KVCache"
        options = {"bits": entry.bits, "group_size": entry.group}
    empty = {
        "rows": None,
        "codes": None,
        "states": [None] * options.get("size", 0),
        "vector": np.zeros(0, np.int32),
        "vector?": None,
        "flag": False,
    }
    cls = CLASSES[name]
    values = {
        field: options.get(field, 0) if kind == "count" else empty[kind]
        for field, kind in cls.fields.items()
    }
    return LayerValues(cls, values, [])
