"""Entries and specs of caches: valid and invalid arguments, and derived properties."""

import pickle
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from mlstate import CapacityError, CompatibilityError, TensorNotFoundError
from mlstate.kv import CacheEntry, CacheSpec

SHAPE = (2, 4, 64, 32)


def entry(kind="full", name="0.keys", shape=SHAPE, dtype="float16", seq_axis=-2, **more):
    if kind == "quantized":
        more = {"bits": 8, "group": 32, **more}
    return CacheEntry(name, kind, shape, dtype, seq_axis, **more)


# ---- entries ----


@pytest.mark.parametrize("dtype", ["float16", np.float16, np.dtype(">f2"), np.dtype("f2")])
def test_a_dtype_may_be_a_name_or_a_dtype_of_numpy(dtype):
    assert entry(dtype=dtype).dtype == "float16"
    labelled = np.dtype("u2", metadata={"mlstate.dtype": "bfloat16"})
    assert entry(dtype=labelled).dtype == "bfloat16"


def test_a_dtype_may_be_one_of_torch():
    torch = pytest.importorskip("torch")
    assert entry(dtype=torch.float16).dtype == "float16"
    assert entry(dtype=torch.bfloat16).dtype == "bfloat16"


@pytest.mark.parametrize("kind", ["full", "sliding", "quantized"])
def test_the_sequence_axis_is_counted_from_zero(kind):
    spec_entry = entry(kind)
    assert spec_entry.seq_axis == 2 and spec_entry.seq_length == 64
    assert entry(kind, seq_axis=1).seq_length == 4
    assert entry(kind, seq_axis=0) == entry(kind, seq_axis=-4)


@pytest.mark.parametrize("kind", ["recurrent", "conv", "opaque"])
def test_kinds_without_a_sequence_may_have_any_rank(kind):
    for shape in ((), (7,), (1,) * 12):
        spec_entry = entry(kind, shape=shape, seq_axis=99)
        assert (
            spec_entry.seq_axis is None
            and spec_entry.seq_length is None
            and spec_entry.shape == shape
        )


def test_a_quantized_entry_has_three_arrays():
    spec_entry = entry("quantized", bits=4, group=8)
    assert spec_entry.arrays == {
        "0.keys": ((2, 4, 64, 4), "uint32"),
        "0.keys.scales": ((2, 4, 64, 4), "float16"),
        "0.keys.biases": ((2, 4, 64, 4), "float16"),
    }
    assert spec_entry.nbytes == 2 * 4 * 64 * (4 * 4 + 4 * 2 + 4 * 2)
    assert entry().arrays == {"0.keys": (SHAPE, "float16")} and entry().nbytes == 2 * 16384


def test_the_window_is_the_array_by_default():
    assert entry("sliding").window == 64
    assert entry("sliding", window=100, sinks=99).window == 100


def test_entries_are_immutable_values():
    spec_entry = entry(layer=np.int64(3), role="keys", shape=list(SHAPE))
    assert spec_entry == entry(layer=3, role="keys") and hash(spec_entry) == hash(
        entry(layer=3, role="keys")
    )
    assert type(spec_entry.layer) is int and spec_entry.shape == SHAPE
    assert replace(spec_entry, name="1.keys").layer == 3
    assert pickle.loads(pickle.dumps(spec_entry)) == spec_entry
    with pytest.raises(FrozenInstanceError):
        spec_entry.name = "other"
    conv = entry("conv")
    assert replace(conv, shape=(3,)).seq_axis is None


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"kind": "ful"}, CompatibilityError, "kind 'ful' is unknown; did you mean 'full'"),
        ({"kind": None}, CompatibilityError, "kind None is unknown"),
        ({"name": ""}, ValueError, "name is empty"),
        ({"name": 3}, TypeError, "name must be a str, got int"),
        ({"role": 3}, TypeError, "0.keys: role must be a str, got int"),
        ({"layer": -1}, CapacityError, "0.keys: layer must be at least 0, got -1"),
        ({"layer": 1.5}, TypeError, "0.keys: layer must be an integer"),
        ({"shape": 3}, TypeError, "0.keys: shape must be a sequence of integers, got int"),
        ({"shape": "34"}, TypeError, "shape must be a sequence of integers, got str"),
        ({"shape": (2, -1)}, CapacityError, r"0.keys: shape\[1\] must be at least 0, got -1"),
        ({"shape": (2, 1.5)}, TypeError, r"0.keys: shape\[1\] must be an integer"),
        ({"shape": (5,)}, CompatibilityError, "0.keys must have 2 to 8 dimensions.*got 1"),
        ({"seq_axis": 4}, CompatibilityError, r"seq_axis 4 is outside -4..3: 0.keys has 4 dim"),
        ({"seq_axis": "2"}, TypeError, "seq_axis must be an integer, got str"),
        ({"seq_axis": None}, CompatibilityError, "0.keys: kind 'full' needs seq_axis"),
        ({"dtype": "float12"}, CompatibilityError, "0.keys: dtype 'float12' is not supported"),
        ({"dtype": None}, CompatibilityError, "dtype None is not supported"),
        ({"dtype": "S3"}, CompatibilityError, "dtype 'S3' is not supported"),
        ({"dtype": object}, CompatibilityError, "is not supported"),
        ({"window": 9}, CompatibilityError, "window and sinks belong to kind 'sliding'"),
        ({"sinks": 1}, CompatibilityError, "belong to kind 'sliding', not to 'full'"),
        ({"kind": "sliding", "next_slot": 65}, CapacityError, "slot 65 is beyond the 64 positions"),
        ({"kind": "sliding", "next_slot": -1}, CapacityError, "next_slot must be at least 0"),
        ({"next_slot": 0}, CompatibilityError, "next_slot belongs to kind 'sliding', not to 'full"),
        ({"kind": "recurrent", "next_slot": 0}, CompatibilityError, "sliding', not to 'recurrent"),
        ({"kind": "sliding", "sinks": 64}, CompatibilityError, "64 sinks leave no position"),
        ({"kind": "sliding", "sinks": -1}, CapacityError, "sinks must be at least 0"),
        ({"kind": "sliding", "window": 0}, CapacityError, "window must be at least 1"),
        ({"kind": "sliding", "shape": (1, 0, 3)}, CapacityError, "positions must be at least 1"),
        ({"bits": 8}, CompatibilityError, "bits and group belong to kind 'quantized'"),
        ({"kind": "conv", "group": 8}, CompatibilityError, "'quantized', not to 'conv'"),
        ({"kind": "quantized", "bits": None}, CompatibilityError, "needs bits and group"),
        ({"kind": "quantized", "bits": 7}, ValueError, "0.keys: bits must be 2, 3, 4, 5, 6 or 8"),
        ({"kind": "quantized", "bits": 5, "group": 8}, ValueError, "a multiple of 32 up to 4096"),
        ({"kind": "quantized", "group": 12}, ValueError, "group must be a multiple of 8"),
        ({"kind": "quantized", "group": 24}, CompatibilityError, "not whole groups of 24"),
        ({"kind": "quantized", "group": 2**70}, CapacityError, "64 bits"),
        ({"kind": "quantized", "dtype": "float64"}, CompatibilityError, "not float64"),
        ({"kind": "quantized", "seq_axis": -1}, CompatibilityError, "axis is the last one"),
    ],
)
def test_invalid_entries_are_refused(change, error, text):
    with pytest.raises(error, match=text):
        entry(**change)


def test_errors_have_fields():
    with pytest.raises(CapacityError) as caught:
        entry("sliding", next_slot=65)
    assert (caught.value.name, caught.value.expected, caught.value.got) == ("0.keys", "0..64", "65")
    with pytest.raises(CompatibilityError) as caught:
        entry("quantized", group=24)
    assert caught.value.name == "0.keys" and caught.value.got == "32"


# ---- specs ----


def hybrid():
    """Two attention layers of different kinds, one of them quantized, and a recurrent layer."""
    return CacheSpec(
        [
            entry(layer=0, role="keys"),
            entry("quantized", "0.values", layer=0, role="values"),
            entry("sliding", "1.keys", (2, 4, 16, 32), sinks=2, layer=1),
            entry("recurrent", "2.state", (2, 8, 8), "float32", layer=2),
            entry("opaque", "tokens", (100,), "uint8"),
        ]
    )


def test_a_spec_finds_entries_by_array_and_by_index():
    spec = hybrid()
    assert len(spec) == 5 and list(spec) == list(spec.entries)
    assert spec["0.values.biases"] is spec[1] is spec.entry_of("0.values")
    assert spec[1:3] == spec.entries[1:3] and spec[-1].name == "tokens"
    assert spec.capacity == 64 and spec.layer_count == 3
    assert spec.nbytes == sum(e.nbytes for e in spec)
    assert spec == hybrid() and hash(spec) == hash(hybrid()) and spec != CacheSpec(spec[:2])
    assert spec != spec.entries and pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(TensorNotFoundError, match=r"no array '0.key'; did you mean '0.keys'"):
        spec["0.key"]
    with pytest.raises(TensorNotFoundError, match=r"no array 3"):
        spec.entry_of(3)
    with pytest.raises(IndexError):
        spec[5]


def test_a_cache_of_sliding_layers_has_no_capacity():
    spec = CacheSpec([entry("sliding"), entry("sliding", "1.keys", (2, 4, 9, 32))])
    assert spec.capacity is None


def test_entries_that_disagree_on_positions_are_refused():
    with pytest.raises(
        CompatibilityError, match=r"1.keys: 32 positions, but 0.keys has 64"
    ) as caught:
        CacheSpec([entry(), entry(name="1.keys", shape=(2, 4, 32, 32))])
    assert (caught.value.name, caught.value.expected, caught.value.got) == ("1.keys", "64", "32")
    with pytest.raises(CompatibilityError, match=r"q: 32 positions, but 0.keys has 64"):
        CacheSpec([entry(), entry("quantized", "q", (2, 4, 32, 32))])
    for positions, window in ((16, 20), (63, 100)):
        narrow = entry("sliding", "s", (2, 4, positions, 32), window=window)
        least = min(64, window)
        with pytest.raises(CompatibilityError, match=rf"s: {positions} positions .* least {least}"):
            CacheSpec([narrow, entry()])
    CacheSpec([entry(), entry("sliding", "s", (2, 4, 64, 32), window=100)])
    CacheSpec([entry(), entry("sliding", "s", (2, 4, 100, 32), window=100)])


@pytest.mark.parametrize(
    ("entries", "error", "text"),
    [
        ([], ValueError, "entries is empty"),
        (entry(), TypeError, "must be an iterable of CacheEntry, got CacheEntry"),
        (3, TypeError, "must be an iterable of CacheEntry, got int"),
        ([entry(), "0.values"], TypeError, r"entries\[1\] must be a CacheEntry, got str"),
        ([entry(), entry()], ValueError, "two arrays have the name '0.keys'"),
        (
            [entry("quantized"), entry(name="0.keys.scales")],
            ValueError,
            "two arrays have the name '0.keys.scales'",
        ),
    ],
)
def test_invalid_specs_are_refused(entries, error, text):
    with pytest.raises(error, match=text):
        CacheSpec(entries)


# ---- text ----


def test_the_repr_counts_entries():
    assert repr(hybrid()) == (
        "CacheSpec(5 entries: 1 full, 1 sliding, 1 recurrent, 1 quantized, 1 opaque; 3 layers, "
        "64 positions)"
    )
    assert repr(CacheSpec([entry("conv", layer=0)])) == "CacheSpec(1 entry: 1 conv; 1 layer)"


def test_the_html_lists_entries_and_escapes_names():
    spec = CacheSpec([*hybrid(), entry("conv", "<b>", (3,))])
    html = spec._repr_html_()
    for text in ("CacheSpec: 6 entries", "2 sinks", "8 bits, groups of 32", "&lt;b&gt;", "window"):
        assert text in html
    assert "<b>" not in html
    many = CacheSpec(entry(name=f"{i}.keys", layer=i) for i in range(64))
    assert "0.keys … 63.keys (64 alike)" in many._repr_html_()
