"""Situations of which users of other stores reported wrong answers: right, or refused."""

import logging

import pytest
from needs import needs

pytestmark = [pytest.mark.torch, needs("transformers")]
torch = pytest.importorskip("torch", reason="transformers needs it")
transformers = pytest.importorskip("transformers", reason="its models run")

from cache_models import (  # noqa: E402
    ARGUMENT,
    TOKENS,
    new_model,
    one_thread,  # noqa: F401
    prefilled,
    restored,
    run,
    shared_model,
)
from model_types import config_of  # noqa: E402
from transformers import DynamicCache, EncoderDecoderCache  # noqa: E402

from mlstate.errors import CompatibilityError  # noqa: E402
from mlstate.integrations.transformers import from_cache  # noqa: E402
from mlstate.prompts import PromptStore, fingerprint  # noqa: E402


def with_rejected_drafts(model):
    """A cache of 40 tokens, after 5 others were removed, as speculative decoding does."""
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    run(model, TOKENS[:, :40], cache)
    run(model, TOKENS[:, 60:65], cache)
    cache.crop(-5)
    return cache


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_rejected_drafts_are_not_stored(store, name):
    model = shared_model(name)
    assert store.put(TOKENS[:, :40], with_rejected_drafts(model)) == 40
    cache = DynamicCache(config=model.config)
    assert restored(store, cache) == 40
    rest = TOKENS[:, 40:60]
    assert torch.equal(run(model, rest, cache), run(model, rest, prefilled(model, 40)))


def test_a_recurrent_state_that_may_have_rejected_drafts_is_refused(store):
    """transformers does not remove them from it (transformers 49036)."""
    model = shared_model("qwen3_next")
    with pytest.raises(CompatibilityError, match=r"recurrent_states\.0: the layer records drafts"):
        store.put(TOKENS[:, :40], with_rejected_drafts(model))
    assert store.stats()["records"] == 0


def test_a_generation_with_drafts_is_stored_without_the_rejected_ones(store):
    model, cache = shared_model("gemma3"), DynamicCache(config=shared_model("gemma3").config)
    settings = {"assistant_model": new_model("gemma3"), "max_new_tokens": 20, "do_sample": False}
    output = model.generate(TOKENS[:, :30], **settings, **{ARGUMENT: cache})
    length = cache.get_seq_length()
    assert store.put(output[:, :length], cache) == length
    again, fresh = (DynamicCache(config=model.config) for _ in range(2))
    assert restored(store, again, output[:, :length], full=True) == length
    run(model, output[:, :length], fresh)
    rest = TOKENS[:, 60:70]
    assert torch.allclose(run(model, rest, again), run(model, rest, fresh), atol=1e-6)


@pytest.mark.parametrize(("stored", "into"), [("config", None), (None, "config")])
def test_a_cache_that_ignores_the_windows_is_refused(store, stored, into):
    model = shared_model("gemma3")
    caches = {"config": DynamicCache(config=model.config), None: DynamicCache()}
    run(model, TOKENS[:, :40], caches[stored])
    store.put(TOKENS[:, :40], caches[stored])
    with store.match(TOKENS) as match, pytest.raises(CompatibilityError, match=r"0\.keys"):
        store.restore(match, into=caches[into])
    assert caches[into].get_seq_length() == 0


def test_tensors_without_data_are_refused(store):
    cache = DynamicCache(config=shared_model("llama").config)
    for layer in range(2):
        cache.update(*torch.zeros(2, 1, 2, 40, 8, device="meta"), layer)
    with pytest.raises(CompatibilityError, match=r"0\.keys: a meta tensor has no data"):
        store.put(TOKENS[:, :40], cache)
    state = from_cache(cache)
    store.put(TOKENS[:, :40], prefilled(shared_model("llama"), 40))
    with store.match(TOKENS) as match, pytest.raises(CompatibilityError, match=r"0\.keys: a meta"):
        store.restore(match, into=state)


def test_a_cross_attention_needs_the_digest_of_its_input(tmp_path):
    """The same first tokens of a decoder belong to many inputs of the encoder."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=97, decoder_start_token_id=0, **sizes)
    model = transformers.T5ForConditionalGeneration(config).eval()

    def empty():
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))

    def filled(inputs):
        cache = empty()
        tokens = {"input_ids": inputs, "decoder_input_ids": TOKENS[:, :20]}
        with torch.no_grad():
            model(**tokens, use_cache=True, **{ARGUMENT: cache})
        return cache

    caches = {"a": filled(TOKENS[:, 40:60]), "b": filled(TOKENS[:, 60:85])}
    with (
        PromptStore(tmp_path, model="t5") as store,
        pytest.raises(CompatibilityError, match="pass its digest as salt="),
    ):
        store.put(TOKENS[:, :20], caches["a"], extra={1: "a"})
    with PromptStore(tmp_path / "digests", model="t5") as store:
        for digest, expected in caches.items():
            store.put(TOKENS[:, :20], expected, extra={0: digest})
        for digest, expected in caches.items():
            cache = empty()
            assert restored(store, cache, TOKENS[:, :21], extra={0: digest}) == 20
            got, want = (each.cross_attention_cache.layers[1].keys for each in (cache, expected))
            assert torch.equal(got, want)
    for salt, cache in caches.items():
        with PromptStore(tmp_path, model="t5", salt=salt) as store:
            store.put(TOKENS[:, :20], cache)
    for salt, expected in caches.items():
        with PromptStore(tmp_path, model=fingerprint("t5", salt=salt)) as store:
            cache = empty()
            assert restored(store, cache, TOKENS[:, :21]) == 20
            store.put(TOKENS[:, :20], cache)
        got, expected = (each.cross_attention_cache.layers[1].keys for each in (cache, expected))
        assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", ["default", "dynamic", "longrope", "yarn"])
def test_a_rotation_by_the_length_of_the_prompt_or_the_engine_is_logged(tmp_path, caplog, kind):
    """Keys of the first tokens differ between short and long prompts, or between engines."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}
    rope = {"rope_type": kind, "rope_theta": 10000.0}
    rope |= {"dynamic": {"factor": 4.0}, "longrope": factors}.get(kind, {})
    rope |= {"factor": 4.0, "truncate": False} if kind == "yarn" else {}
    config = config_of("llama", max_position_embeddings=48, initializer_range=0.02)
    config.rope_parameters = rope | {"original_max_position_embeddings": 48}
    model = transformers.LlamaForCausalLM(config).eval()
    short, long = (prefilled(model, count).layers[0].keys[:, :, :32] for count in (32, 80))
    assert torch.allclose(short, long, atol=1e-3) == (kind in ("default", "yarn"))
    model.save_pretrained(tmp_path / "model")
    with caplog.at_level(logging.WARNING, "mlstate"):
        PromptStore(tmp_path / "a", model=tmp_path / "model").close()
        PromptStore(tmp_path / "b", model=model, hash_weights=True).close()
    texts = [r.getMessage() for r in caplog.records if r.name.startswith("mlstate")]
    assert len(texts) == (0 if kind == "default" else 2)
    cause = "the engine" if kind == "yarn" else "the length"
    assert all(f"keys with {kind} RoPE depend on {cause}" in text for text in texts)
