"""Models of transformers continue from a stored prompt with the bits of the live cache."""

import copy

import forked
import pytest
from needs import needs

pytestmark = [pytest.mark.torch, needs("transformers")]
torch = pytest.importorskip("torch", reason="transformers needs it")
transformers = pytest.importorskip("transformers", reason="its models run")

from cache_models import (  # noqa: E402
    ARGUMENT,
    KINDS,
    MODELS,
    TOKENS,
    one_thread,  # noqa: F401
    prefilled,
    restored,
    run,
    shared_model,
)
from toy_caches import flip  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from mlstate.errors import CompatibilityError  # noqa: E402
from mlstate.integrations.transformers import from_cache  # noqa: E402


@pytest.fixture
def name():
    return "llama"


@pytest.fixture
def dtype():
    return "float32"


@pytest.fixture
def model(name, dtype):
    return copy.deepcopy(shared_model(name)).to(getattr(torch, dtype))


def continued(model, cache, start):
    """The logits of the rest of the prompt at once, and of two further tokens."""
    logits = [run(model, TOKENS[:, start:], cache)]
    for _ in range(2):
        logits.append(run(model, logits[-1].argmax(-1, keepdim=True), cache))
    return torch.stack(logits)


FLOATS = ["float32", "bfloat16", "float16"]
MOVES = [
    *((kind, kind, dtype) for kind in KINDS for dtype in FLOATS),
    ("dynamic", "static", "float32"),
    ("static", "dynamic", "float32"),
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("stored", "into", "dtype"), MOVES)
def test_a_restored_cache_gives_the_logits_of_the_live_one(model, store, stored, into):
    cache, live = prefilled(model, 70, stored), prefilled(model, 70, into)
    assert store.put(TOKENS[:, :70], cache) == 70
    other = KINDS[into](config=model.config)
    assert restored(store, other) == 70
    assert torch.equal(continued(model, other, 70), continued(model, live, 70))


PROGRAM = """
import os, signal, sys
import torch
from transformers import DynamicCache
from cache_models import ARGUMENT, MODELS, new_model, prompt
from mlstate.prompts import PromptStore

torch.set_num_threads(1)
folder, is_first = sys.argv[1], sys.argv[2] == "first"
tokens, stores = prompt(90), []
for name in MODELS:
    model = new_model(name)
    stores.append(PromptStore(f"{folder}/{name}", model=name, block_tokens=16, snapshots=32))
    cache = DynamicCache(config=model.config)
    with stores[-1].match(tokens) as match:
        start = stores[-1].restore(match, into=cache)
    assert start == (0 if is_first else 89), (name, start)
    with torch.no_grad():
        for stop in stores[-1].stops(tokens, start):
            model(tokens[:, start:stop], use_cache=True, **{ARGUMENT: cache})
            stores[-1].put(tokens[:, :stop], cache)
            start = stop
    settings = {"max_new_tokens": 12, "do_sample": False, ARGUMENT: cache}
    print(name, model.generate(tokens, **settings).tolist(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)  # all stores are open
"""


def test_a_killed_process_starts_again_without_a_prefill(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    outputs = []
    for turn in ("first", "second"):
        [(status, out, err)] = forked.run(program, ([tmp_path, turn], {}))
        assert status == -9, err
        outputs.append(out)
    assert outputs[0] == outputs[1] and outputs[0].count("[[") == len(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_damage_never_reaches_a_model(model, store, tmp_path):
    """A damaged record gives the tokens of an earlier position, or none, and no wrong ones."""
    is_hybrid = any(e.kind != "full" for e in from_cache(prefilled(model, 70)).spec)
    for stop in (20, 48, 70):
        store.put(TOKENS[:, :stop], prefilled(model, stop))
    cache = prefilled(model, 70)
    layer = next(e.layer for e in from_cache(cache).spec if e.kind == "full")
    flip(tmp_path, cache.layers[layer].keys[0, 1, 40].numpy().tobytes())
    other = DynamicCache(config=model.config)
    position = restored(store, other)
    assert position == (20 if is_hybrid else 32)
    expected = prefilled(model, position) if is_hybrid else None
    if expected is not None:
        got, reference = continued(model, other, position), continued(model, expected, position)
        assert torch.equal(got, reference)
    else:
        assert other.get_seq_length() == position
        for got, live in zip(other.layers, prefilled(model, 70).layers, strict=True):
            assert torch.equal(got.keys, live.keys[:, :, :position])


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_match_a_cache_is_empty(model, store, kind):
    store.put(TOKENS[:, :70], prefilled(model, 70))
    cache = prefilled(model, 30, kind)
    assert restored(store, cache, TOKENS + 1) == 0
    fresh = KINDS[kind](config=model.config)
    assert torch.equal(continued(model, cache, 0), continued(model, fresh, 0))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_without_a_match_a_cache_of_transformers_5_0_is_empty(model, store, monkeypatch):
    """Its `reset` keeps the tokens as zeros, which a model would attend to."""

    def reset(layer):
        if layer.is_initialized:
            layer.keys.zero_()
            layer.values.zero_()
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = 0

    monkeypatch.setattr("transformers.cache_utils.DynamicLayer.reset", reset)
    cache = prefilled(model, 30)
    assert restored(store, cache) == 0
    fresh = DynamicCache(config=model.config)
    assert cache.get_seq_length() == 0
    assert torch.equal(continued(model, cache, 0), continued(model, fresh, 0))


def test_a_batch_of_sequences_is_refused(model, store):
    cache = DynamicCache(config=model.config)
    run(model, TOKENS[:, :20].repeat(2, 1), cache)
    with pytest.raises(CompatibilityError, match=r"2 sequences.*batch_select_indices"):
        store.put(TOKENS[:, :20], cache)
    with pytest.raises(ValueError, match="pass one row at a time"):
        store.put(TOKENS[:, :20].repeat(2, 1), cache)


def test_more_tokens_than_the_cache_has_are_refused(model, store):
    cache = DynamicCache(config=model.config)
    output = model.generate(TOKENS[:, :20], max_new_tokens=5, do_sample=False, **{ARGUMENT: cache})
    with pytest.raises(CompatibilityError, match=r"generate\(\) returns one"):
        store.put(output, cache)
    assert store.put(output[:, :-1], cache) == 24


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_the_tensors_are_on_the_device_that_the_caller_names(model, store):
    store.put(TOKENS[:, :70], prefilled(model, 70))
    cache = DynamicCache(config=model.config)
    with store.match(TOKENS) as match:
        assert store.restore(match, into=cache, device="meta") == 70
    tensors = from_cache(cache).arrays.values()
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    with store.match(TOKENS) as match, pytest.raises(TypeError, match="device= is for"):
        store.restore(match, into=from_cache(cache), device="meta")
    with store.match(TOKENS) as match, pytest.raises(ValueError, match="nowhere"):
        store.restore(match, into=cache, device="nowhere")
