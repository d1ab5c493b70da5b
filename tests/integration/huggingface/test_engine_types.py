"""One prompt in transformers and mlx-lm, for the model types that both have: moved or refused."""

import numpy as np
import pytest
from needs import needs

pytestmark = [pytest.mark.long, pytest.mark.torch, needs("transformers"), needs("mlx", "mlx_lm")]
pytest.importorskip("torch", reason="transformers needs it")
pytest.importorskip("transformers", reason="its models run")
pytest.importorskip("mlx_lm", reason="its models run")

from cache_models import HAS_CACHE, one_thread  # noqa: E402, F401
from engines import (  # noqa: E402
    TOKENS,
    Mlx,
    Transformers,
    loaded_by_mlx,
    mlx_config,
    new_mlx_model,
    new_transformers_model,
)
from model_types import ROPE, YARN  # noqa: E402
from transformers import CONFIG_MAPPING  # noqa: E402

from mlstate.errors import CompatibilityError  # noqa: E402
from mlstate.prompts import PromptStore  # noqa: E402

# With the same small weights, a restored cache continues as one that the engine filled itself.
AGREEING = """
afmoe apertus cohere cohere2 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe gemma gemma3_text glm
glm4 glm4_moe gpt_bigcode gpt_neox gptj granite granitemoe helium hunyuan_v1_dense internlm3 laguna
lfm2 llama mellum nemotron olmo2 olmo3 olmoe phi qwen2 qwen2_moe qwen3 qwen3_5 qwen3_moe qwen3_next
seed_oss smollm3 stablelm
""".split()  # noqa: SIM905
# The engines name weights after the first attention in two ways, so only its keys are compared.
FIRST_LAYER = "gpt_oss mimo_v2_flash solar_open".split()  # noqa: SIM905
# They name all weights in two ways, so only bits of the moved cache are compared.
DIFFERING = "gemma3 gemma3n gpt2 nanochat".split()  # noqa: SIM905
# They have other arrays of a prompt, or in another order.
REFUSED = """
bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 gemma2 glm4_moe_lite glm_moe_dsa jamba
kimi_linear llama4 llama4_text longcat_flash minicpm3 ministral3 mixtral nemotron_h olmo_hybrid phi3
phimoe qwen3_5_moe starcoder2
""".split()  # noqa: SIM905
NOT_RUN = {
    "bitnet": "its linear layers in mlx-lm are a Metal kernel",
    "olmo": "mlx-lm ends the process without ai2-olmo, whose format transformers does not read",
}
HALF_ROTATED = ROPE | {"partial_rotary_factor": 0.5}
# Options of the config of transformers.
OPTIONS = {
    "glm": {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},  # mlx-lm has no other
    "gpt_neox": {"intermediate_size": 128},
    "gpt_oss": {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 32.0, "truncate": True}},
    "gptj": {"n_inner": 128},
    "llama4": {"layers": 4, "num_experts_per_tok": 1},
    "mimo_v2_flash": {
        "rope_parameters": dict.fromkeys(["sliding_attention", "full_attention"], HALF_ROTATED)
    },
}
# The same facts in the words of mlx-lm.
FACTS = {
    "deepseek_v2": YARN,
    "exaone4": {"sliding_window_pattern": "LG"},
    "mimo_v2_flash": {"sliding_window_size": 15, "moe_layer_freq": [0, 1]},
    "minicpm3": YARN,
    "nemotron_h": {"hybrid_override_pattern": "M*", "time_step_limit": [0.0, 1e9]},
}
LENGTH = 70


def engines_of(kind, folder):
    """The small model in transformers and in mlx-lm."""
    model, facts = new_transformers_model(kind, **OPTIONS.get(kind, {})), FACTS.get(kind, {})
    if kind in AGREEING + FIRST_LAYER:
        other = loaded_by_mlx(model, folder, kind, kind in AGREEING, **facts)
    else:
        other = new_mlx_model(kind, arguments=mlx_config(model, kind) | facts)
    return Transformers(model), Mlx(other)


def shared_tokens(states):
    """The arrays of both states in the order of tokens; of a window, the tokens that both keep.

    The states of a hybrid model have other names in each engine; `test_prompt_hybrids.py` has them.
    """
    names = [{n for n in state.arrays if "states" not in n} for state in states]
    assert names[0] == names[1] and states[0].length == states[1].length
    for name in names[0]:
        arrays = [np.ascontiguousarray(state.ordered(name)) for state in states]
        kept = min(array.shape[2] for array in arrays)
        assert kept > 0
        yield name, *(np.ascontiguousarray(a[:, :, a.shape[2] - kept :]) for a in arrays)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not HAS_CACHE, reason="the list is of transformers 5.24")
@pytest.mark.parametrize(
    "kind",
    [kind for kind in AGREEING + FIRST_LAYER + DIFFERING + REFUSED if kind in CONFIG_MAPPING]
    + [pytest.param(kind, marks=pytest.mark.skip(reason)) for kind, reason in NOT_RUN.items()],
)
def test_a_prompt_goes_to_the_other_engine_or_is_refused_by_name(tmp_path, kind):
    engines = engines_of(kind, tmp_path / "model")
    for way, (source, target) in enumerate([engines, engines[::-1]]):
        cache, reference = (engine.after(TOKENS[:LENGTH]) for engine in (source, target))
        into = target.new_cache()
        with PromptStore(tmp_path / str(way), model=kind, model_type=kind) as store:
            store.put(TOKENS[:LENGTH], cache)
            with store.match(TOKENS[: LENGTH + 1]) as match:
                if kind in REFUSED:
                    with pytest.raises(CompatibilityError, match=r"\d\.\w+|layer \d"):
                        store.restore(match, into=into)
                    unchanged, _ = target.run(TOKENS[:LENGTH], into)
                    expected, _ = target.run(TOKENS[:LENGTH], target.new_cache())
                    assert np.array_equal(unchanged, expected)
                    continue
                assert store.restore(match, into=into) == LENGTH
        moved, filled, stored = map(
            lambda engine, cache: engine.module.from_cache(cache, length=LENGTH),
            (target, target, source),
            (into, reference, cache),
        )
        for name, got, expected in shared_tokens([moved, stored]):
            assert got.tobytes() == expected.tobytes(), name
        for name, got, expected in shared_tokens([moved, filled]):
            if kind not in DIFFERING and name.startswith("0."):
                np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
        if kind in AGREEING:
            got, expected = (target.continued(each, LENGTH) for each in (into, reference))
            np.testing.assert_allclose(got, expected, rtol=0, atol=3e-3)
