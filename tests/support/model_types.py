"""Small models with random weights of almost every type of transformers that predicts tokens."""

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

# Those that take a cache, and that the sizes below fit.
TYPES = """
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
""".split()  # noqa: SIM905
TEXT = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
WIDTHS = dict.fromkeys(
    ["hidden_size", "d_model", "n_embd", "hidden_dim", "dim", "word_embed_proj_dim", "lru_width",
     "attention_hidden_size"], 32,
) | dict.fromkeys(
    ["intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "decoder_ffn_dim",
     "encoder_ffn_dim"], 48,
) | dict.fromkeys(
    ["moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"], 16
)  # fmt: skip
HEADS = dict.fromkeys(
    ["num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads",
     "encoder_attention_heads", "linear_num_value_heads", "mamba_n_heads"], 4,
) | {"num_key_value_heads": 2, "linear_num_key_heads": 2} | dict.fromkeys(
    ["head_dim", "v_head_dim", "qk_nope_head_dim", "linear_key_head_dim", "linear_value_head_dim",
     "head_size"], 8,
) | {"qk_rope_head_dim": 4, "rotary_dim": 4, "mamba_d_head": 16}  # fmt: skip
EXPERTS = dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4) | {
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "expert_layer_period": 2, "expert_layer_offset": 1, "zero_expert_num": 0,
}  # fmt: skip
OTHERS = dict.fromkeys(
    ["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"], 256
) | dict.fromkeys(["q_lora_rank", "kv_lora_rank", "mamba_d_state", "state_size",
                   "hidden_size_per_layer_input", "block_multiple_of"], 8) | {
    "sliding_window": 16, "attention_window_size": 16, "attn_layer_period": 2,
    "attn_layer_offset": 1, "use_mamba_kernels": False, "initializer_range": 0.3,
    "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 0, "laurel_rank": 4,
    "conv_L_cache": 3, "mamba_expand": 2, "is_decoder": True,
}  # fmt: skip
LAYERS = ["num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"]


def config_of(kind, layers=2):
    """Return the config of a small model; layers of several kinds take turns."""
    default = CONFIG_MAPPING[kind]()
    text = getattr(default, "text_config", None)
    default = text if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else default
    sizes = TEXT | WIDTHS | HEADS | EXPERTS | OTHERS | dict.fromkeys(LAYERS, layers)
    sizes["attention_types"] = [[["global"], layers]]
    if hasattr(default, "qk_rope_head_dim"):  # latent attention
        sizes |= {"head_dim": 4, "num_key_value_heads": 4}
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or []))
    if kinds:
        sizes["layer_types"] = (2 * kinds[-2:] * layers)[:layers]
    settable = {
        name: value
        for name, value in sizes.items()
        if hasattr(default, name)
        and getattr(getattr(type(default), name, None), "fset", True) is not None
    }
    config = type(default)(**settable)
    config._attn_implementation = "eager"
    return config


def model_of_type(kind):
    """Return a model with the same weights each time."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(kind)).eval()
