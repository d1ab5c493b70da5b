"""A conversation that mlx-lm quantizes at a length: one store, and the cache of each length."""

import pytest

pytest.importorskip("mlx_lm", reason="its caches are quantized")

import mlx.core as mx
import numpy as np
from engines import new_mlx_model
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache
from toy_caches import flip

from mlstate.errors import CompatibilityError
from mlstate.integrations.mlx import from_cache
from mlstate.prompts import PromptStore

START = 30
TOKENS = np.random.default_rng(0).integers(2, 97, 60).tolist()


@pytest.fixture(scope="module")
def model():
    return new_mlx_model("llama", head_dim=32)


@pytest.fixture
def store(tmp_path):
    with PromptStore(tmp_path, model="m", block_tokens=8, quantized_kv_start=START) as store:
        yield store


def run(model, cache, tokens):
    """Run token by token, as a generation does."""
    for token in tokens:
        model(mx.array([[token]]), cache=cache)
        maybe_quantize_kv_cache(cache, START, 32, 8)
    return cache


def bits(cache):
    state = from_cache(cache)
    return {name: np.array(array)[:, :, : state.length] for name, array in state.arrays.items()}


def test_each_length_has_the_cache_of_the_engine(model, store):
    cache, done = make_prompt_cache(model), 0
    for stop in (20, 29, 30, 45, 60):
        run(model, cache, TOKENS[done:stop])
        assert store.put(TOKENS[:stop], cache) == stop
        done = stop
    lengths = set()
    for length in (8, 14, 20, 23, 29, 30, 31, 32, 44, 46, 58):
        into = make_prompt_cache(model)
        with store.match([*TOKENS[:length], 1]) as match:
            restored = store.restore(match, into=into)
        expected = run(model, make_prompt_cache(model), TOKENS[:restored])
        assert [type(layer) for layer in into] == [type(layer) for layer in expected]
        got, want = bits(into), bits(expected)
        assert got.keys() == want.keys()
        assert all(np.array_equal(got[name], array) for name, array in want.items())
        lengths.add(restored)
    assert lengths == {8, 20, 29, 30, 32, 40, 45, 56}
    assert (store.pin(TOKENS), store.unpin(TOKENS), store.delete(TOKENS)) == (60, 60, 60)


def test_a_cache_that_the_engine_cannot_have_is_refused(model, store):
    short = run(model, make_prompt_cache(model), TOKENS[:20])
    quantized = [layer.to_quantized(32, 8) for layer in short]
    with pytest.raises(CompatibilityError, match="kind 'quantized' in a cache of 20 tokens"):
        store.put(TOKENS[:20], quantized)
    long = make_prompt_cache(model)
    model(mx.array([TOKENS]), cache=long)
    with pytest.raises(CompatibilityError, match="kind 'full' in a cache of 60 tokens"):
        store.put(TOKENS, long)
    assert store.stats()["records"] == 0


def test_without_a_start_a_quantized_cache_beside_full_ones_is_refused(model, tmp_path):
    with PromptStore(tmp_path, model="m") as store:
        cache = run(model, make_prompt_cache(model), TOKENS[:20])
        store.put(TOKENS[:20], cache)
        run(model, cache, TOKENS[20:40])
        with pytest.raises(CompatibilityError, match="quantized_kv_start="):
            store.put(TOKENS[:40], cache)


def test_damage_below_the_start_restores_no_token(model, store, tmp_path):
    """The tokens before the damage would be quantized, which the engine never has there."""
    cache = run(model, make_prompt_cache(model), TOKENS[:48])
    store.put(TOKENS[:48], cache)
    codes = bits(cache)[next(name for name in bits(cache) if name.startswith("0.keys"))]
    flip(tmp_path, np.ascontiguousarray(codes[0, 0, 16:24]).tobytes())
    into = make_prompt_cache(model)
    with store.match(TOKENS) as match:
        assert match.length == 48
        assert store.restore(match, into=into) == 0
    assert all(layer.empty() for layer in into)
    assert store.put(TOKENS[:48], cache) == 48


@pytest.mark.parametrize(
    ("start", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_a_malformed_start_is_refused(tmp_path, start, error):
    with pytest.raises(error, match="quantized_kv_start"):
        PromptStore(tmp_path / "new", model="m", quantized_kv_start=start)
    assert not (tmp_path / "new").exists()
