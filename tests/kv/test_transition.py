"""Expanding and compacting caches: every dtype, length and layout compared with NumPy."""

import functools

import numpy as np
import pytest
from kv_model import (
    ALL_DTYPES,
    LAYOUTS,
    PLAIN,
    REGISTERED,
    assert_same_bits,
    assert_same_values,
    cache,
    dtype_of,
    expand,
    layout,
    random_bits,
)

import mlstate
from mlstate import kv
from mlstate._common.dtypes import PACKED
from mlstate.kv import compact_kv_state, transition_kv_state

CONVERTIBLE = ["float16", "bfloat16", "float32", "float64"]


# ---- lengths and positions ----


@pytest.mark.parametrize("length", range(4))
@pytest.mark.parametrize("target", range(7))
def test_moves_between_all_short_lengths(length, target):
    source = cache(length)
    for position in (None, *range(length + 1)) if target >= length else ():
        got = transition_kv_state(source, target, position, 9.0)
        assert_same_bits(got, expand(source, target, position, 9.0))
    for position in range(min(length, target) + 1):
        got = compact_kv_state(source, target, position)
        assert_same_bits(got, expand(source, target, position))
        assert not np.shares_memory(got, source)


@pytest.mark.parametrize(
    "shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0), (0, 0, 0, 0), (1, 1, 1, 1)]
)
def test_empty_axes(shape):
    source = np.ones(shape, np.float32)
    assert_same_bits(transition_kv_state(source, 6), expand(source, 6))
    assert_same_bits(compact_kv_state(source, 2, 0), expand(source, 2, 0))
    out = np.full((*shape[:2], 6, shape[3]), 7, np.float64)
    assert transition_kv_state(source, 6, 0, out=out) is out and not out.any()


def test_unchanged_size_returns_the_source():
    source = cache()
    assert transition_kv_state(source, 8) is source
    assert transition_kv_state(source, 8, 8) is source
    assert transition_kv_state(source, 8, 8, 3.0) is source


def test_every_other_request_returns_new_memory():
    source = cache()
    for moved in (
        transition_kv_state(source, 8, 7),
        transition_kv_state(source, 8, dtype=source.dtype),
        transition_kv_state(source, 9),
        compact_kv_state(source, 8, 8),
    ):
        assert not np.shares_memory(moved, source)
    out = np.empty_like(source)
    assert transition_kv_state(source, 8, out=out) is out
    assert_same_bits(out, source)


@pytest.mark.parametrize(
    "integer", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.int64, np.uint64]
)
def test_numpy_integers_are_lengths(integer):
    source = cache()
    assert_same_bits(transition_kv_state(source, integer(100), integer(5)), expand(source, 100, 5))
    assert_same_bits(compact_kv_state(source, integer(6), integer(5)), expand(source, 6, 5))
    assert kv.validate_state_shapes([integer(n) for n in (1, 2, 3, 4)], (1, 2, 3, 4)) is True


def test_names_at_the_top_are_the_same_functions():
    assert mlstate.transition_kv_state is transition_kv_state
    assert mlstate.compact_kv_state is compact_kv_state


def test_the_arguments_have_the_peers_names_and_order():
    source = cache()
    expected = expand(source, 12, 5, 2.0, np.float32)
    assert_same_bits(transition_kv_state(source, 12, 5, 2.0, np.float32), expected)
    got = transition_kv_state(
        source_state=source,
        target_seq_length=12,
        current_position=5,
        pad_value=2.0,
        dtype=np.float32,
    )
    assert_same_bits(got, expected)
    got = compact_kv_state(
        source_state=source, target_seq_length=6, current_position=5, dtype=np.float32
    )
    assert_same_bits(got, expand(source, 6, 5, 0, np.float32))


# ---- padding ----


@pytest.mark.parametrize("name", CONVERTIBLE)
@pytest.mark.parametrize("pad", [0.0, -0.0, 1.0, -2.5, 0.1, float("inf"), float("-inf")])
def test_pads_floats(name, pad):
    dtype = dtype_of(name)
    source = random_bits((2, 2, 3, 5), dtype)
    assert_same_bits(transition_kv_state(source, 8, 2, pad), expand(source, 8, 2, pad))


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_pads_with_nan(name):
    got = transition_kv_state(np.zeros((1, 1, 1, 3), dtype_of(name)), 4, 1, float("nan"))
    assert (got[:, :, 1:] != got[:, :, 1:]).all() and not (got[:, :, :1] != 0).any()


@pytest.mark.parametrize("dtype", [d for d in PLAIN if d.kind in "iub"], ids=str)
def test_pads_integers_exactly_or_refuses(dtype):
    source = np.ones((1, 2, 2, 3), dtype)
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    for pad in {0, 1, low, high if high < 2**53 else 2**53}:
        assert_same_bits(transition_kv_state(source, 4, 1, pad), expand(source, 4, 1, pad))
    for pad in (0.5, float(high) * 4, low - 1000.0 * (1 - low), float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cannot be stored as"):
            transition_kv_state(source, 4, 1, pad)


@pytest.mark.parametrize("name", ["complex64", *REGISTERED[1:]])
def test_other_dtypes_are_padded_with_zero_only(name):
    source = random_bits((1, 1, 2, 3), dtype_of(name))
    with pytest.raises(mlstate.CompatibilityError, match="only be padded with 0, not 1"):
        transition_kv_state(source, 4, pad_value=1.0)


@pytest.mark.parametrize(("name", "largest"), [("float16", 65519.9), ("float32", 3.4028235e38)])
def test_a_pad_beyond_the_range_is_refused(name, largest):
    source = np.zeros((1, 1, 1, 2), name)
    assert np.isfinite(transition_kv_state(source, 2, 0, largest)).all()
    with pytest.raises(ValueError, match=f"beyond the range of {name}"):
        transition_kv_state(source, 2, 0, -2 * largest)


def test_a_pad_is_a_number():
    for pad in ("0", None, [0.0], 1j):
        with pytest.raises(TypeError, match="pad_value must be a number, got"):
            transition_kv_state(cache(), 12, pad_value=pad)
    with pytest.raises(ValueError, match="pad_value is beyond the range"):
        transition_kv_state(cache(), 12, pad_value=10**400)
    assert_same_bits(
        transition_kv_state(cache(), 12, pad_value=np.float16(1.5)), expand(cache(), 12, None, 1.5)
    )


# ---- dtypes ----


@functools.cache
def bits_to_convert(name):
    """Every 16-bit pattern; for wider types the edges of every rounding, and random bits."""
    dtype = dtype_of(name)
    if dtype.itemsize == 2:
        return np.arange(1 << 16, dtype=np.uint16).view(dtype)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)].astype(dtype)
    brains = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    brains = brains[np.isfinite(brains)].astype(dtype)
    edges = [halves, brains]
    # the ties between two neighbours, and the values next to the ties
    with np.errstate(all="ignore"):
        edges += [halves[:-1] / 2 + halves[1:] / 2, brains[:-1] / 2 + brains[1:] / 2]
    around = [e.view(unsigned) + np.array(d).astype(unsigned) for e in edges for d in (0, 1, -1)]
    random = random_bits((50_000,), unsigned)
    return np.concatenate([*around, random]).view(dtype)


@pytest.mark.parametrize("to", CONVERTIBLE)
@pytest.mark.parametrize("name", CONVERTIBLE)
def test_converts_as_numpy_and_ml_dtypes_do(name, to):
    values = bits_to_convert(name)
    count = values.size // 7 * 7
    source = values[:count].reshape(1, 1, -1, 7)
    with np.errstate(all="ignore"):
        if (name, to) == ("float64", "bfloat16"):  # by way of float32, as in ml_dtypes and torch
            values = values.astype(np.float32)
        expected = values.astype(dtype_of(to))
    got = transition_kv_state(source, source.shape[2] + 1, dtype=to)
    assert_same_values(got[0, 0, :-1].reshape(-1), expected[:count])


@pytest.mark.parametrize(
    "dtype", ["float32", np.float32, np.dtype("<f4"), "f4", "<f4", "single"], ids=repr
)
def test_dtype_accepts_numpy_forms(dtype):
    got = transition_kv_state(cache(), 12, 5, dtype=dtype)
    assert_same_bits(got, expand(cache(), 12, 5, 0, np.float32))


@pytest.mark.parametrize("name", [name for name in REGISTERED if name not in PACKED])
def test_dtype_names_of_ml_dtypes(name):
    dtype = dtype_of(name)
    source = random_bits((1, 2, 3, 4), dtype)
    assert transition_kv_state(source, 3, 2, dtype=name).dtype == dtype
    assert compact_kv_state(source, 3, 2, dtype=dtype).dtype == dtype
    assert compact_kv_state(source, 3, 2, dtype=dtype.type).dtype == dtype


INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
WHOLE = [n for n in CONVERTIBLE if n != "bfloat16"] + INTEGERS


@pytest.mark.parametrize("name", [n for n in ALL_DTYPES if n not in [*CONVERTIBLE, *INTEGERS]])
def test_other_dtypes_refuse_conversion(name):
    source = random_bits((1, 1, 2, 3), dtype_of(name))
    for target in ("float32", "int32"):
        with pytest.raises(mlstate.CompatibilityError, match=f"{name} does not convert to") as e:
            transition_kv_state(source, 4, dtype=target)
        assert (e.value.expected, e.value.got) == (name, target)
        with pytest.raises(mlstate.CompatibilityError, match=f"{target} does not convert"):
            transition_kv_state(np.zeros((1, 1, 2, 3), target), 4, dtype=dtype_of(name))


@pytest.mark.parametrize("target", WHOLE)
@pytest.mark.parametrize("name", WHOLE)
def test_integers_and_floats_convert(name, target):
    source = np.arange(2 * 6 * 5).reshape(1, 2, 6, 5).astype(name)
    for got in (
        transition_kv_state(source, 9, 4, pad_value=1, dtype=target),
        transition_kv_state(source, 9, 4, pad_value=1, out=np.empty((1, 2, 9, 5), target)),
    ):
        assert got.dtype == target
        assert np.array_equal(got[:, :, :4], source[:, :, :4].astype(target))
        assert (got[:, :, 4:] == 1).all()
    assert np.array_equal(compact_kv_state(source, 4, 3, dtype=target)[:, :, :3], source[:, :, :3])


def test_floats_become_integers_truncated_toward_zero():
    source = np.array([-1.9, -0.5, 0.5, 1.9, 127.9, -128.9]).reshape(1, 1, 2, 3)
    for name in ("float16", "float32", "float64"):
        got = transition_kv_state(source.astype(name), 2, dtype="int8")
        assert got.ravel().tolist() == [-1, 0, 0, 1, 127, -128]


@pytest.mark.parametrize(
    ("value", "name", "target"),
    [
        (np.nan, "float32", "int32"), (np.inf, "float16", "int64"), (128, "float32", "int8"),
        (-1, "float64", "uint8"), (2.0**63, "float64", "int64"), (2.0**64, "float32", "uint64"),
        (300, "int16", "uint8"), (-1, "int8", "uint64"), (70000, "int32", "float16"),
    ],
)  # fmt: skip
def test_tokens_out_of_range_are_refused_before_writing(value, name, target):
    source = np.zeros((1, 1, 3, 2), name)
    source[0, 0, 1, 1] = value
    out = np.full((1, 1, 4, 2), 7, target)
    for options in ({"dtype": target}, {"out": out}):
        with pytest.raises(ValueError, match=f"NaN or out of the range of {target}"):
            transition_kv_state(source, 4, **options)
    assert (out == 7).all()
    transition_kv_state(source, 4, 1, out=out)  # so the position is not in the cache
    assert not out.any()


@pytest.mark.parametrize(
    "dtype", ["S3", "U2", "O", "M8[s]", "m8[s]", "complex128", "longdouble", "V4", "i4,f4"]
)
def test_dtypes_that_the_core_does_not_have(dtype):
    source = np.empty((1, 1, 2, 3), dtype)
    with pytest.raises(mlstate.CompatibilityError, match=r"source_state: dtype .* not supported"):
        transition_kv_state(source, 4)
    with pytest.raises(mlstate.CompatibilityError, match="not supported"):
        transition_kv_state(cache(), 12, dtype=dtype)
    with pytest.raises(mlstate.CompatibilityError, match=r"out: dtype .* not supported"):
        transition_kv_state(cache(), 8, out=np.empty((2, 3, 8, 5), dtype))


def test_a_dtype_that_is_none():
    for dtype in ("no dtype", 17, object()):
        with pytest.raises(TypeError):
            transition_kv_state(cache(), 12, dtype=dtype)


@pytest.mark.parametrize("name", ["float16", "float64", "int32", "uint64", "complex64"])
def test_the_result_keeps_the_other_byte_order(name):
    source = random_bits((2, 3, 4, 5), np.dtype(name).newbyteorder())
    got = transition_kv_state(source, 7, 3)
    assert got.dtype.byteorder == source.dtype.byteorder
    assert_same_bits(got, expand(source, 7, 3))
    native = transition_kv_state(source, 7, 3, dtype=name)
    assert native.dtype.isnative
    assert_same_bits(native, expand(source, 7, 3, 0, np.dtype(name)))
    back = transition_kv_state(native, 9, 3, dtype=source.dtype)
    assert_same_bits(back, expand(native, 9, 3, 0, source.dtype))


# ---- layouts ----


@pytest.mark.parametrize("name", ["int8", "float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("of_source", LAYOUTS)
def test_sources_of_any_layout(of_source, name):
    values = cache(9, name)
    source = layout(of_source, values)
    before = source.copy()
    got = transition_kv_state(source, 14, 6)
    np.testing.assert_array_equal(got, expand(values, 14, 6))
    assert got.dtype == source.dtype
    np.testing.assert_array_equal(source, before)


@pytest.mark.parametrize("of_target", LAYOUTS)
@pytest.mark.parametrize("of_source", LAYOUTS)
@pytest.mark.parametrize("to", ["float16", "float32"])
def test_out_of_any_layout(of_source, of_target, to):
    values = cache(9)
    out = layout(of_target, np.full((2, 3, 14, 5), 77, to))
    base = out if out.base is None else out.base
    assert transition_kv_state(layout(of_source, values), 14, 6, 2.0, out=out) is out
    np.testing.assert_array_equal(out, expand(values, 14, 6, 2.0, np.dtype(to)))
    out[...] = 0
    assert not base.any(), "wrote beside its view"


def test_a_broadcast_source():
    source = np.broadcast_to(np.arange(5, dtype=np.float16), (2, 3, 4, 5))
    assert_same_bits(transition_kv_state(source, 6), expand(source, 6))
    source = np.broadcast_to(np.arange(4, dtype=np.float32)[:, None], (2, 3, 4, 5))
    assert_same_bits(compact_kv_state(source, 3, 3, np.float16), expand(source, 3, 3, 0, "f2"))


def test_a_read_only_source(tmp_path):
    source = cache()
    source.flags.writeable = False
    assert_same_bits(transition_kv_state(source, 12), expand(source, 12))
    np.save(tmp_path / "cache.npy", source)
    mapped = np.load(tmp_path / "cache.npy", mmap_mode="r")
    got = transition_kv_state(mapped, 12)
    assert type(got) is np.ndarray
    assert_same_bits(got, expand(source, 12))


# ---- transition info ----


def test_transition_info():
    info = kv.get_transition_info(256, 512, 200)
    assert list(info.items()) == [
        ("source_seq_length", 256),
        ("target_seq_length", 512),
        ("current_position", 200),
        ("valid_tokens", 200),
        ("padded_positions_source", 56),
        ("padded_positions_target", 312),
        ("expansion_factor", 2.0),
        ("additional_capacity", 256),
    ]


def test_transition_info_of_a_compaction_that_does_not_fit():
    info = kv.get_transition_info(512, 256, 300)
    assert info["padded_positions_target"] == -44
    assert (info["expansion_factor"], info["additional_capacity"]) == (0.5, -256)


@pytest.mark.parametrize("integer", [np.uint8, np.int8, np.int64])
def test_transition_info_does_not_wrap(integer):
    info = kv.get_transition_info(integer(100), 512, integer(120))
    assert info == kv.get_transition_info(100, 512, 120)
    assert {type(value) for value in info.values()} == {int, float}


def test_transition_info_refuses_invalid_lengths():
    with pytest.raises(ValueError, match="source_seq_length is 0"):
        kv.get_transition_info(0, 512, 0)
    for arguments in ((256.0, 512, 2), (256, "512", 2), (256, 512, None)):
        with pytest.raises(TypeError):
            kv.get_transition_info(*arguments)


@pytest.mark.parametrize("kind", [tuple, list, np.array])
def test_shapes_that_go_together(kind):
    source = kind((36, 1, 256, 64))
    assert kv.validate_state_shapes(source, kind((36, 1, 512, 64))) is True
    assert kv.validate_state_shapes(source, source) is True


@pytest.mark.parametrize(
    ("axis", "label"), [(0, "layers"), (1, "heads"), (3, "head_dim")], ids=["0", "1", "3"]
)
def test_shapes_of_different_models(axis, label):
    source, target = [2, 2, 2, 2], [2, 2, 4, 2]
    target[axis] = 3
    with pytest.raises(mlstate.CompatibilityError, match=f"^{label} differ: .* 2, .* 3;") as caught:
        kv.validate_state_shapes(source, target)
    assert isinstance(caught.value, ValueError)
    assert (caught.value.expected, caught.value.got) == ("2", "3")


def test_a_shape_that_is_shorter():
    with pytest.raises(mlstate.CapacityError, match=r"256 .* 512: compact") as caught:
        kv.validate_state_shapes((1, 1, 512, 2), (1, 1, 256, 2))
    assert (caught.value.expected, caught.value.got) == ("at least 512", "256")


@pytest.mark.parametrize("shape", [(), (2,), (2, 3, 4), (1, 2, 3, 4, 5), (1,) * 65])
def test_invalid_cache_shapes_are_refused(shape):
    for arguments in ((shape, (1, 2, 3, 4)), ((1, 2, 3, 4), shape)):
        with pytest.raises(mlstate.CompatibilityError, match="dimensions"):
            kv.validate_state_shapes(*arguments)


def test_shapes_that_are_none():
    for shape in ("abcd", (1, 2, 3.0, 4), (1, 2, None, 4), 17, None):
        with pytest.raises(TypeError):
            kv.validate_state_shapes(shape, (1, 2, 3, 4))
    with pytest.raises(mlstate.CompatibilityError, match="negative dimension -1"):
        kv.validate_state_shapes((1, 2, -1, 4), (1, 2, 3, 4))
    with pytest.raises(mlstate.CapacityError, match="64 bits"):
        kv.validate_state_shapes((1, 2, 2**64, 4), (1, 2, 3, 4))


def test_a_shape_that_changes_while_it_is_read():
    class Emptying:
        def __index__(self):
            shape.clear()
            return 2

    shape = [Emptying(), 3, 4, 5]
    assert kv.validate_state_shapes(shape, (2, 3, 4, 5)) is True
    assert shape == []


def test_shapes_by_name_are_compared_one_by_one():
    source = {"k": (2, 1, 256, 32), "v": (2, 1, 256, 32)}
    assert kv.validate_state_shapes(source, {**source, "k": (2, 1, 512, 32)}) is True
    with pytest.raises(mlstate.errors.CompatibilityError, match=r"^v: .*heads") as caught:
        kv.validate_state_shapes(source, {**source, "v": (2, 4, 256, 32)})
    assert caught.value.name == "v"
    with pytest.raises(mlstate.errors.CapacityError, match=r"^k: "):
        kv.validate_state_shapes(source, {**source, "k": (2, 1, 128, 32)})
    with pytest.raises(
        mlstate.errors.CompatibilityError, match=r"v: the target has no such state; did you m"
    ):
        kv.validate_state_shapes({"v": source["v"]}, {"v_": source["v"]})
    with pytest.raises(TypeError, match=r"two mappings of names to shapes.*: got dict and tuple"):
        kv.validate_state_shapes(source, (2, 1, 256, 32))
