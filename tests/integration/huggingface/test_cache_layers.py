"""Every kind of layer of transformers as a CacheState and back: no copies, no silent changes."""

import copy
import pickle
from inspect import isabstract, isclass

import numpy as np
import pytest
from needs import needs

from mlstate.errors import CapacityError, CompatibilityError
from mlstate.kv import CacheEntry, CacheSpec, CacheState

pytestmark = [pytest.mark.torch, needs("transformers")]
torch = pytest.importorskip("torch", reason="transformers needs it")
pytest.importorskip("transformers", reason="its caches are the subject")

from cache_layers import LAYERS, SIZE, WINDOW, write  # noqa: E402
from transformers import cache_utils  # noqa: E402
from transformers.cache_utils import (  # noqa: E402
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from mlstate.integrations.transformers import from_cache, to_cache  # noqa: E402

HISTORIES = {"short": [3], "exact": [8], "long": [20], "decode": [5] + [1] * 9, "two": [5, 7]}


def filled(create, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    layer = create()
    for count in steps:
        write(layer, count, generator)
    return Cache(layers=[layer])


def state_of(kind, sizes, length, dtypes=("float32", "float32"), **options):
    """A state of another library: keys and values with numbers of positions, filled with thirds."""
    entries = [
        CacheEntry(f"0.{part}", kind, (1, 1, size, 4), dtype, layer=0, **options)
        for part, size, dtype in zip(("keys", "values"), sizes, dtypes, strict=True)
    ]
    arrays = {e.name: (np.arange(4 * e.shape[2]).reshape(e.shape) / 3).astype(e.dtype)
              for e in entries}  # fmt: skip
    return CacheState(CacheSpec(entries), arrays, length)


def tensors_of(value):
    """All tensors in the attributes of a layer, by name."""
    tensors = {}
    for name, each in vars(value).items():
        parts = each.items() if isinstance(each, dict) else [("", each)]
        if isinstance(each, tuple):
            parts = enumerate(each)
        tensors |= {f"{name}.{key}": part for key, part in parts}
    return tensors


def assert_same_layer(got, expected, *, but=()):
    assert type(got) is type(expected)
    left, right = tensors_of(got), tensors_of(expected)
    assert left.keys() == right.keys()
    for name, value in right.items():
        if name in but:
            continue
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                left[name].view(torch.uint8) if value.element_size() == 1 else left[name],
                value.view(torch.uint8) if value.element_size() == 1 else value,
                rtol=0, atol=0, msg=name,
            )  # fmt: skip
        else:
            assert left[name] == value, name


def assert_same_future(got, expected, steps=(1, 1, 3, 1, 9, 1)):
    """Both layers return the same for all later tokens."""
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    for count in steps:
        results = [
            write(layer, count, generator)
            for layer, generator in zip((got, expected), generators, strict=True)
        ]
        for left, right in zip(*results, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0)


def pickle_round_trip(value):
    return pickle.loads(pickle.dumps(value))


def length_argument(cache, steps):
    is_linear = type(cache.layers[0]) is LinearAttentionLayer
    return {"length": sum(steps)} if is_linear else {}


def filled_twice(name, steps):
    """A cache, another one with the same tokens, and the state of the first."""
    cache, twin = filled(LAYERS[name], steps), filled(LAYERS[name], steps)
    return cache, twin, from_cache(cache, **length_argument(cache, steps))


def addresses(cache):
    layer = cache.layers[0]
    return {
        name: each.data_ptr()
        for name, each in tensors_of(layer).items()
        if isinstance(each, torch.Tensor) and "length" not in name and "window" not in name
    }


# A full window's tensor counter is not used; transformers leaves it where the window filled up.
COUNTER = ("cumulative_length.",)


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_new_cache_uses_the_tensors_themselves(name, history):
    steps = HISTORIES[history]
    cache, twin, state = filled_twice(name, steps)
    assert state.length == sum(steps)
    moved = to_cache(state)
    assert addresses(moved) == addresses(cache)
    assert_same_layer(cache.layers[0], twin.layers[0])
    assert_same_layer(moved.layers[0], twin.layers[0], but=COUNTER)
    assert_same_future(moved.layers[0], twin.layers[0])


@pytest.mark.parametrize("target", ["used", "fresh"])
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_cache_is_filled_in_place(name, history, target):
    steps = HISTORIES[history]
    cache, twin, state = filled_twice(name, steps)
    other = filled(LAYERS[name], [11, 2] if target == "used" else [], seed=3)
    before = addresses(other)
    assert to_cache(state, into=other) is other
    if "static" in name or name in ("linear", "two states"):
        names = before.keys() - {"indexer_position_ids."}
        assert {n: addresses(other)[n] for n in names} == {n: before[n] for n in names}
    assert_same_layer(other.layers[0], twin.layers[0], but=COUNTER)
    if "static" in name:
        most = WINDOW if "sliding" in name else SIZE
        assert int(other.layers[0].cumulative_length) == min(sum(steps), most)
    assert_same_layer(cache.layers[0], twin.layers[0])
    assert_same_future(other.layers[0], twin.layers[0])


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, CacheState.copy, "pickle"])
def test_copies_of_a_state_are_independent(name, duplicate):
    if name == "fp8" and duplicate == "pickle":
        pytest.skip("torch does not pickle float8 tensors")
    steps = [5, 7]
    cache, twin, state = filled_twice(name, steps)
    other = pickle.loads(pickle.dumps(state)) if duplicate == "pickle" else duplicate(state)
    moved = to_cache(other)
    assert_same_future(cache.layers[0], twin.layers[0])
    assert_same_future(moved.layers[0], filled(LAYERS[name], steps).layers[0])


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("dynamic", "static"),
        ("static", "dynamic"),
        ("dynamic sliding", "static sliding"),
        ("static sliding", "dynamic sliding"),
        ("dynamic indexed", "static indexed"),
        ("linear and sliding", "linear and static sliding"),
        ("linear and static", "linear and full"),
    ],
)
def test_dynamic_and_static_layers_take_each_others_tokens(source, target, history):
    steps = HISTORIES[history]
    state = from_cache(filled(LAYERS[source], steps))
    moved = to_cache(state, into=Cache(layers=[LAYERS[target]()]))
    expected = filled(LAYERS[target], steps)
    assert moved.get_seq_length() == expected.get_seq_length()
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    for count in (1, 3, 1):
        assert moved.get_mask_sizes(count, 0) == expected.get_mask_sizes(count, 0)
        got = write(moved.layers[0], count, generators[0])
        want = write(expected.layers[0], count, generators[1])
        for left, right in zip(got, want, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["static", "static indexed", "linear and static"])
def test_a_resized_state_becomes_a_longer_static_cache(name):
    steps = [5, 7]
    state = from_cache(filled(LAYERS[name], steps))
    if name == "static indexed":
        with pytest.raises(CompatibilityError, match="indexer_position_ids"):
            state.resize(64)
        return
    state.resize(64)
    moved = to_cache(state)
    assert moved.layers[0].max_cache_len == 64
    assert moved.layers[0].keys.data_ptr() == state.arrays["0.keys"].data_ptr()
    longer = Cache(layers=[type(moved.layers[0])(64)])
    generator = torch.Generator().manual_seed(0)
    for count in steps:
        write(longer.layers[0], count, generator)
    assert_same_layer(moved.layers[0], longer.layers[0])
    assert_same_future(moved.layers[0], longer.layers[0])


def test_a_window_as_long_as_its_cache_is_unknown_after_a_resize():
    layers = [StaticLayer(16), StaticSlidingWindowLayer(16, 512)]
    cache = Cache(layers=layers)
    for layer in layers:
        write(layer, 10, torch.Generator())
    state = from_cache(cache)
    state.resize(64)
    with pytest.raises(CompatibilityError, match=r"layer 1 .*its window is unknown: pass into="):
        to_cache(state)
    longer = Cache(layers=[StaticLayer(64), StaticSlidingWindowLayer(64, 512)])
    moved = to_cache(state, into=longer)
    assert moved.layers[1].keys.shape[2] == 64
    assert torch.equal(moved.layers[1].keys[:, :, :10], layers[1].keys[:, :, :10])
    assert moved.layers[1].cumulative_length_int == int(moved.layers[1].cumulative_length) == 10


def sliding_layer_after(steps, *size_and_window):
    layer = StaticSlidingWindowLayer(*size_and_window)
    generator = torch.Generator().manual_seed(0)
    for count in steps:
        write(layer, count, generator)
    return layer


@pytest.mark.parametrize("duplicate", [lambda state: state, copy.copy, pickle_round_trip])
def test_a_cache_of_sliding_layers_alone_grows_only_with_a_known_window(duplicate):
    state = from_cache(Cache(layers=[sliding_layer_after([6], 10, 24)]))
    state.resize(32)
    with pytest.raises(CompatibilityError, match="10 positions, so its window is unknown"):
        to_cache(duplicate(state))
    moved = to_cache(state, into=Cache(layers=[StaticSlidingWindowLayer(32, 24)])).layers[0]
    assert_same_future(moved, sliding_layer_after([6], 32, 24), steps=(9, 20, 1))
    state = from_cache(Cache(layers=[sliding_layer_after([6], 64, 24)]))
    for capacity in (32, 64, 24):
        state.resize(capacity)
        moved = to_cache(state.copy()).layers[0]
        assert_same_future(moved, sliding_layer_after([6], 64, 24), steps=(9, 20, 1))


def test_a_window_longer_than_a_shrunk_cache_stays_unknown():
    """A layer of 10 positions of a window of 24 is not a layer with a window of 10."""
    for size in (16, 64):
        state = from_cache(Cache(layers=[sliding_layer_after([6], size, 24)]))
        state.resize(10)
        shrunk, expected = to_cache(state), sliding_layer_after([6], 10, 24)
        assert_same_layer(shrunk.layers[0], expected)
        assert shrunk.is_croppable
        state = from_cache(shrunk)
        state.resize(64)
        with pytest.raises(CompatibilityError, match="10 positions, so its window is unknown"):
            to_cache(state)
        assert_same_future(shrunk.layers[0], expected)


@pytest.mark.parametrize("inference", [False, True])
def test_a_static_layer_continues_after_a_restore(inference):
    layers = [StaticLayer(SIZE), StaticSlidingWindowLayer(SIZE, WINDOW), LinearAttentionLayer()]
    cache, generator = Cache(layers=layers), torch.Generator().manual_seed(0)
    with torch.inference_mode(inference):  # its tensors refuse writes outside of it
        for layer in layers:
            write(layer, 10, generator)
    before_bytes = copy.deepcopy(layers)
    state = from_cache(cache)
    before, tensors = state.snapshot(), [layers[0].keys, layers[1].keys, layers[2].conv_states[0]]
    with torch.inference_mode(inference):
        for layer in layers:
            write(layer, 5, generator)
    state.restore(before)
    assert to_cache(state, into=cache) is cache
    assert layers[0].keys is tensors[0] and layers[1].keys is tensors[1]
    assert layers[2].conv_states[0] is tensors[2]
    assert int(layers[0].cumulative_length) == layers[1].cumulative_length_int == 10
    assert_same_layer(layers[1], before_bytes[1], but=COUNTER)
    for left, right in zip(layers, before_bytes, strict=True):
        generators = [torch.Generator().manual_seed(1) for _ in range(2)]
        with torch.inference_mode(inference):
            left_results, right_results = map(write, (left, right), (1, 1), generators)
        for got, expected in zip(left_results, right_results, strict=True):
            if got.shape[2:3] == (SIZE,):  # positions of dropped tokens keep their content
                got, expected = got[:, :, :11], expected[:, :, :11]
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("steps", [[5], [8], [20], [5] + [1] * 12, [5, 7], [20, 3, 1]], ids=str)
@pytest.mark.parametrize("name", ["dynamic", "dynamic sliding", "static", "static sliding"])
def test_each_position_has_its_token(name, steps):
    layer, length = LAYERS[name](), 0
    for count in steps:
        keys = torch.arange(length, length + count, dtype=torch.float32).reshape(1, 1, -1, 1)
        layer.update(keys, keys)
        length += count
    state = from_cache(Cache(layers=[layer]))
    positions, slots = state.positions("0.keys"), state.arrays["0.keys"].ravel()
    tokens = positions[positions >= 0]
    windows = {"dynamic sliding": WINDOW - 1, "static sliding": WINDOW}
    assert state.length == length == layer.get_seq_length()
    assert sorted(tokens) == [*range(max(length - windows.get(name, length), 0), length)]
    assert slots[positions >= 0].tolist() == tokens.tolist()
    assert state.ordered("0.keys").ravel().tolist() == sorted(tokens)
    assert state.ordered("0.keys", copy=False).data_ptr() == layer.keys.data_ptr()


def test_tokens_outside_of_inference_mode_reach_its_tensors():
    with torch.inference_mode():
        cache = filled(LAYERS["static"], [5])
        target = filled(LAYERS["static"], [9], seed=4)
    to_cache(from_cache(cache), into=target)
    assert target.get_seq_length() == 5
    assert torch.equal(target.layers[0].keys, cache.layers[0].keys)


def test_an_encoder_decoder_cache_keeps_its_cross_attention():
    decoder, cross = DynamicCache(), DynamicCache()
    for index in range(2):
        decoder.update(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), index)
        cross.update(torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4), index)
    cache = EncoderDecoderCache(decoder, cross)
    state = from_cache(cache)
    assert state.length == 5 and state.spec["cross.1.keys"].shape == (1, 2, 9, 4)
    moved = to_cache(state)
    assert type(moved) is EncoderDecoderCache and moved.is_updated == {0: True, 1: True}
    assert moved.cross_attention_cache.layers[1].keys.data_ptr() == cross.layers[1].keys.data_ptr()
    static = EncoderDecoderCache(
        Cache(layers=[StaticLayer(16) for _ in range(2)]),
        Cache(layers=[StaticLayer(12) for _ in range(2)]),
    )
    to_cache(state, into=static)
    assert static.get_seq_length() == 5 and static.is_updated == {0: True, 1: True}
    assert static.cross_attention_cache.get_seq_length(1) == 9
    back = to_cache(from_cache(static))
    layer = back.cross_attention_cache.layers[1]
    assert layer.max_cache_len == 12 and torch.equal(layer.keys[:, :, :9], cross.layers[1].keys)
    with pytest.raises(CompatibilityError, match=r"no place for 'cross\.0\.keys'"):
        to_cache(state, into=DynamicCache())
    with pytest.raises(CompatibilityError, match=r"no place for '1\.keys'"):
        to_cache(state, into=EncoderDecoderCache(Cache(layers=[DynamicLayer()]), DynamicCache()))


def test_a_moved_cache_adds_layers_if_the_source_does():
    keys = torch.ones(1, 3, 5, 4)
    cache = DynamicCache()
    cache.update(keys, keys, 0)
    pair = EncoderDecoderCache(DynamicCache(), DynamicCache())
    pair.self_attention_cache.update(keys, keys, 0)
    pair.cross_attention_cache.update(keys, keys, 0)
    moved, moved_pair = to_cache(from_cache(cache)), to_cache(from_cache(pair))
    for each in (moved, moved_pair.self_attention_cache, moved_pair.cross_attention_cache):
        each.update(keys, keys, 1)
        assert [layer.get_seq_length() for layer in each.layers] == [5, 5]
    with pytest.raises(IndexError):
        to_cache(from_cache(Cache(layers=cache.layers))).update(keys, keys, 1)


def test_shared_and_unused_layers_have_no_entry():
    layers = [cache_utils.DummyLayer(), DynamicLayer(), DynamicLayer(), cache_utils.DummyLayer()]
    cache = Cache(layers=layers)
    cache.update(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), 1)
    state = from_cache(cache)
    assert list(state.arrays) == ["1.keys", "1.values"]
    moved = to_cache(state)
    assert [type(each) for each in moved.layers] == [type(each) for each in layers]
    assert not moved.layers[2].is_initialized and moved.get_seq_length() == 5


def test_one_reset_layer_is_refused_and_all_are_empty():
    layers = [LinearAttentionLayer(), DynamicLayer()]
    for layer in layers:
        write(layer, 5, torch.Generator())
    layers[0].reset()
    with pytest.raises(CompatibilityError, match="layer 0 is a LinearAttentionLayer without a tok"):
        from_cache(Cache(layers=layers))
    layers[1].reset()
    with pytest.raises(CompatibilityError, match="no layer of the cache has a token"):
        from_cache(Cache(layers=layers))


def test_layers_that_record_their_past_are_moved():
    layers = [DynamicSlidingWindowLayer(WINDOW), LinearAttentionLayer()]
    layers[1].activate_past_recording()
    layers[0].activate_past_recording()
    layers[0].update(torch.randn(1, 2, 20, 4), torch.randn(1, 2, 20, 4))
    layers[1].update_conv_state(torch.randn(1, 6, 9), conv_kernel_size=4)
    state = from_cache(Cache(layers=layers))
    assert state.spec["0.keys"].shape[2] == 20 and state.spec["1.conv_states.0"].shape[2] == 4
    assert state.positions("0.keys").tolist() == [*range(20)]
    state.trim(0)
    moved = to_cache(state)
    assert torch.equal(moved.layers[0].keys, layers[0].keys[:, :, -7:])
    assert torch.equal(moved.layers[1].conv_states[0], layers[1].conv_states[0][..., -4:])
    short = LinearAttentionLayer()
    short.activate_past_recording()
    short.update_conv_state(torch.ones(1, 6, 2), conv_kernel_size=4)
    padded = from_cache(Cache(layers=[short]), length=2).arrays["0.conv_states.0"]
    assert padded[0, 0].tolist() == [0, 0, 1, 1]


def test_linear_attention_alone_needs_a_number_of_tokens():
    cache = filled(LAYERS["linear"], [5])
    with pytest.raises(CompatibilityError, match="pass length="):
        from_cache(cache)
    assert from_cache(cache, length=5).length == 5
    with pytest.raises(CompatibilityError, match="have 5 tokens, and length is 6"):
        from_cache(filled(LAYERS["dynamic"], [5]), length=6)


@pytest.mark.parametrize("name", ["QuantoQuantizedLayer", "HQQQuantizedLayer"])
def test_codes_of_other_libraries_are_refused_by_name(name):
    layer = object.__new__(getattr(cache_utils, name))  # the constructor needs the library
    cache_utils.QuantizedLayer.__init__(layer)
    layer.cumulative_length, layer.keys, layer.codec = 5, torch.ones(1, 2, 5, 4), object()
    text = f"layer 1 is a {name}, which is an unknown class, and its codec is of type object"
    with pytest.raises(CompatibilityError, match=text):
        from_cache(Cache(layers=[DynamicLayer(), layer]))


def test_every_class_of_transformers_is_moved_or_refused_by_name():
    """A class that a later version adds fails here."""
    members = vars(cache_utils).values()
    classes = [each for each in members if getattr(each, "__module__", "") == cache_utils.__name__]
    layers = {each for each in classes if "Layer" in each.__name__ and not isabstract(each)}
    moved = {type(create()) for create in LAYERS.values()} | {cache_utils.DummyLayer}
    refused = {cache_utils.QuantoQuantizedLayer, cache_utils.HQQQuantizedLayer}
    assert moved.isdisjoint(refused) and layers == moved | refused
    caches = {each for each in classes if isclass(each) and issubclass(each, Cache)}
    moved = {Cache, DynamicCache, cache_utils.StaticCache, cache_utils.QuantizedCache}
    moved.add(EncoderDecoderCache)
    packed = {cache_utils.MtpCache, cache_utils.DFlashCache}
    assert caches == moved | packed
    for each in packed:
        cache = each()
        cache.update(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), 0)
        assert type(to_cache(from_cache(cache))) is each
        with pytest.raises(CompatibilityError, match=r"no place for 'cache\.whole'"):
            to_cache(from_cache(cache), into=DynamicCache())


@pytest.mark.skipif(not hasattr(StaticLayer, "crop"), reason="since transformers 5.24")
@pytest.mark.parametrize("name", ["static", "static indexed", "static sliding"])
def test_a_cropped_static_layer_continues(name):
    cache = filled(LAYERS[name], [7])
    if name == "static sliding":
        cache = Cache(layers=[StaticSlidingWindowLayer(WINDOW, WINDOW)])
        write(cache.layers[0], 7, torch.Generator().manual_seed(0))
    twin = copy.deepcopy(cache)
    cache.layers[0].crop(-3)
    twin.layers[0].crop(-3)
    if name == "static indexed":
        for each in (cache, twin):
            each.layers[0].indexer_position_ids = each.layers[0].indexer_position_ids[..., :4]
    state = from_cache(cache)
    assert state.length == 4
    moved = to_cache(state.copy())
    assert moved.get_seq_length() == 4
    assert_same_future(moved.layers[0], twin.layers[0], (1, 1))


@pytest.mark.parametrize(
    "name", ["dynamic", "dynamic sliding", "static", "static sliding", "linear and static"]
)
def test_keys_and_values_keep_different_dtypes(name):
    """transformers 5.23 creates static layers with one dtype; 5.24 stores both."""
    kind = "sliding" if "sliding" in name else "full"
    state = state_of(kind, (8, 8), 5, ("float16", "float32"))
    layer = to_cache(state, into=Cache(layers=[LAYERS[name]()])).layers[0]
    for part in ("keys", "values"):
        got, expected = getattr(layer, part)[:, :, :5].numpy(), state.arrays[f"0.{part}"][:, :, :5]
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match="must be a Cache of transformers, got tuple"):
        from_cache(((torch.zeros(1), torch.zeros(1)),))
    with pytest.raises(CompatibilityError, match="layer 0 is a int, which is an unknown class"):
        from_cache(Cache(layers=[3]))
    with pytest.raises(TypeError, match="state must be a CacheState"):
        to_cache({})


def test_layers_with_different_numbers_of_tokens_are_refused():
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4), 0)
    cache.update(torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 6, 4), 1)
    with pytest.raises(CompatibilityError, match="layer 1 has 6 tokens, but layer 0 5"):
        from_cache(cache)


MUTATIONS = [
    ("dynamic", "keys", torch.zeros(2, 3, 4)),
    ("dynamic", "values", torch.zeros(2, 3, 9, 4)),
    ("dynamic", "keys", [1]),
    ("dynamic", "is_initialized", 1),
    ("dynamic sliding", "cumulative_length", torch.tensor(5)),
    ("dynamic sliding", "cumulative_length", 50),
    ("dynamic sliding", "sliding_window", None),
    ("static", "cumulative_length", 5),
    ("static", "cumulative_length", torch.tensor([5])),
    ("static", "cumulative_length", torch.tensor(5.0)),
    ("static", "cumulative_length", torch.tensor(50)),
    ("static", "max_cache_len", 31),
    ("static sliding", "cumulative_length_int", torch.tensor(5)),
    ("static sliding", "cumulative_length_int", -1),
    ("dynamic indexed", "indexer_keys", torch.zeros(2, 4, 5)),
    ("dynamic indexed", "indexer_keys", None),
    ("static indexed", "indexer_cumulative_length", torch.tensor(4)),
    ("fp8", "_quantized_keys", torch.zeros(2)),
    ("fp8", "_quantized_keys", (torch.zeros(2), torch.zeros(()))),
    ("fp8", "cumulative_length", 4),
    ("linear", "conv_states", [torch.zeros(1)]),
    ("linear", "conv_states", {1: torch.zeros(1)}),
    ("linear", "conv_kernel_size", {0: None}),
    ("linear", "recurrent_states", {0: None}),
    ("linear", "number_of_states", "1"),
]


@pytest.mark.parametrize("number", range(len(MUTATIONS)))
def test_another_layout_is_refused_before_use(number):
    name, attribute, value = MUTATIONS[number]
    cache = filled(LAYERS[name], [5])
    setattr(cache.layers[0], attribute, value)
    with pytest.raises(CompatibilityError) as raised:
        from_cache(cache, **length_argument(cache, [5]))
    assert raised.value.name.startswith("0")


JUNK = [None, 1, -1, True, 10**30, "x", [], {}, {0: None}, (1,), torch.tensor(1), torch.zeros(2, 3)]


@pytest.mark.parametrize("name", LAYERS)
def test_junk_in_any_attribute_is_used_or_refused(name):
    cache = filled(LAYERS[name], [5])
    length = length_argument(cache, [5])
    state = from_cache(cache, **length)
    for attribute in vars(cache.layers[0]):
        for junk in JUNK:
            other = filled(LAYERS[name], [3])
            setattr(other.layers[0], attribute, copy.copy(junk))
            before = copy.deepcopy(other.layers[0])
            for call in (lambda c: from_cache(c, **length), lambda c: to_cache(state, into=c)):
                try:
                    call(other)
                except (CompatibilityError, CapacityError):
                    assert_same_layer(other.layers[0], before)


def ring_state(length, window=8):
    """Tokens 0, 1, … in a ring as `RollingKVState` fills it."""
    slots = np.zeros((1, 1, window, 1), np.float32)
    for position in range(length):
        slots[0, 0, position % window] = position
    names = "0.keys", "0.values"
    entries = [CacheEntry(n, "sliding", slots.shape, "float32", layer=0) for n in names]
    return CacheState(CacheSpec(entries), dict.fromkeys(names, slots), length)


@pytest.mark.parametrize("length", [3, 8, 9, 20])
def test_a_ring_of_another_library_is_put_in_order(length):
    newest = [*range(max(length - 8, 0), length)]
    moved = to_cache(ring_state(length), into=Cache(layers=[DynamicSlidingWindowLayer(9)]))
    assert moved.layers[0].keys.ravel().tolist() == newest
    assert moved.get_seq_length() == length
    moved = to_cache(ring_state(length), into=Cache(layers=[StaticSlidingWindowLayer(64, 8)]))
    assert moved.layers[0].keys.ravel().tolist() == newest + [0] * (8 - len(newest))
    assert moved.get_seq_length() == length


def test_keys_and_values_of_different_lengths_are_refused():
    with pytest.raises(CompatibilityError, match=r"0\.values: the array has shape"):
        to_cache(state_of("sliding", (8, 6), 3), into=Cache(layers=[DynamicSlidingWindowLayer(9)]))


def test_sinks_are_refused():
    state = state_of("sliding", (8, 8), 3, sinks=2)
    with pytest.raises(CompatibilityError, match="2 sinks: transformers has none"):
        to_cache(state, into=Cache(layers=[DynamicSlidingWindowLayer(9)]))


def test_a_state_without_layouts_needs_a_cache():
    state = state_of("full", (16, 16), 5)
    with pytest.raises(CompatibilityError, match="pass into="):
        to_cache(state)
    cache = to_cache(state, into=DynamicCache())
    assert cache.get_seq_length() == 5
    assert cache.layers[0].keys.data_ptr() == state.arrays["0.keys"].ctypes.data
    static = to_cache(state, into=Cache(layers=[StaticLayer(8)]))
    expected = state.arrays["0.keys"][0, 0, :5, 0].tolist()
    assert static.layers[0].keys[0, 0, :, 0].tolist() == expected + [0] * 3


def refusals():
    """Caches that cannot be filled with 12 tokens of a layer, by name of the layer."""
    yield "static", "needs a larger max_cache_len", lambda: StaticLayer(8)
    yield (
        "static",
        "an entry of kind full does not fit",
        lambda: StaticSlidingWindowLayer(SIZE, WINDOW),
    )
    yield "static", "no place for '1.keys'", LinearAttentionLayer
    yield "static", "shape|needs a tensor", lambda: other_shape(StaticLayer(SIZE))
    yield "static", "torch.float16", lambda: other_shape(StaticLayer(SIZE), torch.float16)
    yield "static sliding", "12 tokens, not 8", lambda: StaticSlidingWindowLayer(64, 64)
    yield "static sliding", "has 4 positions", lambda: StaticSlidingWindowLayer(4, WINDOW)
    yield "dynamic sliding", "keeps 5 tokens", lambda: DynamicSlidingWindowLayer(6)
    yield "dynamic sliding", "older ones were", lambda: DynamicSlidingWindowLayer(20)
    yield "linear", "needs a tensor", lambda: other_states()
    yield "linear", "no place for '1.conv_states.0'", lambda: StaticLayer(8)
    yield "fp8", "kind opaque does not fit layer 1, a DynamicLayer", DynamicLayer


def other_shape(layer, dtype=torch.float32):
    heads = 3 if dtype is torch.float16 else 1
    layer.update(torch.ones(2, heads, 2, 4, dtype=dtype), torch.ones(2, heads, 2, 6, dtype=dtype))
    return layer


def other_states():
    layer = LinearAttentionLayer()
    layer.update_conv_state(torch.ones(2, 5, 4))
    layer.update_recurrent_state(torch.ones(2, 3, 4, 4))
    return layer


@pytest.mark.parametrize("number", range(len(list(refusals()))))
def test_a_cache_that_does_not_fit_is_unchanged(number):
    name, text, create = list(refusals())[number]
    cache = filled(LAYERS[name], [12])
    kind = {"fp8": lambda _: DynamicLayer(), "linear": lambda _: LinearAttentionLayer()}
    create_first = kind.get(name, StaticLayer)
    first = create_first(SIZE)
    write(first, 12, torch.Generator().manual_seed(2))
    cache.layers.insert(0, first)
    state = from_cache(cache, **length_argument(cache, [12]))
    layers = [create_first(SIZE), create()]
    write(layers[0], 2, torch.Generator())
    before = copy.deepcopy(layers)
    with pytest.raises((CompatibilityError, CapacityError), match=text):
        to_cache(state, into=Cache(layers=layers))
    for layer, unchanged in zip(layers, before, strict=True):
        assert_same_layer(layer, unchanged)


def test_memory_at_other_positions_is_refused():
    cache = filled(LAYERS["static"], [5])
    state = from_cache(cache)
    keys = torch.zeros(2, 3, SIZE + 1, 4)
    entries = {"0.keys": keys[:, :, 1:], "0.values": state.arrays["0.values"]}
    shifted = CacheState(state.spec, entries, 5)
    cache.layers[0].keys = keys[:, :, :-1]
    with pytest.raises(CompatibilityError, match="shares memory with layer 0"):
        to_cache(shifted, into=cache)


def test_layers_with_tokens_are_not_left_behind():
    state = from_cache(filled(LAYERS["dynamic"], [5]))
    cache = DynamicCache()
    for index in range(2):
        cache.update(torch.zeros(1, 3, 3, 4), torch.zeros(1, 3, 3, 6), index)
    with pytest.raises(CompatibilityError, match="layer 1 has tokens, but the state has none"):
        to_cache(state, into=cache)
    assert cache.get_seq_length(0) == cache.get_seq_length(1) == 3


def used_linear_layer(channels=6, record_past=False):
    layer = LinearAttentionLayer()
    if record_past:
        layer.activate_past_recording()
    layer.update_conv_state(torch.ones(1, channels, 9 if record_past else 4), conv_kernel_size=4)
    return layer


def test_a_recording_layer_refuses_inputs_of_another_shape_or_dtype():
    state = from_cache(Cache(layers=[used_linear_layer()]), length=4)
    layer = used_linear_layer(channels=5, record_past=True)
    with pytest.raises(CompatibilityError, match=r"0.conv_states.0: .* \(1, 6, 9\)"):
        to_cache(state, into=Cache(layers=[layer]))
    layer = used_linear_layer(record_past=True)
    layer.conv_states[0] = layer.conv_states[0].double()
    with pytest.raises(CompatibilityError, match="float64"):
        to_cache(state, into=Cache(layers=[layer]))
    assert layer.conv_states[0].shape == (1, 6, 9)


def test_states_that_a_cache_state_lacks_are_not_left_behind():
    state = from_cache(Cache(layers=[used_linear_layer()]), length=4)
    layer = used_linear_layer()
    layer.update_recurrent_state(torch.ones(1, 3, 4, 4))
    with pytest.raises(CompatibilityError, match="layer 0 has tokens"):
        to_cache(state, into=Cache(layers=[layer]))
    layer.reset()
    to_cache(state, into=Cache(layers=[layer]))
    assert layer.conv_states[0].all() and not layer.recurrent_states[0].any()
    only_recurrent = LinearAttentionLayer()
    only_recurrent.update_recurrent_state(torch.ones(1, 3, 4, 4))
    state = from_cache(filled(LAYERS["dynamic"], [5]))
    with pytest.raises(CompatibilityError, match="layer 1 has tokens"):
        to_cache(state, into=Cache(layers=[DynamicLayer(), only_recurrent]))


@pytest.mark.parametrize("name", ["dynamic indexed", "static indexed"])
def test_position_ids_of_an_indexer_are_not_left_behind(name):
    source, target = filled(LAYERS[name], [5]), filled(LAYERS[name], [3])
    entries = [e for e in from_cache(source).spec if "indexer" not in e.name]
    arrays = {e.name: from_cache(source).arrays[e.name] for e in entries}
    layer = target.layers[0]
    layer.indexer_keys, layer.is_indexer_initialized = None, False
    with pytest.raises(CompatibilityError, match="layer 0 has tokens"):
        to_cache(CacheState(CacheSpec(entries), arrays, 5), into=target)
    assert layer.indexer_position_ids.shape[2] == 3


def test_layers_that_are_one_object_or_share_memory_are_refused():
    source = DynamicCache()
    for index in range(2):
        source.update(torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4), index)
    state = from_cache(source)
    for layer in (DynamicLayer(), StaticLayer(8)):
        with pytest.raises(CompatibilityError, match="layers 0 and 1 are the same object"):
            to_cache(state, into=Cache(layers=[layer, layer]))
    layers = [StaticLayer(8), StaticLayer(8)]
    for layer in layers:
        layer.update(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
    layers[1].values = layers[0].keys
    with pytest.raises(CompatibilityError, match=r"it shares elements with '1.values'"):
        to_cache(state, into=Cache(layers=layers))
    assert not layers[0].keys.any() and int(layers[0].cumulative_length) == 1
    layer = used_linear_layer()
    layer.update_recurrent_state(layer.conv_states[0])
    state = from_cache(Cache(layers=[layer]), length=4).copy()
    layer.recurrent_states[0] = layer.conv_states[0]
    with pytest.raises(CompatibilityError, match="it shares elements with"):
        to_cache(state, into=Cache(layers=[layer]))


@pytest.mark.parametrize("kind", ["layers", "keys and values", "linear", "growing"])
def test_a_cache_that_holds_the_arrays_of_other_entries_is_refused(kind):
    if kind == "linear":
        layers = [used_linear_layer(), used_linear_layer()]
        state = from_cache(Cache(layers=layers), length=4)
        tensors = [layer.conv_states[0] for layer in layers]
    else:
        layers = [StaticLayer(8), StaticLayer(8)]
        for layer in layers:
            layer.update(torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4))
        state = from_cache(Cache(layers=layers))
        tensors = [part for layer in layers for part in (layer.keys, layer.values)]
    before = [tensor.clone() for tensor in tensors]
    if kind == "keys and values":
        layers[1].keys, layers[1].values = layers[1].values, layers[1].keys
        into = Cache(layers=layers)
    elif kind == "growing":
        into = Cache(layers=[DynamicLayer(), layers[0]])
    else:
        into = Cache(layers=layers[::-1])
    with pytest.raises(CompatibilityError, match=r"has elements of the array '[01]"):
        to_cache(state, into=into)
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
    to_cache(state.copy(), into=into)


@pytest.mark.parametrize("name", ["dynamic", "dynamic sliding", "dynamic indexed", "fp8"])
def test_a_used_layer_is_not_filled_with_tokens_of_another_model(name):
    state = from_cache(filled(LAYERS[name], [5]))
    others = {
        "heads": torch.ones(2, 4, 3, 4),
        "width": torch.ones(2, 3, 3, 7),
        "dtype": torch.ones(2, 3, 3, 4).half(),
    }
    for keys in others.values():
        layer = LAYERS[name]()
        layer.update(keys, keys)
        before = copy.deepcopy(layer)
        with pytest.raises(CompatibilityError, match=r"0\.\w+: the array "):
            to_cache(state, into=Cache(layers=[layer]))
        assert_same_layer(layer, before)
    layer = LAYERS[name]()
    layer.update(torch.ones(1, 3, 9, 4), torch.ones(1, 3, 9, 6))  # another batch is fine
    cache = to_cache(state, into=Cache(layers=[layer]))
    assert cache.get_seq_length() == 5


def test_quantized_codes_of_mlstate_are_refused():
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 5, 64), torch.zeros(1, 2, 5, 64), 0)
    state = from_cache(cache)
    state.quantize()
    for into in (None, DynamicCache(), Cache(layers=[StaticLayer(8)])):
        with pytest.raises(CompatibilityError, match=r"fit layer 0, .*: call state.dequantize\(\)"):
            to_cache(state, into)
    state.dequantize()
    assert torch.equal(to_cache(state).layers[0].keys, cache.layers[0].keys)


def test_an_offloading_cache_is_refused():
    cache = filled(LAYERS["dynamic"], [5])
    cache.offloading = True
    with pytest.raises(CompatibilityError, match="offloads its layers"):
        from_cache(cache)
