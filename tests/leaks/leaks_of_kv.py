"""Leak cases of KV caches."""

import pickle

import numpy as np
import pytest
from leak_cases import case, each, raises, with_members

from mlstate import errors, kv


def cache(length=8, dtype=np.float16):
    return np.arange(2 * 3 * length * 4).reshape(2, 3, length, 4).astype(dtype)


@case("transition_kv_state", "compact_kv_state")
def moves(_):
    source, out = cache(), cache(16, np.float32)
    strided = cache(16)[:, :, ::2]
    return each(
        lambda: kv.transition_kv_state(source, 16, 5),
        lambda: kv.transition_kv_state(source, 8),
        lambda: kv.transition_kv_state(source, 16, 5, 1.5, out=out),
        lambda: kv.transition_kv_state(strided, 16, dtype=np.float32, low_memory=True),
        lambda: kv.compact_kv_state(source, 4, 3),
        lambda: kv.compact_kv_state(source, 4, 3, np.float32),
    ), [source, out, strided]


@case()
def refused_moves(_):
    source, flat = cache(), np.zeros(3)
    return each(
        raises(errors.CapacityError, kv.transition_kv_state, source, 4, 2),
        raises(errors.CapacityError, kv.transition_kv_state, source, 16, -1),
        raises(errors.CapacityError, kv.compact_kv_state, source, 4, 5),
        raises(ValueError, kv.transition_kv_state, flat, 16),
        raises(ValueError, kv.transition_kv_state, source, 8, 3, out=source),
        raises(TypeError, kv.transition_kv_state, "no array", 16),
        raises((TypeError, ValueError), kv.transition_kv_state, source, 16, dtype="S3"),
    ), [source, flat]


@case()
def torch_moves(_):
    torch = pytest.importorskip("torch", reason="moves torch tensors")
    source, out = torch.ones(2, 3, 8, 4, dtype=torch.bfloat16), torch.zeros(2, 3, 16, 4)
    return each(
        lambda: kv.transition_kv_state(source, 16, 5),
        lambda: kv.transition_kv_state(source, 16, 5, out=out),
        lambda: kv.compact_kv_state(source, 4, 3, torch.float32),
        raises(errors.CapacityError, kv.compact_kv_state, source, 4, 5),
    ), [source, out]


@case("validate_state_shapes", "get_transition_info")
def questions(_):
    have, want = (2, 3, 8, 4), (2, 3, 16, 4)
    return each(
        lambda: kv.validate_state_shapes(have, want),
        raises(ValueError, kv.validate_state_shapes, want, have),
        lambda: kv.get_transition_info(8, 16, 5),
    ), [have, want]


@case("create_attention_size_mask", "create_decode_mask", "create_causal_mask")
def masks(_):
    out = np.zeros((1, 1, 6, 6), np.float32)
    return each(
        lambda: kv.create_attention_size_mask(6, 2, 3, out=out),
        lambda: kv.create_attention_size_mask(6, 2, 3, fill=-100.0),
        lambda: kv.create_decode_mask(6, 2, 3, dtype=np.float32),
        lambda: kv.create_causal_mask(6),
        raises(ValueError, kv.create_attention_size_mask, 6, 2, 9),
        raises(ValueError, kv.create_decode_mask, 6, -1, 3),
        raises(ValueError, kv.create_attention_size_mask, 5, 2, 3, out=out),
    ), [out]


@case(*with_members("KVState", "from_array resize reserve contiguous copy"))
def kv_state(_):
    array = cache()

    def run():
        state = kv.KVState.from_array(array, capacity=16)
        state.resize(16)
        state.reserve(32)
        state.contiguous(), state.copy(), pickle.loads(pickle.dumps(state))
        view = state.array
        raises(errors.CapacityError, state.resize, 64)()
        del state
        view[...] = 1  # a view keeps the memory alive

    return each(run, raises(ValueError, kv.KVState, (1, 1, 8, 4), 4)), [array]


@case(*with_members("RollingKVState", "append ordered positions trim copy"))
def rolling_kv_state(_):
    array = cache()

    def run():
        state = kv.RollingKVState(array.shape, 5, array.dtype, sinks=2)
        state.append(array)
        state.trim(1)
        state.ordered()
        state.positions(), state.copy()
        pickled = state.__reduce__()[2]
        state.__setstate__(pickled)
        raises(errors.CapacityError, state._buffer.fill, state.array.copy(), 0, 3, 0)()
        raises(TypeError, state._buffer.fill, "no array", 2, 3, 0)()
        view = state.array
        raises(errors.CapacityError, state.trim, 64)()
        raises(errors.CompatibilityError, state.append, array[0])()
        del state
        view[...] = 1  # a view keeps the memory alive

    return each(run, raises(ValueError, kv.RollingKVState, (1, 1, 8, 4), sinks=8)), [array]


@case("rotate_keys")
def rotate_keys(_):
    array, shifts = cache(), np.arange(8)
    refused = raises(ValueError, kv.rotate_keys, array, 3, base=0)
    return each(
        lambda: kv.rotate_keys(array, shifts), lambda: kv.rotate_keys(array, 0, out=array), refused
    ), [array, shifts]


@case(
    "CacheEntry",
    "CacheSpec",
    "CacheSpec.entry_of",
    "CacheState",
    *(f"CacheState.{n}" for n in ("view", "positions", "ordered", "advance", "resize", "trim")),
    *(f"CacheState.{n}" for n in ("crop", "copy", "next_slot", "snapshot", "restore")),
    "Snapshot",
)
def cache_state(_):
    array, ring = cache(), np.ones((2, 4, 4), np.float32)

    def run():
        spec = kv.CacheSpec(
            [
                kv.CacheEntry("keys", "full", array.shape, array.dtype, 2, layer=0),
                kv.CacheEntry("ring", "sliding", ring.shape, ring.dtype, sinks=1, window=4),
            ]
        )
        spec.entry_of("keys")
        state = kv.CacheState(spec, {"keys": array, "ring": ring}, 2)
        state.advance(1)
        state.restore(state.snapshot())
        copied = state.copy()
        copied.next_slot("ring"), copied.ordered("ring", copy=False)
        raises(ValueError, copied.restore, state.snapshot())()
        raises(errors.CompatibilityError, state.next_slot, "keys")()
        state.resize(16)
        state.trim(1)
        state.crop(1)
        raises(ValueError, state.quantize)()  # a last axis of 4 elements
        for name in state.arrays:
            state.view(name), state.positions(name), state.ordered(name)
        raises(errors.CapacityError, state.resize, 0)()
        raises(ValueError, kv.CacheState, spec, {"keys": array}, 2)()
        raises(errors.TensorNotFoundError, state.view, "values")()

    return run, [array, ring]


@case("CacheState.quantize", "CacheState.dequantize", "QuantizationLoss")
def quantized_cache_state(_):
    array, bad = np.ones((2, 5, 16), np.float32), np.full((2, 5, 16), np.nan, np.float32)
    spec = kv.CacheSpec([kv.CacheEntry("keys", "full", array.shape, array.dtype)])

    def run():
        state = kv.CacheState(spec, {"keys": array}, 5)
        state.quantize(4, 8, report=True)
        state.dequantize(capacity=9)
        raises(ValueError, state.quantize, 3, 8)()
        raises(errors.CapacityError, state.quantize, 4, 8, capacity=2)()
        raises(ValueError, kv.CacheState(spec, {"keys": bad}, 5).quantize, 8, 8)()

    return run, [array, bad, spec]


@case(*with_members("StateTransitionManager", "register_model transition get_transition_path"))
def manager(_):
    source = cache()

    def run():
        models = kv.StateTransitionManager()
        models.register_model("small", 8, 2, 3, 4)
        models.register_model("large", 16, num_layers=2)
        models.transition(source, "small", "large", 5)
        models.get_transition_path("small", "large")
        raises(ValueError, models.get_transition_path, "large", "small")()
        raises(ValueError, models.transition, source, "small", "none", 5)()

    return run, [source]


@case(
    "LadderStep",
    "ContextLadder",
    *(f"ContextLadder.{n}" for n in ("size_for", "next_step", "refill", "shrink", "mask")),
    "ContextLadder.prefill_batches",
)
def context_ladder(_):
    sizes = [8, 16]

    def run():
        ladder = kv.ContextLadder(sizes, overflow="shift_refill", batch_size=4, prompt_tokens=2)
        ladder.size_for(9), ladder.prefill_batches(9), ladder.shrink(3), ladder.refill(20)
        for position, size in ((7, 8), (8, 8), (16, 16)):
            str(ladder.next_step(position, size).indices)
        ladder.mask(3, 8), ladder.mask(3, 8, 4)
        raises(ValueError, ladder.next_step, 9, 8)()
        raises(TypeError, kv.ContextLadder, [True])()

    return run, [sizes]


@case(
    "CombinedStrategy",
    *(f"CombinedStrategy.{n}" for n in ("check_sizes", "after_prefill", "next_step")),
    *(f"CombinedStrategy.{n}" for n in ("prefill_mask", "generate_mask")),
)
def combined_strategy(_):
    stage = (8, 4)

    def run():
        strategy = kv.CombinedStrategy(prefill=16, generate=stage)
        strategy.check_sizes([8, 16]), strategy.after_prefill(5), strategy.next_step(8, 8)
        strategy.prefill_mask(0, 4), strategy.generate_mask(7, 8, attention_size=2)
        raises(ValueError, strategy.check_sizes, [8])()
        raises(ValueError, kv.CombinedStrategy, prefill=8, generate=16)()

    return run, [stage]


def rolled_back(state):
    """The state, restored from a snapshot of itself."""
    state.restore(state.snapshot())
    return state


@case("from_cache", "to_cache")
def caches_of_transformers(_):
    pytest.importorskip("transformers", reason="its caches are moved")
    import torch
    from transformers.cache_utils import (
        Cache,
        DynamicLayer,
        LinearAttentionLayer,
        StaticLayer,
        StaticSlidingWindowLayer,
    )

    from mlstate.integrations.transformers import from_cache, to_cache

    def filled(full):
        layers = [full, StaticSlidingWindowLayer(16, 4), LinearAttentionLayer()]
        for layer in layers[:2]:
            layer.update(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4))
        layers[2].update_conv_state(torch.ones(1, 6, 4))
        layers[2].update_recurrent_state(torch.ones(1, 2, 4, 4))
        return Cache(layers=layers)

    cache, target, other = filled(StaticLayer(16)), filled(StaticLayer(32)), filled(DynamicLayer())

    few = Cache(layers=cache.layers[:1])
    return each(
        lambda: to_cache(from_cache(cache)),
        lambda: to_cache(from_cache(cache), into=target),
        lambda: to_cache(from_cache(other).copy()),
        lambda: pickle.loads(pickle.dumps(from_cache(other))),
        lambda: to_cache(rolled_back(from_cache(cache)), into=cache),
        raises(errors.CompatibilityError, lambda: to_cache(from_cache(cache), into=few)),
        raises(errors.CompatibilityError, lambda: from_cache(Cache(layers=[DynamicLayer()]))),
        raises(TypeError, from_cache, "no cache"),
    ), [cache, target, other]


@case("from_cache", "to_cache", "load_prompt_cache", "save_prompt_cache")
def caches_of_mlx(folder):
    pytest.importorskip("mlx_lm", reason="its caches are moved")
    import mlx.core as mx
    from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

    from mlstate.integrations.mlx import (
        from_cache,
        load_prompt_cache,
        save_prompt_cache,
        to_cache,
    )

    def filled(full):
        layers = [full, RotatingKVCache(4), ArraysCache(1)]
        for layer in layers[:2]:
            layer.update_and_fetch(mx.ones((1, 2, 5, 4)), mx.ones((1, 2, 5, 4)))
        layers[2][0] = mx.ones((1, 6, 4), mx.bfloat16)
        return layers

    cache, target, path = filled(KVCache()), filled(KVCache()), folder / "prompt.safetensors"
    save_prompt_cache(path, cache)

    return each(
        lambda: to_cache(from_cache(cache)),
        lambda: to_cache(from_cache(cache).copy()),
        lambda: pickle.loads(pickle.dumps(from_cache(cache))),
        lambda: save_prompt_cache(path, cache, {"model": "tiny"}),
        lambda: load_prompt_cache(path, return_metadata=True),
        lambda: to_cache(rolled_back(from_cache(cache)), into=target),
        raises(errors.CompatibilityError, lambda: to_cache(from_cache(cache), into=target[:1])),
        raises(errors.CompatibilityError, lambda: from_cache([KVCache()])),
        raises(errors.CompatibilityError, lambda: save_prompt_cache(path, [object()])),
        raises(errors.StoreError, lambda: load_prompt_cache(folder / "absent")),
        raises(TypeError, from_cache, "no cache"),
    ), [cache, target]
