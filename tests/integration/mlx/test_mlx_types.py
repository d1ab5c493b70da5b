"""Caches of mlx-lm with layers of unknown classes, rows of a batch, and a draft model's layers."""

import pytest
from needs import needs

pytestmark = needs("mlx", "mlx_lm")
mx = pytest.importorskip("mlx.core", reason="its caches are moved")
pytest.importorskip("mlx_lm", reason="its models run")

from engines import TOKENS, model_of  # noqa: E402

from mlstate.errors import CompatibilityError  # noqa: E402
from mlstate.integrations.mlx import from_cache, save_prompt_cache, to_cache  # noqa: E402
from mlstate.prompts import PromptStore  # noqa: E402


def test_layers_of_unknown_classes_fit_equal_classes_and_numbers(tmp_path):
    model = model_of("mlx", "deepseek_v41")
    state = from_cache(model.after(TOKENS[:24]))
    assert {entry.kind for entry in state.spec} == {"opaque"}
    other = model.new_cache()
    other[0].window_size += 1
    with pytest.raises(CompatibilityError, match=r"layer 0 has window_size=\d+, and the array"):
        to_cache(state, into=other)
    assert all(layer.empty() for layer in other)
    with pytest.raises(CompatibilityError, match="prompt files hold known ones only"):
        save_prompt_cache(tmp_path / "prompt.safetensors", model.after(TOKENS[:24]))
    strange = model.after(TOKENS[:24])
    strange[1].note = object()
    with pytest.raises(CompatibilityError, match="which is an unknown class, and its note is of"):
        from_cache(strange)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", "deepseek_v32"])
def test_rows_of_a_batch_are_stored_one_by_one(tmp_path, kind):
    """`extract` leaves out the padding on the left; `merge` adds it again."""
    model = model_of("mlx", kind)
    lengths = (24, 9, 17)
    rows = [model.after(TOKENS[:count]) for count in lengths]
    batch = [layers[0].merge(layers) for layers in zip(*rows, strict=True)]
    with PromptStore(tmp_path, model=kind, block_tokens=8) as store:
        with pytest.raises(CompatibilityError, match="3 sequences: store each of them by itself"):
            store.put(TOKENS[:24], batch)
        for row, count in enumerate(lengths):
            store.put(TOKENS[:count], [layer.extract(row) for layer in batch])
        restored = [model.new_cache() for _ in lengths]
        for cache, count in zip(restored, lengths, strict=True):
            with store.match(TOKENS[: count + 1]) as match:
                assert store.restore(match, into=cache) == count
    again = [layers[0].merge(layers) for layers in zip(*restored, strict=True)]
    tokens = mx.array([[5], [6], [7]])
    for _ in range(8):
        got, expected = (model.model(tokens, cache=cache) for cache in (again, batch))
        assert bool(mx.array_equal(got, expected))


def test_a_list_of_a_model_and_its_draft_model_is_split_by_the_caller():
    model, draft = model_of("mlx", "llama"), model_of("mlx", "qwen2")
    parts = model.after(TOKENS[:20]), draft.after(TOKENS[:24])
    with pytest.raises(CompatibilityError, match="split a list of a model and its draft model"):
        from_cache([*parts[0], *parts[1]])
    assert [from_cache(part).length for part in parts] == [20, 24]
