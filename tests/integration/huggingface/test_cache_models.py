"""Models of transformers continue from moved caches with the bits of the unmoved cache."""

import copy

import pytest
from needs import needs

pytestmark = [pytest.mark.torch, needs("transformers")]
torch = pytest.importorskip("torch", reason="transformers needs it")
transformers = pytest.importorskip("transformers", reason="its models run")

from cache_models import ARGUMENT, HAS_CACHE, MODELS, one_thread, prompt, run, shared_model  # noqa: E402, F401
from engines import new_transformers_model  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

import mlstate  # noqa: E402
from mlstate.integrations.transformers import from_cache, to_cache  # noqa: E402


def steps(model, logits, cache, count):
    """The logits of some greedy steps."""
    results = [logits]
    for _ in range(count):
        results.append(run(model, results[-1].argmax(-1, keepdim=True), cache))
    return torch.stack(results)


def all_tensors(cache):
    for index, layer in enumerate(cache.layers):
        for name, value in vars(layer).items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            for key, part in parts:
                is_counter = "length" in name or "window" in name
                if isinstance(part, torch.Tensor) and not is_counter:
                    yield f"{index}.{name}.{key}", part


def assert_same_bytes(got, expected):
    left, right = dict(all_tensors(got)), dict(all_tensors(expected))
    assert left.keys() == right.keys()
    for name, value in right.items():
        assert torch.equal(left[name], value), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_ladder_of_static_caches_equals_a_fixed_one(name, dtype):
    model = copy.deepcopy(shared_model(name)).to(getattr(torch, dtype))
    fixed, rung = StaticCache(model.config, 256), StaticCache(model.config, 64)
    expected = run(model, prompt(), fixed)
    logits = run(model, prompt(), rung)
    assert torch.equal(logits, expected)
    for capacity in (128, 256):
        got = steps(model, logits, rung, 40)
        want = steps(model, expected, fixed, 40)
        assert torch.equal(got, want)
        logits, expected = got[-1], want[-1]
        larger = StaticCache(model.config, capacity)
        rung = to_cache(from_cache(rung), into=larger)
        assert rung is larger and rung.get_seq_length() == fixed.get_seq_length()
    assert_same_bytes(rung, fixed)
    assert torch.equal(steps(model, logits, rung, 40), steps(model, expected, fixed, 40))
    assert_same_bytes(rung, fixed)


@pytest.mark.parametrize("name", MODELS)
def test_a_used_static_cache_takes_other_tokens(name):
    model = shared_model(name)
    cache, used = StaticCache(model.config, 64), StaticCache(model.config, 128)
    logits = run(model, prompt(), cache)
    run(model, prompt(50, seed=7), used)
    addresses = {key: tensor.data_ptr() for key, tensor in all_tensors(used)}
    to_cache(from_cache(cache), into=used)
    assert {key: tensor.data_ptr() for key, tensor in all_tensors(used)} == addresses
    fixed = StaticCache(model.config, 128)
    expected = run(model, prompt(), fixed)
    assert_same_bytes(used, fixed)
    assert torch.equal(steps(model, logits, used, 20), steps(model, expected, fixed, 20))


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_keeps_a_cache_for_the_next_process(tmp_path, name):
    model = copy.deepcopy(shared_model(name)).to(torch.bfloat16)
    cache, loaded = DynamicCache(config=model.config), DynamicCache(config=model.config)
    logits = run(model, prompt(), cache)
    mlstate.save(tmp_path / "c", states={"prompt": from_cache(cache)})
    to_cache(mlstate.load(tmp_path / "c").states["prompt"], into=loaded)
    assert_same_bytes(loaded, cache)
    assert torch.equal(steps(model, logits, loaded, 20), steps(model, logits, cache, 20))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("argument", ["past_key_values", "cache"] if HAS_CACHE else [ARGUMENT])
@pytest.mark.parametrize("kind", ["dynamic", "static", "dynamic to static"])
@pytest.mark.parametrize("name", MODELS)
def test_generate_continues_from_a_moved_cache(name, kind, argument):
    model = shared_model(name)

    def cache_after(count):
        tokens = prompt(count)
        if kind == "static":
            cache = StaticCache(model.config, 64)
        else:
            cache = DynamicCache(config=model.config)
        run(model, tokens[:, :-1], cache)
        return tokens, cache

    def generate(tokens, cache):
        settings = {"max_new_tokens": 20, "do_sample": False, "disable_compile": True}
        return model.generate(tokens, **{argument: cache}, **settings).tolist()

    tokens, cache = cache_after(24)
    state = from_cache(cache).copy()
    expected = generate(tokens, cache)
    into = StaticCache(model.config, 128) if kind == "dynamic to static" else None
    moved = to_cache(state, into)
    assert generate(tokens, moved) == expected
    assert len(expected[0]) == 44 and moved.get_seq_length() == 43


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_a_rollback_equals_a_cache_that_never_went_ahead(name, kind):
    model = shared_model(name)

    def new_cache():
        if kind == "static":
            return StaticCache(model.config, 64)
        return DynamicCache(config=model.config)

    cache, other = new_cache(), new_cache()
    logits, expected = run(model, prompt(), cache), run(model, prompt(), other)
    for rejected in range(1, 21):
        state = from_cache(cache)
        before = state.snapshot()
        run(model, prompt(rejected, seed=rejected), cache)
        assert cache.get_seq_length() == state.length + rejected
        state.restore(before)
        assert to_cache(state, into=cache) is cache
        got, want = steps(model, logits, cache, 1), steps(model, expected, other, 1)
        assert torch.equal(got, want), rejected
        logits, expected = got[-1], want[-1]
        assert cache.get_seq_length() == other.get_seq_length()
    length = other.get_seq_length()
    for name_of, tensor in all_tensors(other):
        moved = dict(all_tensors(cache))[name_of]
        if tensor.ndim == 4 and tensor.shape[2] == 64:  # later positions keep rejected tokens
            moved, tensor = moved[:, :, :length], tensor[:, :, :length]
        assert torch.equal(moved, tensor), name_of


SETTINGS = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_generate_continues_with_a_moved_encoder_decoder_cache(kind):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    parts = [DynamicCache(config=config) for _ in range(2)]
    if kind == "static":
        parts = [StaticCache(config, 64), StaticCache(config, 9)]
    cache = transformers.EncoderDecoderCache(*parts)
    encoded, decoded = prompt(9), prompt(5, seed=2)
    with torch.no_grad():
        outputs = model.encoder(encoded)
        model(
            encoder_outputs=outputs,
            decoder_input_ids=decoded[:, :-1],
            use_cache=True,
            **{ARGUMENT: cache},
        )
    state = from_cache(cache).copy()
    assert state.length == 4 and state.spec["cross.0.keys"].shape[2] == 9

    def generate(used):
        inputs = {"encoder_outputs": outputs, "decoder_input_ids": decoded, ARGUMENT: used}
        return model.generate(**inputs, **SETTINGS).tolist()

    moved = to_cache(state)
    assert generate(moved) == generate(cache)
    assert_same_bytes(moved.self_attention_cache, cache.self_attention_cache)
    assert_same_bytes(moved.cross_attention_cache, cache.cross_attention_cache)


@pytest.mark.filterwarnings("ignore")
def test_generate_continues_with_a_moved_fp8_cache():
    model = shared_model("llama")
    cache = transformers.QuantizedCache("fp8", model.config)
    tokens = prompt(24)
    run(model, tokens[:, :-1], cache)
    state = from_cache(cache)
    assert state.spec["0.quantized_keys"].dtype == "float8_e4m3fn"
    moved = to_cache(state.copy())
    assert type(moved) is transformers.QuantizedCache
    expected = model.generate(tokens, **{ARGUMENT: cache}, **SETTINGS).tolist()
    assert model.generate(tokens, **{ARGUMENT: moved}, **SETTINGS).tolist() == expected


def test_a_model_of_linear_attention_is_taken_back():
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=8, eos_token_id=None
    )
    model = transformers.MambaForCausalLM(config).eval()
    argument = "cache" if HAS_CACHE else "cache_params"
    cache = DynamicCache(config=config)

    @torch.no_grad()
    def step(tokens, used):
        return model(tokens, use_cache=True, **{argument: used}).logits[:, -1]

    step(prompt(), cache)
    state = from_cache(cache, length=20)
    other = to_cache(state.copy())
    before = state.snapshot()
    for token in prompt(5, seed=3)[0]:
        step(token.reshape(1, 1), cache)
    state.restore(before)
    to_cache(state, into=cache)
    for token in prompt(5, seed=4)[0]:
        assert torch.equal(step(token.reshape(1, 1), cache), step(token.reshape(1, 1), other))
    assert_same_bytes(cache, other)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_layers_that_share_tensors_are_moved(kind):
    options = {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4}
    model = new_transformers_model("gemma3n_text", 4, **options)
    config = model.config
    create = {"max_cache_len": 64} if kind is StaticCache else {}
    cache = kind(config=config, **create)
    run(model, prompt(), cache)
    state = from_cache(cache)
    assert {entry.layer for entry in state.spec} == {0, 1}
    moved = to_cache(state.copy())
    assert len(moved) == len(cache)
    tokens = prompt(5, seed=3)
    for token in tokens[0]:
        token = token.reshape(1, 1)
        assert torch.equal(run(model, token, moved), run(model, token, cache))
