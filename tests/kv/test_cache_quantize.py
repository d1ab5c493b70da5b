"""Quantized entries: the same bits as the definition in NumPy, and all entries or none."""

import sys
import time
from collections import deque

import child
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_model import LAYOUTS, assert_refused, assert_same_bits, dtype_of, layout
from thread_team import calling_in_background
from traced_memory import traced
from tries import tries

from mlstate import CapacityError, CompatibilityError, TensorNotFoundError, _core
from mlstate.kv import CacheEntry, CacheSpec, CacheState
from mlstate.kv.records import QuantizationLoss

DTYPES = ["float16", "bfloat16", "float32"]
BITS = [2, 3, 4, 5, 6, 8]


def join(codes, bits):
    """Codes of the last axis as one string of bits in words, the first code in the lowest bits."""
    single = codes[..., None] >> np.arange(bits, dtype=np.uint32) & 1
    string = single.reshape(*codes.shape[:-1], codes.shape[-1] * bits).astype(np.uint8)
    return np.packbits(string, axis=-1, bitorder="little").view("<u4").astype(np.uint32)


def split(words, bits):
    """The reverse of `join`."""
    string = np.unpackbits(words.astype("<u4").view(np.uint8), axis=-1, bitorder="little")
    single = string.reshape(*words.shape[:-1], words.shape[-1] * 32 // bits, bits)
    return (single.astype(np.uint32) << np.arange(bits, dtype=np.uint32)).sum(-1)


def quantize(values, bits, group):
    """The definition, in the words of mlx: codes, scales and biases of the last axis."""
    levels = np.float32(2**bits - 1)
    x = values.astype(np.float32).reshape(*values.shape[:-1], values.shape[-1] // group, group)
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    from_low = np.abs(low) > np.abs(high)
    scales = np.maximum((high - low) / levels, np.float32(1e-7))
    scales = np.where(from_low, scales, -scales)
    edges = np.where(from_low, low, high)
    steps = np.rint(edges / scales)
    with np.errstate(divide="ignore", invalid="ignore"):
        scales = np.where(steps != 0, edges / steps, scales)
    biases = np.where(steps != 0, edges, np.float32(0))
    codes = np.clip(np.rint((x - biases) / scales), 0, levels).astype(np.uint32)
    words = join(codes.reshape(values.shape), bits)
    return words, scales[..., 0].astype(values.dtype), biases[..., 0].astype(values.dtype)


def dequantize(words, scales, biases, bits, group):
    codes = split(words, bits).astype(np.float32).reshape(*scales.shape, group)
    wide = [array.astype(np.float32)[..., None] for array in (scales, biases)]
    values = wide[0] * codes + wide[1]
    return values.reshape(*words.shape[:-1], scales.shape[-1] * group).astype(scales.dtype)


def normal(shape, dtype="float16", seed=0, scale=1.0):
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return values.astype(dtype_of(dtype))


def state_of(arrays, length, **more):
    """A state of full entries with the sequence before the last axis."""
    spec = CacheSpec(
        CacheEntry(name, "full", array.shape, array.dtype, **more) for name, array in arrays.items()
    )
    return CacheState(spec, arrays, length)


@settings(max_examples=tries(60), deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(
        [
            *((bits, sizes) for bits in (4, 8) for sizes in [(8, 1), (8, 3), (24, 5)]),
            *((bits, sizes) for bits in BITS for sizes in [(64, 1), (32, 3), (4096, 1), (1024, 5)]),
        ]
    ),
    st.tuples(st.integers(0, 3), st.integers(1, 70)),
    st.sampled_from([1e-5, 1.0, 300.0]),
    st.data(),
)
def test_codes_match_the_definition(dtype, parameters, outer, scale, data):
    bits, (group, groups) = parameters
    values = normal((*outer, group * groups), dtype, 1, scale)
    values[..., :group] = np.abs(values[..., :group])  # a group without negative numbers
    values[:, ::7] = 0
    length = data.draw(st.integers(0, outer[1]))
    state = state_of({"k": values}, length)
    state.quantize(bits, group)
    expected = quantize(values[:, :length], bits, group)
    for (name, array), part in zip(state.arrays.items(), expected, strict=True):
        assert_same_bits(state.view(name), part)
        assert not array[:, length:].any()
    assert state.spec["k"] == CacheEntry(
        "k", "quantized", values.shape, dtype, bits=bits, group=group
    )
    parts = [array.copy() for array in state.arrays.values()]
    state.dequantize()
    assert state.spec == state_of({"k": values}, 0).spec
    assert_same_bits(state.arrays["k"], dequantize(*parts, bits, group))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_arrays_may_have_any_strides(name, bits):
    values = normal((2, 3, 7, 64))
    group = 16 if bits % 4 == 0 else 32
    state = state_of({"k": layout(name, values)}, 7)
    state.quantize(bits, group)
    expected = quantize(values, bits, group)
    for array, part in zip(state.arrays.values(), expected, strict=True):
        assert_same_bits(array, part)
    arrays = {key: layout(name, array) for key, array in state.arrays.items()}
    again = CacheState(state.spec, arrays, 7)
    again.dequantize()
    assert_same_bits(again.arrays["k"], dequantize(*expected, bits, group))


@pytest.mark.parametrize("axis", [0, 1])
def test_the_sequence_may_be_any_axis_but_the_last(axis):
    values = normal((6, 5, 8), "float32")
    state = state_of({"k": values}, 4, seq_axis=axis)
    state.quantize(group=8)
    tokens = (slice(None),) * axis + (slice(4),)
    for name, part in zip(state.arrays, quantize(values[tokens], 8, 8), strict=True):
        assert_same_bits(state.view(name), part)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_at_most_one_scale(dtype, bits):
    """The bound of the docstring: one scale, plus the rounding of scale and bias."""
    values = normal((4, 256, 64), dtype, 3)
    state = state_of({"k": values}, 256)
    state.quantize(bits, 32)
    scales = np.repeat(np.abs(state.arrays["k.scales"].astype(np.float64)), 32, axis=-1)
    state.dequantize()
    error = np.abs(state.arrays["k"].astype(np.float64) - values.astype(np.float64))
    unit = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24}[dtype]
    rounding = unit * (2**bits * scales + 2 * np.abs(values.astype(np.float64)).max())
    assert (error <= 1.001 * scales + rounding).all()


def test_large_arrays_are_divided_among_threads():
    values = normal((16, 2048, 128), "float32")
    state = state_of({"k": values}, 2048)
    state.quantize(4)
    expected = quantize(values, 4, 64)
    for array, part in zip(state.arrays.values(), expected, strict=True):
        assert_same_bits(array, part)


def test_other_threads_run_during_a_call():
    """No thread is made to give up the GIL here, so the other one runs if the call releases it."""
    values, codes = normal((8, 4096, 128), "float32"), np.zeros((8, 4096, 32), np.uint32)
    scales, biases = np.zeros((2, 8, 4096, 2), np.float32)
    noted = deque(maxlen=100_000)

    def note():
        noted.append(time.perf_counter())
        time.sleep(1e-5)

    def runs_during(function):
        start = time.perf_counter()
        function(values, codes, scales, biases, 8, 64)
        end = time.perf_counter()
        return any(start < moment < end for moment in noted.copy())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        with calling_in_background(note):
            for function in (_core.kv_quantize, _core.kv_dequantize):
                assert any(runs_during(function) for _ in range(100))
    finally:
        sys.setswitchinterval(interval)


def test_labelled_bfloat16_integers_are_quantized():
    """Arrays of a file that was read without ml_dtypes."""
    values = normal((2, 5, 64), "bfloat16")
    labelled = np.dtype("u2", metadata={"mlstate.dtype": "bfloat16"})
    state = state_of({"k": values.view(labelled)}, 5)
    assert state.spec["k"].dtype == "bfloat16"
    state.quantize()
    for array, part in zip(state.arrays.values(), quantize(values, 8, 64), strict=True):
        assert_same_bits(array, part)


# ---- all entries or none ----


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused(bad, bits):
    """The entry before the one with the value stays as it is too."""
    arrays = {"0.keys": normal((2, 9, 32)), "0.values": normal((2, 9, 32))}
    arrays["0.values"][1, 4, 17] = bad
    state = state_of(arrays, 9)
    assert_refused(state, ValueError, "0.values: a value is NaN or infinite", bits=bits, group=32)
    state.trim(5)  # the value is not a token any more
    state.quantize(bits, group=32)
    assert [entry.kind for entry in state.spec] == ["quantized"] * 2


def test_a_group_that_spans_more_than_float_is_refused():
    values = np.full((1, 4, 8), 3e38, np.float32)
    values[0, 2, 1] = -3e38
    state = state_of({"k": values}, 4)
    assert_refused(state, ValueError, "k: .* values of a group are too far apart", group=8)


def test_only_full_entries_are_quantized():
    spec = CacheSpec(
        [
            CacheEntry("full", "full", (1, 8, 16), "float16"),
            CacheEntry("ring", "sliding", (1, 8, 16), "float16"),
            CacheEntry("codes", "quantized", (1, 8, 16), "float16", bits=8, group=8),
            CacheEntry("state", "recurrent", (16,), "float16"),
            CacheEntry("conv", "conv", (16,), "float16"),
            CacheEntry("blob", "opaque", (16,), "uint8"),
        ]
    )
    arrays = {
        name: np.zeros(shape, dtype) for e in spec for name, (shape, dtype) in e.arrays.items()
    }
    state = CacheState(spec, arrays, 3)
    for name, text in {
        "ring": "a sliding entry is not quantized: kind 'quantized' has no window",
        "codes": "the entry is quantized already",
        "state": "every token changes it, so errors add up",
        "conv": "a convolution state is not quantized",
        "blob": "an opaque entry is not quantized: its layout is unknown",
    }.items():
        error = assert_refused(state, CompatibilityError, text, names=["full", name], group=8)
        assert (error.name, error.expected, error.got) == (name, "full", spec[name].kind)
    text = "full: the entry has kind 'full', not 'quantized'"
    assert_refused(state, CompatibilityError, text, "dequantize", names=["codes", "full"])
    state.quantize(4, 16, names=iter(["full"]))
    assert [e.kind for e in state.spec] == [
        "quantized", "sliding", "quantized", "recurrent", "conv", "opaque"
    ]  # fmt: skip
    assert (state.spec["full"].bits, state.spec["codes"].bits) == (4, 8)
    assert state.arrays["ring"] is arrays["ring"] and state.arrays["codes"] is arrays["codes"]
    assert_refused(state, CompatibilityError, "no entry has kind 'full'")
    state.dequantize(names=["codes"])
    assert [e.kind for e in state.spec][:3] == ["quantized", "sliding", "full"]
    state.dequantize()
    assert_refused(state, CompatibilityError, "no entry has kind 'quantized'", "dequantize")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"bits": 7}, ValueError, "k: bits must be 2, 3, 4, 5, 6 or 8, got 7"),
        ({"bits": 1}, ValueError, "k: bits must be 2, 3, 4, 5, 6 or 8, got 1"),
        ({"bits": 9}, ValueError, "k: bits must be 2, 3, 4, 5, 6 or 8, got 9"),
        ({"bits": 2**32 + 4}, ValueError, "k: bits must be 2, 3, 4, 5, 6 or 8"),
        ({"bits": "8"}, TypeError, "bits must be an integer, got str"),
        ({"group": 0}, ValueError, "k: group must be a multiple of 8 up to 4096 for 8 bits"),
        (
            {"bits": 3, "group": 16},
            ValueError,
            "k: group must be a multiple of 32 up to 4096 for 3",
        ),
        ({"group": 12}, ValueError, "k: group must be a multiple of 8"),
        ({"group": 4104}, ValueError, "k: group must be a multiple of 8"),
        ({"group": 48}, CompatibilityError, "k: the last axis has 64 elements"),
        ({"group": -8}, CapacityError, "k: group -8 is negative"),
        ({"names": "k"}, TypeError, "names must be an iterable of names, got the str 'k'"),
        ({"names": ["k", "v"]}, TensorNotFoundError, "the cache has no array 'v'"),
        ({"names": [3]}, TensorNotFoundError, "the cache has no array 3"),
        ({"report": "no"}, TypeError, "report must be True or False, got str"),
        ({"report": None}, TypeError, "report must be True or False, got NoneType"),
    ],
)
def test_invalid_arguments_are_refused(change, error, text):
    assert_refused(state_of({"k": normal((2, 5, 64))}, 5), error, text, **change)


def test_entries_that_cannot_be_quantized_are_refused():
    wide = state_of({"k": normal((2, 5, 64)), "v": normal((2, 5, 64), "float64")}, 5)
    assert_refused(wide, CompatibilityError, "v: only float16, bfloat16 and float32 are quantized")
    innermost = state_of({"k": normal((2, 5, 64))}, 5, seq_axis=-1)
    assert_refused(innermost, CompatibilityError, "k: the sequence axis is the last one")


def test_the_core_refuses_arrays_of_another_shape_or_dtype():
    values, codes, parts = normal((2, 64)), np.zeros((2, 16), np.uint32), normal((2, 2))
    _core.kv_quantize(values, codes, parts, parts.copy(), 8, 32)
    with pytest.raises(CompatibilityError, match=r"codes have shape \(2, 15\) instead"):
        _core.kv_quantize(values, codes[:, :15], parts, parts, 8, 32)
    with pytest.raises(CompatibilityError, match="scales are float32 instead of float16"):
        _core.kv_dequantize(values, codes, parts.astype("f4"), parts, 8, 32)
    with pytest.raises(CompatibilityError, match="the values are float64: only float16"):
        _core.kv_quantize(values.astype("f8"), codes, parts, parts, 8, 32)
    with pytest.raises(CompatibilityError, match="codes are int32 instead of uint32"):
        _core.kv_quantize(values, codes.view(np.int32), parts, parts, 8, 32)
    with pytest.raises(CompatibilityError, match=r"scales have shape \(2,\) instead"):
        _core.kv_quantize(values, codes, parts[0], parts, 8, 32)
    with pytest.raises(CompatibilityError, match="biases are float32 instead of float16"):
        _core.kv_quantize(values, codes, parts, parts.astype("f4"), 8, 32)
    with pytest.raises(CompatibilityError, match="no axis to make groups of"):
        _core.kv_quantize(np.float16(1).reshape(()), codes, parts, parts, 8, 32)
    codes.flags.writeable = False
    with pytest.raises(ValueError, match="codes is read-only"):
        _core.kv_quantize(values, codes, parts, parts, 8, 32)
    _core.kv_dequantize(values, codes, parts, parts, 8, 32)
    values.flags.writeable = False
    with pytest.raises(ValueError, match="values is read-only"):
        _core.kv_dequantize(values, codes, parts, parts, 8, 32)


# ---- on the way to another capacity ----


@pytest.mark.parametrize("capacity", [5, 8, 9, 40])
@pytest.mark.parametrize("bits", BITS)
def test_capacity_gives_the_bits_of_resize_and_quantize(bits, capacity):
    values = normal((2, 8, 64))
    state, other = (state_of({"k": values}, 5) for _ in range(2))
    state.quantize(bits, 32, capacity=capacity)
    other.resize(capacity)
    other.quantize(bits, 32)
    assert state.spec == other.spec and state.capacity == capacity
    for name, array in state.arrays.items():
        assert_same_bits(array[:, :5], other.arrays[name][:, :5])
        assert not array[:, 5:].any()  # `resize` and `quantize` leave the codes of zeros


@pytest.mark.parametrize("capacity", [5, 8, 9, 40])
def test_values_are_computed_in_arrays_of_another_capacity(capacity):
    state = state_of({"k": normal((2, 8, 64), "float32")}, 5)
    state.quantize(3, 32)
    other = state.copy()
    state.dequantize(capacity=capacity)
    other.dequantize()
    other.resize(capacity)
    assert state.spec == other.spec
    assert_same_bits(state.arrays["k"], other.arrays["k"])


def test_capacity_moves_the_other_entries_as_resize_does():
    def new_state():
        spec = CacheSpec(
            [
                CacheEntry("0.keys", "full", (1, 16, 32), "float32"),
                CacheEntry("0.values", "full", (1, 16, 32), "float32"),
                CacheEntry("1.ring", "sliding", (1, 16, 2), "float32", window=24, next_slot=3),
                CacheEntry("2.state", "recurrent", (4,), "float32"),
            ]
        )
        arrays = {entry.name: normal(entry.shape, "float32", 2) for entry in spec}
        return CacheState(spec, arrays, 14)

    state, other = new_state(), new_state()
    old = state.arrays["2.state"]
    state.quantize(4, 32, names=["0.values"], capacity=64)
    other.resize(64)
    assert_same_bits(state.arrays["0.keys"], other.arrays["0.keys"])
    assert_same_bits(state.arrays["1.ring"], other.arrays["1.ring"])
    assert state.next_slot("1.ring") == other.next_slot("1.ring")
    assert state.arrays["2.state"] is old
    assert list(state.arrays) == [name for entry in state.spec for name in entry.arrays]
    state.dequantize(capacity=14)
    assert [entry.seq_length for entry in state.spec] == [14, 14, 14, None]


def test_a_capacity_that_tokens_do_not_fit_is_refused():
    state = state_of({"k": normal((2, 8, 64))}, 5)
    assert_refused(state, CapacityError, "k: 5 tokens do not fit into 4", capacity=4)
    assert_refused(state, CapacityError, "capacity must be at least 1, got 0", capacity=0)
    assert_refused(state, TypeError, "capacity must be an integer", capacity="8")
    state.quantize()
    assert_refused(state, CapacityError, "5 tokens do not fit", "dequantize", capacity=4)


def test_tokens_are_quantized_without_an_array_of_their_values():
    values = np.ones((16, 2048, 64), np.float32)  # 8 MiB
    state = state_of({"k": values}, 2048)
    with traced() as trace:
        state.quantize(4, capacity=4096)
    assert trace.peak < 1.1 * state.nbytes < values.nbytes / 2


# ---- the report ----


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_report_has_the_errors_of_the_tokens(dtype, bits):
    values = normal((3, 40, 96), dtype, 5)
    values[:, 33:] = np.nan  # not tokens
    state = state_of({"k": values, "v": normal((3, 40, 96), dtype, 6)}, 33)
    before = state.nbytes
    losses = state.quantize(bits, 32, names=["k"], report=True)
    assert list(losses) == ["k"]
    loss = losses["k"]
    assert isinstance(loss, QuantizationLoss)
    assert loss.bytes_before - loss.bytes_after == before - state.nbytes
    state.dequantize()
    original = values[:, :33].astype(np.float64)
    error = np.abs(state.view("k").astype(np.float64) - original)
    assert loss.max_error == error.max()
    assert loss.rms_error == pytest.approx(np.sqrt((error**2).mean()), rel=1e-12)
    relative = np.sqrt((error**2).sum() / (original**2).sum())
    assert loss.relative_error == pytest.approx(relative, rel=1e-12)


def test_a_report_of_no_values_has_no_errors():
    for values, length in ((normal((2, 5, 64)), 0), (np.zeros((2, 5, 64), np.float16), 5)):
        (loss,) = state_of({"k": values}, length).quantize(report=True).values()
        assert loss[:3] == (0.0, 0.0, 0.0)
    assert state_of({"k": values}, 5).quantize() is None


def test_the_report_of_every_instruction_set_is_the_same():
    code = """
import numpy as np
from mlstate.kv import CacheEntry, CacheSpec, CacheState
values = np.random.default_rng(0).standard_normal((3, 700, 96)).astype("f2")
for bits in (2, 3, 8):
    spec = CacheSpec([CacheEntry("k", "full", values.shape, "float16")])
    print(CacheState(spec, {"k": values}, 700).quantize(bits, 32, report=True))
"""
    assert child.run(code) == child.run(code, MLSTATE_CPU="scalar")


# ---- torch ----


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_tensors_become_arrays(dtype):
    torch = pytest.importorskip("torch")
    values = torch.randn(2, 5, 64).to(getattr(torch, dtype))
    state = state_of({"k": values}, 5)
    state.quantize()
    expected = quantize(values.float().numpy().astype(dtype_of(dtype)), 8, 64)
    for array, part in zip(state.arrays.values(), expected, strict=True):
        assert_same_bits(array, part)
