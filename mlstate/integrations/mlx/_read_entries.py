"""Layers of mlx-lm as entries of a `CacheState`: ring, padding, quantization; no copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ...errors import CompatibilityError
from ...kv import CacheEntry
from ...kv._arguments import incompatible
from ...kv._packed_object import PART
from .._caches import EntryReader
from ._layer_values import LayerValues


class Layout(NamedTuple):
    """The facts that `to_cache` needs to create a layer like one that `from_cache` was given."""

    class_name: str
    options: dict[str, Any]
    children: tuple[Layout, ...] = ()  # of a CacheList

    @property
    def has_padding(self) -> bool:
        """Whether a sequence of a batch has padding, or the layer counts lengths by sequence.

        Masks and positions need these numbers, so another class of layer cannot take the tokens.
        """
        values = (self.options.get(name) for name in ("padding", "first", "left_padding"))
        own = any(any(each) for each in values if each is not None)
        lengths = self.options.get("lengths") is not None
        return own or lengths or any(child.has_padding for child in self.children)


class Reader(EntryReader):
    """Collects the entries of layers, and the number of tokens that all of them have."""

    def __init__(self) -> None:
        super().__init__()
        self._full_windows: list[tuple[str, LayerValues]] = []

    def read(self, layer: LayerValues, index: int, where: str) -> None:
        """Add the entries of a layer, and of its children.

        `index`: of the layer in the cache. `where`: its place, such as "3", or "3.1" for a child.
        """
        name = layer.cls.name
        for i, child in enumerate(layer.children):
            self.read(child, index, f"{where}.{i}")
        for i, state in enumerate(layer.values.get("cache", ())):
            if state is not None:
                self.add(where, index, f"states.{i}", state, "recurrent")
        if layer.values.get(PART) is not None:
            self.add(where, index, PART, layer.values[PART], "opaque")
            if layer.tokens is not None:
                self.count(layer.tokens, where)
        if name not in _READ or layer.is_empty:
            return
        _READ[name](_Place(self, layer, index, where))
        if name == "BatchRotatingKVCache" and (layer.tokens or 0) >= layer.positions:
            # After mlx merged full windows, it may count fewer tokens than were seen, namely the
            # positions: `finish` decides whether this count is used.
            self._full_windows.append((where, layer))
        else:
            self.count(layer.tokens or 0, where)

    def finish(self) -> None:
        """Check the layers together, and leave out positions that not all of them have.

        Call it after the last `read`. Raises CompatibilityError for an empty cache or different
        numbers of tokens. The number of a full window of a batch, which may be too low, counts only
        if the cache has fewer tokens than the window has positions, or no other layer counts them.
        """
        self.require_entries()
        counts = [(layer.tokens or 0, where) for where, layer in self._full_windows]
        # only full windows: the largest number is the nearest to the true one
        if self.length is None and counts:
            self.count(*max(counts))
        for where, layer in self._full_windows:
            if (self.length or 0) < layer.positions:
                self.count(layer.tokens or 0, where)
        self._cut_to_common_capacity()

    def _cut_to_common_capacity(self) -> None:
        """Leave out free positions that not all layers have: entries must have one capacity.

        mlx allocates positions for each layer when it needs them. A window counts while it has
        fewer positions than its size.
        """
        limits = [
            entry.seq_length or 0
            for entry in self.entries
            if entry.kind in ("full", "quantized")
            or (entry.window is not None and (entry.seq_length or 0) < entry.window)
        ]
        for i, entry in enumerate(self.entries):
            if entry.kind in ("full", "quantized") and entry.seq_length != min(limits):
                shape = (*entry.shape[:2], min(limits), entry.shape[3])
                self.entries[i] = replace(entry, shape=shape)
                for name in entry.arrays:
                    self.arrays[name] = self.arrays[name][:, :, : min(limits)]


class _Place(NamedTuple):
    """A layer of mlx-lm that is being read."""

    reader: Reader
    layer: LayerValues
    layer_index: int  # in the cache
    where: str  # start of its entries' names, such as "3", or "3.1" in a CacheList

    def add_both(self, kind: str, end: int | None = None, **options: Any) -> None:
        """Add keys and values as entries of a kind, without positions from `end` (None: all).

        `options`: further arguments of `CacheEntry`.
        """
        for part in ("keys", "values"):
            array = self.layer.values[part][:, :, :end]
            self.reader.add(self.where, self.layer_index, part, array, kind, **options)

    def unknown(self, attribute: str, text: str) -> CompatibilityError:
        """Return the exception for a value that contradicts the layer's other values.

        `attribute`: name of the value. `text`: the contradiction.
        """
        value = self.layer.values[attribute]
        text = f"layer {self.where}: {self.layer.cls.name}.{attribute} is {value}, and {text}"
        return incompatible(text, self.where, "the values of mlx-lm 0.31 or 0.32", value)


def _read_full(at: _Place) -> None:
    at.add_both("full")


def _read_quantized(at: _Place) -> None:
    """Add keys and values of a quantized layer: each has codes, scales and biases."""
    bits, group = at.layer.values["bits"], at.layer.values["group_size"]
    for part in ("keys", "values"):
        codes, scales, biases = at.layer.values[part]
        entry = CacheEntry(
            f"{at.where}.{part}",
            "quantized",
            (*codes.shape[:3], codes.shape[3] * 32 // bits),  # codes are packed in uint32
            scales.dtype,
            2,
            layer=at.layer_index,
            role=part,
            bits=bits,
            group=group,
        )
        at.reader.entries.append(entry)
        at.reader.arrays.update(zip(entry.arrays, (codes, scales, biases), strict=True))


def _read_ring(at: _Place) -> None:
    """Add the tokens of a layer with a window, whose array is a ring.

    Raises CompatibilityError if its slot, tokens and positions contradict each other.
    """
    values, positions, tokens = at.layer.values, at.layer.positions, at.layer.tokens or 0
    slot, window, sinks = values["_idx"], values["max_size"], values.get("keep", 0)
    if tokens <= positions and slot != tokens:
        raise at.unknown("_idx", f"the layer has {tokens} tokens in {positions} positions")
    if tokens > positions < window or slot < min(sinks, tokens):
        raise at.unknown("_idx", f"{positions} positions hold a window of {window}")
    if values.get("rotated") is False and slot != min(tokens, positions):
        raise at.unknown("rotated", f"_idx is {slot} of {positions} positions")
    unwritten = int(at.layer.is_unwritten and tokens >= positions)
    at.add_both("sliding", window=window, sinks=sinks, next_slot=slot, unwritten=unwritten)


def _read_chunked(at: _Place) -> None:
    """Add the tokens of a ChunkedKVCache, which drops the oldest ones and stores the rest in order.

    Raises CompatibilityError if a trim has left less than a chunk.
    """
    values = at.layer.values
    start, size = values["start_position"], values["chunk_size"]
    stored = values["offset"] - start
    if start and stored < size:
        raise at.unknown("start_position", f"only {stored} of {size} tokens are left after a trim")
    if start:
        at.add_both("sliding", stored, window=size, next_slot=stored)
    else:
        at.add_both("sliding", window=size, next_slot=stored)


# By class: adds the entries of the layer `at` to its reader.
_READ = {
    "KVCache": _read_full,
    "QuantizedKVCache": _read_quantized,
    "RotatingKVCache": _read_ring,
    "ChunkedKVCache": _read_chunked,
    "BatchKVCache": _read_full,
    "BatchRotatingKVCache": _read_ring,
}


def layout_of(layer: LayerValues, length: int) -> Layout:
    """Return the values of a layer that stay when the number of tokens changes.

    `length`: tokens of the cache; the padding of a batch is counted from them.
    """
    name, values = layer.cls.name, layer.values
    names = ("group_size", "bits", "keep", "max_size", "chunk_size")
    options: dict[str, Any] = {name: values[name] for name in names if name in values}
    if layer.cls.unknown is not None:
        options = {"unknown": layer.cls.unknown}
    elif name == "ArraysCache":
        options = {"size": len(values["cache"])}
        for vector in ("left_padding", "lengths"):
            options[vector] = None if values[vector] is None else values[vector].tolist()
    elif "left_padding" in values:
        evicted = length - min(length, layer.positions)
        # By sequence: positions that it does not count, and the position of its first token. Both
        # are counted from the first position of the batch, also after it was evicted.
        options["padding"] = (length - values["offset"]).tolist()
        options["first"] = (values["left_padding"] + evicted).tolist()
    return Layout(name, options, tuple([layout_of(child, length) for child in layer.children]))
