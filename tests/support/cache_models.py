"""Small models of transformers with random weights, one for each kind of cache."""

from functools import cache as kept

import pytest
import torch
import transformers
from engines import new_transformers_model
from transformers import DynamicCache, StaticCache

MODELS = {
    "llama": {},
    "gemma3": {"kind": "gemma3_text", "sliding_window": 16},
    # the first static cache is shorter than the window
    "gemma3 wide": {"kind": "gemma3_text", "sliding_window": 100},
    "qwen3_next": {},
    "lfm2": {},
}
# `cache=` since 5.24; before, and deprecated since, `past_key_values=`.
HAS_CACHE = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
ARGUMENT = "cache" if HAS_CACHE else "past_key_values"


def new_model(name):
    """A model with the same weights in every process."""
    options = {"kind": name, "initializer_range": 0.02, **MODELS[name]}
    return new_transformers_model(**options)


shared_model = kept(new_model)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt(count=20, seed=1):
    return torch.randint(2, 97, (1, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def run(model, tokens, cache):
    return model(tokens, use_cache=True, **{ARGUMENT: cache}).logits[:, -1]


# ---- stored prompts ----

TOKENS = prompt(90)
KINDS = {"dynamic": DynamicCache, "static": lambda config: StaticCache(config, 128)}


def prefilled(model, count, kind="dynamic"):
    """A cache of the first tokens of TOKENS."""
    cache = KINDS[kind](config=model.config)
    run(model, TOKENS[:, :count], cache)
    return cache


def restored(store, cache, tokens=TOKENS, **options):
    """Restore the longest stored prefix of the tokens into a cache; return its length."""
    with store.match(tokens, **options) as match:
        return store.restore(match, into=cache)
