"""One prompt of a model with sliding windows in transformers and mlx-lm.

Of a window of 16, transformers keeps 15 tokens or 16 slots, and mlx-lm 16 slots, or all tokens of a
prefill.
"""

import numpy as np
import pytest
from needs import needs

pytestmark = [pytest.mark.torch, needs("transformers")]
torch = pytest.importorskip("torch", reason="transformers needs it")
pytest.importorskip("transformers", reason="its models run")
pytest.importorskip("mlx_lm", reason="its models run")

import mlx.core as mx  # noqa: E402
from cache_models import (  # noqa: E402
    KINDS,
    TOKENS,
    new_model,
    one_thread,  # noqa: F401
    prefilled,
    restored,
    run,
)
from engines import loaded_by_mlx  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

LENGTHS = [10, 15, 16, 17, 40, 60]
CLOSE = 1e-5


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same weights in both engines."""
    model = new_model("gemma3")
    return model, loaded_by_mlx(model, tmp_path_factory.mktemp("model"), "gemma3_text")


def run_mlx(model, start, stop, cache):
    logits = model(mx.array(TOKENS[:, start:stop].numpy()), cache=cache)
    return np.array(logits[:, -1])


def run_torch(model, start, stop, cache):
    return run(model, TOKENS[:, start:stop], cache).numpy()


def assert_continues(step, model, length, got, expected):
    """Compare a token, a few, and more than the window."""
    for start, stop in ((0, 1), (1, 5), (5, 25)):
        at = length + start, length + stop
        assert np.abs(step(model, *at, got) - step(model, *at, expected)).max() < CLOSE


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_window_of_transformers_continues_in_mlx(pair, store, kind, length):
    model, other = pair
    store.put(TOKENS[:, :length], prefilled(model, length, kind))
    moved, live = make_prompt_cache(other), make_prompt_cache(other)
    run_mlx(other, 0, length, live)
    assert restored(store, moved) == length
    assert_continues(run_mlx, other, length, moved, live)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("prefill", [1, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_window_of_mlx_continues_in_transformers(pair, store, kind, prefill, length):
    """`prefill`: tokens that are decoded after it, so that mlx-lm has a ring."""
    model, other = pair
    cache = make_prompt_cache(other)
    run_mlx(other, 0, length - prefill, cache)
    for position in range(length - prefill, length):
        run_mlx(other, position, position + 1, cache)
    store.put(TOKENS[:, :length], cache)
    moved, live = KINDS[kind](config=model.config), prefilled(model, length, kind)
    assert restored(store, moved) == length
    assert_continues(run_torch, model, length, moved, live)
