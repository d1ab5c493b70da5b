"""Models that do not continue a split prefill are found, and warned of by type."""

import logging

import pytest
from needs import needs

from mlstate.errors import CompatibilityError
from mlstate.prompts import PromptStore, check_split

pytestmark = [pytest.mark.torch, needs("transformers"), pytest.mark.timeout(200)]
torch = pytest.importorskip("torch", reason="transformers needs it")
transformers = pytest.importorskip("transformers", reason="its models are the subject")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_d_head": 16,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "state_size": 8,
    "mamba_expand": 2,
    "attn_layer_indices": [1],
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "use_mamba_kernels": False,
    "initializer_range": 0.3,
}
ANSWERS = {
    "llama": "good",
    "mistral": "good",
    "jamba": "feed singly",
    "mamba": "feed singly",
    "falcon_mamba": "feed singly",
    "bamba": "no way",
}


def model_of(kind):
    base = transformers.CONFIG_MAPPING[kind]()
    config = type(base)(**{name: value for name, value in SIZES.items() if hasattr(base, name)})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ANSWERS)
def test_the_answer_and_the_warning_agree(tmp_path, kind, caplog):
    model = model_of(kind).train()
    assert check_split(model) == ANSWERS[kind]
    assert model.training
    with caplog.at_level(logging.WARNING):
        PromptStore(tmp_path / "store", model=model, hash_weights=True).close()
    warned = [text for text in caplog.messages if "a split prefill has other logits" in text]
    assert len(warned) == (ANSWERS[kind] != "good")
    if warned:
        assert ("singly" in warned[0]) == (ANSWERS[kind] == "feed singly")


@pytest.mark.parametrize("tokens", [2, 7])
def test_half_precision_has_a_wider_limit(tokens):
    assert check_split(model_of("llama").to(torch.bfloat16), tokens) == "good"


def test_other_arguments_are_refused():
    with pytest.raises(TypeError, match="must be a model of transformers"):
        check_split(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="must be a model of transformers"):
        check_split("llama")
    with pytest.raises(ValueError, match="tokens"):
        check_split(model_of("llama"), 1)
    model = model_of("llama")
    forward = model.forward
    model.forward = lambda ids, use_cache=False: forward(ids, use_cache=use_cache)
    with pytest.raises(CompatibilityError, match="takes or returns no cache"):
        check_split(model)
