"""Every kind of layer of mlx-lm as a CacheState and back: no copies, no silent changes."""

import copy
import pickle
import sys
import threading

import numpy as np
import pytest
from golden.make_prompt_caches import feed, histories
from mlx_caches import assert_equal_caches, attention_bits, bits_of, decode, layers_of, numbers_of
from needs import needs

import mlstate
from mlstate.errors import CapacityError, CompatibilityError, UnstorableError
from mlstate.kv import CacheEntry, CacheSpec, CacheState

pytestmark = needs("mlx", "mlx_lm")
mx = pytest.importorskip("mlx.core", reason="its arrays are the subject")
pytest.importorskip("mlx_lm", reason="its caches are the subject")

from mlx_lm.models import cache as models  # noqa: E402

from mlstate.integrations.mlx import from_cache, to_cache  # noqa: E402

NAMES = list(histories(models))


def assert_same_caches(got, expected):
    """The same arrays, and the same numbers in all layers."""
    assert_equal_caches(got, expected)
    for layer, other in zip(layers_of(got), layers_of(expected), strict=True):
        assert numbers_of(layer) == numbers_of(other)


def make(name):
    cache = histories(models)[name]
    mx.eval([layer.state for layer in cache if not isinstance(layer, models.CacheList)])
    return cache


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_comes_back_with_all_its_values(name):
    cache = make(name)
    restored = to_cache(from_cache(cache))
    assert_same_caches(restored, cache)


@pytest.mark.parametrize("copied", [False, True], ids=["views", "copies"])
@pytest.mark.parametrize("name", NAMES)
def test_a_moved_cache_continues_like_the_unmoved_one(name, copied):
    state = from_cache(make(name))
    restored = to_cache(pickle.loads(pickle.dumps(state)) if copied else state)
    for counts in ((1,), (1, 1, 1), (4,), (1,) * 9):
        decode(restored, 40, counts)
    expected = make(name)
    for counts in ((1,), (1, 1, 1), (4,), (1,) * 9):
        decode(expected, 40, counts)
    assert_same_caches(restored, expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_arrays_are_views_and_keep_their_tokens(name):
    cache = make(name)
    state = from_cache(cache)
    again = from_cache(to_cache(state))
    before = {key: array.copy() for key, array in state.arrays.items()}
    for key, array in state.arrays.items():
        assert not array.flags.owndata
        assert array.ctypes.data == again.arrays[key].ctypes.data, key  # nothing was copied
    decode(cache, 70)
    decode(to_cache(state), 80)
    for key, array in state.arrays.items():
        np.testing.assert_array_equal(array, before[key])


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_takes_a_cache_back(name):
    cache = make(name)
    state = from_cache(cache)
    before = state.snapshot()
    decode(cache, 90)  # a draft that is rejected
    state.restore(before)
    assert to_cache(state, into=cache) is cache
    expected = make(name)
    assert_equal_caches(cache, expected)
    assert_equal_caches(decode(cache, 40), decode(expected, 40))


@pytest.mark.parametrize("name", ["full", "window", "wrapped", "long prefill", "window and full"])
def test_each_position_has_its_token(name):
    state = from_cache(make(name))
    for entry in state.spec:
        positions = state.positions(entry.name)
        tokens = np.abs(state.arrays[entry.name][0, 0, :, 0])
        np.testing.assert_array_equal(tokens[positions >= 0], positions[positions >= 0])
        assert (positions >= 0).sum() == min(state.length, entry.shape[2])


def test_kinds_and_parameters_of_the_entries():
    layers = [
        feed(models.KVCache(), [9]),
        feed(models.RotatingKVCache(8, 2), [9]),
        feed(models.KVCache(), [9], width=32).to_quantized(32, 4),
        histories(models)["states"][0],
    ]
    spec = from_cache(layers).spec
    assert [(e.name, e.kind) for e in spec] == [
        ("0.keys", "full"),
        ("0.values", "full"),
        ("1.keys", "sliding"),
        ("1.values", "sliding"),
        ("2.keys", "quantized"),
        ("2.values", "quantized"),
        ("3.states.0", "recurrent"),
        ("3.states.1", "recurrent"),
    ]
    assert (spec["1.keys"].window, spec["1.keys"].sinks) == (8, 2)
    assert (spec["2.keys"].bits, spec["2.keys"].group, spec["2.keys"].shape[3]) == (4, 32, 32)
    assert [entry.layer for entry in spec] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_list_of_states_needs_a_length():
    cache = [histories(models)["states"][0]]
    with pytest.raises(CompatibilityError, match="pass length="):
        from_cache(cache)
    assert from_cache(cache, length=9).length == 9
    with pytest.raises(CompatibilityError, match="the layers have 9 tokens, and length is 8"):
        from_cache(make("states"), length=8)


# ---- other sizes ----


def test_a_resized_state_fills_new_layers():
    state = from_cache(make("full"))
    for capacity in (1024, 32, 512):
        state.resize(capacity)
        cache = to_cache(state)
        assert cache[0].keys.shape[2] == capacity and cache[0].offset == 11
        assert_equal_caches(cache, make("full"))
        assert_equal_caches(decode(cache, 11), decode(make("full"), 11))


@pytest.mark.parametrize("steps", [[5, 1], [3], [14], [5] + [1] * 3])
def test_a_window_grows_as_long_as_no_token_was_evicted(steps):
    cache = [feed(models.RotatingKVCache(16, 4), steps)]
    larger = to_cache(from_cache(cache), into=[models.RotatingKVCache(64, 4)])
    expected = [feed(models.RotatingKVCache(64, 4), steps)]
    at = sum(steps)
    counts = [1] * 60 + [3] + [1] * 10
    assert_equal_caches(decode(larger, at, counts), decode(expected, at, counts))
    assert larger[0].max_size == 64 and larger[0].offset == at + len(counts) + 2


@pytest.mark.parametrize("steps", [[5, 1], [14], [20], [5] + [1] * 30, [5] + [1] * 15 + [4]])
def test_a_window_shrinks_to_its_newest_tokens(steps):
    cache = [feed(models.RotatingKVCache(16, 2), steps)]
    smaller = to_cache(from_cache(cache), into=[models.RotatingKVCache(8, 2)])
    expected = [feed(models.RotatingKVCache(8, 2), steps)]
    decode(smaller, sum(steps), [1])
    decode(expected, sum(steps), [1])
    tokens = [np.sort(np.array(c[0].keys_and_values()[0])[0, 0, :, 0]) for c in (smaller, expected)]
    np.testing.assert_array_equal(*tokens)


def test_a_larger_window_that_needs_evicted_tokens_is_refused():
    state = from_cache(make("wrapped"))
    into = [models.RotatingKVCache(16, 2)]
    with pytest.raises(CompatibilityError, match="older ones were evicted"):
        to_cache(state, into=into)
    assert into[0].keys is None and into[0].offset == 0
    with pytest.raises(CompatibilityError, match="keeps the first 3 tokens"):
        to_cache(state, into=[models.RotatingKVCache(8, 3)])


def test_free_positions_that_not_all_layers_have_are_left_out():
    """mlx allocates the window of one layer, and 256 positions for the other one."""
    window, full = models.RotatingKVCache(600), models.KVCache()
    cache = [feed(window, [260]), feed(full, [260])]
    state = from_cache(cache)
    assert state.capacity == 260 and state.arrays["1.keys"].shape[2] == 260
    state.resize(1024)
    assert state.arrays["0.keys"].shape[2] == 600
    into = to_cache(state, into=[models.RotatingKVCache(600), models.KVCache()])
    assert_equal_caches(decode(into, 260), decode(cache, 260))


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_a_quantized_state_makes_quantized_layers(bits, group):
    cache = [feed(models.KVCache(), [9, 1], width=64)]
    expected = [cache[0].to_quantized(group, bits)]
    state = from_cache(cache)
    state.quantize(bits, group)
    quantized = to_cache(state)
    assert type(quantized[0]) is models.QuantizedKVCache
    assert_equal_caches(quantized, expected)
    assert_equal_caches(to_cache(from_cache(expected)), expected)
    assert_equal_caches(decode(quantized, 10), decode(expected, 10))
    state = from_cache(make("quantized"))
    state.dequantize()
    assert type(to_cache(state)[0]) is models.KVCache


def test_a_chunked_layer_that_dropped_tokens():
    def chunked():
        return [feed(models.ChunkedKVCache(8), [9, 1, 1, 5, 1])]

    state = from_cache(chunked())
    restored = to_cache(state)
    assert restored[0].start_position == 8 and restored[0].offset == 17
    assert state.positions("0.keys").tolist() == list(range(8, 17))
    assert_equal_caches(restored, chunked())
    assert_equal_caches(decode(restored, 17), decode(chunked(), 17))


def test_a_state_of_another_program_fills_a_cache():
    shape = (1, 2, 32, 4)
    keys = np.arange(np.prod(shape), dtype=">f4").reshape(shape)
    entries = [CacheEntry(f"0.{part}", "full", shape, "float32") for part in ("keys", "values")]
    state = CacheState(CacheSpec(entries), {"0.keys": keys, "0.values": keys[..., ::-1]}, 20)
    with pytest.raises(CompatibilityError, match="pass into="):
        to_cache(state)
    cache = to_cache(state, into=[models.KVCache()])
    np.testing.assert_array_equal(np.array(cache[0].keys), keys)
    np.testing.assert_array_equal(np.array(cache[0].values), keys[..., ::-1])
    assert cache[0].offset == 20


def test_a_batch_without_padding_fills_other_classes():
    batch = feed(models.BatchKVCache([0, 0]), [9], batch=2)
    moved = to_cache(from_cache([batch]), into=[models.KVCache()])
    expected = [feed(models.KVCache(), [9], batch=2)]
    assert_equal_caches(decode(moved, 40), decode(expected, 40))
    rotating = feed(models.BatchRotatingKVCache(8, [0, 0]), [6] + [1] * 5, batch=2)
    moved = to_cache(from_cache([rotating]), into=[models.RotatingKVCache(8)])
    expected = [feed(models.RotatingKVCache(8), [6] + [1] * 5, batch=2)]
    assert_equal_caches(decode(moved, 40), decode(expected, 40))


def test_quantized_tokens_of_a_padded_batch_do_not_lose_the_padding():
    state = from_cache([feed(models.BatchKVCache([3, 0]), [9], batch=2, width=32)])
    state.quantize(8, 32)
    with pytest.raises(CompatibilityError, match="QuantizedKVCache, and the sequences"):
        to_cache(state, into=[models.QuantizedKVCache(32, 8)])


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_keeps_a_state_or_refuses_it(name, tmp_path):
    cache = make(name)
    state = from_cache(cache)
    try:
        mlstate.save(tmp_path / "c", states={"kv": state})
    except UnstorableError as error:
        assert "layer 0 has the padding of a batch" in str(error)
        assert name in ("batch", "batch window", "batch wrapped")
        mlstate.save(tmp_path / "c", states={"kv": CacheState(state.spec, state.arrays, 9)})
        with pytest.raises(CompatibilityError, match="padding of a batch"):
            mlstate.load(tmp_path / "c", into={"states": {"kv": state.copy()}})
        return
    loaded = mlstate.load(tmp_path / "c").states["kv"]
    moved = to_cache(loaded, into=decode(make(name), 70))
    assert_same_caches(moved, cache)


@pytest.mark.parametrize("steps", [[5] + [1] * 8, [20], [3]])
@pytest.mark.parametrize("padding", [[0, 0], [1, 2]])
def test_a_used_batch_takes_a_state_without_padding_at_its_positions(steps, padding):
    create = {
        "rotating": lambda: models.BatchRotatingKVCache(8, padding),
        "full": lambda: models.BatchKVCache(padding),
    }
    source = [models.RotatingKVCache(8), models.KVCache()]
    for layer in source:
        feed(layer, [6], 2, 64, "float32")
    state = from_cache(source)
    used, fresh = ([new() for new in create.values()] for _ in range(2))
    for layer in used:
        feed(layer, steps, 2, 64, "float32")
    for into in (used, fresh):
        to_cache(state, into=into)
    for layer, expected in zip(used, fresh, strict=True):
        assert layer.left_padding.tolist() == expected.left_padding.tolist() == padding
        assert layer.offset.tolist() == [6 - count for count in padding]
    assert_equal_caches(decode(used, 7), decode(fresh, 7))


def test_a_used_merge_of_full_windows_takes_a_state_at_its_positions():
    windows = [models.RotatingKVCache(8) for _ in range(2)]
    for layer, count in zip(windows, (20, 12), strict=True):
        feed(layer, [count], 1, 64, "float32")
    merged = models.RotatingKVCache.merge(windows)
    source = models.RotatingKVCache(8)
    feed(source, [6], 2, 64, "float32")
    to_cache(from_cache([source]), into=[merged])
    assert merged.offset.tolist() == [6, 6] and merged.left_padding.tolist() == [0, 0]


def test_a_state_of_another_library_needs_a_cache_to_fill():
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from mlstate.integrations.transformers import to_cache as to_transformers

    state = from_cache([_full()])
    with pytest.raises(CompatibilityError, match="pass into="):
        to_transformers(state)
    moved = to_transformers(state, into=transformers.DynamicCache())
    assert moved.get_seq_length() == state.length
    np.testing.assert_array_equal(moved.layers[0].keys, bits_of(_full().keys)[:, :, :9])


def test_lazy_arrays_of_another_thread_have_a_remedy():
    layer = models.KVCache()
    thread = threading.Thread(
        target=lambda: layer.update_and_fetch(mx.ones((1, 2, 3, 4)) * 2, mx.ones((1, 2, 3, 4)) * 3)
    )
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match=r"layer 0: mlx cannot compute keys.*call mx\.eval\("):
        from_cache([layer])


def test_a_list_without_layers_comes_back():
    cache = [models.CacheList(), models.CacheList(models.CacheList(), _full())]
    moved = to_cache(from_cache(cache))
    assert list(moved[0].caches) == list(moved[1].caches[0].caches) == []
    assert_equal_caches(moved, cache)


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint8", "bool", "complex64"])
def test_no_dtype_is_narrowed_on_the_way_to_mlx(dtype):
    array = (np.arange(8).reshape(1, 8) / 3).astype(dtype)
    state = CacheState(CacheSpec([CacheEntry("0.states.0", "opaque", (1, 8), dtype)]),
                       {"0.states.0": array}, 3)  # fmt: skip
    moved = to_cache(state, into=[models.ArraysCache(1)])[0][0]
    assert moved.dtype == getattr(mx, "bool_" if dtype == "bool" else dtype)
    np.testing.assert_array_equal(np.array(moved, copy=False), array)


def test_dtypes_pass_both_ways():
    for dtype in ("float32", "float16", "bfloat16"):
        cache = [feed(models.KVCache(), [9], dtype=dtype)]
        state = from_cache(cache)
        assert state.spec["0.keys"].dtype == dtype
        for moved in (to_cache(state), to_cache(state.copy())):
            assert moved[0].keys.dtype == getattr(mx, dtype)
            assert_equal_caches(moved, cache)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_strided_and_lazy_arrays_are_views_too(dtype):
    """A first prefill of a window stores transposed keys, which are computed later."""
    keys = (mx.arange(80).reshape(1, 10, 2, 4) * 0.5).astype(getattr(mx, dtype))
    layer = models.RotatingKVCache(8, 2)
    layer.update_and_fetch(keys.transpose(0, 2, 1, 3), -keys.transpose(0, 2, 1, 3))
    state = from_cache([layer])
    assert not state.arrays["0.keys"].flags.c_contiguous
    np.testing.assert_array_equal(
        state.arrays["0.keys"].astype(np.float32),
        np.arange(80).reshape(1, 10, 2, 4).swapaxes(1, 2) / 2,
    )
    again = from_cache(to_cache(state))
    assert again.arrays["0.keys"].ctypes.data == state.arrays["0.keys"].ctypes.data
    assert_equal_caches(to_cache(state.copy()), [layer])


def test_bfloat16_passes_without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    cache = make("bfloat16")
    state = from_cache(cache)
    assert state.arrays["0.keys"].dtype == np.uint16
    assert state.spec["0.keys"].dtype == "bfloat16"
    assert_equal_caches(to_cache(state), cache)
    assert_equal_caches(to_cache(state.copy()), cache)
    state.resize(512)
    assert_equal_caches(to_cache(state), cache)


def test_other_views_of_the_memory_of_mlx_are_copied():
    """Only views with the order of mlx's own array are used again."""
    state = from_cache([_full()])
    arrays = dict(state.arrays)
    reversed_keys = arrays["0.keys"][:, :, ::-1]
    swapped = arrays["0.values"].astype(">f2")
    other = CacheState(state.spec, {"0.keys": reversed_keys, "0.values": swapped}, 9)
    moved = to_cache(other, into=[models.KVCache()])[0]
    np.testing.assert_array_equal(np.array(moved.keys), reversed_keys)
    np.testing.assert_array_equal(np.array(moved.values), arrays["0.values"])
    bits = {name: array.view(np.int16) for name, array in arrays.items()}
    spec = CacheSpec(CacheEntry(e.name, "full", e.shape, "int16") for e in state.spec)
    moved = to_cache(CacheState(spec, bits, 9), into=[models.KVCache()])[0]
    assert moved.keys.dtype == mx.int16
    np.testing.assert_array_equal(np.array(moved.keys), bits["0.keys"])


def test_layers_without_tokens_have_no_entry():
    cache = [models.KVCache(), feed(models.KVCache(), [9]), models.ArraysCache(2)]
    state = from_cache(cache)
    assert [entry.layer for entry in state.spec] == [1, 1]
    restored = to_cache(state)
    assert restored[0].keys is None and restored[2].cache == [None, None]


def test_the_table_of_a_state_is_shown_in_a_notebook():
    html = from_cache(make("window and full"))._repr_html_()
    assert "0.keys" in html and "window 8" in html and "13 of" in html


# ---- refusals ----


def fingerprint(cache):
    """All attributes of a cache, with the identity of the arrays."""
    return [
        {
            name: id(value) if isinstance(value, mx.array) else value
            for name, value in vars(layer).items()
        }
        for layer in layers_of(cache)
    ]


class Unknown(models.KVCache):
    pass


def _without(name):
    layer = feed(models.KVCache(), [9])
    delattr(layer, name)
    return layer


def _with(layer, **attributes):
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def _full(*counts):
    return feed(models.KVCache(), counts or [9])


def _ring(*counts):
    return feed(models.RotatingKVCache(8, 2), counts or [9, 1])


def _batch():
    return feed(models.BatchKVCache([3, 0]), [9], batch=2)


REFUSED = {
    "subclass": (
        lambda: _with(feed(Unknown(), [9]), note=object()),
        "layer 0 is a Unknown, which is an unknown class, and its note is of type object",
    ),
    "no layer": (lambda: None, "layer 0 is a NoneType, which is an unknown class"),
    "no offset": (lambda: _without("offset"), "KVCache.offset is absent: the layout of mlx-lm"),
    "offset of mlx": (lambda: _with(_full(), offset=mx.array(9)), "offset is an array of int32"),
    "negative": (lambda: _with(_full(), offset=-1), "offset is -1, not a number of 0 or more"),
    "too many": (lambda: _with(_full(), offset=300), "offset counts 300 tokens in 256 positions"),
    "flag": (lambda: _with(_full(), offset=True), "offset is of type bool"),
    "only keys": (lambda: _with(_full(), values=None), "KVCache.values is None"),
    "list of keys": (lambda: _with(_full(), keys=[1]), "KVCache.keys is of type list"),
    "three axes": (
        lambda: _with(_full(), keys=mx.zeros((2, 256, 4))),
        r"shape \(2, 256, 4\), not an array with 4 axes",
    ),
    "other positions": (
        lambda: _with(_full(), values=mx.zeros((1, 2, 32, 4))),
        r"values has shape \(1, 2, 32, 4\), and the keys \(1, 2, 256, 4\)",
    ),
    "slot of a ring": (lambda: _with(_ring(4), _idx=3), "_idx is 3, and the layer has 4 tokens"),
    "slot beyond": (lambda: _with(_ring(), _idx=99), "_idx counts 99 tokens in 8 positions"),
    "window": (lambda: _with(_ring(), max_size=80), "8 positions hold a window of 80"),
    "no window": (lambda: _with(_ring(), max_size=0), "max_size is 0"),
    "codes": (
        lambda: _with(histories(models)["quantized"][0], bits=0),
        "bits is 0, and the codes have 4 words",
    ),
    "more bits": (
        lambda: _with(histories(models)["quantized"][0], bits=8),
        "bits is 8, and the codes have 4 words for 1 scales and 1 biases of groups of 32",
    ),
    "biases": (
        lambda: _with(
            histories(models)["quantized"][0],
            values=(*histories(models)["quantized"][0].values[:2], mx.zeros((1, 2, 256, 2))),
        ),
        "for 1 scales and 2 biases",
    ),
    "group": (lambda: _with(histories(models)["quantized"][0], group_size=24), "group"),
    "two codes": (
        lambda: _with(histories(models)["quantized"][0], keys=(1, 2)),
        "keys is of type tuple, not three arrays with 4 axes",
    ),
    "states": (lambda: _with(models.ArraysCache(2), cache=None), "cache is None, not a list"),
    "list": (lambda: _with(models.CacheList(), caches=5), "caches is not a list of layers"),
    "deep list": (
        lambda: models.CacheList(models.CacheList(models.CacheList(models.CacheList(
            models.CacheList(_full()))))),
        "has lists in more than 4 lists",
    ),
    "batch being filled": (
        lambda: _with(_batch(), _right_padding=mx.array([1, 0])),
        r"being filled: call finalize\(\) of the BatchKVCache first",
    ),
    "batch of another size": (
        lambda: _with(_batch(), left_padding=mx.array([1, 0, 0])),
        "left_padding has 3 elements for a batch of 2",
    ),
    "trimmed chunks": (
        lambda: feed(models.ChunkedKVCache(8), [9, 1, -3]),
        "only 6 of 8 tokens are left after a trim",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_layer_is_refused_and_unchanged(name):
    create, text = REFUSED[name]
    cache = [create(), _full()]
    before = fingerprint(cache[1:])
    with pytest.raises((CompatibilityError, ValueError), match=text) as caught:
        from_cache(cache)
    if isinstance(caught.value, CompatibilityError):
        assert caught.value.name.startswith("0")
    with pytest.raises((CompatibilityError, ValueError)):
        to_cache(from_cache([_full(), _full()]), into=cache)
    assert fingerprint(cache[1:]) == before


def test_layers_of_other_lengths_are_refused():
    with pytest.raises(CompatibilityError, match="layer 1 has 8 tokens, but layer 0 9"):
        from_cache([_full(9), _full(8)])
    with pytest.raises(CompatibilityError, match="there is nothing to move"):
        from_cache([models.KVCache()])


@pytest.mark.parametrize("value", ["cache", None, 5, {}], ids=repr)
def test_other_objects_are_refused(value):
    with pytest.raises(TypeError, match="cache must be a list of layers"):
        from_cache(value)
    with pytest.raises(TypeError, match="state must be a CacheState"):
        to_cache(value)
    if value is not None:
        with pytest.raises(TypeError, match="into must be a list of layers"):
            to_cache(from_cache([_full()]), into=value)


UNFIT = {
    "fewer layers": (
        lambda: ([_full(), _full()], [_full()]),
        "into has 1 layer, and the state comes from 2",
    ),
    "more layers": (
        lambda: ([_full()], [_full(), _full()]),
        "into has 2 layers, and the state comes from 1",
    ),
    "more empty layers": (
        lambda: ([_full()], [models.KVCache(), models.KVCache()]),
        "into has 2 layers, and the state comes from 1",
    ),
    "more layers in a list": (
        lambda: (
            [models.CacheList(_full())],
            [models.CacheList(models.KVCache(), models.KVCache())],
        ),
        "layer 0 has 2 layers, and the state comes from 1",
    ),
    "tokens beside an empty layer": (
        lambda: ([_full(), models.KVCache()], [_full(), _full()]),
        "layer 1 has tokens, but",
    ),
    "padding": (
        lambda: ([_batch()], [models.KVCache()]),
        "layer 0 is a KVCache, and the sequences of the BatchKVCache have .* padding",
    ),
    "padding of a window": (
        lambda: (
            [feed(models.BatchRotatingKVCache(8, [3, 0]), [6], batch=2)],
            [models.RotatingKVCache(8)],
        ),
        "layer 0 is a RotatingKVCache, and the sequences of the BatchRotatingKVCache have",
    ),
    "padding in a list": (
        lambda: ([models.CacheList(_batch())], [models.CacheList(models.KVCache())]),
        r"layer 0\.0 is a KVCache, and the sequences",
    ),
    "class": (
        lambda: ([_full()], [models.RotatingKVCache(8)]),
        "an entry of kind full does not fit layer 0, a RotatingKVCache",
    ),
    "quantized": (
        lambda: (histories(models)["quantized"], [models.KVCache()]),
        "an entry of kind quantized does not fit layer 0, a KVCache",
    ),
    "bits": (
        lambda: (histories(models)["quantized"], [models.QuantizedKVCache(32, 8)]),
        "4 bits and groups of 32 do not fit layer 0",
    ),
    "heads": (
        lambda: (
            [_full()],
            [_with(_full(), keys=mx.zeros((1, 3, 256, 4)), values=mx.zeros((1, 3, 256, 4)))],
        ),
        r"the array has shape \(1, 2, 256, 4\), and layer 0 \(1, 3, 256, 4\)",
    ),
    "dtype": (
        lambda: ([_full()], [feed(models.KVCache(), [3], dtype="float32")]),
        "the array is float16, and the one of layer 0 float32",
    ),
    "batch": (
        lambda: ([_full()], [models.BatchKVCache([0, 1])]),
        "layer 0 has 2 sequences, and the array 1",
    ),
    "states": (
        lambda: (
            [histories(models)["states"][0], _full()],
            [models.ArraysCache(1), models.KVCache()],
        ),
        "the cache has no place for '0.states.1'",
    ),
    "shape of states": (
        lambda: (
            [histories(models)["states"][0], _full()],
            [_with(models.ArraysCache(2), cache=[mx.zeros((1, 3)), None]), _full()],
        ),
        r"the array has shape \(1, 3, 4\), and layer 0 \(1, 3\)",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_cache_that_does_not_fit_is_refused_and_unchanged(name):
    create, text = UNFIT[name]
    source, into = create()
    state = from_cache(source)
    before, arrays = fingerprint(into), dict(state.arrays)
    with pytest.raises(CompatibilityError, match=text):
        to_cache(state, into=into)
    assert fingerprint(into) == before and dict(state.arrays) == arrays


def test_an_interrupt_at_any_line_leaves_a_cache_whole():
    state = from_cache([_full(9), _ring(9), _full(9)])

    def fill(stop):
        """Interrupt `to_cache` at a line of the package; return the cache and all lines."""
        cache, lines = [_full(3), _ring(3), _full(3)], 0

        def trace(frame, event, _):
            nonlocal lines
            if "mlstate" not in frame.f_code.co_filename:
                return None
            if event == "line":
                lines += 1
                if lines == stop:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            to_cache(state, into=cache)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return cache, lines

    filled, last = fill(0)
    whole = [list(map(numbers_of, filled)), list(map(numbers_of, [_full(3), _ring(3), _full(3)]))]
    for stop in range(1, last + 1):
        cache, _ = fill(stop)
        assert list(map(numbers_of, cache)) in whole
        assert len({attention_bits(layer)[0].shape[2] for layer in cache}) == 1


def test_a_layer_in_two_places_is_refused():
    layer = models.KVCache()
    with pytest.raises(CompatibilityError, match="layers 0 and 1 are the same object"):
        to_cache(from_cache([_full(), _full()]), into=[layer, layer])
    assert layer.keys is None


def test_a_refusal_of_the_last_layer_changes_no_layer():
    state = from_cache([_full(), _full()])
    into = [models.KVCache(), feed(models.KVCache(), [3], dtype="float32")]
    before = fingerprint(into)
    with pytest.raises(CompatibilityError, match="layer 1 float32"):
        to_cache(state, into=into)
    assert fingerprint(into) == before


def test_states_that_mlx_cannot_hold_are_refused():
    def state_of(dtype, shape=(1, 2, 8, 4), axis=2):
        entries = [CacheEntry(f"0.{p}", "full", shape, dtype, axis) for p in ("keys", "values")]
        zeros = {entry.name: np.zeros(shape, dtype) for entry in entries}
        return CacheState(CacheSpec(entries), zeros, 4)

    ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy has no 8-bit floats")
    into = [models.KVCache()]
    for state, text in (
        (state_of(ml_dtypes.float8_e4m3fn), "mlx has no dtype float8_e4m3fn"),
        (state_of(np.float32, (1, 8, 4), 1), "4 axes, the sequence is axis 2|sequence axis 1"),
    ):
        with pytest.raises(CompatibilityError, match=text):
            to_cache(state, into=into)
    assert into[0].keys is None


def test_tensors_of_torch_are_refused_by_name():
    torch = pytest.importorskip("torch", reason="its tensors are refused")
    shape = (1, 2, 8, 4)
    entries = [CacheEntry(f"0.{part}", "full", shape, "float32") for part in ("keys", "values")]
    state = CacheState(CacheSpec(entries), {e.name: torch.zeros(shape) for e in entries}, 4)
    with pytest.raises(CompatibilityError, match="mlx takes arrays of NumPy, not Tensor"):
        to_cache(state, into=[models.KVCache()])


def test_a_trim_beyond_the_tokens_is_refused():
    state = from_cache([_full()])
    with pytest.raises(CapacityError, match="cannot drop 10 tokens"):
        state.trim(10)
    assert copy.copy(state).length == 9
