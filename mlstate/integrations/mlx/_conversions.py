"""`from_cache` and `to_cache` of mlx-lm: arguments, new layers for a state, layers to fill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._common.set_module import set_module
from ...kv import CacheSpec
from .._caches import LaidOutState, unknown_classes
from ._fill_layers import Filler, empty_layer, layouts_for
from ._live_layers import check_cache, new_layer, read_layer
from ._read_entries import Layout, Reader, layout_of

if TYPE_CHECKING:
    from ...kv import CacheState
    from ._layer_values import LayerValues


@set_module("mlstate.integrations.mlx")
def from_cache(cache: list[Any], *, length: int | None = None) -> CacheState:
    """Return the arrays of a prompt cache of mlx-lm as a `CacheState`, without copying them.

    Parameters
    ----------
    cache : list of layers
        As ``make_prompt_cache`` of mlx-lm returns it. It is not changed.
    length : int, optional
        Number of tokens of a cache that consists of ArraysCache only, which does not count them.
        For another cache, this must be its number of tokens.

    Returns
    -------
    CacheState
        Entries with the names ``"<layer>.<array>"``, such as ``"0.keys"``, ``"1.states.0"``, and
        ``"2.0.keys"`` for the first part of a CacheList. The arrays are views of NumPy over the
        memory of mlx, of bfloat16 too. Layers that have no token have no entry.

    Raises
    ------
    CompatibilityError
        A layer of an unknown class has other attributes than arrays, numbers and texts, or a layer
        of a known one others than in mlx-lm 0.31 and 0.32; layers have different numbers of tokens;
        no layer has a token; or a layer of a batch is between ``prepare`` and ``finalize``. A
        ValueError.
    TypeError
        `cache` is not a list of layers.
    RuntimeError
        Arrays are lazy, and mlx cannot compute them in this thread: call ``mx.eval`` in the thread
        that made them.

    Notes
    -----
    ====================================  ===============================================
    layer                                 entries
    ====================================  ===============================================
    KVCache, BatchKVCache                 ``keys``, ``values``: full
    QuantizedKVCache                      ``keys``, ``values``: quantized
    RotatingKVCache                       ``keys``, ``values``: sliding; `sinks` is ``keep``,
                                          `window` is ``max_size``
    BatchRotatingKVCache, ChunkedKVCache  ``keys``, ``values``: sliding, without sinks
    ArraysCache                           ``states.<i>``: recurrent
    CacheList                             the entries of its layers, as ``<layer>.<i>.keys``
    layers of other classes               ``whole``: opaque, bytes of all attributes, copied
    ====================================  ===============================================

    Arrays that are lazy are computed. mlx does not write to the memory of the state: if the cache
    continues, mlx copies each array once at the next token. So the state keeps the tokens of this
    moment. If layers have different numbers of free positions, the views leave out those that not
    all of them have. The length of a batch counts the padding. Checkpoints do not store padding, so
    `mlstate.save` refuses such a state; `save_prompt_cache` stores it.

    Examples
    --------
    >>> import mlx.core as mx
    >>> from mlx_lm.models.cache import KVCache
    >>> from mlstate.integrations.mlx import from_cache, to_cache
    >>> cache = [KVCache(), KVCache()]
    >>> for layer in cache:
    ...     _ = layer.update_and_fetch(mx.ones((1, 2, 10, 64)), mx.ones((1, 2, 10, 64)))
    >>> state = from_cache(cache)
    >>> state
    CacheState(10 of 256 positions; 4 entries: 4 full)
    >>> state.trim(3)
    >>> to_cache(state)[0].offset
    7
    """
    check_cache(cache, "cache")
    return read_state([read_layer(layer, str(i)) for i, layer in enumerate(cache)], length)


def read_state(layers: list[LayerValues], length: int | None = None) -> CacheState:
    """Return the values of layers as a state, without copies of arrays.

    `length`: number of tokens, needed if no layer counts them. Raises CompatibilityError if the
    layers count another number, or contradict each other.
    """
    reader = Reader()
    for i, layer in enumerate(layers):
        reader.read(layer, i, str(i))
    reader.finish()
    tokens = reader.checked_length(length)
    layouts = tuple([layout_of(layer, tokens) for layer in layers])
    padded = [i for i, layout in enumerate(layouts) if layout.has_padding]
    unstored = (
        ""
        if not padded
        else (
            f"layer {padded[0]} has the padding of a batch, which checkpoints do not store: use "
            "save_prompt_cache and load_prompt_cache"
        )
    )
    return LaidOutState(CacheSpec(reader.entries), reader.arrays, tokens, layouts, unstored)


@set_module("mlstate.integrations.mlx")
def to_cache(state: CacheState, into: list[Any] | None = None) -> list[Any]:
    """Return a prompt cache of mlx-lm with the tokens of a state.

    Parameters
    ----------
    state : CacheState
        A state from `from_cache`. With `into`, any other one whose arrays have the same names.
    into : list of layers, optional
        The cache to fill, for example of ``make_prompt_cache(model, max_kv_size)`` with another
        size. Its layers get other arrays and numbers, so objects that refer to the layers see the
        new tokens. Default: a new cache with layers of the classes that `from_cache` was given; a
        state that was quantized has QuantizedKVCache.

    Returns
    -------
    list of layers
        `into`, or a new list.

    Raises
    ------
    CompatibilityError
        The layers of `into` do not fit the arrays: another class, number, shape, dtype, group or
        number of bits; a window needs tokens that were evicted; a layer does not store the padding
        of a batch; mlx does not have a dtype; or a new cache needs `into`. Nothing is changed then.
        A ValueError.
    TypeError
        `state` is not a `CacheState`, or `into` not a list of layers.

    Notes
    -----
    Arrays of `from_cache` are used again without a copy: the cache and the state share memory, and
    mlx copies an array before it writes to it. A write of NumPy to an array of the state changes
    all caches that share its memory, also copies of `copy.deepcopy`. mlx cannot use the memory of
    other arrays, for example of `resize`, `quantize` or `copy`, so these are copied, and so are
    rings that are not stored in the order of mlx. An interrupt leaves `into` unchanged or filled.

    Examples
    --------
    >>> import mlx.core as mx
    >>> from mlx_lm.models.cache import RotatingKVCache
    >>> from mlstate.integrations.mlx import from_cache, to_cache
    >>> cache = [RotatingKVCache(16, keep=4)]
    >>> _ = cache[0].update_and_fetch(mx.ones((1, 2, 10, 64)), mx.ones((1, 2, 10, 64)))
    >>> larger = to_cache(from_cache(cache), into=[RotatingKVCache(64, keep=4)])
    >>> larger[0].offset, larger[0].max_size
    (10, 64)
    """
    filler = Filler(state)
    layouts = _layouts_of(state)
    if into is None:
        cache = _new_cache(state, layouts)
    else:
        check_cache(into, "into")
        cache = into
    for i, layout in enumerate(layouts_for(cache, layouts, "into")):
        filler.plan(cache[i], i, layout)
    filler.write_all()
    return cache


def _layouts_of(state: CacheState) -> tuple[Layout, ...] | None:
    """Return the layouts of the mlx-lm layers that a state was made from; None for other states."""
    layouts = state._layouts if isinstance(state, LaidOutState) else None
    if not isinstance(layouts, tuple) or not all(isinstance(each, Layout) for each in layouts):
        return None
    return layouts


def _new_cache(state: CacheState, layouts: tuple[Layout, ...] | None) -> list[Any]:
    """Create empty layers of the classes that the state was made from.

    Raises CompatibilityError if `layouts` is None: the classes are unknown.
    """
    if layouts is None:
        raise unknown_classes()
    return [new_layer(empty_layer(each, str(i), state), str(i)) for i, each in enumerate(layouts)]
