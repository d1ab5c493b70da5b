"""Small configs of almost every model type of transformers and mlx-lm, from one table of sizes."""

import dataclasses
import importlib
import typing

# The types of transformers that predict tokens, take a cache and accept the sizes below, and the
# types of mlx-lm.
TYPES = {
    engine: names.split()
    for engine, names in {
        "transformers": """
afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 bailing_hybrid bart beam bert
bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom
camembert codegen cohere cohere2 cohere2_moe ctrl cwm data2vec-text deepseek_v2 deepseek_v3
deepseek_v32 diffllama doge electra ernie ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon
flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text glm glm4 glm4_moe
glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese
gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text
hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling_text internlm3 iquestcoder jais2
jamba jetmoe kimi_linear kolibri1 laguna lara_mini lfm2 lfm3 llama llama4 llama4_text
longcat_flash marian mbart megatron-bert mellum mimo_v2_flash minicpm3 minimax_m2
minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder moshi
moss_transcribe_diarize mpt mvp nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe
opt pegasus persimmon phi phi3 phimoe plbart qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe
qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next rembert roberta roberta-prelayernorm roformer
sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma whisper
xglm xlm-roberta xlm-roberta-xl youtu
""",
        "mlx": """
Klear afm7 afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v3
cohere cohere2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v41 dots1 ernie4_5
ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 gear gemma gemma2 gemma3 gemma3_text gemma3n
gemma4 gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss
gptj granite granitemoe granitemoehybrid helium hunyuan hunyuan_v1_dense internlm2 internlm3
iquestloopcoder jamba kimi_k25 kimi_linear kimi_vl laguna lfm2 lfm2-vl lfm2_moe llama llama4
llama4_text longcat_flash longcat_flash_ngram mamba mamba2 mellum mimo mimo_v2_flash minicpm
minicpm3 minimax ministral3 mistral3 mistral4 mixtral muse_glimmer nanbeige nanochat nemotron
nemotron-nas nemotron_h olmo2 olmo3 olmo_hybrid olmoe openelm phi phi3 phimoe pixtral plamo plamo2
plamo3 qwen qwen2 qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl
qwen3_vl_moe recurrent_gemma rwkv7 seed_oss smollm3 solar_open stablelm starcoder2 talkie telechat3
youtu_llm
""",
    }.items()
}
# One type of mlx-lm for each kind of its caches.
FEW = """
baichuan_m1 deepseek_v32 deepseek_v41 gemma3_text lfm2 llama llama4 longcat_flash_ngram qwen3_next
rwkv7
""".split()  # noqa: SIM905
LAYERS = ["num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"]
SIZES = {
    name: size
    for size, names in {
        0: "num_kv_shared_layers pad_token_id",
        1: """n_group topk_group first_k_dense_replace num_shared_experts n_shared_experts n_groups
            mamba_n_groups attn_layer_offset expert_layer_offset bos_token_id decoder_sparse_step
            num_kv_reuse_layers""",
        2: """num_key_value_heads n_kv_heads num_kv_heads linear_num_key_heads moe_topk moe_k top_k
            num_experts_per_tok index_n_heads conv_window full_attention_interval mamba_expand
            sliding_window_pattern layer_group_size interleave_moe_layer_step expand
            attn_layer_period expert_layer_period""",
        3: "conv_L_cache",
        4: """num_attention_heads n_head n_heads num_heads num_kv_heads_linear laurel_rank
            linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads num_experts
            n_routed_experts num_local_experts moe_num_experts linear_conv_kernel_dim conv_kernel
            mamba_d_conv short_conv_kernel_size decoder_attention_heads encoder_attention_heads
            swa_num_attention_heads swa_num_key_value_heads
            qk_rope_head_dim rotary_dim""",
        8: """head_dim v_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim
            linear_head_dim mamba_d_state state_size ssm_state_size block_multiple_of head_size
            hidden_size_per_layer_input chunk_size mamba_chunk_size swa_head_dim
            swa_v_head_dim""",
        16: """kv_lora_rank q_lora_rank index_head_dim mamba_d_head mamba_head_dim sliding_window
            sliding_window_size attention_chunk_size attention_window_size window_size
            moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
            moe_ffn_hidden_size moe_shared_expert_intermediate_size""",
        32: """hidden_size d_model n_embd hidden_dim dim embed_dim block_dim lru_width
            attention_hidden_size word_embed_proj_dim""",
        48: """intermediate_size ffn_dim n_inner ffn_hidden_size d_ff decoder_ffn_dim block_ff_dim
            encoder_ffn_dim intermediate_size_mlp ffn_intermediate_size mlp_hidden_size
            shared_intermediate_size intermediate_dim""",
        64: "index_topk",
        97: "vocab_size vocab_size_per_layer_input",
        512: "max_position_embeddings n_positions n_ctx max_seq_len",
        0.5: "partial_rotary_factor",
        1e4: "rope_theta swa_rope_theta rope_local_base_freq",
    }.items()
    for name in names.split()
} | {"use_cache": True, "is_decoder": True, "eos_token_id": None, "initializer_range": 0.3}
YARN = {
    "rope_scaling": {
        "type": "yarn",
        "factor": 1.0,
        "mscale_all_dim": 0,
        "long_factor": [1.0] * 2,
        "short_factor": [1.0] * 2,
        "original_max_position_embeddings": 512,
    }
}
ROPE = {"rope_theta": 1e4, "rope_type": "default", "original_max_position_embeddings": 512}
LLAMA4_ROPE = {"rope_parameters": ROPE | {"llama_4_scaling_beta": 0.1}}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
CONV = {"layer_types": ["conv", "full_attention"] * 2}
LONGCAT = {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_method": "MLA"}
LONGCAT |= {"zero_expert_num": 2, "zero_expert_type": "identity"}
# Values of the config of a text model inside the arguments of another one.
TEXT = SIZES | {
    "model_type": "text",
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_traditional": False,
    "attention_bias": False,
    "conv_bias": False,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "use_qk_norm": False,
    "mlp_only_layers": [],
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
# Arguments of types of mlx-lm that need more than the sizes above.
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
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n": {
        **SLIDING,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5] * 4,
        "altup_num_inputs": 4,
        "altup_coef_clip": 1.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "final_logit_softcapping": 1.0,
    },
    "gemma4": SLIDING,
    "glm_moe_dsa": {
        "rope_parameters": ROPE,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {"rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"}},
    "kimi_linear": {
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 4,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
        }
    },
    "lfm2": CONV,
    "lfm2-vl": CONV,
    "lfm2_moe": CONV,
    "llama4": {"num_experts_per_tok": 1},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0], "rope_scaling": None},
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": LONGCAT,
    "mamba2": {"time_step_limit": (0.0, 1e9), "intermediate_size": 64, "num_heads": 8},
    "mellum": {**SLIDING, "rope_parameters": dict.fromkeys(SLIDING["layer_types"], ROPE)},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1] * 2,
        "moe_layer_freq": [0, 1, 1, 1],
        "topk_method": "noaux_tc",
    },
    "minicpm3": YARN,
    "ministral3": LLAMA4_ROPE,
    "mistral4": LLAMA4_ROPE,
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
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 8},
    "qwen3_5": {"num_experts": 0},
    "qwen3_moe": {"mlp_only_layers": []},
    "qwen3_next": {"mlp_only_layers": []},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 16},
}


def config_of(kind, layers=2, **options):
    """Return the config of a small model of transformers; layers of several kinds take turns.

    `options`: values that replace the sizes.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    default = CONFIG_MAPPING[kind]()
    text = getattr(default, "text_config", None)
    default = text if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else default
    sizes = SIZES | dict.fromkeys(LAYERS, layers)
    sizes["attention_types"] = [[["global"], layers]]
    if hasattr(default, "qk_rope_head_dim"):  # latent attention
        sizes |= {"head_dim": 4, "num_key_value_heads": 4}
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or []))
    if kinds == ["full_attention"] and hasattr(default, "conv_L_cache"):
        kinds = ["conv", *kinds]
    if kinds:
        sizes["layer_types"] = (2 * kinds[-2:] * layers)[:layers]
    aliases = default.attribute_map
    settable = {
        name: value
        for name, value in sizes.items()
        if hasattr(default, name)
        and getattr(getattr(type(default), aliases.get(name, name), None), "fset", True) is not None
    }
    config = type(default)(**settable | options)
    config._attn_implementation = "eager"
    return config


def mlx_arguments(kind, layers=4, **options):
    """Return the arguments of a small model of mlx-lm: sizes, and a value of the type of any other.

    `options`: values that replace the sizes.
    """
    cls = importlib.import_module(f"mlx_lm.models.{kind}").ModelArgs
    extra = dict.fromkeys(LAYERS, layers) | EXTRA.get(kind, {}) | options
    values = SIZES | extra | {"text_config": TEXT | extra}
    hints, arguments = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        if field.name in values:
            arguments[field.name] = values[field.name]
        elif field.name.endswith(("_eps", "_epsilon")):
            arguments[field.name] = 1e-5
        elif field.default is field.default_factory is dataclasses.MISSING:
            by_type = {bool: False, int: 2, float: 1.0, str: "silu"}
            arguments[field.name] = by_type.get(hints[field.name])
    return arguments | {"model_type": kind}
