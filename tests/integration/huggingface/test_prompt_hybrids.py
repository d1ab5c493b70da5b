"""One prompt of a hybrid model in transformers and mlx-lm: their states have other layouts."""

import logging

import numpy as np
import pytest
from needs import needs

pytestmark = [pytest.mark.torch, needs("transformers")]
torch = pytest.importorskip("torch", reason="transformers needs it")
transformers = pytest.importorskip("transformers", reason="its models run")
pytest.importorskip("mlx_lm", reason="its models run")

import mlx.core as mx  # noqa: E402
from cache_models import (  # noqa: E402
    ARGUMENT,
    HAS_CACHE,
    TOKENS,
    one_thread,  # noqa: F401
    restored,
)
from engines import loaded_by_mlx, new_transformers_model  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

from mlstate.errors import CompatibilityError  # noqa: E402
from mlstate.integrations.mlx import from_cache  # noqa: E402
from mlstate.prompts import PromptStore  # noqa: E402

CLOSE = {"float32": 2e-5, "bfloat16": 5e-2}


HYBRIDS = {
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
    "lfm2": {},
    "mamba2": {"num_heads": 8},
    "qwen3_5": {},
    "qwen3_next": {},  # keys and values of states have the same length: no shape shows their order
}
# In the words of mlx-lm.
FACTS = {
    "granitemoehybrid": HYBRIDS["granitemoehybrid"],
    "mamba2": {"intermediate_size": 64, "time_step_limit": [0.0, 1e9]},
}


@pytest.fixture
def dtype():
    return "float32"


@pytest.fixture
def pair(name, dtype, tmp_path):
    """The same weights in both engines; the config has the facts that mlx-lm needs."""
    model = new_transformers_model(name, initializer_range=0.02, **HYBRIDS[name])
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith(("dt_bias", "A_log")):
                value.copy_(torch.rand_like(value))
    model = model.to(getattr(torch, dtype))
    return model, loaded_by_mlx(model, tmp_path / "model", name, **FACTS.get(name, {}))


def store_at(folder, **options):
    return PromptStore(folder / "store", model="hybrid", block_tokens=16, **options)


@torch.no_grad()
def run(model, start, stop, cache):
    is_old = not HAS_CACHE and "mamba" in model.config.model_type
    name = "cache_params" if is_old else ARGUMENT
    logits = model(TOKENS[:, start:stop], use_cache=True, **{name: cache}).logits
    return logits[0, -1].float().numpy()


def run_mlx(model, start, stop, cache):
    logits = model(mx.array(TOKENS[:, start:stop].numpy()), cache=cache)
    return np.array(logits[0, -1].astype(mx.float32))


def bits(array):
    return np.ascontiguousarray(array).view("u1")


def states_of(name, cache):
    """The states of transformers in the layout of mlx-lm."""
    states = {}
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "conv_states", None):
            states[f"{index}.states.0"] = layer.conv_states[0][..., 1:].transpose(1, 2)
            state = layer.recurrent_states[0]
            if state is not None:
                state = state.transpose(-1, -2) if name.startswith("qwen3") else state
                states[f"{index}.states.1"] = state
    return states


def assert_same_states(name, cache, other, length):
    state, expected = from_cache(other, length=length), states_of(name, cache)
    assert [each for each in state.arrays if "states" in each] == list(expected)
    for each, tensor in expected.items():
        same = tensor.contiguous().view(torch.uint8).numpy()
        assert np.array_equal(bits(state.arrays[each]), same), each
    for index, layer in enumerate(cache.layers):
        for part in ("keys", "values") if f"{index}.keys" in state.arrays else ():
            tensor = getattr(layer, part)[:, :, :length].contiguous().view(torch.uint8)
            assert np.array_equal(bits(state.ordered(f"{index}.{part}")), tensor.numpy())


# mlx multiplies the matrices of experts in float32 only, on CPUs.
NO_EXPERTS = [(name, "bfloat16") for name in ("lfm2", "mamba2", "qwen3_5")]


@pytest.mark.parametrize(("name", "dtype"), [(name, "float32") for name in HYBRIDS] + NO_EXPERTS)
def test_a_hybrid_prompt_of_transformers_continues_in_mlx_and_back(pair, name, dtype, tmp_path):
    model, other = pair
    cache, moved, live = DynamicCache(config=model.config), *map(make_prompt_cache, (other, other))
    run(model, 0, 70, cache)
    run_mlx(other, 0, 70, live)
    with store_at(tmp_path, model_type=name) as store:
        assert store.put(TOKENS[:, :70], cache) == 70
        assert restored(store, moved) == 70
        assert_same_states(name, cache, moved, 70)
        states = from_cache(moved, length=70), from_cache(live, length=70)
        for each in states_of(name, cache):  # a prefill in mlx-lm gives the same layout
            got, expected = (state.arrays[each].astype(np.float32) for state in states)
            assert np.abs(got - expected).max() < CLOSE[dtype] * np.abs(expected).max(), each
        got, expected = run_mlx(other, 70, 90, moved), run_mlx(other, 70, 90, live)
        assert np.abs(got - expected).max() < CLOSE[dtype]

        assert store.put(TOKENS, moved) == 90
        back = DynamicCache(config=model.config)
        assert restored(store, back, full=True) == 90
    assert_same_states(name, back, moved, 90)
    run(model, 70, 89, cache)
    run(model, 89, 90, cache)
    got, expected = run(model, 5, 6, back), run(model, 5, 6, cache)
    assert np.abs(got - expected).max() < CLOSE[dtype]


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_a_hybrid_prompt_of_mlx_comes_into_a_static_cache(pair, name, tmp_path):
    model, other = pair
    cache, static = make_prompt_cache(other), StaticCache(model.config, 128)
    run_mlx(other, 0, 70, cache)
    with store_at(tmp_path, model_type=name) as store:
        store.put(TOKENS[:, :70], cache)
        assert restored(store, static) == 70
    assert_same_states(name, static, cache, 70)


@pytest.mark.parametrize("name", ["qwen3_next"])
def test_states_of_an_unknown_layout_are_refused(pair, name, tmp_path):
    model, other = pair
    cache, moved = DynamicCache(config=model.config), make_prompt_cache(other)
    run(model, 0, 70, cache)
    for model_type in (None, "other"):
        with store_at(tmp_path, model_type=model_type) as store:
            store.put(TOKENS[:, :70], cache)
            with (
                store.match(TOKENS) as match,
                pytest.raises(CompatibilityError, match=r"conv_states\.0: another engine stored"),
            ):
                store.restore(match, into=moved)
        assert moved[0].empty()
    with store_at(tmp_path / "mlx") as store:
        run_mlx(other, 0, 70, moved)
        store.put(TOKENS[:, :70], moved)
        empty = DynamicCache(config=model.config)
        with (
            store.match(TOKENS) as match,
            pytest.raises(CompatibilityError, match=r"states\.0: another engine stored"),
        ):
            store.restore(match, into=empty)
        assert empty.get_seq_length() == 0
    with (
        store_at(tmp_path / "mlx", model_type=name) as store,
        store.match(TOKENS) as match,
        pytest.raises(CompatibilityError, match=r"states\.0: mlx-lm stored .* without model_type="),
    ):
        store.restore(match, into=empty)


@pytest.mark.parametrize("name", ["lfm2"])
def test_the_folder_of_a_model_names_its_states(pair, name, tmp_path, caplog):
    model, other = pair
    cache, moved = DynamicCache(config=model.config), make_prompt_cache(other)
    run(model, 0, 70, cache)
    with PromptStore(tmp_path / "store", model=tmp_path / "model", block_tokens=16) as store:
        store.put(TOKENS[:, :70], cache)
        with store.match(TOKENS) as match, caplog.at_level(logging.WARNING):
            assert store.restore(match, into=moved) == 70
    assert_same_states(name, cache, moved, 70)
    assert not caplog.records
    with pytest.raises(TypeError, match="model_type must be a str, got int"):
        store_at(tmp_path, model_type=3)
    with pytest.raises(ValueError, match=r"model_type is 'mamba2', and the config .* 'lfm2'"):
        PromptStore(tmp_path / "store", model=tmp_path / "model", model_type="mamba2")
