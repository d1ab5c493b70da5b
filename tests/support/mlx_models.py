"""Tiny models of mlx-lm with random weights, and their steps."""

import importlib

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MODELS = {
    "llama": {},
    "gemma3_text": {"sliding_window": 16, "sliding_window_pattern": 2},
    "qwen3_next": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [],
        "moe_intermediate_size": 16,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 512,
        "full_attention_interval": 2,
    },
    "lfm2": {
        "max_position_embeddings": 512,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"],
    },
    "llama4": {
        "num_hidden_layers": 4,
        "attention_bias": False,
        "attention_chunk_size": 16,
        "interleave_moe_layer_step": 5,
        "intermediate_size_mlp": 48,
        "max_position_embeddings": 512,
        "num_experts_per_tok": 1,
        "num_local_experts": 2,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_qk_norm": False,
    },
    "deepseek_v32": {
        "moe_intermediate_size": 16,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "qk_nope_head_dim": 8,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 64,
        "first_k_dense_replace": 2,
    },
}


def create_model(name, seed=0, **options):
    """A model with random weights."""
    import mlx.core as mx

    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(seed)
    config = {**COMMON, **MODELS[name], **options, "model_type": name}
    if name == "llama4":
        config = {"model_type": name, "text_config": config}
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


def prompt_of(count, seed=1):
    """Token ids."""
    import mlx.core as mx

    return mx.random.randint(2, 97, (count,), key=mx.random.key(seed))


def run_model(model, tokens, cache):
    """Logits of the last token."""
    import mlx.core as mx

    logits = model(tokens[None], cache=cache)[0, -1]
    mx.eval(logits)
    return logits


def steps_of(model, logits, cache, count):
    """Logits of some greedy steps, as one array."""
    import mlx.core as mx

    results = [logits]
    for _ in range(count):
        results.append(run_model(model, results[-1].argmax(keepdims=True), cache))
    return mx.stack(results)
