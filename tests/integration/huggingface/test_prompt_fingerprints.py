"""The fingerprint of models of transformers, and of their adapters."""

import copy

import pytest
from needs import needs

pytestmark = [pytest.mark.torch, needs("transformers")]
torch = pytest.importorskip("torch", reason="transformers needs it")
pytest.importorskip("transformers", reason="its models are hashed")

from cache_models import new_model, prompt  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from mlstate.prompts import fingerprint  # noqa: E402


def of(model):
    return fingerprint(model, hash_weights=True)


def test_the_folder_of_a_model_and_a_prefill_do_not_matter(tmp_path):
    model = new_model("llama")
    before = of(model)
    model.generate(prompt(20), max_new_tokens=3, do_sample=False)
    assert of(copy.deepcopy(model)) == before
    model.set_attn_implementation("eager")
    model.generation_config.max_length = 7
    assert of(model) == before
    for name in "ab":
        model.save_pretrained(tmp_path / name)
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "ab")
    assert of(first) == of(second)


@pytest.mark.parametrize(("fact", "value"), [("rms_norm_eps", 1e-3), ("head_dim", 7)])
def test_another_value_in_the_config_is_another_model(fact, value):
    model = new_model("llama")
    before = of(model)
    setattr(model.config, fact, value)
    assert of(model) != before


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_the_state_of_an_adapter_belongs_to_the_model():
    peft = pytest.importorskip("peft", reason="it has the adapters")

    def adapted(alpha):
        torch.manual_seed(0)
        settings = {"r": 2, "target_modules": ["k_proj"], "init_lora_weights": False}
        model = peft.get_peft_model(
            new_model("llama"), peft.LoraConfig(lora_alpha=alpha, **settings)
        )
        model.add_adapter("other", peft.LoraConfig(lora_alpha=1, **settings))
        return model.eval()

    model = adapted(4)
    seen = [of(model)]
    assert of(adapted(4)) == seen[0]
    seen.append(of(adapted(8)))  # the same weights, with another scale
    model.set_adapter("other")
    seen.append(of(model))
    model.set_adapter("default")
    model.base_model.disable_adapter_layers()
    seen.append(of(model))
    model.base_model.enable_adapter_layers()
    model.set_adapter("default")
    model.merge_adapter()
    seen.append(of(model))
    assert len(set(seen)) == 5


def test_a_generation_of_a_vision_model_keeps_its_fingerprint():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = transformers.Qwen2VLConfig(
        text_config={**sizes, **layers, "intermediate_size": 32, "rope_parameters": rope},
        vision_config=vision,
        **{name: 15 + i for i, name in enumerate(names)},
    )
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    before = of(model)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
    assert model.model.rope_deltas is not None
    assert of(model) == before
