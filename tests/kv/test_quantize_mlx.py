"""Codes, scales and biases of every width against `mlx.core.quantize`, bit for bit."""

import numpy as np
import pytest

from mlstate.kv import CacheEntry, CacheSpec, CacheState

mx = pytest.importorskip("mlx.core")
ml_dtypes = pytest.importorskip("ml_dtypes")

BITS = [2, 3, 4, 5, 6, 8]
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
ROWS, DIM = 96, 256


@pytest.fixture(autouse=True)
def _cpu():
    """The CPU backend is the definition; Metal rounds elsewhere."""
    with mx.stream(mx.cpu):
        yield


def to_mlx(array):
    if array.dtype == DTYPES["bfloat16"]:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


def bits_of(array):
    """The elements as unsigned integers, of mlx or NumPy."""
    if isinstance(array, mx.array):
        if array.dtype == mx.bfloat16:
            array = array.view(mx.uint16)
        array = np.array(array)
    return array.view(f"u{array.dtype.itemsize}")


def random_bits(rng, dtype):
    """Finite numbers of every exponent, subnormal ones too; a group's range does not overflow."""
    raw = rng.integers(0, 2 ** (8 * dtype.itemsize), (ROWS, DIM), np.uint64)
    values = raw.astype(f"u{dtype.itemsize}").view(dtype)
    with np.errstate(invalid="ignore"):
        is_fit = np.abs(values.astype(np.float64)) < 1.5e38  # False for NaN
    return np.where(is_fit, values, np.zeros((), dtype))


def with_constant_groups(rng, dtype):
    values = rng.standard_normal((ROWS, DIM)).astype(dtype)
    constants = rng.standard_normal(ROWS // 2)
    constants[:4] = 0.0, -0.0, 1e-7, -1e-7
    values[::2] = constants[:, None].astype(dtype)
    return values


def subnormals(rng, dtype):
    smallest = np.array(1, f"u{dtype.itemsize}").view(dtype).astype(np.float64)
    return (rng.integers(-40, 40, (ROWS, DIM)) * smallest).astype(dtype)


def with_largest(rng, dtype):
    """Half of the groups reach the largest number of the dtype, with one sign."""
    values = rng.random((ROWS, DIM)).astype(dtype)
    largest = 65504.0 if dtype == np.float16 else 3.3e38
    values[::2, ::32] = dtype.type(largest)
    values[::4] = -values[::4]
    return values


CONTENTS = {
    "normal": lambda rng, dtype: rng.standard_normal((ROWS, DIM)).astype(dtype),
    "random bits": random_bits,
    "constant groups": with_constant_groups,
    "subnormals": subnormals,
    "near the least scale": lambda rng, d: (rng.standard_normal((ROWS, DIM)) * 1e-6).astype(d),
    "signed zeros": lambda rng, d: np.copysign(0.0, rng.standard_normal((ROWS, DIM))).astype(d),
    "ties": lambda rng, d: (rng.integers(-9, 10, (ROWS, DIM)) / 2).astype(d),
    "one sign": lambda rng, d: (-np.exp(rng.standard_normal((ROWS, DIM)) * 2)).astype(d),
    "largest": with_largest,
    "one outlier": lambda rng, d: np.where(
        rng.random((ROWS, DIM)) < 0.01, 6e4, rng.standard_normal((ROWS, DIM))
    ).astype(d),
}


def quantized(values, bits, group):
    entry = CacheEntry("k", "full", values.shape, values.dtype)
    state = CacheState(CacheSpec([entry]), {"k": values}, len(values))
    state.quantize(bits, group)
    return state


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("bits", BITS)
def test_no_bit_differs_from_mlx(bits, content):
    for name, dtype in DTYPES.items():
        for group in (32, 64, 128):
            rng = np.random.default_rng([bits, group, len(content)])
            values = CONTENTS[content](rng, dtype)
            state = quantized(values, bits, group)
            expected = mx.quantize(to_mlx(values), group_size=group, bits=bits)
            for array, part in zip(state.arrays.values(), expected, strict=True):
                np.testing.assert_array_equal(bits_of(array), bits_of(part), f"{name} {group}")


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", DTYPES)
def test_values_of_one_rounding_are_never_further_from_the_exact_ones_than_those_of_mlx(name, bits):
    """mlx rounds the product to the dtype, and then the sum."""
    rng, further = np.random.default_rng(bits), 0
    for scale in (1e-3, 1.0, 100.0):
        values = (rng.standard_normal((ROWS, DIM)) * scale + scale).astype(DTYPES[name])
        state = quantized(values, bits, 64)
        codes, scales, biases = state.arrays.values()
        entry = CacheEntry("k", "quantized", values.shape, np.float32, bits=bits, group=64)
        wide = [codes, scales.astype(np.float32), biases.astype(np.float32)]
        arrays = dict(zip(entry.arrays, wide, strict=True))
        exact_state = CacheState(CacheSpec([entry]), arrays, len(values))
        exact_state.dequantize()
        exact = exact_state.arrays["k"].astype(np.float64)
        of_mlx = mx.dequantize(*map(to_mlx, (codes, scales, biases)), group_size=64, bits=bits)
        state.dequantize()
        ours = np.abs(state.arrays["k"].astype(np.float64) - exact)
        theirs = np.abs(np.array(of_mlx.astype(mx.float32)).astype(np.float64) - exact)
        assert (ours <= theirs).all()
        further += np.count_nonzero(ours < theirs)
    assert (further > 0) == (name != "float32")
