"""A cache of several arrays changes as a model in NumPy does, and all of it or none of it."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_model import LAYOUTS, assert_refused, assert_same_bits, layout, random_bits
from tries import tries

from mlstate import CapacityError, CompatibilityError, TensorNotFoundError
from mlstate.kv import CacheEntry, CacheSpec, CacheState

FULL = CacheEntry("0.keys", "full", (2, 3, 16, 8), "float16", layer=0)
INNER = CacheEntry("0.values", "full", (4, 16), "int8", -1, layer=0)
CODES = CacheEntry("1.keys", "quantized", (3, 16, 8), "float32", layer=1, bits=8, group=8)
RING = CacheEntry("1.values", "sliding", (2, 6, 5), "float32", window=6, sinks=2, layer=1)
WIDE = CacheEntry("2.keys", "sliding", (16, 3), "float16", 0, window=20, sinks=3, layer=2)
STATE = CacheEntry("3.state", "recurrent", (2, 7), "float32", layer=3)
CONV = CacheEntry("3.conv", "conv", (3,), "float16", layer=3)
BLOB = CacheEntry("blob", "opaque", (9,), "uint8")


def arrays_of(spec, seed=0):
    """Random finite arrays for a spec."""
    arrays = {}
    for i, (name, (shape, dtype)) in enumerate(
        pair for entry in spec for pair in entry.arrays.items()
    ):
        bits = random_bits(shape, dtype, seed * 100 + i)
        arrays[name] = np.nan_to_num(bits, nan=1, posinf=2, neginf=3)
    return arrays


def state_of(*entries, length=10, seed=0):
    spec = CacheSpec(entries)
    return CacheState(spec, arrays_of(spec, seed), length)


# ---- construction ----


@pytest.mark.parametrize("name", LAYOUTS)
def test_arrays_are_used_without_copying(name):
    array = layout(name, random_bits((2, 3, 16, 8), np.float16))
    array.flags.writeable = False
    state = CacheState(CacheSpec([FULL]), {"0.keys": array}, 7)
    assert state.arrays["0.keys"] is array
    assert np.shares_memory(state.view("0.keys"), array)
    assert_same_bits(state.view("0.keys"), array[:, :, :7])


def test_array_mapping_is_read_only_in_spec_order():
    spec = CacheSpec([FULL, CODES])
    arrays = arrays_of(spec)
    state = CacheState(spec, dict(reversed(arrays.items())), np.int64(3))
    assert list(state.arrays) == ["0.keys", "1.keys", "1.keys.scales", "1.keys.biases"]
    assert state.nbytes == sum(a.nbytes for a in arrays.values()) and state.capacity == 16
    assert type(state.length) is int
    with pytest.raises(TypeError):
        state.arrays["0.keys"] = None
    arrays.clear()  # of the caller
    assert len(state.arrays) == 4


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda s, a: (s.entries, a, 5), TypeError, "spec must be a CacheSpec, got tuple"),
        (lambda s, a: (s, list(a.values()), 5), TypeError, "arrays must be a mapping"),
        (lambda s, a: (s, a, 5.0), TypeError, "length must be an integer, got float"),
        (lambda s, a: (s, a, True), TypeError, "length must be an integer, got bool"),
        (lambda s, a: (s, a, -1), CapacityError, "length must be at least 0, got -1"),
        (lambda s, a: (s, a, 17), CapacityError, "0.keys: 17 tokens do not fit into 16 positions"),
        (
            lambda s, a: (s, {**a, "0.keys": [1, 2]}, 5),
            TypeError,
            "0.keys must be a NumPy array or a torch tensor",
        ),
    ],
)
def test_wrong_arguments_are_refused(change, error, text):
    spec = CacheSpec([FULL, CODES])
    with pytest.raises(error, match=text):
        CacheState(*change(spec, arrays_of(spec)))


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "text"),
    [
        (
            "0.keys",
            (3, 16, 8),
            "f2",
            r": the array has 3 dimensions, .* the spec has \(2, 3, 16, 8\)",
        ),
        ("0.keys", (2, 3, 32, 8), "f2", ": the sequence axis 2 has length 32, in the spec 16"),
        ("0.keys", (2, 1, 16, 8), "f2", ": axis 1 has length 1, in the spec 3"),
        ("0.keys", (2, 3, 16, 8), "f4", ": the array is float32, in the spec float16"),
        ("1.keys", (3, 16, 2), "i4", ": the array is int32, in the spec uint32"),
        ("1.keys.scales", (3, 16, 2), "f4", ": axis 2 has length 2, in the spec 1"),
    ],
)
def test_arrays_that_do_not_fit_the_spec_are_refused(name, shape, dtype, text):
    spec = CacheSpec([FULL, CODES])
    with pytest.raises(CompatibilityError, match=name + text):
        CacheState(spec, {**arrays_of(spec), name: np.zeros(shape, dtype)}, 5)


def test_another_number_of_layers_is_refused():
    """The error names the arrays and both numbers of layers."""
    spec = CacheSpec(
        CacheEntry(f"{i}.{role}", "full", (1, 8, 4), "float16", layer=i)
        for i in range(4)
        for role in ("keys", "values")
    )
    arrays = arrays_of(spec)
    few = {name: array for name, array in arrays.items() if name < "2"}
    with pytest.raises(CompatibilityError) as caught:
        CacheState(spec, few, 3)
    assert str(caught.value) == (
        "the arrays lack '2.keys', '2.values', '3.keys', '3.values'; the spec has 4 layers, the "
        "arrays 2"
    )
    assert caught.value.name == "2.keys" and caught.value.got == "4 arrays"
    many = {**arrays, **{f"{i}.keys": arrays["0.keys"] for i in range(4, 10)}}
    with pytest.raises(CompatibilityError, match=r"spec does not have '4.keys'.*and 2 more$"):
        CacheState(spec, many, 3)


# ---- views and positions ----


def test_full_and_quantized_tokens_are_views():
    state = state_of(FULL, INNER, CODES, STATE, length=7)
    for name, tokens in [
        ("0.keys", np.s_[:, :, :7]),
        ("0.values", np.s_[:, :7]),
        ("1.keys.scales", np.s_[:, :7]),
        ("3.state", np.s_[:]),
    ]:
        assert np.shares_memory(state.view(name), state.arrays[name])
        assert_same_bits(state.view(name), state.arrays[name][tokens])
    np.testing.assert_array_equal(state.positions("0.values"), [*range(7)] + [-1] * 9)
    assert_same_bits(state.ordered("0.values"), state.view("0.values"))
    assert not np.shares_memory(state.ordered("0.values"), state.arrays["0.values"])


def test_an_array_below_its_window_never_wraps():
    narrow = CacheEntry("s", "sliding", (4, 3), "float16", window=9, sinks=6)
    state = state_of(narrow, length=4)
    np.testing.assert_array_equal(state.positions("s"), range(4))
    with pytest.raises(CapacityError, match="s: 5 tokens do not fit into 4 positions: resize"):
        state_of(narrow, length=5)


def test_an_empty_cache_has_no_positions():
    state = state_of(CacheEntry("k", "full", (2, 0, 4), "float16"), length=0)
    assert state.positions("k").shape == (0,) and state.ordered("k").shape == (2, 0, 4)
    state.resize(4)
    assert state.arrays["k"].shape == (2, 4, 4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_ordered_accepts_any_strides(name):
    entry = CacheEntry("k", "sliding", (2, 3, 6, 4), "float16", sinks=1)
    values = random_bits((2, 3, 6, 4), np.float16)
    state = CacheState(CacheSpec([entry]), {"k": layout(name, np.nan_to_num(values))}, 9)
    expected = np.nan_to_num(values)[:, :, [0, 4, 5, 1, 2, 3]]
    np.testing.assert_array_equal(state.positions("k"), [0, 6, 7, 8, 4, 5])
    assert_same_bits(state.ordered("k"), expected)


@pytest.mark.parametrize("entry", [STATE, CONV, BLOB])
def test_kinds_without_a_sequence_have_no_positions(entry):
    state = state_of(entry)
    for method in (state.positions, state.ordered):
        with pytest.raises(CompatibilityError, match=f"{entry.name}: a {entry.kind} entry has no"):
            method(entry.name)
    assert state.view(entry.name) is state.arrays[entry.name]


def test_an_unknown_name_is_an_error_with_a_hint():
    state = state_of(FULL)
    for method in (state.view, state.positions, state.ordered):
        with pytest.raises(TensorNotFoundError, match=r"no array '0.key'; did you mean '0.keys'"):
            method("0.key")


# ---- resize, trim, crop ----


ENTRIES = [FULL, INNER, CODES, RING, WIDE, STATE, CONV]


@settings(max_examples=tries(60), deadline=None)
@given(
    st.lists(st.sampled_from(ENTRIES), min_size=1, unique=True),
    st.integers(0, 40),
    st.lists(
        st.tuples(st.sampled_from(["resize", "trim", "crop", "advance"]), st.integers(0, 30)),
        max_size=8,
    ),
)
def test_operations_agree_with_the_tokens_by_position(entries, length, steps):
    """After any operations each position holds the elements that it held before."""
    limit = 40 if all(entry is RING or entry.seq_axis is None for entry in entries) else 16
    state = state_of(*entries, length=min(length, limit))
    untouched = {e.name: state.arrays[e.name] for e in entries if e.seq_axis is None}

    def tokens():
        values_by_position = {}
        for entry in state.spec:
            for name in entry.arrays if entry.seq_axis is not None else ():
                at = state.positions(name)
                for slot in np.flatnonzero(at >= 0):
                    elements = np.take(state.arrays[name], slot, entry.seq_axis)
                    values_by_position[name, at[slot]] = elements.tobytes()
        return values_by_position

    for operation, number in steps:
        before, old, arrays = tokens(), (state.spec, state.length), dict(state.arrays)
        try:
            getattr(state, operation)(number)
        except (CapacityError, CompatibilityError):
            assert (state.spec, state.length) == old
            assert all(state.arrays[name] is array for name, array in arrays.items())
            continue
        after = tokens()
        if operation == "resize":
            assert after == before
            for entry in state.spec:
                if entry.kind in ("full", "quantized"):
                    assert entry.seq_length == number
        elif operation == "advance":
            assert state.length == old[1] + number
        else:
            remaining = number if operation == "crop" else old[1] - number
            assert state.length == remaining
            assert after == {key: value for key, value in before.items() if key[1] < remaining}
        for name, array in untouched.items():
            assert state.arrays[name] is array


@pytest.mark.parametrize("capacity", [10, 12, 16, 40])
def test_resize_moves_the_tokens_and_zeroes_the_rest(capacity):
    state = state_of(FULL, INNER, CODES, RING, STATE, length=10)
    old = dict(state.arrays)
    state.resize(capacity)
    assert state.capacity == capacity and state.spec["0.values"].shape == (4, capacity)
    for name, axis in (("0.keys", 2), ("0.values", 1), ("1.keys", 1), ("1.keys.biases", 1)):
        new, before = (np.moveaxis(a, axis, 0) for a in (state.arrays[name], old[name]))
        np.testing.assert_array_equal(new[:10], before[:10])
        assert len(new) == capacity and (capacity == 16 or not new[10:].any())
    assert state.arrays["1.values"] is old["1.values"]  # its window is full
    assert state.arrays["3.state"] is old["3.state"]
    if capacity == 16:
        assert state.arrays["0.keys"] is old["0.keys"]


def test_resize_grows_a_sliding_entry_up_to_its_window():
    state = state_of(WIDE, FULL, length=12)
    old = state.arrays["2.keys"]
    state.resize(100)
    assert state.arrays["2.keys"].shape == (20, 3)
    np.testing.assert_array_equal(state.arrays["2.keys"][:12], old[:12])
    state.resize(12)
    assert state.arrays["2.keys"].shape == (12, 3) and state.spec["2.keys"].window == 20


def test_resize_refuses_tokens_that_do_not_fit():
    state = state_of(INNER, WIDE, length=10)
    error = assert_refused(
        state, CapacityError, "0.values: 10 tokens do not fit into 9 positions", "resize", 9
    )
    assert (error.name, error.expected, error.got) == ("0.values", "10 or more", "9")
    wrapped = state_of(RING, STATE, length=100)
    assert_refused(wrapped, CapacityError, "6 tokens do not fit into 5 positions", "resize", 5)
    wrapped.resize(6)
    for bad in (0, -3):
        assert_refused(wrapped, CapacityError, "capacity must be at least 1", "resize", bad)
    assert_refused(wrapped, TypeError, "capacity must be an integer", "resize", 8.0)


def test_resize_without_memory_keeps_the_state(monkeypatch):
    from mlstate.kv import _cache_state

    state, calls = state_of(FULL, INNER, CODES), []

    def failing(*args, **more):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("no memory")
        return original(*args, **more)

    original = _cache_state.compact_kv_state
    monkeypatch.setattr(_cache_state, "compact_kv_state", failing)
    assert_refused(state, MemoryError, "no memory", "resize", 32)
    state.resize(32)


def test_opaque_entry_refuses_operations():
    state = state_of(FULL, BLOB)
    assert_refused(
        state, CompatibilityError, "blob: an opaque entry cannot be resized", "resize", 20
    )
    assert_refused(state, CompatibilityError, "blob: an opaque entry cannot be trimmed", "trim", 1)
    state.resize(16)  # no change
    state.trim(0)
    state.quantize(group=8)  # of the other entry
    assert state.spec["blob"] == BLOB


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (STATE, "3.state: a recurrent state cannot be trimmed: every token changed all of it"),
        (CONV, "3.conv: a convolution state cannot be trimmed: it keeps the last inputs only"),
        (BLOB, "blob: an opaque entry cannot be trimmed: its layout is unknown"),
        (RING, "1.values: a sliding entry cannot be trimmed: it has evicted 4 tokens"),
    ],
)
def test_an_entry_that_cannot_go_back_refuses_for_all(entry, text):
    """Restoring keys without the recurrent state gave wrong answers elsewhere."""
    state = state_of(FULL, entry)
    remedy = "; restore an earlier copy of it, or prefill the first 8 tokens again"
    error = assert_refused(state, CompatibilityError, text + remedy, "trim", 2)
    assert (error.name, error.expected, error.got) == (entry.name, "10 tokens", "8 tokens")
    assert_refused(state, CompatibilityError, text, "crop", 8)
    state.trim(0)
    state.crop(10)
    assert state.length == 10


def test_trim_drops_and_crop_keeps():
    state = state_of(FULL, WIDE, CODES)
    state.trim(3)
    assert state.length == 7
    state.crop(2)
    assert state.length == 2
    old = dict(state.arrays)
    for operation, verb in (("trim", "drop"), ("crop", "keep")):
        text = f"cannot {verb} 3 tokens: the cache has 2"
        error = assert_refused(state, CapacityError, text, operation, 3)
        assert (error.expected, error.got) == ("0..2", "3")
        assert_refused(state, CapacityError, "n must be at least 0", operation, -1)
        assert_refused(state, TypeError, "n must be an integer", operation, 1.0)
    state.trim(2)
    assert state.length == 0 and dict(state.arrays) == old


def test_dropped_tokens_do_not_come_back_after_a_resize():
    state = state_of(FULL)
    state.trim(4)
    state.resize(32)
    assert not state.arrays["0.keys"][:, :, 6:].any()


def test_advance_counts_tokens_that_a_model_wrote():
    state = state_of(FULL, RING, STATE)
    state.arrays["0.keys"][:, :, 10:13] = 5
    state.advance(3)
    assert state.length == 13 and (state.view("0.keys")[:, :, 10:] == 5).all()
    assert_refused(state, CapacityError, "0.keys: 17 tokens do not fit into 16", "advance", 4)
    assert_refused(state, CapacityError, "n must be at least 0", "advance", -1)


# ---- other ----


def test_torch_tensors_stay_torch_tensors():
    torch = pytest.importorskip("torch")
    spec = CacheSpec([FULL, RING])
    arrays = {name: torch.from_numpy(a) for name, a in arrays_of(spec).items()}
    state = CacheState(spec, arrays, 8)
    assert state.arrays["0.keys"] is arrays["0.keys"]
    assert state.view("0.keys").data_ptr() == arrays["0.keys"].data_ptr()
    np.testing.assert_array_equal(state.positions("1.values"), [0, 1, 6, 7, 4, 5])
    in_order = arrays["1.values"][:, [0, 1, 4, 5, 2, 3]]
    np.testing.assert_array_equal(state.ordered("1.values"), in_order.numpy())
    state.resize(20)
    assert torch.equal(state.arrays["0.keys"][:, :, :8], arrays["0.keys"][:, :, :8])
    assert state.arrays["0.keys"].shape == (2, 3, 20, 8)
    with pytest.raises(CompatibilityError, match=r"0.keys: the array is float32"):
        CacheState(spec, {**arrays, "0.keys": arrays["0.keys"].float()}, 8)


def test_a_state_can_be_copied_and_pickled():
    state = state_of(FULL, CODES, STATE)
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        other.resize(32)
        assert (state.capacity, other.capacity, other.length) == (16, 32, 10)
        assert_same_bits(other.view("0.keys"), state.view("0.keys"))


def test_the_repr_and_the_html_show_the_tokens():
    state = state_of(FULL, RING, STATE)
    assert repr(state) == (
        "CacheState(10 of 16 positions; 3 entries: 1 full, 1 sliding, 1 recurrent)"
    )
    assert repr(state_of(RING, length=1)) == "CacheState(1 token; 1 entry: 1 sliding)"
    html = state_of(FULL, RING, CacheEntry("<i>", "opaque", (3,), "uint8"))._repr_html_()
    for text in ("CacheState: 10 of 16 positions", "window 6, 2 sinks", "&lt;i&gt;", "tokens held"):
        assert text in html
    assert "<i>" not in html
