"""One prompt in transformers and mlx-lm, for the model types that both have: moved or refused."""

import dataclasses
import importlib
import json

import numpy as np
import pytest
from needs import needs

pytestmark = [pytest.mark.long, pytest.mark.torch, needs("transformers"), needs("mlx", "mlx_lm")]
torch = pytest.importorskip("torch", reason="transformers needs it")
transformers = pytest.importorskip("transformers", reason="its models run")
mx = pytest.importorskip("mlx.core", reason="its caches are moved")
pytest.importorskip("mlx_lm", reason="its models run")

from cache_models import HAS_CACHE, TOKENS, one_thread, run  # noqa: E402, F401
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402
from mlx_types import EXTRA, YARN, arguments_of  # noqa: E402
from model_types import model_of_type  # noqa: E402
from transformers import CONFIG_MAPPING, DynamicCache  # noqa: E402

from mlstate.errors import CompatibilityError  # noqa: E402
from mlstate.integrations import mlx  # noqa: E402
from mlstate.integrations import transformers as hf  # noqa: E402
from mlstate.prompts import PromptStore  # noqa: E402

# The same small weights give the same logits in both engines.
AGREEING = """
cohere cohere2 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe gemma gemma3_text glm4 glm4_moe
gpt_bigcode gptj granite granitemoe helium hunyuan_v1_dense internlm3 laguna llama mellum nemotron
olmo2 olmo3 olmoe phi qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm
""".split()  # noqa: SIM905
# The engines read the small config in two ways, so only bits of the cache can be compared.
DIFFERING = "afmoe apertus gemma3n glm gpt2 gpt_neox gpt_oss nanochat solar_open".split()  # noqa: SIM905
# They have other arrays of a prompt, or in another order.
REFUSED = """
deepseek_v2 deepseek_v3 deepseek_v32 gemma2 glm4_moe_lite glm_moe_dsa jamba llama4 llama4_text
longcat_flash ministral3 mixtral nemotron_h phi3 phimoe qwen3_5_moe starcoder2
""".split()  # noqa: SIM905
FACTS = {
    "deepseek_v2": YARN,
    "exaone4": {"sliding_window_pattern": "LG"},
    "nemotron_h": {"hybrid_override_pattern": "M*"},
}
LENGTH = 70


def facts_of(model, kind):
    """The config of a model with all that mlx-lm asks for."""
    facts = json.loads(model.config.to_json_string(use_diff=False))
    rope = facts.get("rope_parameters") or {}
    if "rope_theta" not in rope:  # by kind of layer
        rope = next((value for value in rope.values() if isinstance(value, dict)), {})
    names = ("rope_theta", "partial_rotary_factor")
    facts = {name: rope[name] for name in names if name in rope} | facts
    if rope:
        facts.setdefault("rope_scaling", None)
    for alias, name in model.config.attribute_map.items():
        facts.setdefault(alias, facts.get(name))
    cls = importlib.import_module(f"mlx_lm.models.{kind}").ModelArgs
    required = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is field.default_factory is dataclasses.MISSING
    }
    for name, value in arguments_of(cls, kind, EXTRA.get(kind, {})).items():
        if name in required and facts.get(name) is None and name != "rope_scaling":
            facts[name] = value
    if "sliding_attention" in (facts.get("layer_types") or []):
        facts["sliding_window_pattern"] = 2
    return facts | {"model_type": kind} | FACTS.get(kind, {})


class Engine:
    """A model in one engine, with its empty caches and their arrays."""

    def __init__(self, logits, new_cache, arrays):
        self.logits, self.new_cache, self.arrays = logits, new_cache, arrays

    def cache_after(self, count):
        cache = self.new_cache()
        return cache, self.logits(TOKENS[:, :count], cache)


def engines_of(kind, folder):
    """The same weights in transformers and in mlx-lm."""
    model = model_of_type(kind)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(facts_of(model, kind)))
    other = load_model(folder, strict=kind in AGREEING and kind != "gptj")[0]

    def mlx_logits(tokens, cache):
        logits = other(mx.array(tokens.numpy()), cache=cache).astype(mx.float32)
        return np.array(logits)[:, -1]

    return (
        Engine(
            lambda tokens, cache: run(model, tokens, cache).float().numpy(),
            lambda: DynamicCache(config=model.config),
            hf.from_cache,
        ),
        Engine(mlx_logits, lambda: make_prompt_cache(other), mlx.from_cache),
    )


def assert_same_tokens(got, expected):
    """All arrays have the same bits; of a window, in the tokens that both keep."""
    assert set(got.arrays) == set(expected.arrays) and got.length == expected.length
    for name in got.arrays:
        arrays = [np.ascontiguousarray(state.ordered(name)) for state in (got, expected)]
        kept = min(array.shape[2] for array in arrays)
        first, second = (array[:, :, array.shape[2] - kept :] for array in arrays)
        assert kept > 0 and first.tobytes() == second.tobytes()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not HAS_CACHE, reason="the list is of transformers 5.24")
@pytest.mark.parametrize("kind", [k for k in AGREEING + DIFFERING + REFUSED if k in CONFIG_MAPPING])
def test_a_prompt_goes_to_the_other_engine_or_is_refused_by_name(tmp_path, kind):
    engines = engines_of(kind, tmp_path / "model")
    for way, (source, target) in enumerate([engines, engines[::-1]]):
        cache, _ = source.cache_after(LENGTH)
        into = target.new_cache()
        with PromptStore(tmp_path / str(way), model=kind, model_type=kind) as store:
            store.put(TOKENS[:, :LENGTH], cache)
            with store.match(TOKENS[:, : LENGTH + 1]) as match:
                if kind in REFUSED:
                    with pytest.raises(CompatibilityError, match=r"\d\.\w+|layer \d"):
                        store.restore(match, into=into)
                    unchanged = target.logits(TOKENS[:, :LENGTH], into)
                    assert np.array_equal(unchanged, target.cache_after(LENGTH)[1])
                    continue
                assert store.restore(match, into=into) == LENGTH
        assert_same_tokens(target.arrays(into), source.arrays(cache))
        if kind in AGREEING:
            got = target.logits(TOKENS[:, LENGTH:], into)
            expected = source.logits(TOKENS[:, LENGTH:], cache)
            np.testing.assert_allclose(got, expected, rtol=0, atol=3e-3)
