"""Attention masks, equal to their formula."""

import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from kv_model import assert_same_bits, dtype_of, mask_by_loop
from kv_model import layout as lay_out

from mlstate import CapacityError, CompatibilityError
from mlstate.kv import (
    ContextLadder,
    create_attention_size_mask,
    create_causal_mask,
    create_decode_mask,
)

FLOATS = ["float16", "bfloat16", "float32", "float64"]


def test_the_position_behind_the_last_one_has_no_row():
    for seq_length in (0, 6):
        with pytest.raises(CapacityError, match=f"current_position {seq_length} has no row") as e:
            create_decode_mask(seq_length, 2, seq_length)
        assert e.value.got == str(seq_length)


@pytest.mark.parametrize("seq_length", range(13))
def test_every_small_causal_mask(seq_length):
    for attention_size in (None, *range(seq_length + 3)):
        size = seq_length if attention_size is None else attention_size
        mask = create_causal_mask(seq_length, attention_size)
        assert_same_bits(mask, mask_by_loop(seq_length, size))


def test_the_mask_does_not_depend_on_the_position():
    masks = [create_attention_size_mask(7, 2, position) for position in range(8)]
    for earlier, later in itertools.pairwise(masks):
        assert_same_bits(earlier, later)


@pytest.mark.parametrize("seq_length", [0, 1, 2, 5, 31, 64, 100, 257])
def test_full_masks(seq_length):
    for size in (0, 1, seq_length // 2, seq_length, 10 * seq_length, 2**63 - 1):
        expected = mask_by_loop(seq_length, size, np.float32)
        assert_same_bits(create_attention_size_mask(seq_length, size, 0, dtype="f4"), expected)
        assert_same_bits(create_causal_mask(seq_length, size, dtype="f4").copy(), expected)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("fill", [-np.inf, -60000.0, -1.0, 0.0])
def test_dtypes_and_fills(name, fill):
    dtype = dtype_of(name)
    for dtype_form in (name, dtype, dtype.type):
        mask = create_attention_size_mask(5, 2, 0, dtype=dtype_form, fill=fill)
        assert_same_bits(mask, mask_by_loop(5, 2, dtype, fill))
        row = create_decode_mask(5, 2, 3, dtype=dtype_form, fill=fill)
        assert_same_bits(row, mask_by_loop(5, 2, dtype, fill, [3]))
        assert_same_bits(create_causal_mask(5, 2, dtype=dtype_form, fill=fill).copy(), mask)


def test_the_default_is_half_precision_and_minus_infinity():
    mask = create_attention_size_mask(3, 1, 0)
    assert mask.dtype == np.float16 and np.isneginf(mask[0, 0, 0, 1])
    assert mask.flags.c_contiguous and mask.flags.writeable


@pytest.mark.parametrize("dtype", [">f2", ">f4", "<f8"])
def test_byte_orders(dtype):
    assert_same_bits(create_attention_size_mask(5, 2, 0, dtype=dtype), mask_by_loop(5, 2, dtype))
    assert_same_bits(create_causal_mask(5, 2, dtype=dtype).copy(), mask_by_loop(5, 2, dtype))


@pytest.mark.parametrize("integer", [np.int8, np.uint8, np.int64, np.uint64])
def test_numpy_integers_are_lengths(integer):
    expected = mask_by_loop(100, 100)
    with np.errstate(all="raise"):
        assert_same_bits(create_attention_size_mask(*[integer(100)] * 3), expected)
        assert_same_bits(create_causal_mask(integer(100)).copy(), expected)
        assert_same_bits(create_causal_mask(integer(100), integer(7)).copy(), mask_by_loop(100, 7))
        assert create_causal_mask(integer(0)).shape == (1, 1, 0, 0)


# ---- sinks, and rows on demand ----


def attends(seq_length, attention_size, sinks, rows):
    """The definition, by a comparison for each element."""
    i, j = np.arange(*rows)[:, None], np.arange(seq_length)
    return (j <= i) & ((i - j <= attention_size) | (j < sinks))


@hypothesis.given(st.data(), st.integers(0, 40), st.integers(0, 50), st.integers(0, 50))
def test_any_rows_with_sinks(data, seq_length, attention_size, sinks):
    start = data.draw(st.integers(0, seq_length))
    stop = data.draw(st.integers(start, seq_length))
    dtype = data.draw(st.sampled_from(["f2", "f4", ">f4", "f8"]))
    rows = data.draw(st.sampled_from([(start, stop), [start, stop], (np.int8(start), stop)]))
    visible = attends(seq_length, attention_size, sinks, (start, stop))
    expected = np.where(visible, 0.0, -3.0).astype(dtype)[None, None]
    options = {"sinks": sinks, "fill": -3, "dtype": dtype}
    mask = create_attention_size_mask(seq_length, attention_size, 0, rows=rows, **options)
    assert_same_bits(mask, expected)
    out = lay_out("backwards", np.ones(expected.shape, expected.dtype))
    create_attention_size_mask(
        seq_length, attention_size, 0, rows=rows, sinks=sinks, fill=-3, out=out
    )
    assert_same_bits(out, expected)
    for position in range(start, stop):
        row = create_decode_mask(seq_length, attention_size, position, **options)
        assert_same_bits(row, expected[:, :, position - start : position - start + 1])


def test_the_rows_of_prefill_batches_make_the_full_mask():
    for options in ({}, {"sinks": 3}):
        full_mask = create_attention_size_mask(150, 40, 0, **options)
        batches = ContextLadder([150], batch_size=64).prefill_batches(150)
        parts = [create_attention_size_mask(150, 40, 0, rows=b, **options) for b in batches]
        assert [part.shape[2] for part in parts] == [64, 64, 22]
        assert_same_bits(np.concatenate(parts, axis=2), full_mask)


def test_rows_of_a_long_context_allocate_only_rows():
    rows = (1 << 20, (1 << 20) + 3)
    mask = create_attention_size_mask(1 << 21, 100, 0, sinks=4, rows=rows)
    assert mask.shape == (1, 1, 3, 1 << 21)
    assert (mask == 0).sum(axis=-1).ravel().tolist() == [105] * 3


def test_invalid_rows_and_sinks_are_refused():
    for rows in ((-1, 2), (3, 2), (0, 5), (5, 5)):
        with pytest.raises(CapacityError, match="must be a start and a stop in 0") as caught:
            create_attention_size_mask(4, 2, 0, rows=rows)
        assert caught.value.got == str(rows)
    for rows in (3, True, "01", (1,), (1, 2, 3), range(2), np.arange(2)):
        with pytest.raises(TypeError, match=r"rows must be a pair \(start, stop\), got"):
            create_attention_size_mask(4, 2, 0, rows=rows)
    with pytest.raises(TypeError, match=r"rows\[1\] must be an integer, got float"):
        create_attention_size_mask(4, 2, 0, rows=(1, 2.0))
    with pytest.raises(CapacityError, match=r"rows\[0\] does not fit"):
        create_attention_size_mask(4, 2, 0, rows=(2**64, 2))
    for make in (create_attention_size_mask, create_decode_mask):
        with pytest.raises(CapacityError, match="sinks -1 is negative"):
            make(4, 2, 0, sinks=-1)
        with pytest.raises(TypeError, match="sinks must be an integer, got str"):
            make(4, 2, 0, sinks="1")
    with pytest.raises(CompatibilityError) as shape:
        create_attention_size_mask(6, 2, 0, rows=(1, 3), out=np.ones((1, 1, 6, 6)))
    assert shape.value.expected == "(1, 1, 2, 6)"


# ---- out ----


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("of", ["contiguous", "fortran", "gaps", "backwards", "unaligned"])
def test_out(name, of):
    dtype = dtype_of(name)
    out = lay_out(of, np.ones((1, 1, 6, 6), dtype))
    assert create_attention_size_mask(6, 2, 0, out=out) is out
    assert_same_bits(out, mask_by_loop(6, 2, dtype))
    out = lay_out(of, np.ones((1, 1, 1, 6), dtype))
    assert create_decode_mask(6, 2, 4, out=out, fill=-7) is out
    assert_same_bits(out, mask_by_loop(6, 2, dtype, -7, [4]))


def test_out_in_the_other_byte_order():
    out = np.ones((1, 1, 6, 6), ">f4")
    create_attention_size_mask(6, 2, 0, out=out)
    assert_same_bits(out, mask_by_loop(6, 2, ">f4"))


@pytest.mark.parametrize(
    ("out", "error", "text"),
    [
        (np.ones((1, 1, 6, 5)), CompatibilityError, "out: .*shape"),
        (np.ones((6, 6)), CompatibilityError, "out: .*shape"),
        (np.ones((1, 1, 1, 6)), CompatibilityError, "out: .*shape"),
        (np.ones((1, 1, 6, 6), int), CompatibilityError, "made of floats, not of dtype int64"),
        (np.ones((1, 1, 6, 6), bool), CompatibilityError, "made of floats, not of dtype bool"),
        (np.ones((1, 1, 6, 6), complex), CompatibilityError, "complex128 is not supported"),
        (np.broadcast_to(np.ones(6), (1, 1, 6, 6)), ValueError, "read-only"),
        ([[1.0]], TypeError, "out must be a NumPy array or a torch tensor"),
    ],
)
def test_out_that_does_not_do(out, error, text):
    before = np.array(out)
    with pytest.raises(error, match=text):
        create_attention_size_mask(6, 2, 0, out=out)
    np.testing.assert_array_equal(out, before)


def test_a_decode_out_of_the_full_shape():
    with pytest.raises(CompatibilityError) as caught:
        create_decode_mask(6, 2, 0, out=np.ones((1, 1, 6, 6)))
    assert caught.value.expected == "(1, 1, 1, 6)" and caught.value.got == "(1, 1, 6, 6)"


# ---- refusals ----


@pytest.mark.parametrize("make", [create_attention_size_mask, create_decode_mask])
def test_invalid_numbers_are_refused(make):
    for arguments, text in (
        ((-1, 2, 0), "seq_length -1 is negative"),
        ((4, -2, 0), "attention_size -2 is negative"),
        ((4, 2, -1), r"current_position -1 is outside 0\.\.4"),
        ((4, 2, 5), r"current_position 5 is outside 0\.\.4"),
        ((2**64, 2, 0), "seq_length does not fit"),
        ((4, 2**64, 0), "attention_size does not fit"),
    ):
        with pytest.raises(CapacityError, match=text):
            make(*arguments)
    for arguments in ((4.0, 2, 0), (4, "2", 0), (4, 2, None)):
        with pytest.raises(TypeError, match="must be an integer, got"):
            make(*arguments)


def test_invalid_causal_numbers_are_refused():
    for arguments, text in (((-1,), "negative"), ((4, -1), "negative"), ((2**63,), "64 bits")):
        with pytest.raises(CapacityError, match=text):
            create_causal_mask(*arguments)
    for arguments in ((4.0,), ("4",), (4, 1.5)):
        with pytest.raises(TypeError):
            create_causal_mask(*arguments)


def test_masks_that_no_memory_holds():
    for length in (2**31, 2**32, 2**62):
        with pytest.raises((MemoryError, CapacityError)):
            create_attention_size_mask(length, 1, 0, dtype=np.float64)
    for length in (2**50, 2**62):
        with pytest.raises((MemoryError, CapacityError)):
            create_decode_mask(length, 1, 0)
        with pytest.raises((MemoryError, CapacityError)):
            create_causal_mask(length)


def test_a_fill_beyond_the_range():
    for make in (create_attention_size_mask, create_decode_mask):
        with pytest.raises(ValueError, match=r"-1e\+06 is beyond the range of float16"):
            make(4, 2, 0, fill=-1e6)
        out = np.ones((1, 1, 4 if make is create_attention_size_mask else 1, 4), np.float16)
        with pytest.raises(ValueError, match="beyond the range"):
            make(4, 2, 0, fill=-1e6, out=out)
        assert (out == 1).all()
        with pytest.raises(TypeError, match="fill must be a number, got str"):
            make(4, 2, 0, fill="-inf")


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_mask_dtype_must_be_a_float(dtype):
    for make in (
        lambda: create_attention_size_mask(4, 2, 0, dtype=dtype),
        lambda: create_decode_mask(4, 2, 0, dtype=dtype),
        lambda: create_causal_mask(4, dtype=dtype),
    ):
        with pytest.raises(CompatibilityError, match=f"made of floats, not of dtype {dtype}"):
            make()
    with pytest.raises(CompatibilityError, match="not supported"):
        create_decode_mask(4, 2, 0, dtype="S1")


# ---- memory ----


def test_a_causal_mask_takes_the_memory_of_two_rows():
    mask = create_causal_mask(1 << 20, 7)
    low, high = np.lib.array_utils.byte_bounds(mask)
    assert high - low == (2 * (1 << 20) - 1) * 2
    assert mask.nbytes == (1 << 20) ** 2 * 2
    assert mask.strides == (0, 0, -2, 2)
    for row in (0, 6, 7, 1000, (1 << 20) - 1):
        assert_same_bits(mask[:, :, row : row + 1].copy(), mask_by_loop(1 << 20, 7, rows=[row]))


def test_a_causal_mask_is_read_only():
    mask = create_causal_mask(4)
    assert not mask.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        mask[0, 0, 0, 0] = 1
    full = np.ascontiguousarray(mask)
    full[0, 0, 0, 0] = 1
    assert mask[0, 0, 0, 0] == 0
