"""Small models of transformers whose caches have layers or classes of their own."""

import torch
from cache_models import COMMON
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, StaticCache


class ModelWithCache:
    """A model, and how it takes and returns its cache."""

    def __init__(self, model, create_cache, argument="cache"):
        self.model, self.create_cache, self.argument = model, create_cache, argument

    def new_cache(self):
        return self.create_cache(config=self.model.config)

    @torch.no_grad()
    def run(self, tokens, cache):
        """Return the logits of the last token, and the cache."""
        output = self.model(tokens, use_cache=True, **{self.argument: cache})
        return output.logits[:, -1], getattr(output, self.argument, cache)


def new_model(kind, **options):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**COMMON | {"num_hidden_layers": 4} | options)
    config._attn_implementation = "eager"
    return AutoModelForCausalLM.from_config(config).eval()


def _deepseek_v4():
    sparse, heavy = "compressed_sparse_attention", "heavily_compressed_attention"
    return new_model(
        "deepseek_v4",
        num_key_value_heads=1,
        layer_types=["sliding_attention", heavy, sparse, sparse],
        compress_rates={sparse: 4, heavy: 8},
        sliding_window=16,
        q_lora_rank=8,
        o_lora_rank=8,
        o_groups=2,
        qk_rope_head_dim=4,
        index_head_dim=8,
        index_n_heads=2,
        index_topk=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        initializer_range=0.3,
    )


def _minimax():
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    model = new_model(
        "minimax",
        layer_types=["linear_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=8,
        initializer_range=0.3,
    )
    return ModelWithCache(model, lambda config: MiniMaxCache())


def _minimax_m3():
    return new_model("minimax_m3_vl_text", layer_types=["full_attention", "minimax_m3_sparse"] * 2)


def _xlstm():
    from transformers.models.xlstm.modeling_xlstm import xLSTMCache

    model = new_model(
        "xlstm",
        hidden_size=64,
        num_hidden_layers=2,
        num_blocks=2,
        num_heads=4,
        qk_dim_factor=1.0,
        chunk_size=8,
        mode="inference",
        return_last_states=True,
        initializer_range=0.3,
    )
    return ModelWithCache(model, lambda config: xLSTMCache(config, 1, dtype=torch.float32))


def _rwkv():
    model = new_model("rwkv", attention_hidden_size=32, initializer_range=0.3)
    return ModelWithCache(model, lambda config: None, "state")


def new_recurrent_gemma():
    kinds = ["recurrent", "recurrent", "attention"]
    return new_model("recurrent_gemma", lru_width=32, attention_window_size=16, block_types=kinds)


MODELS = {
    "deepseek_v4": lambda: ModelWithCache(_deepseek_v4(), DynamicCache),
    "minimax": _minimax,
    "minimax_m3": lambda: ModelWithCache(_minimax_m3(), DynamicCache),
    "minimax_m3 static": lambda: ModelWithCache(
        _minimax_m3(), lambda config: StaticCache(config, 64)
    ),
    "xlstm": _xlstm,
    "rwkv": _rwkv,
}
