"""Caches of almost all model types of mlx-lm: moved and restored ones give the live one's bits."""

import pytest
from needs import needs

pytestmark = needs("mlx", "mlx_lm")
mx = pytest.importorskip("mlx.core", reason="its caches are moved")
pytest.importorskip("mlx_lm", reason="its models run")

from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_models import prompt_of, run_model  # noqa: E402
from mlx_types import FEW, TYPES, model_of_type  # noqa: E402

import mlstate  # noqa: E402
from mlstate.errors import CompatibilityError  # noqa: E402
from mlstate.integrations.mlx import from_cache, save_prompt_cache, to_cache  # noqa: E402
from mlstate.prompts import PromptStore  # noqa: E402

TOKENS, LENGTH = prompt_of(40), 24
KINDS = [pytest.param(kind, marks=[] if kind in FEW else pytest.mark.long) for kind in TYPES]


def cache_after(model, count=LENGTH):
    cache = make_prompt_cache(model)
    run_model(model, TOKENS[:count], cache)
    return cache


def continued(model, cache, start=LENGTH):
    logits = [run_model(model, TOKENS[i : i + 1], cache) for i in range(start, start + 8)]
    return mx.stack(logits)


def assert_equal(got, expected):
    assert bool(mx.array_equal(got, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_or_restored_cache_gives_the_same_bits(tmp_path, kind):
    model = model_of_type(kind)
    cache = cache_after(model)
    state = from_cache(cache, length=LENGTH)
    with PromptStore(tmp_path / "store", model=kind, block_tokens=8) as store:
        store.put(mx.array(TOKENS).tolist()[:LENGTH], cache)
    mlstate.save(tmp_path / "checkpoint", states={"prompt": state})
    copied = state.copy()
    expected = continued(model, cache)
    assert_equal(continued(model, to_cache(copied)), expected)
    assert_equal(continued(model, to_cache(copied, into=make_prompt_cache(model))), expected)

    used = cache_after(model, 9)
    if kind in PACKED:
        with pytest.raises(CompatibilityError, match="has tokens: pass a new cache"):
            to_cache(copied, into=used)
        used = make_prompt_cache(model)
    assert_equal(continued(model, to_cache(copied, into=used)), expected)

    loaded = mlstate.load(tmp_path / "checkpoint").states["prompt"]
    assert_equal(continued(model, to_cache(loaded, into=make_prompt_cache(model))), expected)
    with (
        PromptStore(tmp_path / "store", model=kind, block_tokens=8) as store,
        store.match(TOKENS.tolist()[: LENGTH + 1]) as match,
    ):
        restored = make_prompt_cache(model)
        assert store.restore(match, into=restored) == LENGTH
    assert_equal(continued(model, restored), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollback_equals_a_cache_that_never_went_ahead(kind):
    model = model_of_type(kind)
    cache, unmoved = cache_after(model), cache_after(model)
    state = from_cache(cache, length=LENGTH)
    before = state.snapshot()
    continued(model, cache, 30)  # rejected
    state.restore(before)
    cache = to_cache(state) if kind in PACKED else to_cache(state, into=cache)
    assert_equal(continued(model, cache), continued(model, unmoved))


PACKED = ["deepseek_v41"]  # layers of a class of the model's own


@pytest.mark.parametrize("kind", PACKED)
def test_a_layer_of_an_unknown_class_fits_its_own_class_and_numbers_only(tmp_path, kind):
    model = model_of_type(kind)
    state = from_cache(cache_after(model))
    assert {entry.kind for entry in state.spec} == {"opaque"}
    other = make_prompt_cache(model)
    other[0].window_size += 1
    with pytest.raises(CompatibilityError, match=r"layer 0 has window_size=\d+, and the array"):
        to_cache(state, into=other)
    assert all(layer.empty() for layer in other)
    with pytest.raises(CompatibilityError, match="prompt files hold known ones only"):
        save_prompt_cache(tmp_path / "prompt.safetensors", cache_after(model))
    strange = cache_after(model)
    strange[1].note = object()
    with pytest.raises(CompatibilityError, match="which is an unknown class, and its note is of"):
        from_cache(strange)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", "deepseek_v32"])
def test_rows_of_a_batch_are_stored_one_by_one(tmp_path, kind):
    """`extract` leaves out the padding on the left; `merge` adds it again."""
    model = model_of_type(kind)
    lengths = (24, 9, 17)
    rows = [cache_after(model, count) for count in lengths]
    batch = [layers[0].merge(layers) for layers in zip(*rows, strict=True)]
    with PromptStore(tmp_path, model=kind, block_tokens=8) as store:
        with pytest.raises(CompatibilityError, match="3 sequences: store each of them by itself"):
            store.put(TOKENS.tolist()[:24], batch)
        for row, count in enumerate(lengths):
            store.put(TOKENS.tolist()[:count], [layer.extract(row) for layer in batch])
        restored = [make_prompt_cache(model) for _ in lengths]
        for cache, count in zip(restored, lengths, strict=True):
            with store.match(TOKENS.tolist()[: count + 1]) as match:
                assert store.restore(match, into=cache) == count
    again = [layers[0].merge(layers) for layers in zip(*restored, strict=True)]
    tokens = mx.array([[5], [6], [7]])
    for _ in range(8):
        assert_equal(model(tokens, cache=again), model(tokens, cache=batch))


def test_a_list_of_a_model_and_its_draft_model_is_split_by_the_caller():
    model, draft = model_of_type("llama"), model_of_type("qwen2")
    both = [*cache_after(model, 20), *cache_after(draft, 24)]
    with pytest.raises(CompatibilityError, match="split a list of a model and its draft model"):
        from_cache(both)
    count = len(model.layers)
    parts = from_cache(both[:count]), from_cache(both[count:])
    assert [part.length for part in parts] == [20, 24]
