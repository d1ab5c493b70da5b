"""Moving keys with RoPE to other positions, compared with the definition in NumPy."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_model import LAYOUTS, assert_same_bits, dtype_of
from thread_team import run_in_threads
from tries import tries

from mlstate import CompatibilityError
from mlstate.kv import RollingKVState, rotate_keys

DTYPES = ["float16", "bfloat16", "float32", "float64"]


def rope(keys, positions, *, base=10000.0, scaling=1.0, interleaved=False, rotary_dim=None):
    """The definition in float64: keys (..., sequence, head_dim) rotated to `positions`."""
    dim = keys.shape[-1] if rotary_dim is None else rotary_dim
    first = np.arange(0, dim, 2) if interleaved else np.arange(dim // 2)
    second = first + (1 if interleaved else dim // 2)
    wide = keys.astype(np.float64)
    frequencies = base ** (-2.0 * np.arange(dim // 2) / dim)
    angles = np.asarray(positions, np.float64).reshape(-1, 1) * frequencies / scaling
    x, y = wide[..., first], wide[..., second]
    turned = wide.copy()
    turned[..., first] = x * np.cos(angles) - y * np.sin(angles)
    turned[..., second] = y * np.cos(angles) + x * np.sin(angles)
    return turned


def pair_lengths(keys, *, interleaved=False):
    """The length of the pair of each element."""
    half = keys.shape[-1] // 2
    wide = keys.astype(np.float64)
    if interleaved:
        return np.repeat(np.hypot(wide[..., ::2], wide[..., 1::2]), 2, axis=-1)
    return np.tile(np.hypot(wide[..., :half], wide[..., half:]), 2)


def normal(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


TOLERANCE = {"float16": 5e-3, "bfloat16": 4e-2, "float32": 3e-6, "float64": 1e-11}


# ---- the error bound of the docstring ----


def stated_bounds():
    """The table of the docstring: dtype -> (relative to the pair, absolute)."""
    bounds = re.findall(r"(\w+) +([\d.e-]+) r(?: \+ ([\d.e-]+))?", rotate_keys.__doc__)
    return {name: (float(relative), float(absolute or 0)) for name, relative, absolute in bounds}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", DTYPES)
def test_the_error_stays_below_the_stated_bound(name, interleaved):
    """Against keys rotated from the start, in the same dtype, at positions up to 131,072."""
    relative, absolute = stated_bounds()[name]
    dtype, worst = dtype_of(name), 0.0
    rng = np.random.default_rng(3)
    for scale in (1e-4, 1.0, 30.0):
        keys = (scale * normal((8, 512, 128), np.float64, 5)).astype(dtype)
        old = rng.integers(0, 131073, 512)
        new = rng.integers(0, 131073, 512)
        stored = rope(keys, old, interleaved=interleaved).astype(dtype)
        expected = rope(keys, new, interleaved=interleaved).astype(dtype)
        got = rotate_keys(stored, new - old, interleaved=interleaved)
        error = np.abs(got.astype(np.float64) - expected.astype(np.float64))
        bound = relative * pair_lengths(keys, interleaved=interleaved) + absolute
        worst = max(worst, (error / bound).max())
    assert worst <= 0.95, "less than the margin of 5 % is left"
    assert worst >= 0.2, "the stated bound is far from the error"


def test_the_bounds_are_of_all_dtypes():
    assert sorted(stated_bounds()) == sorted(DTYPES)


# ---- the definition ----


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", DTYPES)
def test_one_shift_and_one_for_each_position(name, interleaved):
    keys = normal((2, 3, 40, 64), dtype_of(name))
    shifts = np.random.default_rng(1).integers(-500, 500, 40)
    unsigned = np.abs(shifts).astype("u8")
    for shift in (0, 1, -7, 3000, np.int8(5), shifts, list(map(int, shifts)), unsigned):
        got = rotate_keys(keys, shift, interleaved=interleaved)
        assert got.dtype == keys.dtype and not np.shares_memory(got, keys)
        expected = rope(keys, shift, interleaved=interleaved)
        np.testing.assert_allclose(got.astype(np.float64), expected, 0, TOLERANCE[name])
    assert_same_bits(rotate_keys(keys, 0, interleaved=interleaved), keys)


@settings(deadline=None, max_examples=tries(150))
@given(st.data())
def test_any_shape_axis_and_parameters(data):
    rank = data.draw(st.integers(2, 8))
    dim = 2 * data.draw(st.integers(1, 20))
    shape = [*data.draw(st.lists(st.integers(1, 3), min_size=rank - 1, max_size=rank - 1)), dim]
    axis = data.draw(st.integers(0, rank - 2))
    shape[axis] = data.draw(st.integers(0, 70))
    options = {
        "base": data.draw(st.sampled_from([10.0, 1e4, 5e5])),
        "scaling": data.draw(st.sampled_from([0.5, 1.0, 8.0])),
        "interleaved": data.draw(st.booleans()),
        "rotary_dim": data.draw(st.none() | st.integers(1, dim // 2).map(lambda n: 2 * n)),
    }
    name = data.draw(st.sampled_from(DTYPES))
    keys = normal(shape, dtype_of(name))
    shift = data.draw(st.integers(-99, 99))
    if data.draw(st.booleans()):
        shift = np.random.default_rng(2).integers(-99, 99, shape[axis])
    innermost = data.draw(st.booleans())  # the positions are adjacent in memory
    strided_keys = np.moveaxis(np.ascontiguousarray(np.moveaxis(keys, axis, -1)), -1, axis)
    seq_axis = axis if data.draw(st.booleans()) else axis - rank
    got = rotate_keys(strided_keys if innermost else keys, shift, seq_axis=seq_axis, **options)
    expected = np.moveaxis(rope(np.moveaxis(keys, axis, -2), shift, **options), -2, axis)
    np.testing.assert_allclose(got.astype(np.float64), expected, 0, TOLERANCE[name])
    rest = options["rotary_dim"] or dim
    assert_same_bits(got[..., rest:], keys[..., rest:])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_every_layout_gives_the_same_bits(name, dtype, interleaved):
    keys = normal((2, 3, 33, 24), dtype)
    expected = rotate_keys(keys, -11, interleaved=interleaved)
    source = LAYOUTS[name](keys)
    np.testing.assert_array_equal(rotate_keys(source, -11, interleaved=interleaved), expected)
    out = LAYOUTS[name](np.zeros_like(keys))
    assert rotate_keys(keys, -11, interleaved=interleaved, out=out) is out
    np.testing.assert_array_equal(out, expected)
    rotate_keys(source, -11, interleaved=interleaved, out=source)  # in place
    np.testing.assert_array_equal(source, expected)


def test_large_caches_use_threads_and_give_the_same_bits():
    keys = normal((2, 2, 8192, 128), np.float32)
    expected = rotate_keys(keys, 17)
    for start in (0, 5000):
        part = rotate_keys(keys[:, :, start : start + 300], 17)
        assert_same_bits(expected[:, :, start : start + 300], part)
    innermost = np.ascontiguousarray(keys.swapaxes(-1, -2)).swapaxes(-1, -2)
    np.testing.assert_array_equal(rotate_keys(innermost, 17), expected)


def test_infinity_and_nan_stay_in_their_pair():
    keys = normal((1, 4, 8), np.float16)
    keys[0, 1, 2], keys[0, 2, 3] = np.inf, np.nan
    got = rotate_keys(keys, 3)
    bad = ~np.isfinite(got)
    assert {tuple(where) for where in np.argwhere(bad)} == {
        (0, 1, 2),
        (0, 1, 6),
        (0, 2, 3),
        (0, 2, 7),
    }


def test_kept_keys_of_a_rolling_cache_close_the_gap():
    """Sinks stay, the others move next to them, as in a cache that never had the evicted ones."""
    raw = normal((2, 3, 50, 64), np.float32)
    state = RollingKVState((2, 3, 16, 64), dtype=np.float32, sinks=4)
    state.append(rope(raw, np.arange(50)).astype(np.float32))
    positions = np.sort(state.positions())
    keys = rotate_keys(state.ordered(), np.arange(16) - positions)
    expected = rope(raw[:, :, positions], np.arange(16))
    np.testing.assert_allclose(keys, expected, 0, 5e-6)
    in_place = state.positions()
    rotate_keys(state.array, np.argsort(np.argsort(in_place)) - in_place, out=state.array)
    np.testing.assert_array_equal(state.ordered(), keys)


# ---- torch ----


def test_torch_tensors_with_out():
    torch = pytest.importorskip("torch")
    keys = normal((2, 5, 8), np.float32)
    expected = rotate_keys(keys, 9)
    tensor = torch.from_numpy(keys.copy())
    out = torch.empty_like(tensor)
    assert rotate_keys(tensor, 9, out=out) is out
    assert (out.numpy() == expected).all()
    brain = tensor.to(torch.bfloat16)
    rotate_keys(brain, torch.tensor(9), out=brain)
    np.testing.assert_allclose(brain.float().numpy(), expected, 0, 4e-2)
    with pytest.raises(TypeError, match=r"not a NumPy array but Tensor: pass out="):
        rotate_keys(tensor, 9)


# ---- errors ----


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"keys": np.ones(8, np.float16), "seq_axis": -1}, CompatibilityError, "2 to 8 dimensions"),
        ({"keys": np.ones((2, 4, 8), np.int8)}, CompatibilityError, "keys are int8: only float16"),
        ({"keys": np.ones((2, 4, 8), object)}, CompatibilityError, "not supported"),
        ({"keys": [[1.0, 2.0]]}, TypeError, "keys is not a NumPy array but list"),
        ({"seq_axis": -1}, CompatibilityError, r"pass a view .* keys.swapaxes"),
        ({"seq_axis": 2}, CompatibilityError, "must be the head dimension"),
        ({"seq_axis": 3}, CompatibilityError, r"seq_axis 3 is outside -3..2"),
        ({"seq_axis": None}, TypeError, "seq_axis must be an integer"),
        ({"shift": [1, 2]}, CompatibilityError, "shift has 2 entries for 4 positions"),
        ({"shift": 1.0}, TypeError, "shift must be an integer"),
        ({"shift": "a"}, TypeError, "shift must be an integer"),
        ({"shift": 2**70}, TypeError, "shift must be an integer of at most 64 bits"),
        ({"shift": np.uint64(2**63)}, TypeError, "shift must be an integer of at most 64 bits"),
        ({"shift": np.ones((4, 1), int)}, TypeError, "one-dimensional"),
        ({"base": 0}, ValueError, "base must be finite and above 0, got 0"),
        ({"base": float("nan")}, ValueError, "base must be finite"),
        ({"scaling": -1.0}, ValueError, "scaling must be finite and above 0, got -1"),
        ({"scaling": float("inf")}, ValueError, "scaling must be finite"),
        ({"scaling": "1"}, TypeError, "scaling"),
        ({"rotary_dim": 7}, ValueError, "rotary_dim 7 must be even"),
        ({"rotary_dim": -2}, ValueError, "rotary_dim -2 is negative"),
        ({"keys": np.ones((2, 4, 9))}, ValueError, "rotary_dim 9 must be even"),
        ({"out": np.zeros((2, 4, 9))}, CompatibilityError, "shape"),
        ({"out": np.zeros((2, 4, 8), np.float16)}, CompatibilityError, "pass equal dtypes"),
        ({"out": np.zeros((2, 4, 8), np.int64)}, CompatibilityError, "does not convert"),
    ],
)
def test_refused_arguments_keep_the_keys(changes, error, text):
    arguments = {"keys": normal((2, 4, 8), np.float64), "shift": 3, "out": None, **changes}
    original = np.array(arguments["keys"], copy=True)
    keys, shift = arguments.pop("keys"), arguments.pop("shift")
    with pytest.raises(error, match=text):
        rotate_keys(keys, shift, **arguments)
    np.testing.assert_array_equal(np.array(keys), original)
    if arguments["out"] is not None:
        assert not arguments["out"].any()


def test_out_that_is_read_only_or_overlaps():
    room = normal((3, 4, 8))
    original = room.copy()
    with pytest.raises(ValueError, match="shares memory with keys, but is another view"):
        rotate_keys(room[1:], 3, out=room[:2])
    out = np.zeros_like(room)
    out.setflags(write=False)
    with pytest.raises(ValueError, match="out is read-only: pass a writable array"):
        rotate_keys(room, 3, out=out)
    assert_same_bits(room, original)
    room.setflags(write=False)
    rotate_keys(room, 3)  # keys are only read


@pytest.mark.timeout(60)
def test_threads_rotate_at_once():
    keys = normal((4, 4, 256, 64), np.float16)
    expected = rotate_keys(keys, 5)

    def work(number):
        for _ in range(20):
            assert_same_bits(rotate_keys(keys, 5), expected)

    run_in_threads(work, 8)
