"""One prompt in transformers and in Core AI, and the states of Core ML, with the same weights."""

import functools

import numpy as np
import pytest
from needs import needs

pytestmark = [pytest.mark.coreai, pytest.mark.torch, needs("transformers")]
torch = pytest.importorskip("torch", reason="transformers needs it")
pytest.importorskip("transformers", reason="its models run")

from cache_models import (  # noqa: E402
    TOKENS,
    new_model,
    one_thread,  # noqa: F401
    prefilled,
    restored,
    run,
)
from coreai_models import NDArray, save_llama, session  # noqa: E402
from engines import loaded_by_mlx  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from mlstate.coreai import StateManager  # noqa: E402
from mlstate.coreml import FakeMLState  # noqa: E402
from mlstate.integrations.transformers import from_cache  # noqa: E402
from mlstate.kv import CacheEntry, CacheSpec, CacheState  # noqa: E402

LAYERS, HEADS, HEAD_DIM = 2, 2, 8
# Of logits up to 1, computed by another engine from the same cache.
CLOSE = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}


def by_layer(keys, values, length=0):
    """Keys and values of all layers as a state over the same memory, named as transformers does.

    The arrays have the shape (layers, batch, heads, positions, head_dim), or, in the layout of
    iOS, (layers, batch, heads * head_dim, 1, positions).
    """
    arrays, entries = {}, []
    for role, array in (("keys", keys), ("values", values)):
        is_rows = array.shape[3] == 1
        for layer, tokens in enumerate(array):
            if is_rows:
                tokens = tokens.reshape(1, HEADS, HEAD_DIM, -1)
            name, axis = f"{layer}.{role}", -1 if is_rows else -2
            arrays[name] = tokens
            entries.append(CacheEntry(name, "full", tokens.shape, tokens.dtype, axis))
    return CacheState(CacheSpec(entries), arrays, length)


@functools.cache
def model_of(dtype):
    return new_model("llama").to(getattr(torch, dtype))


@pytest.fixture(params=["float32", "float16 rows", "bfloat16"], scope="module")
def pair(request, tmp_path_factory):
    """The same weights in both engines."""
    dtype, _, layout = request.param.partition(" ")
    path = tmp_path_factory.mktemp("coreai") / "llama.aimodel"
    save_llama(path, model_of(dtype), dtype, is_rows=layout == "rows")
    with session(path) as loaded:
        yield dtype, model_of(dtype), loaded


def arrays_of(manager):
    return [manager.state[name].numpy() for name in ("k_cache", "v_cache")]


def same_bits(first, second, count=None):
    count = first.length if count is None else count
    for name in second.arrays:
        a, b = first.ordered(name), second.ordered(name)
        if first.spec.entry_of(name).seq_axis == 3:
            a = np.moveaxis(a, 3, 2)
        a, b = (np.ascontiguousarray(x[:, :, :count]).view("u1") for x in (a, b))
        if not np.array_equal(a, b):
            return False
    return True


def decode(loaded, manager, start, stop):
    """The logits of Core AI of the last token."""
    for position in range(start, stop):
        manager.grow_if_needed(position)
        logits = loaded.step(manager, int(TOKENS[0, position]), position)
    return logits.astype(np.float32)


def logits_of(model, tokens, cache):
    return run(model, tokens, cache).float().numpy()[0]


def test_a_prompt_of_transformers_continues_in_core_ai_and_back(pair, store):
    dtype, model, loaded = pair
    cache = prefilled(model, 70)
    assert store.put(TOKENS[:, :70], cache) == 70

    manager = StateManager(loaded.functions["main"], (128, 256))
    keys, values = map(np.zeros_like, arrays_of(manager))
    assert restored(store, by_layer(keys, values)) == 70
    manager.state.update(k_cache=NDArray(keys), v_cache=NDArray(values))
    assert same_bits(by_layer(*arrays_of(manager), length=70), from_cache(cache))
    got, expected = decode(loaded, manager, 70, 90), logits_of(model, TOKENS[:, 70:], cache)
    assert np.abs(got - expected).max() < CLOSE[dtype] and got.argmax() == expected.argmax()

    continued = by_layer(*arrays_of(manager), length=90)
    assert store.put(TOKENS, continued) == 90
    back = DynamicCache(config=model.config)
    assert restored(store, back, full=True) == 90
    assert same_bits(continued, from_cache(back))
    following = torch.tensor([[int(got.argmax())]])
    got, expected = (logits_of(model, following, each) for each in (back, cache))
    assert np.abs(got - expected).max() < CLOSE[dtype]


def test_a_prompt_of_core_ai_continues_in_mlx_and_back(pair, store, tmp_path):
    pytest.importorskip("mlx_lm", reason="its models run")
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from mlstate.integrations import mlx

    dtype, model, loaded = pair
    other = loaded_by_mlx(model, tmp_path / "model")
    manager = StateManager(loaded.functions["main"], (128,))
    decode(loaded, manager, 0, 40)
    state = by_layer(*arrays_of(manager), length=40)
    store.put(TOKENS[:, :40], state)

    cache = make_prompt_cache(other)
    assert restored(store, cache) == 40
    assert same_bits(state, mlx.from_cache(cache))
    logits = other(mx.array(TOKENS[:, 40:60].numpy()), cache=cache)[0, -1].astype(mx.float32)
    assert np.abs(np.array(logits) - decode(loaded, manager, 40, 60)).max() < CLOSE[dtype]

    store.put(TOKENS[:, :60], cache)
    keys, values = map(np.zeros_like, arrays_of(manager))
    back = by_layer(keys, values)
    assert restored(store, back) == 60
    assert same_bits(back, mlx.from_cache(cache))


def test_a_prompt_of_transformers_comes_into_a_state_of_core_ml_and_back(store):
    """Core ML runs on a Mac only; here is its interface: float32 copies of a float16 state."""
    model = model_of("float16")
    cache = prefilled(model, 70)
    store.put(TOKENS[:, :70], cache)
    state = FakeMLState({"kv": (2 * LAYERS, HEADS, 128, HEAD_DIM)})
    kv = state.read_state("kv").astype(np.float16)[:, None]
    assert restored(store, by_layer(kv[:LAYERS], kv[LAYERS:])) == 70
    state.write_state("kv", kv[:, 0].astype(np.float32))

    kv = state.read_state("kv").astype(np.float16)[:, None]
    continued = by_layer(kv[:LAYERS], kv[LAYERS:], length=70)
    assert same_bits(continued, from_cache(cache))
    assert store.put(TOKENS[:, :70], continued) == 70
    assert store.stats()["records"] == 5  # the blocks and the end of one prompt: nothing was new
