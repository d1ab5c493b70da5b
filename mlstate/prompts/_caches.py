"""Caches that `put` and `restore` accept, read as `CacheState`; padding and batches refused."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from .._common.arrays import is_torch, refuse_masked
from ..errors import CompatibilityError
from ..kv import KVState, RollingKVState
from ..kv._arguments import incompatible, tokens_error
from ..kv._cache_spec import CacheEntry, CacheSpec, entry_error
from ..kv._cache_state import CacheState
from ..kv._packed_object import PART as PACKED
from ..kv._packed_object import header_of
from ._hybrids import from_mlx

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

_NAME = "cache"  # of the only entry, for an array or a rolling cache
# Engines by the package of their cache classes, and the integration that converts these.
_ENGINES = {"transformers": "transformers", "mlx_lm": "mlx"}
# Code that takes a sequence out of a batch, for errors.
_ROW_OF = {
    "transformers": "row = copy.deepcopy(cache); row.batch_select_indices(torch.tensor([i]))",
    "mlx": "row = [layer.extract(i) for layer in cache]",
}
_BATCHED = (  # roles of arrays whose first axis is the batch
    "keys",
    "values",
    "quantized_keys",
    "quantized_values",
    "indexer_keys",
    "conv_states",
    "recurrent_states",
    "states",
)


def engine_of(cache: object) -> ModuleType | None:
    """Return the integration module that converts a cache of transformers or mlx-lm, or None.

    Its functions `from_cache` and `to_cache` do so. A list or tuple is a cache of the engine of its
    first item. None: any other object.
    """
    first = cache[0] if isinstance(cache, list | tuple) and cache else cache
    for cls in type(first).__mro__:
        name = _ENGINES.get(cls.__module__.partition(".")[0])
        if name is not None:
            return import_module(f"mlstate.integrations.{name}")
    return None


def state_of(cache: Any, length: int, spec: CacheSpec | None, model_type: str | None) -> CacheState:
    """Return `cache` as a `CacheState` over the same memory, with the layout of transformers.

    `cache`: as for `PromptStore.put`. `length`: tokens that it must hold, else CompatibilityError.
    `spec`: of the store; None: unknown; only an array uses it. `model_type`: of config.json, for
    mlx-lm.
    """
    state = _whole_state(cache, length, spec)
    if isinstance(cache, list | tuple):  # a cache of mlx-lm
        state = from_mlx(state, model_type)
    for name, array in state.arrays.items():
        if is_torch(array) and array.device.type == "meta":
            raise entry_error(name, "a meta tensor has no data to store", "data", "meta")
    state._cache.require_tokens("the store")
    if state.length != length:
        raise incompatible(
            f"the cache has {state.length:,} tokens, and tokens has {length:,}: pass the tokens "
            "that the model has seen; generate() returns one that it has not",
            None,
            f"{state.length} tokens",
            f"{length} tokens",
        )
    return state


def layers_of(cache: Any, spec: CacheSpec) -> int | None:
    """Return the number of layers of a cache, also of those without an entry; None: unknown.

    `cache`: as for `PromptStore.put`. `spec`: its entries.
    """
    part = getattr(cache, "self_attention_cache", cache)
    layers = getattr(part, "layers", part)
    if isinstance(layers, list | tuple):
        return len(layers)
    return max((entry.layer + 1 for entry in spec if entry.layer is not None), default=None)


def _whole_state(cache: Any, length: int, spec: CacheSpec | None) -> CacheState:
    """Return `cache` as a `CacheState`, in the layout of its engine, and of any length.

    The parameters are as for `state_of`, but another number of tokens than `length` is accepted.
    Raises TypeError for an object of another type, and CompatibilityError for a cache of an engine
    with several sequences, padding or drafts.
    """
    if isinstance(cache, CacheState):
        return cache
    if isinstance(cache, RollingKVState):
        return _state_of_ring(cache, length)
    if isinstance(cache, KVState | np.ndarray) or is_torch(cache):
        return state_of_array(cache, length, spec)
    engine = engine_of(cache)
    if engine is None:
        hint = ": pass its past_key_values" if hasattr(cache, "past_key_values") else ""
        raise TypeError(
            "cache must be a CacheState, KVState, RollingKVState, array, or a cache of "
            f"transformers or mlx-lm, got {type(cache).__name__}{hint}"
        )
    try:
        state: Any = engine.from_cache(cache)
    except CompatibilityError:  # for example, its layers do not count the tokens
        state = engine.from_cache(cache, length=length)
    check_one_sequence(state, engine.__name__.rpartition(".")[2])
    if isinstance(cache, list | tuple):  # a cache of mlx-lm
        check_no_padding(state._layouts)
    else:
        _check_no_drafts(cache, state.spec)
    return cast("CacheState", state)


def check_one_sequence(state: CacheState, engine: str) -> None:
    """Raise CompatibilityError unless the cache of an engine holds one sequence.

    The tokens of a put identify one sequence. The batch is the first axis of the arrays. `engine`:
    "transformers" or "mlx", for the loop over the batch in the error.
    """
    for entry in state.spec:
        sequences = 1
        if entry.role == PACKED:
            sequences = header_of(state.arrays[entry.name], entry.name).sequences
        elif entry.role in _BATCHED and entry.kind != "opaque":
            sequences = entry.shape[0]
        if sequences != 1:
            text = f"the cache holds {sequences} sequences: store each of them by itself: for "
            text += f"each i, {_ROW_OF[engine]}; store.put(tokens[i], row)"
            raise entry_error(entry.name, text, 1, sequences)


def check_no_padding(layouts: Iterable[Any]) -> None:
    """Raise CompatibilityError if a layer of mlx-lm, or one below it, has padding.

    `layouts`: of the layers. The positions of padding would be stored as tokens.
    """
    for layout in layouts:
        options = layout.options
        if any(options.get("padding") or options.get("left_padding") or ()):
            text = "the cache has padding: store the sequence without it, for example after extract"
            raise incompatible(f"{text}()", None, "no padding", "left padding")
        check_no_padding(layout.children)


def _check_no_drafts(cache: Any, spec: CacheSpec) -> None:
    """Raise CompatibilityError if a recurrent layer of transformers records drafts.

    `crop` of such a cache may have left removed tokens in the state. `spec`: of the cache.
    """
    for entry in spec:
        layers = getattr(cache, "layers", ())
        if entry.role != "recurrent_states" or entry.layer is None or entry.layer >= len(layers):
            continue
        if getattr(layers[entry.layer], "record_past", False):
            text = (
                "the layer records drafts, and crop() of transformers keeps removed tokens in its "
            )
            text += "recurrent state: put a cache that was filled without drafts"
            raise entry_error(entry.name, text, "record_past=False", "record_past=True")


def is_quantized(spec: CacheSpec) -> bool:
    """Return whether a cache has quantized entries."""
    return any(entry.kind == "quantized" for entry in spec)


def check_start(state: CacheState, start: int) -> None:
    """Raise CompatibilityError unless a cache is quantized from `start` tokens on, and only then.

    `start`: the store's `quantized_kv_start`. Layers that engines do not quantize do not matter.
    """
    expected, other = ("quantized", "full") if state.length >= start else ("full", "quantized")
    for entry in state.spec:
        if entry.kind == other:
            text = f"kind {other!r} in a cache of {state.length:,} tokens, and quantized_kv_start "
            text += f"is {start:,}: pass the number of the engine, or another model="
            raise entry_error(entry.name, text, expected, other)


def check_encoder(spec: CacheSpec) -> None:
    """Raise CompatibilityError if a cache has a cross-attention: its keys depend on the encoder."""
    for entry in spec:
        if entry.name.startswith("cross."):
            text = (
                "a cross-attention depends on the input of the encoder: pass its digest as salt= "
            )
            raise entry_error(entry.name, f"{text}or extra={{0: digest}}", "salt=", None)


def state_of_array(cache: Any, length: int, spec: CacheSpec | None) -> CacheState:
    """Return a `KVState`, array or tensor as a state with one entry over the same memory.

    Its first `length` positions hold tokens; CapacityError if it has fewer. `spec`: of the store:
    if it has one entry, name and sequence axis are from it. A `KVState` has an axis of its own;
    otherwise it is the second to last.
    """
    array, name, axis = cache, _NAME, -2
    if spec is not None and len(spec) == 1:
        name = spec[0].name
        axis = axis if spec[0].seq_axis is None else spec[0].seq_axis
    if isinstance(cache, KVState):
        array, axis = cache.array, cache.seq_axis
    entry = CacheEntry(name, "full", tuple(array.shape), array.dtype, axis)
    positions = entry.seq_length or 0
    if length > positions:
        raise tokens_error(length, positions, "pass the tokens that the cache holds", name)
    return CacheState(CacheSpec([entry]), {name: array}, length)


def ring_spec(cache: RollingKVState) -> CacheSpec:
    """Return a spec with one entry, for the slots of a rolling cache."""
    return CacheSpec(
        [CacheEntry(_NAME, "sliding", cache.shape, cache.dtype, cache.seq_axis, sinks=cache.sinks)]
    )


def _state_of_ring(cache: RollingKVState, length: int) -> CacheState:
    """Return a rolling cache as a state over its slots, with all tokens so far as its length.

    `length`: tokens that the caller expects; `state_of` refuses a state of another length. Raises
    CompatibilityError if the lengths are equal and the window has a gap: `trim` after an eviction
    leaves fewer tokens than a ring of this length has.
    """
    next_position = cache.next_position
    state = CacheState(ring_spec(cache), {_NAME: cache.array}, next_position)
    if next_position == length and not np.array_equal(state.positions(_NAME), cache.positions()):
        text = "tokens were trimmed after others had been evicted, so the window has a gap"
        raise entry_error(_NAME, text, f"{state.length} tokens", f"{cache.length} tokens")
    return state


def as_tokens(tokens: Any) -> Any:
    """Return a copy of token ids that the core accepts: one dimension, native 32 or 64 bits.

    Raises TypeError unless they are integers without a mask, and ValueError for several dimensions,
    except of a batch of one. The core checks their range.
    """
    refuse_masked("tokens", tokens)
    if is_torch(tokens):
        tokens = tokens.detach().cpu().numpy()
    ids = np.asarray(tokens)
    if ids.size == 0:
        ids = ids.astype(np.int64)
    if ids.dtype.kind not in "iu":
        kind = "bool" if ids.dtype.kind == "b" else str(ids.dtype)
        text = f"tokens must be integers, got an array of {kind}"
        if hasattr(tokens, "keys"):
            text = f"tokens must be the ids of one prompt, got {type(tokens).__name__}"
            text += ": pass its ['input_ids'], of one row"
        elif ids.dtype.kind == "U":
            text = "tokens must be token ids, got text: pass what the model's tokenizer returns"
        raise TypeError(text)
    if ids.ndim == 2 and ids.shape[0] == 1:  # a batch of one, from a tokenizer
        ids = ids[0]
    if ids.ndim != 1:
        rows = ": pass one row at a time, with its own cache" if ids.ndim == 2 else ""
        raise ValueError(f"tokens must have one dimension, got shape {ids.shape}{rows}")
    is_accepted = ids.dtype.itemsize >= 4 and ids.dtype.isnative
    return np.array(ids, ids.dtype if is_accepted else np.int64)
