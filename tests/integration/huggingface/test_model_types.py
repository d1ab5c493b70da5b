"""Caches of almost all model types: moved and restored ones give the logits of the live one."""

import copy

import pytest
from needs import needs

pytestmark = [pytest.mark.long, pytest.mark.torch, needs("transformers")]
torch = pytest.importorskip("torch", reason="transformers needs it")
transformers = pytest.importorskip("transformers", reason="its models run")

from cache_models import ARGUMENT, HAS_CACHE, one_thread, prompt  # noqa: E402, F401
from model_types import TYPES, config_of, model_of_type  # noqa: E402
from transformers import CONFIG_MAPPING, DynamicCache, StaticCache  # noqa: E402

from mlstate.errors import CompatibilityError  # noqa: E402
from mlstate.integrations.transformers import from_cache, to_cache  # noqa: E402
from mlstate.prompts import PromptStore  # noqa: E402

TOKENS, LENGTH = prompt(46), 30


@torch.no_grad()
def logits_of(model, cache, start, stop):
    return model(TOKENS[:, start:stop], use_cache=True, **{ARGUMENT: cache}).logits


def continued(model, cache):
    steps = range(LENGTH, LENGTH + 10)
    return torch.cat([logits_of(model, cache, step, step + 1) for step in steps])


def restored(store, cache):
    with store.match(TOKENS[0, : LENGTH + 1]) as match:
        assert store.restore(match, into=cache) == LENGTH
    return cache


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not HAS_CACHE, reason="the list is of transformers 5.24")
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind in CONFIG_MAPPING])
def test_a_moved_or_restored_cache_gives_the_same_logits(tmp_path, kind):
    model = model_of_type(kind)
    cache = DynamicCache(config=model.config)
    logits_of(model, cache, 0, LENGTH)
    state = from_cache(cache).copy()
    expected = continued(model, copy.deepcopy(cache))
    assert torch.equal(continued(model, to_cache(state.copy())), expected)
    into = to_cache(state.copy(), into=DynamicCache(config=model.config))
    assert torch.equal(continued(model, into), expected)

    static, live = (StaticCache(model.config, 64) for _ in range(2))
    logits_of(model, live, 0, LENGTH)
    moved = continued(model, to_cache(state.copy(), into=static))
    torch.testing.assert_close(moved, continued(model, live), rtol=1e-4, atol=1e-4)

    with PromptStore(tmp_path / "store", model=kind, block_tokens=8) as store:
        store.put(TOKENS[0, :LENGTH], cache)
        copied = restored(store, DynamicCache(config=model.config))
        assert torch.equal(continued(model, copied), expected)
        larger = DynamicCache(config=config_of(kind, 3))
        if len(larger.layers) > len(cache.layers):
            with pytest.raises(CompatibilityError, match="no array of layer"):
                to_cache(state, into=larger)
            with pytest.raises(CompatibilityError, match="no array of layer"):
                restored(store, larger)
