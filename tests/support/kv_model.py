"""A NumPy model of KV transitions, and caches of every layout to test it with."""

import numpy as np
import pytest

from mlstate._common.dtypes import DTYPES, EXTENSIONS, stored_dtype

PLAIN = [np.dtype(info.name) for info in DTYPES if info.in_numpy]
REGISTERED = tuple(EXTENSIONS)  # bfloat16 first


ALL_DTYPES = [dtype.name for dtype in PLAIN] + list(REGISTERED)


def dtype_of(name):
    """A dtype by name, also one of ml_dtypes; skips the test if that is not installed."""
    if name in REGISTERED:
        pytest.importorskip("ml_dtypes", reason="NumPy has no such dtype of its own")
        return stored_dtype(name)
    return np.dtype(name)


def cache(length=8, dtype=np.float16):
    """Distinct elements, exact in all float formats of 16 bits and more."""
    return np.arange(2 * 3 * length * 5).reshape(2, 3, length, 5).astype(dtype)


def expand(source, length, position=None, pad=0, dtype=None, axis=-2):
    """The definition: the first `position` positions converted, the others `pad`."""
    tokens = np.moveaxis(source, axis, 0)
    position = tokens.shape[0] if position is None else position
    dtype = source.dtype if dtype is None else dtype
    target = np.empty((length, *tokens.shape[1:]), dtype)
    with np.errstate(all="ignore"):
        target[:position] = tokens[:position].astype(dtype)
    target[position:] = pad
    return np.ascontiguousarray(np.moveaxis(target, 0, axis))


def mask_by_loop(seq_length, attention_size, dtype=np.float16, fill=-np.inf, rows=None):
    """The source document's loop: rows of an attention mask, all of them by default."""
    rows = range(seq_length) if rows is None else rows
    mask = np.full((1, 1, len(rows), seq_length), fill, dtype)
    for row, position in enumerate(rows):
        mask[0, 0, row, max(0, position - attention_size) : position + 1] = 0
    return mask


def random_bits(shape, dtype=np.float16, seed=0):
    """An array of any bit patterns, infinities and NaNs included."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.random.default_rng(seed).integers(0, 2, shape).astype(bool)
    count = int(np.prod(shape, dtype=int))
    raw = np.random.default_rng(seed).bytes(count * dtype.itemsize)
    return np.frombuffer(bytearray(raw), dtype).reshape(shape)


def assert_same_bits(got, expected):
    """Equal in dtype, byte order, shape and every bit."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(expected).tobytes()


def assert_refused(state, error, text, operation="quantize", *args, **more):
    """An operation of a `CacheState` raises; nothing changed, down to the last byte."""

    def facts():
        return state.spec, state.length, {name: id(array) for name, array in state.arrays.items()}

    before, content = facts(), {name: array.copy() for name, array in state.arrays.items()}
    with pytest.raises(error, match=text) as caught:
        getattr(state, operation)(*args, **more)
    assert facts() == before
    for name, array in content.items():
        assert_same_bits(state.arrays[name], array)
    return caught.value


def assert_same_values(got, expected):
    """As `assert_same_bits`, but all NaNs are equal: their payloads may differ."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    with np.errstate(invalid="ignore"):  # ml_dtypes warns about NaNs
        nans, wanted_nans = got != got, expected != expected
    np.testing.assert_array_equal(nans, wanted_nans)
    unsigned = np.dtype(f"u{got.dtype.itemsize}")
    got_bits = np.where(nans, 0, np.ascontiguousarray(got).view(unsigned))
    wanted_bits = np.where(nans, 0, np.ascontiguousarray(expected).view(unsigned))
    np.testing.assert_array_equal(got_bits, wanted_bits)


def _spread(array, step):
    """The same values with gaps: every second element of each axis, forwards or backwards."""
    wide = np.zeros([2 * n for n in array.shape], array.dtype)
    view = wide[tuple(slice(None, None, 2) for _ in array.shape)]
    view = view[tuple(slice(None, None, step) for _ in array.shape)]
    view[...] = array
    return view


def _unaligned(array):
    """The same values, one byte off any alignment."""
    room = np.zeros(array.nbytes + 1, np.uint8)
    view = room[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def _inside(array):
    """The same values as a window into a larger cache."""
    wide = np.zeros([n + 3 for n in array.shape], array.dtype)
    view = wide[tuple(slice(1, n + 1) for n in array.shape)]
    view[...] = array
    return view


LAYOUTS = {
    "contiguous": lambda a: a.copy(),
    "fortran": np.asfortranarray,
    "heads_last": lambda a: np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2),
    "sequence_first": lambda a: np.ascontiguousarray(a.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3),
    "gaps": lambda a: _spread(a, 1),
    "backwards": lambda a: _spread(a, -1),
    "unaligned": _unaligned,
    "window": _inside,
    "swapped": lambda a: a.astype(a.dtype.newbyteorder()),
}


def layout(name, array):
    """`array` in the layout `name`; values are equal, strides and byte order may differ."""
    view = LAYOUTS[name](array)
    np.testing.assert_array_equal(view, array)
    return view
