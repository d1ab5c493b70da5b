"""Layers of transformers' caches as entries of a `CacheState`: tokens, windows; no copies."""

from __future__ import annotations

from typing import Any, NamedTuple

from ....kv import CacheEntry
from ....kv._arguments import as_count, incompatible
from ....kv._packed_object import PART
from ..._caches import EntryReader, is_unwritten
from .layer_classes import (
    LayerClass,
    Layout,
    checked_tensor,
    has_known_class,
    layer_class,
    state_of,
    tensor_of,
    unknown_layout,
    value_of,
)
from .whole_layers import NAME, holds_elements, new_like, read_layer, read_whole


class Reader(EntryReader):
    """Collects the entries of layers, and the number of tokens that all of them have."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__(prefix)
        self.layouts: list[Layout] = []
        self._empty: list[tuple[int, str]] = []  # indices and classes of layers without a token

    def read(self, layer: Any) -> None:
        """Add the entries of the cache's next layer; no tensor is copied.

        Raises CompatibilityError if the layer's class or an attribute is unknown.
        """
        index = len(self.layouts)
        where = f"{self.prefix}{index}"
        cls = layer_class(layer, where)
        at = _Place(self, layer, index, where, cls)
        options: dict[str, int] = {}
        entries = len(self.entries)
        if cls.is_whole:
            self.layouts.append(Layout(cls.name, options, new_like(layer)))
            whole, tokens = read_layer(layer, where)
            if whole is not None:
                at.add(PART, whole, "opaque")
            if tokens:
                self.count(tokens, where)
            self._note_empty(cls, index, entries)
            return
        if cls.attention == "static":
            options["max_cache_len"] = value_of(layer, where, "max_cache_len", int)
            if cls.is_sliding:
                # A layer is not longer than its window. 5.24 knows whether its cache is; then the
                # layout has one position more than the window, for `to_cache`.
                options["sliding_window"] = options["max_cache_len"]
                if getattr(layer, "_is_croppable", None) is False:
                    options["max_cache_len"] += 1
        elif cls.is_sliding:
            options["sliding_window"] = value_of(layer, where, "sliding_window", int)
        if cls.is_linear:
            options["number_of_states"] = value_of(layer, where, "number_of_states", int)
        self.layouts.append(Layout(cls.name, options))
        if cls.attention and value_of(layer, where, "is_initialized", bool):
            _READ[cls.attention](at)
        if cls.has_indexer and value_of(layer, where, "is_indexer_initialized", bool):
            _read_indexer(at)
        if cls.is_linear:
            _read_states(at, options["number_of_states"])
        self._note_empty(cls, index, entries)

    def _note_empty(self, cls: LayerClass, index: int, entries: int) -> None:
        """Note a layer that has no token; `entries`: number of entries before it."""
        if cls.has_tokens and len(self.entries) == entries:
            self._empty.append((index, cls.name))

    def read_rest(self, cache: Any) -> None:
        """Add the attributes of a cache of an unknown class beside its layers, as one array.

        Raises CompatibilityError if such a cache cannot be restored, or if a layer before one with
        tokens has none, so its state is not in the cache.
        """
        is_known = has_known_class(cache)
        holds_states = not is_known and holds_elements(cache)
        if not holds_states:
            self._refuse_absent_states()
        if holds_states or (self.entries and not is_known):
            whole = read_whole(cache, "the cache")
            self.arrays[NAME] = whole
            shape = tuple(whole.shape)
            self.entries.append(CacheEntry(NAME, "opaque", shape, whole.dtype, role=PART))

    def _refuse_absent_states(self) -> None:
        """Raise CompatibilityError if a layer has no token, and a later one has.

        Layers that use the tensors of another one come after it.
        """
        if self.length == 0:  # after a reset, static layers have tensors without tokens
            return
        last = max((entry.layer or 0 for entry in self.entries), default=-1)
        for index, name in self._empty:
            if index < last:
                text = f"layer {index} is a {name} without a token, and layer {last} has tokens: "
                text += "the model keeps this layer's state elsewhere, such as in its modules, and "
                text += "the cache cannot be restored. If the layer has no attention, use "
                text += "DynamicCache(config=model.config)"
                raise incompatible(text, str(index), "tokens in each layer", "none")

    def read_cross(self, layer: Any) -> None:
        """Add the next layer of a cross-attention; its tokens do not change, so it is opaque.

        The entries have only the positions in use, without the free ones of a static layer.
        """
        index = len(self.layouts)
        where = f"{self.prefix}{index}"
        cls = layer_class(layer, where)
        if cls.name not in ("DynamicLayer", "StaticLayer"):
            text = f"layer {where} is a {cls.name}, which is unknown in a cross-attention"
            raise incompatible(text, where, "DynamicLayer or StaticLayer", cls.name)
        at = _Place(self, layer, index, where, cls)
        is_static, options = cls.attention == "static", {}
        if is_static:
            options["max_cache_len"] = value_of(layer, where, "max_cache_len", int)
        self.layouts.append(Layout(cls.name, options))
        if not value_of(layer, where, "is_initialized", bool):
            return
        if is_static:
            keys, values, count = _static_tensors(at)
        else:
            keys, values = _dynamic_tensors(at)
            count = 0 if keys is None else keys.shape[2]
        if count:
            at.add("keys", keys[:, :, :count], "opaque")
            at.add("values", values[:, :, :count], "opaque")


class _Place(NamedTuple):
    """A layer of transformers that is being read."""

    reader: Reader
    layer: Any
    layer_index: int
    where: str  # start of its entries' names, such as "3" or "cross.3"
    cls: LayerClass

    def add(self, part: str, tensor: Any, kind: Any, seq_axis: int = 2, **options: Any) -> None:
        """Add one array of the layer as an entry; `part`: its name in the layer, such as "keys".

        `kind`, `seq_axis`, `options`: arguments of `CacheEntry`.
        """
        self.reader.add(self.where, self.layer_index, part, tensor, kind, seq_axis, **options)

    def unknown(self, attribute: str, text: str) -> Exception:
        """Return the exception for an attribute whose value is not as in known versions.

        `text`: how it differs.
        """
        return unknown_layout(self.layer, self.where, attribute, text)


def _key_values(at: _Place) -> tuple[Any, Any]:
    """Return keys and values of a layer, of shape (batch, heads, positions, head_dim).

    Raises CompatibilityError if they have another rank, or differ in an axis before the last.
    """
    keys, values = (tensor_of(at.layer, at.where, name, 4) for name in ("keys", "values"))
    if keys.shape[:3] != values.shape[:3]:
        text = f"has shape {tuple(values.shape)}, and the keys {tuple(keys.shape)}"
        raise at.unknown("values", text)
    return keys, values


def _dynamic_tensors(at: _Place) -> tuple[Any, Any]:
    """Return keys and values of a growing layer, or two None if it has no token yet."""
    if tensor_of(at.layer, at.where, "keys").numel() == 0:
        return None, None
    return _key_values(at)


def _read_dynamic(at: _Place) -> None:
    """Add the entries of a growing layer to the reader, without copying.

    A sliding layer stores at most one token less than its window, unless it records the past.
    """
    keys, values = _dynamic_tensors(at)
    kind, options = "full", {}
    stored = 0 if keys is None else keys.shape[2]
    tokens = stored
    if at.cls.is_sliding:
        tokens = value_of(at.layer, at.where, "cumulative_length", int)
        # the next token completes the window
        window = value_of(at.layer, at.where, "sliding_window", int) - 1
        if not min(tokens, window) <= stored <= tokens:
            text = f"has {stored} positions after {tokens} tokens with a window of {window}"
            raise at.unknown("keys", text)
        if window < 1:
            raise at.unknown("sliding_window", "leaves no position for earlier tokens")
        # all positions are used, in order: the oldest token, at slot 0, is the next to be replaced
        kind, options = "sliding", {"window": window, "next_slot": 0}
    if keys is None:
        return
    at.add("keys", keys, kind, **options)
    at.add("values", values, kind, **options)
    at.reader.count(tokens, at.where)


def _static_tensors(at: _Place) -> tuple[Any, Any, int]:
    """Return keys, values and the number of tokens of a layer of fixed size.

    The number may exceed the positions of a sliding layer. Raises CompatibilityError for counters
    or shapes that contradict each other.
    """
    keys, values = _key_values(at)
    positions = value_of(at.layer, at.where, "max_cache_len", int)
    if keys.shape[2] != positions:
        raise at.unknown("keys", f"has {keys.shape[2]} positions, and max_cache_len {positions}")
    length = tensor_of(at.layer, at.where, "cumulative_length", 0)
    if length.is_floating_point():
        raise at.unknown("cumulative_length", f"is of {length.dtype}, not of an integer dtype")
    if at.cls.is_sliding:
        tokens = value_of(at.layer, at.where, "cumulative_length_int", int)
    else:
        tokens = int(length)
    if tokens < 0 or (tokens > positions and not at.cls.is_sliding):
        text = f"layer {at.where} counts {tokens} tokens and has {positions} positions"
        raise incompatible(text, at.where, f"0..{positions}", tokens)
    return keys, values, tokens


def _read_static(at: _Place) -> None:
    """Add the entries of a layer of fixed size to the reader, without copying.

    The arrays keep their free positions.
    """
    keys, values, tokens = _static_tensors(at)
    kind, options = "full", {}
    if at.cls.is_sliding:
        kind = "sliding"
        # a full window is stored in order: the oldest token, at slot 0, is the next to be replaced
        is_full = tokens >= keys.shape[2]
        options = {
            "next_slot": 0 if is_full else tokens,
            "unwritten": int(is_full and is_unwritten(at.layer, tokens)),
        }
    at.add("keys", keys, kind, **options)
    at.add("values", values, kind, **options)
    at.reader.count(tokens, at.where)


def _read_fp8(at: _Place) -> None:
    """Add the codes, scales and dtype of an FP8 layer as entries, without copying.

    Raises CompatibilityError unless the codes have one byte each, and as many positions as the
    layer counts tokens.
    """
    tokens = value_of(at.layer, at.where, "cumulative_length", int)
    for part in ("keys", "values"):
        attribute = f"_quantized_{part}"
        pair = value_of(at.layer, at.where, attribute, tuple)
        if len(pair) != 2:
            raise at.unknown(attribute, f"has {len(pair)} parts, not codes and a scale")
        codes = checked_tensor(pair[0], at.layer, at.where, attribute, 4)
        scale = checked_tensor(pair[1], at.layer, at.where, attribute, 0)
        if codes.shape[2] != tokens or codes.element_size() != 1:
            text = f"has {codes.shape[2]} positions of {codes.dtype} after {tokens} tokens"
            raise at.unknown(attribute, text)
        unquantized = tensor_of(at.layer, at.where, part, 1)
        at.add(part, unquantized, "opaque")  # empty: only its dtype counts
        at.add(f"quantized_{part}", codes, "full")
        at.add(f"quantized_{part}.scale", scale, "opaque")
    at.reader.count(tokens, at.where)


_READ = {"dynamic": _read_dynamic, "static": _read_static, "fp8": _read_fp8}


def _read_indexer(at: _Place) -> None:
    """Add the keys of a sparse attention's indexer, and its position ids if it has them.

    Raises CompatibilityError if one has another number of tokens than the layers before. The
    position ids of a static layer have only the positions in use.
    """
    keys = tensor_of(at.layer, at.where, "indexer_keys")
    if keys.numel() == 0:
        return
    keys = tensor_of(at.layer, at.where, "indexer_keys", 3)
    tokens, is_static = keys.shape[1], at.cls.attention == "static"
    if is_static:
        if tokens != value_of(at.layer, at.where, "max_cache_len", int):
            raise at.unknown("indexer_keys", f"has {tokens} positions, unlike max_cache_len")
        tokens = int(tensor_of(at.layer, at.where, "indexer_cumulative_length", 0))
    at.add("indexer_keys", keys, "full", 1)
    at.reader.count(tokens, f"{at.where}.indexer_keys")
    if getattr(at.layer, "indexer_position_ids", None) is None:
        return
    ids = tensor_of(at.layer, at.where, "indexer_position_ids", 3)
    at.add("indexer_position_ids", ids, "opaque" if is_static else "full")
    at.reader.count(ids.shape[2], f"{at.where}.indexer_position_ids")


def _read_states(at: _Place, number_of_states: int) -> None:
    """Add the convolution and recurrent states of a linear attention layer.

    States without a token, or from before a reset, are left out.
    """
    as_count(f"{at.where}: number_of_states", number_of_states)
    for number in range(number_of_states):
        layer, where = at.layer, at.where
        has_conv = state_of(layer, where, "is_conv_states_initialized", number)
        if has_conv and not state_of(layer, where, "has_previous_state", number):
            continue  # the layer was reset; only a convolution's update sets has_previous_state
        if has_conv:
            conv = state_of(layer, where, "conv_states", number)
            at.add(f"conv_states.{number}", _last_inputs(at, conv, number), "conv")
        if state_of(layer, where, "is_recurrent_states_initialized", number):
            state = state_of(layer, where, "recurrent_states", number)
            state = checked_tensor(state, at.layer, at.where, "recurrent_states")
            at.add(f"recurrent_states.{number}", state, "recurrent")


def _last_inputs(at: _Place, conv: Any, number: int) -> Any:
    """Return the last inputs of the convolution of state `number`, as many as its kernel's size.

    The last axis of `conv` is time; fewer inputs are padded with zeros in front.
    """
    conv = checked_tensor(conv, at.layer, at.where, "conv_states")
    size = state_of(at.layer, at.where, "conv_kernel_size", number)
    if type(size) is not int or conv.ndim < 2:
        raise at.unknown("conv_kernel_size", f"is {size!r} for inputs of {tuple(conv.shape)}")
    missing = size - conv.shape[-1]
    if missing > 0:  # a short prefill of a recording layer, which is not padded
        from torch.nn.functional import pad

        return pad(conv, (missing, 0))
    return conv[..., -missing:] if missing else conv
