"""Small models of transformers with random weights, one for each kind of cache."""

import json
from functools import cache as kept

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache


def _llama():
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**COMMON)


def _gemma3(window=16):
    config = transformers.Gemma3TextConfig(
        **COMMON, sliding_window=window, layer_types=["sliding_attention", "full_attention"]
    )
    return transformers.Gemma3ForCausalLM, config


def _gemma3_wide():
    return _gemma3(100)  # the first static cache is shorter than the window


def _qwen3_next():
    config = transformers.Qwen3NextConfig(
        **COMMON,
        **LINEAR_ATTENTION,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    return transformers.Qwen3NextForCausalLM, config


def _lfm2():
    config = transformers.Lfm2Config(
        **COMMON, layer_types=["conv", "full_attention"], conv_L_cache=3, block_multiple_of=8
    )
    return transformers.Lfm2ForCausalLM, config


COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MODELS = {
    "llama": _llama,
    "gemma3": _gemma3,
    "gemma3 wide": _gemma3_wide,
    "qwen3_next": _qwen3_next,
    "lfm2": _lfm2,
}
# `cache=` since 5.24; before, and deprecated since, `past_key_values=`.
HAS_CACHE = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
ARGUMENT = "cache" if HAS_CACHE else "past_key_values"


def new_model(name):
    """A model with the same weights in every process."""
    torch.manual_seed(0)
    create, config = MODELS[name]()
    config._attn_implementation = "eager"
    return create(config).eval()


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


def loaded_by_mlx(model, folder, facts=None):
    """The same weights in mlx-lm, which may need more facts in the config."""
    from mlx_lm.utils import load_model

    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | (facts or {})
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(folder)[0]
