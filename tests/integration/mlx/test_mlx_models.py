"""Models of mlx-lm continue from moved caches with the bits of the unmoved cache."""

import copy

import pytest
from engines import new_mlx_model
from needs import needs

pytestmark = needs("mlx", "mlx_lm")
mx = pytest.importorskip("mlx.core", reason="its caches are moved")
pytest.importorskip("mlx_lm", reason="its models run")

from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models import cache as models  # noqa: E402

from mlstate.cli import main  # noqa: E402
from mlstate.errors import CompatibilityError  # noqa: E402
from mlstate.integrations.mlx import (  # noqa: E402
    from_cache,
    load_prompt_cache,
    save_prompt_cache,
    to_cache,
)

HYBRIDS = ["gemma3_text", "qwen3_next", "lfm2"]
MODELS = ["llama", *HYBRIDS, "llama4", "deepseek_v32"]


def prompt_of(count, seed=1):
    return mx.random.randint(2, 97, (count,), key=mx.random.key(seed))


def run_model(model, tokens, cache):
    """The logits of the last token."""
    logits = model(tokens[None], cache=cache)[0, -1]
    mx.eval(logits)
    return logits


def steps_of(model, logits, cache, count):
    """The logits of some greedy steps."""
    results = [logits]
    for _ in range(count):
        results.append(run_model(model, results[-1].argmax(keepdims=True), cache))
    return mx.stack(results)


@pytest.fixture(scope="module")
def model_of():
    created = {}

    def model(name):
        if name not in created:
            created[name] = new_mlx_model(name)
        return created[name]

    return model


def filled(model, count=20, **options):
    cache = models.make_prompt_cache(model, **options)
    return run_model(model, prompt_of(count), cache), cache


def assert_continues(model, logits, moved, expected, count=30):
    got, want = (steps_of(model, logits, cache, count) for cache in (moved, expected))
    assert bool(mx.array_equal(got, want))


@pytest.mark.parametrize("route", ["file", "mlx-lm's file", "file of 0.31"])
@pytest.mark.parametrize("name", MODELS)
def test_a_restored_cache_continues_with_the_bits_of_the_live_one(model_of, tmp_path, name, route):
    model = model_of(name)
    logits, cache = filled(model)
    path, old = tmp_path / "prompt.safetensors", tmp_path / "old.safetensors"
    (models.save_prompt_cache if route == "mlx-lm's file" else save_prompt_cache)(str(path), cache)
    if route == "file":
        assert_continues(model, logits, models.load_prompt_cache(str(path)), filled(model)[1])
    if route == "file of 0.31":
        assert main(["cache", "convert", str(path), str(old), "--to", "0.31"]) == 0
    moved = load_prompt_cache(old if route == "file of 0.31" else path)
    assert [type(layer) for layer in moved] == [type(layer) for layer in cache]
    assert_continues(model, logits, moved, cache)


@pytest.mark.parametrize("name", MODELS)
def test_a_ladder_of_capacities_equals_a_cache_that_never_moved(model_of, name):
    model = model_of(name)
    logits, rung = filled(model)
    expected_logits, unmoved = filled(model)
    for capacity in (64, 128, 512, 160):
        state = from_cache(rung)
        if state.capacity is not None:
            state.resize(capacity)
        rung = to_cache(state)
        got = steps_of(model, logits, rung, 25)
        want = steps_of(model, expected_logits, unmoved, 25)
        assert bool(mx.array_equal(got, want))
        logits, expected_logits = got[-1], want[-1]
    assert state.length == 20 + 3 * 25


@pytest.mark.parametrize("name", MODELS)
def test_generate_gives_the_tokens_of_the_live_cache(model_of, name):
    model = model_of(name)

    def tokens_of(cache, count=20):
        steps = generate_step(prompt_of(5, seed=3), model, prompt_cache=cache, max_tokens=count)
        return [int(token) for token, _ in steps]

    state = from_cache(filled(model)[1])
    expected = tokens_of(filled(model)[1])
    assert tokens_of(to_cache(state)) == expected
    into = models.make_prompt_cache(model)
    assert tokens_of(to_cache(state, into=into)) == expected
    assert tokens_of(to_cache(state.copy(), into=into)) == expected  # a used cache
    assert from_cache(into).length in (44, 45)  # the last token may not have been read


@pytest.mark.parametrize("name", HYBRIDS)
def test_mlx_lm_cannot_trim_these_caches(model_of, name):
    """Windows that are full, and recurrent states: only a snapshot takes them back."""
    assert not models.can_trim_prompt_cache(filled(model_of(name))[1])


@pytest.mark.parametrize("count", [20, 40])
def test_a_rotating_cache_moves_to_another_context(model_of, count):
    model = model_of("llama")

    def rotating(size):
        return [models.RotatingKVCache(size, keep=4) for _ in model.layers]

    cache, unmoved = rotating(48), rotating(128)
    logits = run_model(model, prompt_of(count), cache)
    run_model(model, prompt_of(count), unmoved)
    larger = to_cache(from_cache(cache), into=rotating(128))
    assert_continues(model, logits, larger, unmoved, 100)
    steps_of(model, logits, cache, 40)
    with pytest.raises(CompatibilityError, match="older ones were evicted"):
        to_cache(from_cache(cache), into=rotating(128))


def test_a_quantized_cache_equals_one_that_mlx_made():
    model = new_mlx_model("llama", head_dim=32)
    logits, cache = filled(model)

    def quantized():
        return [layer.to_quantized(32, 8) for layer in cache]

    state = from_cache(cache)
    state.quantize(8, 32)
    assert_continues(model, logits, to_cache(state), quantized())
    assert_continues(model, logits, to_cache(from_cache(quantized())), quantized())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_its_bits(model_of, tmp_path, dtype):
    model = copy.deepcopy(model_of("gemma3_text"))
    model.set_dtype(getattr(mx, dtype))
    logits, cache = filled(model)
    save_prompt_cache(tmp_path / "prompt.safetensors", cache)
    for moved in (to_cache(from_cache(cache)), load_prompt_cache(tmp_path / "prompt.safetensors")):
        assert moved[1].keys.dtype == getattr(mx, dtype)
        assert_continues(model, logits, moved, filled(model)[1])


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_a_batch_of_prompts_continues(model_of, name):
    model = model_of(name)
    prompts = [prompt_of(count, count) for count in (9, 30, 17)]

    def merged():
        caches = []
        for prompt in prompts:
            cache = models.make_prompt_cache(model)
            run_model(model, prompt, cache)
            caches.append(cache)
        return [layers[0].merge(layers) for layers in zip(*caches, strict=True)]

    def logits_of(cache):
        results = [model(mx.array([[5], [6], [7]]), cache=cache) for _ in range(25)]
        return mx.concatenate(results, axis=1)

    assert bool(mx.array_equal(logits_of(to_cache(from_cache(merged()))), logits_of(merged())))
