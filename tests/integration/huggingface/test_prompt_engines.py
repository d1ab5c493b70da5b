"""One prompt in two engines: transformers and mlx-lm, with the same weights."""

import importlib.util

import numpy as np
import pytest
from needs import needs

pytestmark = [pytest.mark.torch, needs("transformers")]
torch = pytest.importorskip("torch", reason="transformers needs it")
transformers = pytest.importorskip("transformers", reason="its models run")
if importlib.util.find_spec("mlstate.integrations.mlx") is None:
    pytest.skip("needs the integration of mlx-lm", allow_module_level=True)
pytest.importorskip("mlx_lm", reason="its models run")

import mlx.core as mx  # noqa: E402
from cache_models import TOKENS, new_model, prefilled, restored, run  # noqa: E402
from engines import loaded_by_mlx  # noqa: E402
from mlx_lm.models.cache import (  # noqa: E402
    ArraysCache,
    BatchKVCache,
    CacheList,
    KVCache,
    make_prompt_cache,
)
from transformers import DynamicCache, StaticCache  # noqa: E402

from mlstate.errors import CompatibilityError  # noqa: E402
from mlstate.integrations import mlx  # noqa: E402
from mlstate.integrations import transformers as hf  # noqa: E402
from mlstate.kv import CacheEntry, CacheSpec, CacheState  # noqa: E402


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def pair(request, tmp_path, store):
    """The same weights in both engines, and a store."""
    model = new_model("llama").to(getattr(torch, request.param))
    return model, loaded_by_mlx(model, tmp_path / "model"), store


def same_bits(first, second):
    names = list(first.arrays)
    assert names == list(second.arrays) and first.length == second.length
    return all(
        np.array_equal(first.ordered(n).view(np.uint8), second.ordered(n).view(np.uint8))
        for n in names
    )


def readable(state):
    return {name: np.ascontiguousarray(state.ordered(name)) for name in state.arrays}


def mlx_logits(model, tokens, cache):
    return np.array(model(mx.array(tokens.numpy()), cache=cache).astype(mx.float32))[:, -1]


def test_a_prompt_of_transformers_continues_in_mlx_and_back(pair):
    model, other, store = pair
    cache = prefilled(model, 70)
    assert store.put(TOKENS[:, :70], cache) == 70

    moved = make_prompt_cache(other)
    assert restored(store, moved) == 70
    assert same_bits(mlx.from_cache(moved), hf.from_cache(cache))
    got, expected = mlx_logits(other, TOKENS[:, 70:], moved), run(model, TOKENS[:, 70:], cache)
    assert got.argmax() == expected.argmax()

    assert store.put(TOKENS, moved) == 90
    back = DynamicCache(config=model.config)
    assert restored(store, back, full=True) == 90
    assert same_bits(hf.from_cache(back), mlx.from_cache(moved))


def test_a_restored_cache_of_mlx_gives_the_bits_of_the_live_one(pair):
    _, model, store = pair
    live, moved = make_prompt_cache(model), make_prompt_cache(model)
    mlx_logits(model, TOKENS[:, :70], live)
    store.put(TOKENS[:, :70], live)
    assert restored(store, moved) == 70
    for start, stop in ((70, 89), (89, 90)):
        tokens = TOKENS[:, start:stop]
        assert np.array_equal(mlx_logits(model, tokens, moved), mlx_logits(model, tokens, live))


def test_a_prompt_stored_with_the_sequence_last_is_restored_in_order(pair):
    model, other, store = pair
    cache = prefilled(model, 70)
    arrays = {name: np.moveaxis(a, 2, 3) for name, a in readable(hf.from_cache(cache)).items()}
    spec = CacheSpec([CacheEntry(n, "full", a.shape, a.dtype, -1) for n, a in arrays.items()])
    store.put(TOKENS[:, :70], CacheState(spec, arrays, 70))
    for into, read in (
        (DynamicCache(config=model.config), hf.from_cache),
        (StaticCache(model.config, 128), hf.from_cache),
        (make_prompt_cache(other), mlx.from_cache),
    ):
        assert restored(store, into) == 70
        assert same_bits(read(into), hf.from_cache(cache))


def test_a_cache_of_mlx_with_tokens_is_refused(pair):
    _, model, store = pair
    cache = make_prompt_cache(model)
    mlx_logits(model, TOKENS[:, :20], cache)
    with store.match(TOKENS) as match, pytest.raises(CompatibilityError, match="pass one of make"):
        store.restore(match, into=cache)


def test_a_batch_or_padding_of_mlx_is_refused(pair):
    _, _, store = pair
    keys = mx.ones((1, 2, 70, 8))
    padded, whole = BatchKVCache([3]), BatchKVCache([0])
    for layer in (padded, whole):
        layer.update_and_fetch(keys, keys)
    states = ArraysCache(1)
    states[0] = mx.ones((2, 3, 4))
    for cache in ([padded], [CacheList(padded, KVCache())]):
        with pytest.raises(CompatibilityError, match="the cache has padding"):
            store.put(TOKENS[:, :70], cache)
    with pytest.raises(CompatibilityError, match=r"2 sequences.*extract\(i\)"):
        store.put(TOKENS[:, :70], [states])
    assert store.put(TOKENS[:, :70], [whole]) == 70


@pytest.mark.parametrize("engine", ["transformers", "mlx"])
def test_values_shorter_than_keys_stay_in_their_engine(engine, store):
    """Latent attention orders them in another way in each engine, in the same shape."""
    keys, values = torch.randn(1, 1, 70, 16), torch.randn(1, 1, 70, 8)
    caches, empty = [DynamicCache(), [KVCache()]], [DynamicCache(), [KVCache()]]
    caches[0].update(keys, values, 0)
    caches[1][0].update_and_fetch(mx.array(keys.numpy()), mx.array(values.numpy()))
    own = ("transformers", "mlx").index(engine)
    tokens = TOKENS[:, :70]
    assert store.put(tokens, caches[own]) == 70
    with pytest.raises(CompatibilityError, match="the cache lacks the entry"):
        store.put(tokens, caches[1 - own])
    with store.match(tokens, full=True) as match:
        with pytest.raises(CompatibilityError, match=r"0\.(mlx_)?values: another engine"):
            store.restore(match, into=empty[1 - own])
        assert store.restore(match, into=empty[own]) == 70
    read = (hf.from_cache, mlx.from_cache)[own]
    assert same_bits(read(empty[own]), read(caches[own]))
