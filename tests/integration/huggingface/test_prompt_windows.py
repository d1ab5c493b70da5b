"""One prompt of a model with sliding windows in transformers and mlx-lm.

Of a window of 16, transformers keeps 15 tokens or 16 slots, and mlx-lm 16 slots, or all tokens of a
prefill.
"""

import json

import numpy as np
import pytest
from needs import needs

pytestmark = [pytest.mark.torch, needs("transformers")]
torch = pytest.importorskip("torch", reason="transformers needs it")
pytest.importorskip("transformers", reason="its models run")
pytest.importorskip("mlx_lm", reason="its models run")

import mlx.core as mx  # noqa: E402
from cache_models import new_model, one_thread, prompt, run  # noqa: E402, F401
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

from mlstate.prompts import PromptStore  # noqa: E402

TOKENS = prompt(90)
KINDS = {"dynamic": DynamicCache, "static": lambda config: StaticCache(config, 128)}
LENGTHS = [10, 15, 16, 17, 40, 60]
CLOSE = 1e-5


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same weights in both engines; the config has the facts that mlx-lm needs."""
    model, folder = new_model("gemma3"), tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config["rope_parameters"]
    config |= {
        "sliding_window_pattern": 2,
        "rope_theta": rope["full_attention"]["rope_theta"],
        "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return model, load_model(folder)[0]


@pytest.fixture
def store(tmp_path):
    with PromptStore(tmp_path, model="gemma", block_tokens=16) as store:
        yield store


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
    cache = KINDS[kind](config=model.config)
    run_torch(model, 0, length, cache)
    store.put(TOKENS[:, :length], cache)
    moved, live = make_prompt_cache(other), make_prompt_cache(other)
    run_mlx(other, 0, length, live)
    with store.match(TOKENS) as match:
        assert store.restore(match, into=moved) == length
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
    moved, live = KINDS[kind](config=model.config), KINDS[kind](config=model.config)
    run_torch(model, 0, length, live)
    with store.match(TOKENS) as match:
        assert store.restore(match, into=moved) == length
    assert_continues(run_torch, model, length, moved, live)
