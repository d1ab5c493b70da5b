"""`from_cache` and `to_cache` of transformers: arguments, and new caches for a state."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...._common.set_module import set_module
from ....kv import CacheSpec
from ....kv._arguments import incompatible
from ..._caches import LaidOutState, unknown_classes
from .fill_cache import Filler
from .layer_classes import (
    WHOLE,
    Layout,
    added_class,
    check_cache,
    empty_layers,
    has_known_class,
    layer_class,
    new_cache,
    new_layer,
)
from .read_cache import Reader
from .whole_layers import check_emptied, new_like

if TYPE_CHECKING:
    from ....kv import CacheState

_CROSS = "cross."


class _Layouts(NamedTuple):
    """The classes of a cache and of its layers."""

    class_name: str
    layers: list[Layout]
    cross_class_name: str | None  # of an encoder-decoder cache
    cross_layers: list[Layout]
    capacity: int | None  # of the state's spec when it was made
    added_class: str | None = None  # of the layers that the cache adds as a model uses them
    cross_added_class: str | None = None
    prototype: Any = None  # of a cache of an unknown class: see `new_like`


@set_module("mlstate.integrations.transformers")
def from_cache(cache: Any, *, length: int | None = None) -> CacheState:
    """Return the tensors of a cache of transformers as a `CacheState`, without copying them.

    Parameters
    ----------
    cache : transformers.Cache, object or list of torch.Tensor
        A Cache, a cache of a model's own class, such as xLSTMCache, or a list of tensors. It is not
        changed.
    length : int, optional
        Number of tokens of a cache that consists of linear attention only, whose layers do not
        count them. For another cache, this must be its number of tokens.

    Returns
    -------
    CacheState
        Entries with the names ``"<layer>.<array>"``, such as ``"0.keys"``, ``"1.conv_states.0"``,
        and ``"cross.0.keys"`` for cross-attention. The arrays are the tensors of the cache or views
        of them. Layers that have no token, or use the tensors of others, have no entry.

    Raises
    ------
    CompatibilityError
        An object of an unknown class has other attributes than tensors, numbers and texts, or
        tensors that share memory; one of a known class has others than in transformers 5.23 and
        5.24; layers have different numbers of tokens; no layer has a token, or one before a layer
        with tokens has none; or the cache offloads its layers. A ValueError.
    TypeError
        `cache` is not a Cache of transformers.

    Notes
    -----
    ====================================  ===============================================
    layer                                 entries
    ====================================  ===============================================
    DynamicLayer, StaticLayer             ``keys``, ``values``: full
    DynamicSlidingWindowLayer             the same, sliding: a window of one token less
    StaticSlidingWindowLayer              the same, sliding
    DynamicIndexedLayer                   also ``indexer_keys``, ``indexer_position_ids``: full
    StaticIndexedLayer                    the same; ``indexer_position_ids`` is opaque
    LinearAttentionLayer and mixtures     also ``conv_states.<i>``, ``recurrent_states.<i>``
    Fp8QuantizedLayer                     ``quantized_keys`` and ``quantized_values``: full, of
                                          float8_e4m3fn; the rest is opaque
    layers of a cross-attention           ``keys``, ``values``: opaque
    layers of other classes               ``whole``: opaque, bytes of all attributes, copied
    ====================================  ===============================================

    A cache of another class than transformers' own also has the entry ``cache.whole``, with the
    attributes beside its layers. Later tokens change the arrays of static and of linear attention
    layers in place; dynamic layers replace their tensors.

    Examples
    --------
    >>> import torch
    >>> from transformers import DynamicCache
    >>> from mlstate.integrations.transformers import from_cache, to_cache
    >>> cache = DynamicCache()
    >>> for layer in range(2):
    ...     _ = cache.update(torch.zeros(1, 4, 10, 64), torch.zeros(1, 4, 10, 64), layer)
    >>> state = from_cache(cache)
    >>> state
    CacheState(10 of 10 positions; 4 entries: 4 full)
    >>> state.trim(3)
    >>> to_cache(state).get_seq_length()
    7
    """
    check_cache(cache, "cache")
    decoder, cross = _parts_of(cache, "cache")
    reader, cross_reader = Reader(), Reader(_CROSS)
    for layer in _layers_of(decoder):
        reader.read(layer)
    reader.read_rest(decoder)
    for layer in () if cross is None else cross.layers:
        cross_reader.read_cross(layer)
    reader.require_entries()
    spec = CacheSpec([*reader.entries, *cross_reader.entries])
    layouts = _Layouts(
        type(decoder).__name__,
        reader.layouts,
        None if cross is None else type(cross).__name__,
        cross_reader.layouts,
        spec.capacity,
        added_class(decoder),
        added_class(cross),
        None if has_known_class(decoder) else new_like(decoder),
    )
    arrays = reader.arrays | cross_reader.arrays
    return LaidOutState(spec, arrays, reader.checked_length(length), layouts)


def _parts_of(cache: Any, label: str) -> tuple[Any, Any]:
    """Return a cache and None, or the self- and cross-attention cache of an EncoderDecoderCache.

    `label`: name of the argument, for errors. Raises as `check_cache` if one of the two is of an
    unknown class.
    """
    if type(cache).__name__ != "EncoderDecoderCache":
        return cache, None
    parts = []
    for name in ("self_attention_cache", "cross_attention_cache"):
        part = getattr(cache, name, None)
        check_cache(part, f"{label}.{name}", is_known=name == "cross_attention_cache")
        parts.append(part)
    return parts[0], parts[1]


def _layers_of(cache: Any) -> list[Any]:
    """Return the layers of a cache; [] for an object of a model's own, or a list of tensors."""
    layers: list[Any] = getattr(cache, "layers", [])
    return layers


@set_module("mlstate.integrations.transformers")
def to_cache(state: CacheState, into: Any = None) -> Any:
    """Return a cache of transformers with the tokens of a state.

    Parameters
    ----------
    state : CacheState
        A state from `from_cache`. With `into`, any other one whose arrays have the same names.
    into : transformers.Cache, optional
        The cache to fill, for example a StaticCache of another size. Its tokens are replaced.
        Default: a new cache with layers of the classes that `from_cache` was given.

    Returns
    -------
    transformers.Cache
        `into`, or a new cache, which uses the arrays of the state: nothing is copied. To keep the
        state or the cache it came from, pass ``state.copy()``.

    Raises
    ------
    CompatibilityError
        The layers of `into` do not fit the arrays: another class, window, shape, dtype or number;
        a window needs tokens that were evicted; memory overlaps; or a new cache needs `into`.
        Nothing is changed then. A ValueError.
    CapacityError
        The tokens exceed a static layer. Nothing is changed then. A ValueError.
    TypeError
        `state` is not a CacheState, or `into` not a Cache.

    Notes
    -----
    Static and linear attention layers of `into` are filled in place, so that their tensors keep
    their addresses: the tokens are copied, and other positions become zero. Tensors that are those
    of the state already are left as they are, for example after `CacheState.restore`: then only the
    lengths are set. Dynamic layers use views of the arrays. After an exception during the writes,
    `into` is unchanged; with static or linear attention layers it may have no token.

    A static layer with a window has one position more than the tokens of a dynamic one. If the
    window is full, `from_cache` has the slot as `unwritten` until the next token replaces it.

    Examples
    --------
    >>> import torch
    >>> from transformers import DynamicCache
    >>> from mlstate.integrations.transformers import from_cache, to_cache
    >>> cache = DynamicCache()
    >>> _ = cache.update(torch.zeros(1, 4, 10, 64), torch.zeros(1, 4, 10, 64), 0)
    >>> state = from_cache(cache)
    >>> before = state.snapshot()
    >>> _ = cache.update(torch.ones(1, 4, 5, 64), torch.ones(1, 4, 5, 64), 0)  # a rejected draft
    >>> state.restore(before)
    >>> to_cache(state, into=cache) is cache, cache.get_seq_length()
    (True, 10)
    """
    filler = Filler(state, is_shared=into is None)
    if into is not None:
        check_cache(into, "into")
    cache = _new_cache(state) if into is None else into
    decoder, cross = _parts_of(cache, "into")
    added = _missing_layers(state, decoder, "")
    cross_added = _missing_layers(state, cross, _CROSS)
    filler.plan_rest(decoder)
    for index, layer in enumerate([*_layers_of(decoder), *added]):
        filler.plan(layer, index)
    for index, layer in enumerate([] if cross is None else [*cross.layers, *cross_added]):
        filler.plan(layer, index, _CROSS)
    filler.changes.append(partial(_layers_of(decoder).extend, added))
    if cross is not None:
        filler.changes.append(partial(cross.layers.extend, cross_added))
        count = len(cross.layers) + len(cross_added)
        updated = {index: f"{_CROSS}{index}.keys" in filler.used for index in range(count)}
        filler.changes.append(partial(vars(cache).update, is_updated=updated))
    filler.write_all()
    return cache


def empty_cache(cache: Any) -> None:
    """Remove the tokens of a cache; static and linear layers keep their tensors, which are zeroed.

    After an exception the cache has no token either.
    """
    parts = [part for part in _parts_of(cache, "cache") if part is not None]
    layers = [
        (layer, layer_class(layer, str(index)))
        for part in parts
        for index, layer in enumerate(_layers_of(part))
    ]
    layers += [(part, WHOLE) for part in parts if not has_known_class(part)]
    for layer, cls in layers:
        if cls.is_whole:
            check_emptied(layer, f"a {type(layer).__name__}")
    empty_layers(layers, keep=True)
    if len(parts) > 1:
        cache.is_updated = dict.fromkeys(cache.is_updated, False)


def _missing_layers(state: CacheState, cache: Any, prefix: str) -> list[Any]:
    """Return new layers for those that the state has and `cache` lacks.

    Only a cache without a model's config adds layers as it grows; for others, and for None, the
    list is empty. `cache` is not changed. `prefix`: of the entries' names, "cross." or empty for
    the decoder.
    """
    create = getattr(cache, "layer_class_to_replicate", None)
    if create is None:
        return []
    layers = [e.layer for e in state.spec if e.name.startswith(_CROSS) == bool(prefix)]
    count = max((layer + 1 for layer in layers if layer is not None), default=0)
    return [create() for _ in range(count - len(cache.layers))]


def _new_cache(state: CacheState) -> Any:
    """Create an empty cache of the classes that the state was made from.

    Raises CompatibilityError if the state did not come from `from_cache` of transformers.
    """
    layouts = state._layouts if isinstance(state, LaidOutState) else None
    if not isinstance(layouts, _Layouts):
        raise unknown_classes()
    from transformers import EncoderDecoderCache

    assert isinstance(state, LaidOutState)
    layers = [_new_layer(state, layouts, index) for index in range(len(layouts.layers))]
    layout = Layout(layouts.class_name, {}, layouts.prototype)
    decoder = new_cache(layout, layers, layouts.added_class)
    if layouts.cross_class_name is None:
        return decoder
    cross_layers = [new_layer(each) for each in layouts.cross_layers]
    cross = new_cache(Layout(layouts.cross_class_name, {}), cross_layers, layouts.cross_added_class)
    return EncoderDecoderCache(decoder, cross)


def _new_layer(state: LaidOutState, layouts: _Layouts, index: int) -> Any:
    """Create the empty layer number `index`, as long as the arrays that it will use.

    `state`: may have been resized. `layouts`: of the cache that it came from. Raises
    CompatibilityError if the state has grown and a static layer with a window was as long as its
    cache: either may have set the length, so the window is unknown.
    """
    layout, spec = layouts.layers[index], state.spec
    if "max_cache_len" not in layout.options:
        return new_layer(layout)
    # positions of the layer that `from_cache` was given
    old_positions = layout.options.get("sliding_window", layout.options["max_cache_len"])
    # whether they are the window: the cache was longer
    is_window = layout.options["max_cache_len"] > old_positions
    name = f"{index}.keys"
    entry = spec._by_name.get(name)
    positions = old_positions
    if entry is not None:
        positions = entry.seq_length or 0
    elif spec.capacity is not None and old_positions == layouts.capacity:
        positions = spec.capacity
    if "sliding_window" not in layout.options:
        return new_layer(layout, max_cache_len=positions)
    if not is_window and _has_grown(state, layouts, old_positions):
        text = (
            f"layer {index} was as long as its cache of {old_positions} positions, so its window "
            "is unknown: pass into=StaticCache(model.config, max_cache_len)"
        )
        raise incompatible(text, name, "into=", None)
    if not is_window:
        return new_layer(layout, max_cache_len=positions, sliding_window=positions)
    # + 1 if the cache is longer than the window: the new layer must know this too
    longest = max(spec.capacity or 0, positions + (1 if positions == old_positions else 0))
    return new_layer(layout, max_cache_len=longest)


def _has_grown(state: LaidOutState, layouts: _Layouts, old_positions: int) -> bool:
    """Return whether `resize` made a cache of `old_positions` positions longer.

    Without full layers, only the request shows it: an entry does not outgrow its window.
    """
    if layouts.capacity is None:
        return (state.requested_capacity or 0) > old_positions
    return (state.capacity or 0) > layouts.capacity == old_positions
