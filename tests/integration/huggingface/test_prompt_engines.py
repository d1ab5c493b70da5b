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
from cache_models import new_model, prompt, run  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from mlstate.errors import CompatibilityError  # noqa: E402
from mlstate.integrations import mlx  # noqa: E402
from mlstate.integrations import transformers as hf  # noqa: E402
from mlstate.prompts import PromptStore  # noqa: E402

TOKENS = prompt(90)


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def pair(request, tmp_path):
    """The same weights in both engines, and a store."""
    model = new_model("llama").to(getattr(torch, request.param))
    model.save_pretrained(tmp_path / "model")
    other, _ = load_model(tmp_path / "model")
    with PromptStore(tmp_path / "store", model="llama", block_tokens=16) as store:
        yield model, other, store


def same_bits(first, second):
    names = list(first.arrays)
    assert names == list(second.arrays) and first.length == second.length
    return all(
        np.array_equal(first.ordered(n).view(np.uint8), second.ordered(n).view(np.uint8))
        for n in names
    )


def mlx_logits(model, tokens, cache):
    return np.array(model(mx.array(tokens.numpy()), cache=cache).astype(mx.float32))[:, -1]


def test_a_prompt_of_transformers_continues_in_mlx_and_back(pair):
    model, other, store = pair
    cache = DynamicCache(config=model.config)
    run(model, TOKENS[:, :70], cache)
    assert store.put(TOKENS[:, :70], cache) == 70

    moved = make_prompt_cache(other)
    with store.match(TOKENS) as match:
        assert store.restore(match, into=moved) == 70
    assert same_bits(mlx.from_cache(moved), hf.from_cache(cache))
    got, expected = mlx_logits(other, TOKENS[:, 70:], moved), run(model, TOKENS[:, 70:], cache)
    assert got.argmax() == expected.argmax()

    assert store.put(TOKENS, moved) == 90
    back = DynamicCache(config=model.config)
    with store.match(TOKENS, full=True) as match:
        assert store.restore(match, into=back) == 90
    assert same_bits(hf.from_cache(back), mlx.from_cache(moved))


def test_a_restored_cache_of_mlx_gives_the_bits_of_the_live_one(pair):
    _, model, store = pair
    live, moved = make_prompt_cache(model), make_prompt_cache(model)
    mlx_logits(model, TOKENS[:, :70], live)
    store.put(TOKENS[:, :70], live)
    with store.match(TOKENS) as match:
        assert store.restore(match, into=moved) == 70
    for start, stop in ((70, 89), (89, 90)):
        tokens = TOKENS[:, start:stop]
        assert np.array_equal(mlx_logits(model, tokens, moved), mlx_logits(model, tokens, live))


def test_a_cache_of_mlx_with_tokens_is_refused(pair):
    _, model, store = pair
    cache = make_prompt_cache(model)
    mlx_logits(model, TOKENS[:, :20], cache)
    with store.match(TOKENS) as match, pytest.raises(CompatibilityError, match="pass one of make"):
        store.restore(match, into=cache)
