"""Caches of 2 to 8 dimensions with the sequence at any axis, compared with NumPy's moveaxis."""

import re

import child
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from kv_model import (
    ALL_DTYPES,
    LAYOUTS,
    PLAIN,
    assert_same_bits,
    assert_same_values,
    dtype_of,
    expand,
    random_bits,
)
from thread_team import num_threads
from tries import tries

from mlstate import CapacityError, CompatibilityError
from mlstate.kv import (
    KVState,
    StateTransitionManager,
    compact_kv_state,
    transition_kv_state,
    validate_state_shapes,
)

MACOS = (3, 1, 2, 8, 5)  # (layers, batch, heads, sequence, head_dim), axis -2
IOS = (3, 1, 10, 1, 8)  # (layers, batch, heads * head_dim, 1, sequence), axis -1
AXES = [(rank, axis) for rank in range(2, 9) for axis in range(-rank, rank)]


def cache(shape, dtype=np.float16):
    """Distinct elements, as far as the dtype has them."""
    return (np.arange(np.prod(shape)) % 2000).reshape(shape).astype(dtype)


def shape_of(rank, axis, length):
    """A small shape with `length` positions."""
    shape = [2, 1, 3, 1, 2, 1, 2, 3][:rank]
    shape[axis] = length
    return tuple(shape)


@pytest.fixture(params=[1, 3])
def threads(request):
    with num_threads(request.param):
        yield


# ---- transitions ----


@pytest.mark.parametrize(("rank", "axis"), AXES)
def test_every_axis_of_every_rank(rank, axis):
    source = cache(shape_of(rank, axis, 5))
    for position in (0, 3, 5, None):
        expected = expand(source, 9, position, 2.0, axis=axis)
        got = transition_kv_state(source, 9, position, 2.0, seq_axis=axis)
        assert_same_bits(got, expected)
        assert got.flags.c_contiguous and got.flags.owndata
        out = np.full(expected.shape, 7, np.float32)
        assert transition_kv_state(source, 9, position, 2.0, out=out, seq_axis=axis) is out
        assert_same_bits(out, expected.astype(np.float32))
    got = compact_kv_state(source, 4, 3, seq_axis=axis)
    assert_same_bits(got, expand(source, 4, 3, axis=axis))
    assert transition_kv_state(source, 5, seq_axis=axis) is source
    assert not np.shares_memory(compact_kv_state(source, 5, 5, seq_axis=axis), source)


@pytest.mark.parametrize("name", ALL_DTYPES)
@pytest.mark.parametrize(("shape", "axis"), [(MACOS, -2), (IOS, -1), ((8, 3), 0)])
def test_layouts_of_models_keep_every_bit(shape, axis, name):
    source = random_bits(shape, dtype_of(name))
    zero = np.zeros((), source.dtype)
    assert_same_bits(
        transition_kv_state(source, 12, 6, seq_axis=axis), expand(source, 12, 6, zero, axis=axis)
    )
    assert_same_bits(
        compact_kv_state(source, 6, 5, seq_axis=axis), expand(source, 6, 5, zero, axis=axis)
    )


def strided(source, draw):
    """The same values with other strides, alignment or byte order."""
    of_four_axes = {"heads_last", "sequence_first"}
    name = draw(st.sampled_from(["order", *sorted(LAYOUTS.keys() - of_four_axes)]))
    if name == "order":
        order = draw(st.permutations(range(source.ndim)))
        return np.ascontiguousarray(source.transpose(order)).transpose(np.argsort(order))
    return LAYOUTS[name](source)


def drawn_shape(draw):
    """A shape with any number of axes, or with long ones."""
    if draw(st.booleans()):
        return draw(array_shapes(min_dims=2, max_dims=8, min_side=0, max_side=5))
    return tuple(draw(st.integers(0, most)) for most in draw(st.permutations([7, 7, 40, 40])))


@settings(deadline=None, max_examples=tries(500))
@given(data=st.data())
def test_property_moves_as_the_model(data):
    draw = data.draw
    shape = drawn_shape(draw)
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    names = ["float16", "float32", "float64"]
    name = draw(st.sampled_from([*names, *(dtype.name for dtype in PLAIN)]))
    values = random_bits(shape, name, draw(st.integers(0, 99)))
    source = strided(values, draw)
    position = draw(st.none() | st.integers(0, shape[axis]))
    pad = draw(st.floats(-60000, 60000, width=16)) if name in names else 0
    more = draw(st.integers(0, 5))
    to = draw(st.sampled_from(names)) if name in names else name
    length = shape[axis] + more
    expected = expand(values, length, position, pad, to, axis)
    got = transition_kv_state(source, length, position, pad, to, seq_axis=axis)
    assert_same_values(got.astype(to), expected)
    out = strided(np.full(expected.shape, 3, to), draw)
    transition_kv_state(source, length, position, pad, out=out, seq_axis=axis)
    assert_same_values(out.astype(to), expected)
    used = shape[axis] if position is None else position
    shorter = draw(st.integers(used, length))
    got = compact_kv_state(source, shorter, used, to, seq_axis=axis)
    assert_same_values(got.astype(to), expand(values, shorter, used, 0, to, axis))


# Results of 8 MiB and more, which threads share: short rows, long rows, one row, two rows.
LARGE = [
    ((8, 1, 512, 1, 600), -1),
    ((4, 1, 3, 1000, 200), -2),
    ((40, 100_003), -1),
    ((1, 3_000_001), 1),
    ((2, 3000, 701), 1),
    ((3001, 700, 2), 0),
    ((1000, 2101, 2), -1),
    ((900_001, 3, 1, 1), 0),
    ((2, 2, 2, 2, 2, 2, 2, 30_011), -1),
]


@pytest.mark.parametrize(("shape", "axis"), LARGE, ids=str)
@pytest.mark.parametrize("name", ["float16", "float32"])
def test_large_caches_with_threads(threads, shape, axis, name):
    source = random_bits(shape, name)
    length, position = 2 * shape[axis] + 1, shape[axis] - 1
    expected = expand(source, length, position, 1.0, axis=axis)
    assert expected.nbytes >= 8 << 20
    out = np.full(expected.shape, 5, name)
    for got in (
        transition_kv_state(source, length, position, 1.0, out=out, seq_axis=axis),
        transition_kv_state(source, length, position, 1.0, seq_axis=axis),
    ):
        assert np.array_equal(got.view(np.uint16), expected.view(np.uint16))
    expected = expand(source, length, position, 0.0, axis=axis)
    for low_memory in (False, True):
        got = transition_kv_state(source, length, position, low_memory=low_memory, seq_axis=axis)
        assert np.array_equal(got.view(np.uint16), expected.view(np.uint16))


SHORT_ROWS = """
import numpy as np
from mlstate.kv import transition_kv_state, compact_kv_state

def random_bits(shape, dtype):
    return np.random.default_rng(0).integers(0, 65536, shape, dtype)

def expand(source, length, position, pad=0, axis=-1):
    target = np.full((*source.shape[:-1], length), pad, source.dtype)
    target[..., :position] = source[..., :position]
    return target

for length, target in ((264, 528), (264, 300), (264, 531)):  # rows of 16 n, 8 n and 2 n bytes
    source = random_bits((9, 1, 900, 1, length), np.uint16)
    out = np.zeros((9, 1, 900, 1, target), np.uint16)
    for position in (0, 1, 7, 8, 9, 15, 16, 17, 100, 263, 264):
        transition_kv_state(source, target, position, 9.0, out=out, seq_axis=-1)
        assert np.array_equal(out, expand(source, target, position, 9, axis=-1)), position
source = random_bits((9, 1, 900, 3, 600), np.uint16)
wanted = expand(source, 264, 264, axis=-1)
assert np.array_equal(compact_kv_state(source, 264, 264, seq_axis=-1), wanted)
assert np.array_equal(compact_kv_state(source[:, :, ::-1], 264, 264, seq_axis=-1),
                      wanted[:, :, ::-1])
swapped = compact_kv_state(source.astype(">u2"), 264, 264, seq_axis=-1)
assert np.array_equal(swapped, wanted)
print("same")
"""


@pytest.mark.parametrize("copy", ["plain", "loop", "stream1", "auto"])
def test_short_rows_with_each_way_to_store(copy):
    assert child.run(SHORT_ROWS, MLSTATE_COPY=copy).strip() == "same"


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((4, 64, 1, 6000), -1), ((4, 8, 64, 700), 1)])
def test_low_memory_gives_the_same_result(low_memory, shape, axis):
    source = random_bits(shape, np.uint16)
    length = 12 * shape[axis]  # zero pages stay untouched
    got = transition_kv_state(source, length, 3, low_memory=low_memory, seq_axis=axis)
    assert got.nbytes >= 32 << 20
    assert np.array_equal(got, expand(source, length, 3, axis=axis))


@pytest.mark.parametrize(("shape", "axis"), [(MACOS, -2), (IOS, -1), ((8, 3), 0)])
def test_integers_convert(shape, axis):
    source = random_bits(shape, np.int8)
    expected = expand(source, 12, 5, 0, np.float16, axis)
    got = transition_kv_state(source, 12, 5, dtype=np.float16, seq_axis=axis)
    assert_same_bits(got, expected)
    back = np.full_like(expected, 3, np.int8)
    transition_kv_state(expected, 12, 5, out=back, seq_axis=axis)
    assert_same_bits(back, expand(source, 12, 5, axis=axis))
    expected[(slice(None),) * (axis % len(shape)) + (4,)] = np.nan
    with pytest.raises(ValueError, match="NaN or out of the range"):
        transition_kv_state(expected, 12, 5, dtype=np.int8, seq_axis=axis)
    transition_kv_state(expected, 12, 4, dtype=np.int8, seq_axis=axis)


def test_numpy_integers_are_axes():
    source = cache(IOS)
    for axis in (np.int8(-1), np.uint16(4), np.int64(4)):
        got = transition_kv_state(source, 12, 3, seq_axis=axis)
        assert_same_bits(got, expand(source, 12, 3, axis=-1))
        assert KVState(IOS, 12, seq_axis=axis).seq_axis == 4
        assert validate_state_shapes(IOS, (*IOS[:4], 9), seq_axis=axis)


# ---- errors ----

MOVES = [
    lambda source, axis, out: transition_kv_state(source, 12, 3, out=out, seq_axis=axis),
    lambda source, axis, out: compact_kv_state(source, 12, 3, out=out, seq_axis=axis),
    lambda source, axis, out: transition_kv_state(source, 12, 3, dtype="int8", seq_axis=axis),
]


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("shape", [(), (8,), (1,) * 9, (1,) * 64])
def test_ranks_that_no_cache_has(move, shape):
    out = np.full(shape, 7.0)
    with pytest.raises(CompatibilityError, match="source_state must have 2 to 8 dim") as caught:
        move(np.zeros(shape), -1, out)
    assert caught.value.expected == "2 to 8 dimensions"
    assert caught.value.got[:60] == str(shape)[:60]
    assert (out == 7).all()


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("axis", [-6, 5, 100, -(2**62)])
def test_axes_that_the_cache_does_not_have(move, axis):
    out = np.full((3, 1, 2, 12, 5), 7.0)
    text = f"seq_axis {axis} is outside -5..4: source_state has 5 dimensions, shape {MACOS}"
    with pytest.raises(CompatibilityError, match=re.escape(text)) as caught:
        move(np.zeros(MACOS), axis, out)
    assert (caught.value.expected, caught.value.got) == ("-5..4", str(axis))
    assert (out == 7).all()


BAD_AXES = [True, False, np.True_, None, 1.0, "1", (1,), np.float16(1)]


@pytest.mark.parametrize("axis", BAD_AXES, ids=repr)
def test_non_integer_axes_are_refused(axis):
    out = np.full((3, 1, 2, 12, 5), 7.0)
    source = np.zeros(MACOS)
    calls = [
        *(lambda move=move: move(source, axis, out) for move in MOVES),
        lambda: validate_state_shapes(MACOS, MACOS, seq_axis=axis),
        lambda: validate_state_shapes({"k": MACOS}, {"k": MACOS}, seq_axis=axis),
        lambda: StateTransitionManager(seq_axis=axis),
        lambda: KVState(MACOS, seq_axis=axis),
        lambda: KVState.from_array(source, seq_axis=axis),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"seq_axis must be an integer, got \w+"):
            call()
    assert (out == 7).all()
    with pytest.raises(CapacityError, match="seq_axis does not fit into 64 bits"):
        transition_kv_state(source, 12, seq_axis=2**70)


def test_messages_name_the_axis_and_the_shape():
    note = f"(sequence axis 3 of shape {IOS})"
    with pytest.raises(CapacityError, match=re.escape(f"sequence length {note}")) as caught:
        transition_kv_state(cache(IOS), 12, 5)  # forgot seq_axis
    assert caught.value.expected == "0..1"
    note = f"(sequence axis 4 of shape {IOS})"
    with pytest.raises(CapacityError, match=re.escape(f"smaller than the source's 8 {note}: use")):
        transition_kv_state(cache(IOS), 7, seq_axis=-1)
    out = np.zeros((3, 1, 10, 1, 11), np.float16)
    with pytest.raises(CompatibilityError, match="out: ") as caught:
        transition_kv_state(cache(IOS), 12, seq_axis=-1, out=out)
    assert (caught.value.expected, caught.value.got) == ("(3, 1, 10, 1, 12)", str(out.shape))


def test_shapes_with_any_axis():
    assert validate_state_shapes(IOS, (*IOS[:4], 64), seq_axis=-1)
    assert validate_state_shapes({"k": MACOS}, {"k": (3, 1, 2, 9, 5)})
    assert validate_state_shapes((3, 4), (9, 4))
    with pytest.raises(
        CompatibilityError, match=r"^k: lengths of axis 2 differ: .*axis 4 of shape \(3, 1, 10"
    ):
        validate_state_shapes({"k": IOS}, {"k": (3, 1, 11, 1, 8)}, seq_axis=-1)
    with pytest.raises(CompatibilityError, match="dimensions differ: the source has 5, the targ"):
        validate_state_shapes(MACOS, (3, 2, 8, 5))
    with pytest.raises(CapacityError, match=r"smaller than the source's 8 \(sequence axis 0"):
        validate_state_shapes((8, 3), (7, 3), seq_axis=0)
    with pytest.raises(CompatibilityError, match=r"axis 2 is outside -2\.\.1: the source state"):
        validate_state_shapes((8, 3), (8, 3), seq_axis=2)
    for axis in (-9, 8):
        with pytest.raises(CompatibilityError, match=f"seq_axis {axis} is outside -8..7"):
            StateTransitionManager(seq_axis=axis)


# ---- the manager ----


def test_a_manager_of_other_layouts():
    manager = StateTransitionManager(seq_axis=-1)
    assert manager.seq_axis == -1
    for length in (8, 16):
        manager.register_model(f"m{length}", length, num_layers=3)
    source = cache(IOS)
    got = manager.transition(source, "m8", "m16", 5, 2.0)
    assert_same_bits(got, expand(source, 16, 5, 2.0, axis=-1))
    with pytest.raises(CompatibilityError, match="has num_layers 2, but 'm8' was registered"):
        manager.transition(source[:2], "m8", "m16", 5)
    with pytest.raises(CompatibilityError, match="has 7 positions"):
        manager.transition(source[..., :7], "m8", "m16", 5)
    manager.register_model("m16", 16, num_layers=3, head_dim=5)
    with pytest.raises(CompatibilityError, match=r"'m16' .*head_dim 5.*axis 4 has no axis for it"):
        manager.transition(source, "m8", "m16", 5)


def test_a_manager_of_five_dimensions():
    manager = StateTransitionManager()
    for length in (8, 16):
        manager.register_model(f"m{length}", length, 3, 2, 5)
    source = cache(MACOS)
    assert_same_bits(manager.transition(source, "m8", "m16", 5), expand(source, 16, 5))
    for wrong, field in ((source[1:], "num_layers"), (source[:, :, 1:], "num_kv_heads"),
                         (source[..., 1:], "head_dim")):  # fmt: skip
        with pytest.raises(CompatibilityError, match=f"the state has {field}"):
            manager.transition(wrong, "m8", "m16", 5)
    with pytest.raises(CompatibilityError, match=r"axis 1 has no axis for it: .* num_layers"):
        manager.transition(source[0, 0], "m8", "m16", 5)


# ---- KVState ----


@pytest.mark.parametrize(("rank", "axis"), AXES)
def test_a_state_of_every_axis(rank, axis):
    values = random_bits(shape_of(rank, axis, 4), np.uint16) | 1
    state = KVState.from_array(values, 7, seq_axis=axis)
    assert (state.seq_axis, state.seq_length, state.capacity) == (axis % rank, 4, 7)
    assert state.reserved_nbytes == values.nbytes // 4 * 7 and state.nbytes == values.nbytes
    address = state.array.ctypes.data
    state.resize(7)
    assert state.array.ctypes.data == address, "growing copies nothing"
    assert_same_bits(state.array, expand(values, 7, axis=axis))
    tokens = np.moveaxis(state.array, axis, 0)
    assert np.shares_memory(tokens, state.array)
    tokens[4:] = 9  # append
    assert_same_bits(state.array, expand(values, 7, 4, 9, axis=axis))
    del tokens
    for capacity in (7, 8, 4000):
        state.reserve(capacity)
        assert_same_bits(state.array, expand(values, 7, 4, 9, axis=axis))
        state.resize(capacity)
        assert_same_bits(state.array, expand(expand(values, 7, 4, 9, axis=axis), capacity,
                                             axis=axis))  # fmt: skip
        state.resize(7)
    state.resize(5, 3)
    state.resize(6)
    assert_same_bits(state.array, expand(values, 6, 3, axis=axis))
    copy = state.contiguous()
    assert copy.flags.c_contiguous and not np.shares_memory(copy, state.array)
    assert_same_bits(copy, expand(values, 6, 3, axis=axis))


def test_a_large_state_of_short_rows():
    values = random_bits((8, 1, 128, 1, 1500), np.uint16) | 1
    state = KVState.from_array(values, 1500, seq_axis=-1)
    for capacity in (1501, 3000, 5000, 40_000):
        state.reserve(capacity)
        state.resize(capacity)
        assert np.array_equal(state.array[..., :1500], values)
        assert not state.array[..., 1500:].any()
        state.resize(1500)


def test_a_state_shows_its_axis():
    state = KVState(IOS, 16, seq_axis=-1)
    expected = "KVState(shape=(3, 1, 10, 1, 8), capacity=16, dtype=float16, seq_axis=-1)"
    assert repr(state) == expected
    assert repr(KVState(MACOS)) == "KVState(shape=(3, 1, 2, 8, 5), capacity=8, dtype=float16)"
    page = state._repr_html_()
    assert "<caption>KVState: 8 of 16 positions</caption>" in page
    assert "axis 2</th>" in page and "positions</th>" in page and "heads" not in page
