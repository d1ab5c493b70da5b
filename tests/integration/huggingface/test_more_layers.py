"""A cache with more layers than the tokens come from is a cache of another model."""

import numpy as np
import pytest
from needs import needs

from mlstate.errors import CompatibilityError
from mlstate.kv import CacheState
from mlstate.prompts import PromptStore, _store

pytestmark = [pytest.mark.torch, needs("transformers")]
torch = pytest.importorskip("torch", reason="transformers needs it")
pytest.importorskip("transformers", reason="its caches are the subject")

from cache_layers import LAYERS, write  # noqa: E402
from transformers.cache_utils import Cache, DummyLayer, EncoderDecoderCache  # noqa: E402

from mlstate.integrations.transformers import from_cache, to_cache  # noqa: E402

TOKENS = np.arange(20)


def cache_of(*names, count=0, batch=1):
    generator = torch.Generator().manual_seed(1)
    layers = [DummyLayer() if name == "dummy" else LAYERS[name]() for name in names]
    for layer in layers:
        if count and not isinstance(layer, DummyLayer):
            write(layer, count, generator, batch)
    return Cache(layers=layers)


def as_plain(state):
    return CacheState(state.spec, dict(state.arrays), state.length)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("change", [as_plain, lambda state: state])
def test_a_target_with_more_layers_is_refused_and_unchanged(name, change):
    state = change(from_cache(cache_of(name, name, count=5), length=5))
    target = cache_of(name, name, name)
    with pytest.raises(CompatibilityError, match="no array of layer 2: it comes from a model with"):
        to_cache(state, into=target)
    assert not any(getattr(layer, "keys", None) is not None for layer in target.layers)
    if name != "fp8":
        target = cache_of("dummy", name)
        state = change(from_cache(cache_of("dummy", name, count=5), length=5))
        to_cache(state, into=target)


def test_layers_that_were_empty_in_the_source_stay_empty():
    source = cache_of("dynamic", "dynamic", count=5)
    source.layers.append(LAYERS["dynamic"]())
    target = cache_of("dynamic", "dynamic", "dynamic")
    to_cache(from_cache(source), into=target)
    assert [layer.get_seq_length() for layer in target.layers] == [5, 5, 0]
    with pytest.raises(CompatibilityError, match="layer 3"):
        to_cache(from_cache(source), into=cache_of(*["dynamic"] * 4))


def test_a_cross_attention_has_all_layers_or_none():
    source = EncoderDecoderCache(cache_of("dynamic", "dynamic", count=5), cache_of("dynamic"))
    target = EncoderDecoderCache(*(cache_of("dynamic", "dynamic") for _ in range(2)))
    to_cache(as_plain(from_cache(source)), into=target)
    source = EncoderDecoderCache(*(cache_of("dynamic", count=5) for _ in range(2)))
    target = EncoderDecoderCache(cache_of("dynamic"), cache_of("dynamic", "dynamic"))
    with pytest.raises(CompatibilityError, match=r"no array of layer cross\.1"):
        to_cache(as_plain(from_cache(source)), into=target)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_restore_into_more_layers_is_refused(tmp_path, monkeypatch, is_old):
    if is_old:
        monkeypatch.setattr(_store, "layers_of", lambda *_: None)
    store = PromptStore(tmp_path / "store", model="m", block_tokens=4)
    store.put(TOKENS, cache_of("dynamic", "dynamic", count=20))
    with store.match(np.append(TOKENS, 7)) as match:
        assert match._stored.layers == (None if is_old else 2)
        with pytest.raises(CompatibilityError, match="no array of layer 2"):
            store.restore(match, into=cache_of("dynamic", "dynamic", "static"))
        target = cache_of("dynamic", "static", "dummy")
        assert store.restore(match, into=target) == 20


def test_a_stored_cache_with_an_empty_layer_is_restored(tmp_path):
    source = cache_of("dynamic", count=20)
    source.layers.append(LAYERS["dynamic"]())
    store = PromptStore(tmp_path / "store", model="m", block_tokens=4)
    store.put(TOKENS, source)
    with store.match(np.append(TOKENS, 7)) as match:
        assert store.restore(match, into=cache_of("dynamic", "dynamic")) == 20


def test_stores_without_a_number_of_layers_match(tmp_path, monkeypatch):
    for layers in (None, 2, 5):
        monkeypatch.setattr(_store, "layers_of", lambda *_, layers=layers: layers)
        with PromptStore(tmp_path / "store", model="m", block_tokens=4) as store:
            tokens = np.arange(20 + (layers or 0))
            assert store.put(tokens, cache_of("dynamic", "dynamic", count=len(tokens))) > 0
            with store.match(np.append(tokens, 7)) as match:
                assert match.length == len(tokens)
