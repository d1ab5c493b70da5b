"""After an exception the layers of mlx-lm hold the tokens of one cache."""

import pytest
from injected_errors import half_changed
from needs import needs

pytestmark = [needs("mlx", "mlx_lm"), pytest.mark.timeout(200)]
mx = pytest.importorskip("mlx.core", reason="the layers are of mlx")

from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache  # noqa: E402

from mlstate.integrations.mlx import from_cache, to_cache  # noqa: E402


def filled(count, value):
    cache = [KVCache(), RotatingKVCache(16), ArraysCache(2), KVCache()]
    for layer in cache:
        if isinstance(layer, ArraysCache):
            layer[0], layer[1] = mx.full((1, 3), value), mx.full((1, 5), value)
        else:
            layer.update_and_fetch(*[mx.full((1, 2, count, 4), value)] * 2)
    return cache


def content(cache):
    state = from_cache(cache)
    return state.length, [array.tobytes() for array in state.arrays.values()]


def test_an_error_at_any_line_leaves_the_tokens_of_one_cache():
    source = from_cache(filled(12, 1.0))
    raised, wrong = half_changed(
        lambda: filled(7, 2.0), lambda cache: to_cache(source, into=cache), content
    )
    assert raised > 100 and not wrong
