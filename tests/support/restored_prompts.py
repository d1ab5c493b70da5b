"""What a model says after a stored prompt, for a process that did not store it."""

import numpy as np

from mlstate.prompts import PromptStore

LENGTH, MORE = 24, 6


def tokens_of(count):
    return np.random.default_rng(1).integers(2, 97, count).tolist()


def transformers_model(kind):
    """Return a function of tokens and cache, and one that creates a cache."""
    import torch
    from cache_models import ARGUMENT
    from model_types import model_of_type
    from transformers import DynamicCache

    torch.set_num_threads(1)
    model = model_of_type(kind)

    @torch.no_grad()
    def logits(tokens, cache):
        output = model(torch.tensor([tokens]), use_cache=True, **{ARGUMENT: cache})
        return output.logits.float().numpy()

    return logits, lambda: DynamicCache(config=model.config)


def mlx_model(kind):
    """The same with a model of mlx-lm."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_types import model_of_type

    model = model_of_type(kind)

    def logits(tokens, cache):
        return np.array(model(mx.array([tokens]), cache=cache).astype(mx.float32))

    return logits, lambda: make_prompt_cache(model)


MODELS = {"transformers": transformers_model, "mlx": mlx_model}


def continued(logits, cache):
    tokens = tokens_of(LENGTH + MORE)[LENGTH:]
    return np.concatenate([logits([token], cache) for token in tokens])


def put_prompt(engine, kind, folder):
    """Store the prompt of a model; return its next logits."""
    logits, new_cache = MODELS[engine](kind)
    cache = new_cache()
    logits(tokens_of(LENGTH), cache)
    with PromptStore(folder, model=kind, block_tokens=8) as store:
        store.put(tokens_of(LENGTH), cache)
    return continued(logits, cache)


def restore_prompt(engine, kind, folder):
    """Return the logits after the stored prompt of a model."""
    logits, new_cache = MODELS[engine](kind)
    cache = new_cache()
    with (
        PromptStore(folder, model=kind, block_tokens=8) as store,
        store.match(tokens_of(LENGTH + 1)) as match,
    ):
        assert store.restore(match, into=cache) == LENGTH
    return continued(logits, cache)
