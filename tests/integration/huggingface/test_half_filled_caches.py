"""After an exception a cache of an engine is unchanged or empty: never layers of two caches."""

from functools import partial

import numpy as np
import pytest
from injected_errors import half_changed
from needs import needs

from mlstate.prompts import PromptStore

pytestmark = [pytest.mark.torch, needs("transformers"), pytest.mark.timeout(300)]
torch = pytest.importorskip("torch", reason="transformers needs it")
pytest.importorskip("transformers", reason="its caches are the subject")

from cache_layers import LAYERS, write  # noqa: E402
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer  # noqa: E402

from mlstate.integrations.transformers import from_cache, to_cache  # noqa: E402

KINDS = {
    "dynamic": ["dynamic"] * 3,
    "windows": ["dynamic", "dynamic sliding", "dynamic"],
    "static": ["static", "static sliding", "static"],
    "static and dynamic": ["dynamic sliding", "static", "static sliding"],
    "indexed": ["dynamic indexed"] * 2,
    "static indexed": ["static indexed"] * 2,
    "fp8": ["fp8", "fp8"],
    "linear": ["linear", "linear and static", "linear and sliding"],
}


def filled(names, count, seed, batch=2):
    generator = torch.Generator().manual_seed(seed)
    cache = Cache(layers=[LAYERS[name]() for name in names])
    for layer in cache.layers:
        if count:
            write(layer, count, generator, batch)
    return cache


def bits(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def content(cache):
    """Number of tokens and bits of all layers; None for an empty cache."""
    try:
        state = from_cache(cache)
    except ValueError as error:
        assert "no layer of the cache has a token" in str(error)
        return None
    if not state.length:
        return None
    views = [state.arrays[e.name] if e.seq_axis is None else state.view(e.name) for e in state.spec]
    return state.length, [bits(view) for view in views]


@pytest.mark.parametrize("before", [0, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_at_any_line_leaves_the_tokens_of_one_cache(kind, before):
    source = from_cache(filled(KINDS[kind], 20, 1)).copy()
    make = partial(filled, KINDS[kind], before, 2)
    allowed = content(make())

    def content_or_none(cache):
        tokens_and_bits = content(cache)
        return "empty" if tokens_and_bits is None and allowed is None else tokens_and_bits

    raised, wrong = half_changed(
        make, lambda c: to_cache(source, into=c), content_or_none, most=200
    )
    assert raised > 80 and not wrong


def test_an_error_at_any_line_adds_all_layers_or_none():
    source = from_cache(filled(["dynamic"] * 3, 20, 1))

    def make():
        cache = DynamicCache()
        write(cache.layers[0], 5, torch.Generator()) if cache.layers else None
        return cache

    def layers(cache):
        return len(cache.layers), [layer.get_seq_length() for layer in cache.layers]

    raised, wrong = half_changed(make, lambda c: to_cache(source, into=c), layers, most=200)
    assert raised > 80 and not wrong


@pytest.mark.parametrize("kind", ["dynamic", "static", "static and dynamic", "fp8"])
@pytest.mark.parametrize("method", ["lazy_initialization", "narrow", "fill_"])
def test_an_error_of_torch_in_any_layer_leaves_the_tokens_of_one_cache(monkeypatch, kind, method):
    source = from_cache(filled(KINDS[kind], 20, 1)).copy()
    expected = content(to_cache(source.copy()))
    owner = DynamicLayer if method == "lazy_initialization" else torch.Tensor
    real, calls = getattr(owner, method), []
    for at in range(1, 30):
        cache, calls[:] = filled(KINDS[kind], 9, 2), []
        before = content(cache)

        def fails(self, *arguments, at=at, **options):
            calls.append(1)
            if len(calls) == at:
                raise torch.OutOfMemoryError("injected")
            return real(self, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, method, fails)
            try:
                to_cache(source, into=cache)
            except torch.OutOfMemoryError:
                assert content(cache) in (before, None)
            else:
                break
        to_cache(source, into=cache)
        assert content(cache) == expected
    assert content(cache) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_found", [True, False])
def test_an_error_at_any_line_of_a_restore_leaves_the_tokens_of_one_cache(tmp_path, kind, is_found):
    store = PromptStore(tmp_path / "store", model="m", block_tokens=4)
    tokens = np.arange(20)
    store.put(tokens + (0 if is_found else 50), filled(KINDS[kind], 20, 1, batch=1))

    def operate(cache):
        with store.match(np.append(tokens, 1)) as match:
            assert store.restore(match, into=cache) == (20 if is_found else 0)

    def content_or_empty(cache):
        tokens_and_bits = content(cache)
        return "empty" if tokens_and_bits is None and not is_found else tokens_and_bits

    make = partial(filled, KINDS[kind], 9, 2, batch=1)
    raised, wrong = half_changed(make, operate, content_or_empty, most=100)
    assert raised > 80 and not wrong
