"""KV caches on a CUDA device: transitions, quantization, caches of transformers, stored prompts."""

import pytest
from needs import needs

torch = pytest.importorskip("torch")

from device_training import bits_of  # noqa: E402

from mlstate.kv import (  # noqa: E402
    CacheEntry,
    CacheSpec,
    CacheState,
    create_causal_mask,
    transition_kv_state,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]


def cache_on(device, dtype=torch.float32, length=12):
    numbers = torch.randn(2, 3, length, 32, generator=torch.Generator().manual_seed(1)) * 50
    return numbers.to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [-2, 1])
def test_transitions_give_the_bits_of_main_memory(device, dtype, axis):
    on_device, on_host = cache_on(device, dtype), cache_on("cpu", dtype)
    for source, expected in ((on_device, on_host), (on_device[..., ::2], on_host[..., ::2])):
        size = source.shape[axis] + 4
        moves = [{}, {"current_position": 2}, {"pad_value": 1.0, "current_position": 0}]
        moves += [{"dtype": "float32"}] if dtype.is_floating_point else []
        for move in moves:
            moved = transition_kv_state(source, size, seq_axis=axis, **move)
            assert moved.device == source.device
            assert bits_of(moved) == bits_of(
                transition_kv_state(expected, size, seq_axis=axis, **move)
            )
        out = torch.full_like(moved.to(dtype), 7)
        assert transition_kv_state(source, size, 2, seq_axis=axis, out=out) is out
        assert bits_of(out) == bits_of(transition_kv_state(expected, size, 2, seq_axis=axis))


def test_the_current_stream_orders_a_transition(device, stream):
    source = cache_on(device)
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream(device))
        torch.cuda._sleep(100_000_000)
        source.fill_(2)
        moved = transition_kv_state(source, 20)
        total = moved.sum().item()
    assert total == 2 * source.numel()


def state_on(device, dtype):
    entries = [CacheEntry(n, "full", (2, 3, 64, 32), str(dtype)[6:]) for n in ("keys", "values")]
    arrays = {entry.name: cache_on(device, dtype, 64) for entry in entries}
    return CacheState(CacheSpec(entries), arrays, 40)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_quantized_caches_have_the_bits_of_main_memory(device, dtype, bits):
    states = [state_on(where, dtype) for where in (device, torch.device("cpu"))]
    losses = [state.quantize(bits, 32, report=True) for state in states]
    assert bits_of(dict(states[0].arrays)) == bits_of(dict(states[1].arrays))
    assert {str(array.device) for array in states[0].arrays.values()} == {str(device)}
    for name, loss in losses[0].items():
        assert loss == pytest.approx(losses[1][name])
    for state in states:
        state.dequantize()
    assert bits_of(dict(states[0].arrays)) == bits_of(dict(states[1].arrays))


def test_a_cache_is_resized_trimmed_and_restored(device):
    states = [state_on(where, torch.float16) for where in (device, torch.device("cpu"))]
    for state in states:
        before = state.snapshot()
        for array in state.arrays.values():
            array[:, :, 40:45] = 1
        state.advance(5)
        state.restore(before)
        state.trim(3)
        state.resize(128)
    assert states[0].length == states[1].length == 37
    assert bits_of(dict(states[0].arrays)) == bits_of(dict(states[1].arrays))


def test_masks_work_with_attention_on_the_device(device):
    mask = torch.from_numpy(create_causal_mask(12, dtype="float32").copy()).to(device)
    keys = cache_on(device)[:1, :1]
    attended = torch.nn.functional.scaled_dot_product_attention(
        keys[:, :, 8:], keys, keys, attn_mask=mask[..., 8:, :]
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        keys[:, :, 11:], keys, keys
    )  # the last token attends to all
    torch.testing.assert_close(attended[:, :, 3:], expected, rtol=1e-4, atol=1e-4)


# ---- transformers ----


@pytest.fixture
def models():
    pytest.importorskip("transformers")
    return pytest.importorskip("cache_models")


def decode(models, model, cache, count=20):
    """Return the logits of the next tokens, which do not depend on the logits.

    Greedy tokens would differ after a near tie, since each kind of cache has its own kernels.
    """
    tokens = models.prompt(count, 9).to(model.device)
    return torch.cat([models.run(model, token, cache) for token in tokens.split(1, dim=1)])


def assert_close(values, expected):
    """Compare logits or keys, of about 0.1.

    Two kinds of cache differ by 1e-7; logits without the key of a token differ by 7e-5 or more.
    """
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@needs("transformers")
def test_moved_caches_continue_with_the_logits_of_the_unmoved_cache(device, models, kind):
    from transformers import DynamicCache, StaticCache

    from mlstate.integrations.transformers import from_cache, to_cache

    model = models.new_model("llama").to(device)
    prompt = models.prompt().to(device)

    def filled():
        cache = (
            DynamicCache(config=model.config)
            if kind == "dynamic"
            else StaticCache(model.config, 64)
        )
        models.run(model, prompt, cache)
        return cache

    with torch.no_grad():
        expected = decode(models, model, filled())
        for into in (None, StaticCache(model.config, 64), DynamicCache(config=model.config)):
            moved = to_cache(from_cache(filled()).copy(), into=into)
            assert moved.layers[0].keys.device == device
            assert_close(decode(models, model, moved), expected)
        cache = filled()
        state = from_cache(cache)
        before = state.snapshot()
        decode(models, model, cache, 5)  # a rejected draft
        state.restore(before)
        assert_close(decode(models, model, to_cache(state, into=cache)), expected)


@needs("transformers")
def test_a_longer_static_cache_keeps_its_address_for_graphs(device, models):
    from transformers import StaticCache

    from mlstate.integrations.transformers import from_cache, to_cache

    model, prompt = models.new_model("llama").to(device), models.prompt().to(device)
    short, long = StaticCache(model.config, 32), StaticCache(model.config, 64)
    with torch.no_grad():
        models.run(model, prompt, short)
        models.run(model, prompt, long)
        places = [layer.keys.data_ptr() for layer in long.layers]
        to_cache(from_cache(short), into=long)
        assert places == [layer.keys.data_ptr() for layer in long.layers]
        fixed = StaticCache(model.config, 64)
        models.run(model, prompt, fixed)
        for moved, layer in zip(long.layers, fixed.layers, strict=True):
            assert_close(moved.keys, layer.keys)
        assert_close(decode(models, model, long, 9), decode(models, model, fixed, 9))


@needs("transformers")
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_prompts_of_a_device_return_with_their_bits(device, models, tmp_path, kind, asynchronous):
    from mlstate.prompts import PromptStore

    model, tokens = models.new_model("llama").to(device), models.TOKENS.to(device)
    with torch.no_grad(), PromptStore(tmp_path, model="tiny") as store:
        cache = models.KINDS[kind](config=model.config)
        models.run(model, tokens[:, :80], cache)
        keys = [layer.keys[:, :, :80].clone() for layer in cache.layers]
        pending = store.put(tokens[:, :80], cache, asynchronous=asynchronous)
        for layer in cache.layers:
            layer.keys.zero_(), layer.values.zero_()  # after the put
        if asynchronous:
            pending.result(60)
        other = models.KINDS[kind](config=model.config)
        with store.match(tokens) as match:
            length = store.restore(match, into=other, device=device)
        assert length >= 64 and other.layers[0].keys.device == device
        restored = [layer.keys[:, :, :length] for layer in other.layers]
        assert bits_of(restored) == bits_of([each[:, :, :length] for each in keys])


def test_prompts_are_restored_into_tensors_on_the_device(device, tmp_path):
    from mlstate.prompts import PromptStore

    source, target = cache_on(device, torch.bfloat16, 64), cache_on(device, torch.bfloat16, 64) * 0
    with PromptStore(tmp_path, model="tiny") as store:
        store.put(list(range(48)), source)
        with store.match(list(range(60))) as match:
            assert store.restore(match, into=target) == 48
    assert bits_of(target[:, :, :48]) == bits_of(source[:, :, :48])
    assert not target[:, :, 48:].any()
