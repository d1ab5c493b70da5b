"""Small models with random weights of almost every type of mlx-lm, with all its kinds of caches."""

import dataclasses
import importlib
import typing

import mlx.core as mx
from mlx.utils import tree_flatten

SIZES = dict.fromkeys(
    ["hidden_size", "d_model", "n_embd", "hidden_dim", "dim", "embed_dim", "block_dim", "lru_width",
     "attention_hidden_size"], 32,
) | dict.fromkeys(
    ["intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size", "d_ff",
     "shared_expert_intermediate_size", "block_ff_dim", "intermediate_size_mlp",
     "ffn_intermediate_size",
     "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size", "mlp_hidden_size",
     "shared_intermediate_size", "intermediate_dim", "moe_ffn_hidden_size"], 48,
) | dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "n_layers"], 4) | dict.fromkeys(
    ["num_attention_heads", "n_head", "n_heads", "num_heads", "num_kv_heads_linear",
     "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"], 4,
) | dict.fromkeys(
    ["num_key_value_heads", "n_kv_heads", "num_kv_heads", "linear_num_key_heads", "conv_L_cache"], 2
) | dict.fromkeys(
    ["head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "linear_key_head_dim",
     "linear_value_head_dim", "mamba_d_state", "state_size", "ssm_state_size", "block_multiple_of",
     "hidden_size_per_layer_input", "laurel_rank", "head_size"], 8,
) | dict.fromkeys(
    ["kv_lora_rank", "q_lora_rank", "index_head_dim", "mamba_d_head", "mamba_head_dim"], 16
) | dict.fromkeys(
    ["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts",
     "linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv", "short_conv_kernel_size"], 4,
) | {
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_topk": 2, "moe_k": 2, "top_k": 2, "index_n_heads": 2, "index_topk": 64, "vocab_size": 97,
    "vocab_size_per_layer_input": 97, "max_position_embeddings": 512, "sliding_window": 16,
    "attention_chunk_size": 16, "window_size": 16, "n_positions": 512, "n_ctx": 512,
    "rope_theta": 10000.0, "rope_local_base_freq": 10000.0, "chunk_size": 8, "mamba_chunk_size": 8,
    "num_shared_experts": 1, "n_shared_experts": 1, "n_groups": 1, "mamba_n_groups": 1,
    "num_kv_shared_layers": 0,
    "conv_window": 2, "full_attention_interval": 2, "sliding_window_pattern": 2, "mamba_expand": 2,
    "layer_group_size": 2, "num_kv_reuse_layers": 1, "interleave_moe_layer_step": 2, "expand": 2,
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "use_cache": True,
    "expert_layer_offset": 1, "partial_rotary_factor": 0.5, "decoder_sparse_step": 1,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
TEXT = {**SIZES, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_traditional": False}
YARN = {
    "rope_scaling": {
        "type": "yarn",
        "factor": 1.0,
        "mscale_all_dim": 0,
        "long_factor": [1.0] * 4,
        "short_factor": [1.0] * 4,
        "original_max_position_embeddings": 512,
    }
}
# Arguments of types that need more than the sizes above.
EXTRA = {
    "Klear": {"mlp_only_layers": [0]},
    "afmoe": SLIDING,
    "baichuan_m1": {"sliding_window_layers": [0, 2]},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": YARN,
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {**SLIDING, "is_moe_layer": [False, True] * 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4},
    "gemma3": {"text_config": {**TEXT, "model_type": "gemma3_text"}},
    "gemma3n": {
        "text_config": {
            **TEXT,
            **SLIDING,
            "model_type": "gemma3n",
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.5] * 4,
            "altup_num_inputs": 4,
            "altup_coef_clip": 1.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "final_logit_softcapping": 1.0,
        }
    },
    "gemma4": {"text_config": {**TEXT, **SLIDING, "model_type": "gemma4_text"}},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {"rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"}},
    "kimi_k25": {"text_config": {**TEXT, "model_type": "kimi_k2"}},
    "kimi_linear": {
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 4,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
        }
    },
    "kimi_vl": {"text_config": {**TEXT, "model_type": "deepseek_v3"}},
    "lfm2-vl": {
        "text_config": {
            **TEXT,
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention"] * 2,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "rope_theta": 10000.0,
        }
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4": {
        "text_config": {
            **TEXT,
            "model_type": "llama4_text",
            "attention_bias": False,
            "use_qk_norm": False,
            "num_experts_per_tok": 1,
        }
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0], "rope_scaling": None},
    "longcat_flash": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "attention_method": "MLA",
        "zero_expert_num": 2,
        "zero_expert_type": "identity",
    },
    "longcat_flash_ngram": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "attention_method": "MLA",
        "zero_expert_num": 2,
        "zero_expert_type": "identity",
    },
    "mamba2": {"time_step_limit": (0.0, 1e9), "intermediate_size": 64, "num_heads": 8},
    "mellum": {
        **SLIDING,
        "rope_parameters": {
            k: {"rope_type": "default", "rope_theta": 10000.0}
            for k in ("sliding_attention", "full_attention")
        },
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1] * 2,
        "moe_layer_freq": [0, 1, 1, 1],
        "topk_method": "noaux_tc",
    },
    "minicpm3": YARN,
    "ministral3": {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 512,
        }
    },
    "mistral3": {"text_config": {**TEXT, "model_type": "llama"}},
    "mistral4": {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 512,
        }
    },
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2, "no_op": i == 1, "replace_with_linear": False},
                "ffn": {"ffn_mult": 1.3, "no_op": False, "replace_with_linear": False},
            }
            for i in range(4)
        ]
    },
    "nemotron_h": {"hybrid_override_pattern": "M*M-"},
    "openelm": {
        "num_query_heads": [4] * 4,
        "num_kv_heads": [2] * 4,
        "ffn_multipliers": [1.5] * 4,
        "ffn_dim_divisor": 8,
        "num_transformer_layers": 4,
        "model_dim": 32,
    },
    "glm_moe_dsa": {
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
    },
    "pixtral": {"text_config": {**TEXT, "model_type": "llama"}},
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 8, "hidden_size": 32, "num_attention_heads": 4},
    "qwen2_vl": {"text_config": {**TEXT, "model_type": "qwen2"}},
    "qwen3_moe": {"mlp_only_layers": []},
    "qwen3_next": {"mlp_only_layers": []},
    "qwen3_5": {"text_config": {**TEXT, "model_type": "qwen3_5", "num_experts": 0}},
    "qwen3_5_moe": {"text_config": {**TEXT, "model_type": "qwen3_5_moe"}},
    "qwen3_vl": {"text_config": {**TEXT, "model_type": "qwen3", "tie_word_embeddings": False}},
    "qwen3_vl_moe": {
        "text_config": {
            **TEXT,
            "model_type": "qwen3_moe",
            "mlp_only_layers": [],
            "tie_word_embeddings": False,
            "norm_topk_prob": True,
        }
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 16},
}
TYPES = """
Klear afm7 afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v3
cohere cohere2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v41 dots1 ernie4_5
ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 gear gemma gemma2 gemma3 gemma3_text gemma3n
gemma4 gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss
gptj granite granitemoe granitemoehybrid helium hunyuan hunyuan_v1_dense internlm2 internlm3
iquestloopcoder jamba kimi_k25 kimi_linear kimi_vl laguna lfm2 lfm2-vl lfm2_moe llama llama4
llama4_text longcat_flash longcat_flash_ngram mamba mamba2 mellum mimo minicpm minicpm3 minimax
ministral3 mistral3 mistral4 mixtral muse_glimmer nanbeige nanochat nemotron nemotron-nas
nemotron_h olmo2 olmo3 olmo_hybrid olmoe openelm phi phi3 phimoe pixtral plamo plamo2 plamo3 qwen
qwen2 qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe
recurrent_gemma rwkv7 seed_oss smollm3 solar_open stablelm starcoder2 talkie telechat3 youtu_llm
""".split()  # noqa: SIM905
# one for each kind of cache
FEW = """
baichuan_m1 deepseek_v41 gemma3_text longcat_flash_ngram llama llama4 qwen3_next rwkv7
""".split()  # noqa: SIM905
MOST = 3_000_000  # parameters


def arguments_of(cls, name, extra):
    """Return the arguments of a small model: known sizes, and a value of the type of any other."""
    hints, arguments = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        is_required = field.default is field.default_factory is dataclasses.MISSING
        if field.name in extra:
            arguments[field.name] = extra[field.name]
        elif field.name in SIZES:
            arguments[field.name] = SIZES[field.name]
        elif field.name.endswith(("_eps", "_epsilon", "norm_eps")):
            arguments[field.name] = 1e-5
        elif is_required:
            plain = {bool: False, int: 2, float: 1.0, str: "silu"}
            arguments[field.name] = plain.get(hints[field.name])
    return arguments | {"model_type": name}


def model_of_type(name):
    """Return a model with the same weights each time; raise ValueError if it is large."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    arguments = arguments_of(module.ModelArgs, name, EXTRA.get(name, {}))
    model = module.Model(module.ModelArgs.from_dict(arguments))
    count = sum(array.size for _, array in tree_flatten(model.parameters()))
    if count > MOST:
        raise ValueError(f"{name} has {count:,} parameters")
    mx.eval(model.parameters())
    return model
