"""Small models of transformers whose caches have layers or classes of their own."""

from engines import Transformers, new_transformers_model
from transformers import StaticCache

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def _deepseek_v4():
    return Transformers(
        new_transformers_model(
            "deepseek_v4",
            4,
            num_key_value_heads=1,
            layer_types=["sliding_attention", _HEAVY, _SPARSE, _SPARSE],
            compress_rates={_SPARSE: 4, _HEAVY: 8},
            o_lora_rank=8,
            o_groups=2,
            head_dim=8,
            index_topk=4,
        )
    )


def _minimax():
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    kinds = ["linear_attention", "full_attention"] * 2
    model = new_transformers_model("minimax", 4, layer_types=kinds, block_size=8)
    return Transformers(model, lambda config: MiniMaxCache())


def _minimax_m3(create_cache=None):
    kinds = ["full_attention", "minimax_m3_sparse"] * 2
    model = new_transformers_model("minimax_m3_vl_text", 4, layer_types=kinds)
    return Transformers(model, create_cache)


def _xlstm():
    import torch
    from transformers.models.xlstm.modeling_xlstm import xLSTMCache

    options = {"hidden_size": 64, "num_blocks": 2, "qk_dim_factor": 1.0, "mode": "inference"}
    model = new_transformers_model("xlstm", return_last_states=True, **options)
    return Transformers(model, lambda config: xLSTMCache(config, 1, dtype=torch.float32))


def _rwkv():
    return Transformers(new_transformers_model("rwkv", 4), lambda config: None, "state")


def new_recurrent_gemma():
    kinds = ["recurrent", "recurrent", "attention"]
    return Transformers(new_transformers_model("recurrent_gemma", 4, block_types=kinds))


MODELS = {
    "deepseek_v4": _deepseek_v4,
    "minimax": _minimax,
    "minimax_m3": _minimax_m3,
    "minimax_m3 static": lambda: _minimax_m3(lambda config: StaticCache(config, 64)),
    "xlstm": _xlstm,
    "rwkv": _rwkv,
}
