"""A cache that grows in place: which bytes move or become zero, and what keeps memory alive."""

import contextlib
import gc
import sys
import threading

import child
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_model import ALL_DTYPES, LAYOUTS, assert_same_bits, dtype_of, random_bits
from thread_team import run_in_threads
from tries import tries

from mlstate import CapacityError, CompatibilityError
from mlstate.kv import KVState, RollingKVState


def filled(length=8, capacity=20, dtype=np.float16):
    """A state without a single zero."""
    state = KVState((2, 3, length, 5), capacity, dtype)
    state.array[...] = 7
    return state


def test_begins_as_zeros():
    state = KVState((2, 3, 8, 5), 20, np.float32)
    assert state.array.shape == (2, 3, 8, 5) and not state.array.any()
    assert state.shape == (2, 3, 8, 5)
    assert (state.seq_length, state.capacity, state.dtype) == (8, 20, np.float32)
    assert state.nbytes == 2 * 3 * 8 * 5 * 4
    assert state.reserved_nbytes == 2 * 3 * 20 * 5 * 4


def test_defaults():
    state = KVState((2, 3, 8, 5))
    assert (state.capacity, state.dtype) == (8, np.float16)
    assert state.array.flags.c_contiguous


def test_the_array_is_a_writable_view():
    state = filled()
    array = state.array
    assert type(array) is np.ndarray
    assert array.flags.writeable and not array.flags.owndata and not array.flags.c_contiguous
    array[1, 2, 3, 4] = 9
    assert state.array[1, 2, 3, 4] == 9
    assert np.shares_memory(array, state.array)
    assert array.strides == (3 * 20 * 5 * 2, 20 * 5 * 2, 5 * 2, 2)


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_every_dtype(name):
    dtype = dtype_of(name)
    values = random_bits((2, 3, 4, 5), dtype)
    state = KVState.from_array(values, 9)
    assert state.dtype == dtype and state.array.dtype == dtype
    assert_same_bits(state.array, values)
    assert_same_bits(state.contiguous(), values)
    state.resize(9)
    assert_same_bits(state.array[:, :, :4], values)
    assert state.array[:, :, 4:].tobytes().strip(b"\0") == b""
    state.resize(2)
    state.resize(4)
    assert_same_bits(state.array[:, :, :2], values[:, :, :2])
    assert state.array[:, :, 2:].tobytes().strip(b"\0") == b""


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
def test_dtypes_of_ml_dtypes_by_name(name):
    dtype = dtype_of(name)
    assert KVState((1, 1, 2, 3), dtype=name).dtype == dtype


def test_the_other_byte_order():
    state = KVState((1, 1, 2, 3), 5, ">f4")
    state.array[...] = 1
    assert state.dtype == np.dtype(">f4") == state.array.dtype
    assert_same_bits(state.contiguous(), np.ones((1, 1, 2, 3), ">f4"))


@pytest.mark.parametrize("shape", [(0, 3, 8, 5), (2, 0, 8, 5), (2, 3, 0, 5), (2, 3, 8, 0)])
def test_empty_axes(shape):
    state = KVState(shape, 20)
    assert state.array.shape == shape
    for length in (20, 0, 4):
        state.resize(length)
        assert state.array.shape == (*shape[:2], length, shape[3])
        assert not state.array.any()
    state.reserve(30)
    state.resize(30)
    assert state.contiguous().shape == (*shape[:2], 30, shape[3])


def test_no_capacity_at_all():
    state = KVState((2, 3, 0, 5), 0)
    assert state.array.size == 0 and state.capacity == 0
    state.reserve(4)
    state.resize(4)
    state.array[...] = 1


# ---- resizing ----


def test_growth_within_capacity_makes_no_copy():
    state = filled()
    before = state.array
    address = before.ctypes.data
    for length in (9, 15, 20):
        state.resize(length)
        after = state.array
        assert after.ctypes.data == address and np.shares_memory(before, after)
        assert (after[:, :, :8] == 7).all() and not after[:, :, 8:].any()
    assert before.shape == (2, 3, 8, 5), "an array keeps the length it was made with"


def test_resizing_with_numpy_integers():
    state = filled()
    state.resize(np.int8(12), np.uint16(3))
    assert state.seq_length == 12
    state = KVState([np.int64(n) for n in (2, 3, 8, 5)], np.int16(20))
    assert state.capacity == 20
    state.reserve(np.uint8(200))
    assert state.capacity == 200


def test_refused_sizes_keep_the_state():
    state = filled()
    for arguments, text, facts in (
        ((21,), "sequence length 21 is beyond the reserved capacity 20", ("at most 20", "21")),
        ((12, 9), "current_position 9 is beyond the sequence length 8", ("at most 8", "9")),
        ((4, 5), "current_position 5 is beyond the sequence length 4", ("at most 4", "5")),
        ((-1,), "seq_length -1 is negative", (None, None)),
        ((4, -1), "current_position -1 is negative", (None, None)),
        ((2**70,), "seq_length does not fit into 64 bits", (None, None)),
        ((4, 2**70), "current_position does not fit into 64 bits", (None, None)),
    ):
        with pytest.raises(CapacityError, match=text) as caught:
            state.resize(*arguments)
        assert (caught.value.expected, caught.value.got) == facts
    for arguments in ((4.0,), ("4",), (None,), (4, 2.0)):
        with pytest.raises(TypeError, match="must be an integer"):
            state.resize(*arguments)
    assert state.shape == (2, 3, 8, 5) and (state.array == 7).all()


@pytest.mark.parametrize("state_type", [KVState, RollingKVState])
@pytest.mark.parametrize(
    ("shape", "options", "error", "text"),
    [
        ((2, 3, 8, 5), {"capacity": -1}, CapacityError, "capacity -1 is negative"),
        ((2, 3, 8, 5), {"capacity": 2**70}, CapacityError, "capacity does not fit"),
        ((2, 3, 8, 5), {"capacity": 2**62}, CapacityError, "larger than memory"),
        ((2, 3, 8, 5), {"capacity": 2**50}, MemoryError, "cannot map"),
        ((2, 3, 8, 5), {"capacity": 9.5}, TypeError, "capacity must be an integer"),
        ((2**40, 2**40, 8, 5), {}, CapacityError, "larger than memory"),
        ((8,), {}, CompatibilityError, "shape must have 2 to 8 dimensions, .* got 1: shape"),
        ((8,), {"seq_axis": 0}, CompatibilityError, "shape must have 2 to 8 dimensions"),
        ((1,) * 9, {}, CompatibilityError, "2 to 8 dimensions, .* got 9: shape"),
        ((2, 3, -8, 5), {}, CompatibilityError, "shape has the negative dimension -8"),
        ((2, 3, 8.0, 5), {}, TypeError, "must be an integer"),
        (8, {}, TypeError, "shape must be a sequence of integers, got int"),
        ((2, 3, 8, 5), {"seq_axis": 4}, CompatibilityError, r"seq_axis 4 is outside -4..3: shape"),
        ((2, 3, 8, 5), {"seq_axis": -5}, CompatibilityError, r"seq_axis -5 is outside"),
        ((2, 3, 8, 5), {"seq_axis": 1.5}, TypeError, "seq_axis must be an integer"),
    ],
)
def test_invalid_states_are_refused(state_type, shape, options, error, text):
    with pytest.raises(error, match=text):
        state_type(shape, **options)


def test_a_capacity_below_the_length():
    for shape, axis in (((2, 3, 8, 5), -2), ((3, 1, 10, 1, 8), -1)):
        with pytest.raises(CapacityError, match="sequence length 8 is beyond the capacity 7"):
            KVState(shape, 7, seq_axis=axis)


def test_memory_that_the_system_refuses():
    state = filled()
    with pytest.raises(MemoryError, match="cannot map"):
        state.reserve(2**54)
    assert state.capacity == 20 and (state.array == 7).all()


@pytest.mark.parametrize("state_type", [KVState, RollingKVState])
def test_dtypes_that_the_core_does_not_have(state_type):
    for dtype in ("S3", "O", "complex128", "M8[s]", "i4,f4"):
        with pytest.raises(CompatibilityError, match="not supported"):
            state_type((1, 1, 2, 3), dtype=dtype)
    with pytest.raises(TypeError):
        state_type((1, 1, 2, 3), dtype="no dtype")


# ---- reserving ----


def test_reserving_is_refused_while_an_array_lives():
    state = filled()
    array, part = state.array, state.array[0, :, 2:]
    with pytest.raises(BufferError, match=r"^2 arrays still view this cache.*delete them first"):
        state.reserve(40)
    assert state.capacity == 20 and (array == 7).all()
    del array
    with pytest.raises(BufferError, match=r"^1 arrays"):
        state.reserve(40)
    del part
    state.reserve(40)
    assert (state.array == 7).all()


def test_reserving_less_is_refused():
    state = filled()
    with pytest.raises(CapacityError, match="capacity 19 is below the present 20") as caught:
        state.reserve(19)
    assert (caught.value.expected, caught.value.got) == ("at least 20", "19")
    for capacity, error in ((-1, CapacityError), (2**70, CapacityError), (2.5, TypeError)):
        with pytest.raises(error):
            state.reserve(capacity)
    assert state.capacity == 20


# ---- lifetime ----


def test_an_array_outlives_its_state():
    state = KVState((4, 8, 512, 64), 1024, np.float32)
    array = state.array
    array[...] = 3
    del state
    gc.collect()
    other = [KVState((4, 8, 512, 64), 1024, np.float32) for _ in range(4)]
    for each in other:
        each.array[...] = 1
    assert (array == 3).all()
    array[...] = 4
    assert array.sum() == 4 * array.size
    part = array[1:, :, ::2]
    del array
    gc.collect()
    assert (part == 4).all()


def test_a_view_of_an_array_keeps_the_memory_too():
    state = filled()
    flat = state.array[0, 0].reshape(-1)
    assert flat.base is not None
    with pytest.raises(BufferError):
        state.reserve(100)
    del state
    gc.collect()
    assert (flat == 7).all()


def test_array_access_leaks_no_reference():
    state = filled()
    before = sys.getrefcount(state._buffer)
    for _ in range(100):
        state.array  # noqa: B018
    after = sys.getrefcount(state._buffer)
    assert after == before
    state.reserve(21)


def test_the_parts_are_not_for_subclassing_or_making():
    state = filled()
    lease = state.array.base
    with pytest.raises(TypeError):
        type(lease)()
    with pytest.raises(TypeError):
        type("Sub", (type(state._buffer),), {})


# ---- conversion ----


@pytest.mark.parametrize("name", LAYOUTS)
def test_from_array_of_any_layout(name):
    values = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    source = LAYOUTS[name](values)
    state = KVState.from_array(source, 9)
    assert state.dtype == source.dtype and state.capacity == 9
    np.testing.assert_array_equal(state.array, values)
    assert not np.shares_memory(state.array, source)
    source[...] = 0
    np.testing.assert_array_equal(state.array, values)


def test_from_array_refuses_invalid_shapes():
    assert KVState.from_array(np.ones((1, 2, 3, 4))).capacity == 3
    with pytest.raises(CompatibilityError, match="2 to 8 dimensions"):
        KVState.from_array(np.ones(3))
    with pytest.raises(CapacityError):
        KVState.from_array(np.ones((1, 2, 3, 4)), 2)
    for array in ([[[[1.0]]]], None, "cache"):
        with pytest.raises(TypeError, match="array must be a NumPy array, got"):
            KVState.from_array(array)


def test_contiguous_is_a_copy():
    state = filled()
    copy = state.contiguous()
    assert copy.flags.c_contiguous and copy.nbytes == state.nbytes
    assert not np.shares_memory(copy, state.array)
    copy[...] = 0
    assert (state.array == 7).all()
    state.reserve(40)  # the copy does not export the state's memory


@pytest.mark.parametrize("state_type", [KVState, RollingKVState])
def test_numpy_takes_the_state_as_an_array(state_type):
    state = state_type((2, 3, 8, 5), 20)
    state.array[...] = 7
    seen = np.asarray(state)
    assert np.shares_memory(seen, state.array) and seen.shape == state.shape
    assert np.asarray(state, np.float64).dtype == np.float64
    assert not np.shares_memory(np.array(state), state.array)
    assert not np.shares_memory(np.array(state, copy=True), state.array)
    assert np.shares_memory(np.array(state, copy=False), state.array)
    with pytest.raises(ValueError, match="copy"):
        np.array(state, np.float64, copy=False)
    assert np.add(state, 1).max() == 8
    assert np.allclose(state, 7)


def test_repr():
    assert repr(filled()) == "KVState(shape=(2, 3, 8, 5), capacity=20, dtype=float16)"
    assert repr(KVState((1, 1, 2, 3), 9, dtype_of("bfloat16"))) == (
        "KVState(shape=(1, 1, 2, 3), capacity=9, dtype=bfloat16)"
    )


# ---- any sequence of calls ----


class Growing(RuleBasedStateMachine):
    """A state compared with a plain list of positions that is truncated and padded."""

    @initialize(
        length=st.integers(0, 9),
        spare=st.integers(0, 9),
        dims=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 5)),
        dtype=st.sampled_from(["float16", "float64", "int8"]),
    )
    def begin(self, length, spare, dims, dtype):
        layers, heads, head_dim = dims
        self.model = random_bits((layers, heads, length, head_dim), dtype)
        self.state = KVState.from_array(self.model, length + spare)
        self.seed = 0

    @rule(length=st.integers(0, 40), position=st.none() | st.integers(0, 40))
    def resize(self, length, position):
        shorter = min(length, self.model.shape[2])
        if length > self.state.capacity or (position or 0) > shorter:
            with pytest.raises(CapacityError):
                self.state.resize(length, position)
            return
        self.state.resize(length, position)
        valid_length = shorter if position is None else position
        layers, heads, _, head_dim = self.model.shape
        model = np.zeros((layers, heads, length, head_dim), self.model.dtype)
        model[:, :, :valid_length] = self.model[:, :, :valid_length]
        self.model = model

    @rule(more=st.integers(0, 9))
    def reserve(self, more):
        self.state.reserve(self.state.capacity + more)

    @rule()
    def write(self):
        self.seed += 1
        self.model = random_bits(self.model.shape, self.model.dtype, self.seed)
        self.state.array[...] = self.model

    @invariant()
    def is_the_model(self):
        if hasattr(self, "state"):
            assert_same_bits(self.state.array, self.model)
            assert_same_bits(self.state.contiguous(), self.model)


TestGrowing = Growing.TestCase
TestGrowing.settings = settings(deadline=None, max_examples=tries(60), stateful_step_count=20)


# ---- threads ----


@pytest.mark.timeout(60)
def test_eight_threads_share_one_state():
    state = filled(8, 64)

    def work(which):
        for i in range(300):
            if which % 4 == 0:
                state.resize(8 + i % 57)
            elif which % 4 == 1:
                array = state.array
                assert (array[:, :, :8] == 7).all()
            elif which % 4 == 2:
                copy = state.contiguous()
                assert (copy[:, :, :8] == 7).all() and not copy[:, :, 8:].any()
            else:
                assert 8 <= state.seq_length <= 64 and len(repr(state)) > 20

    run_in_threads(work, 8)
    state.reserve(100)


@pytest.mark.timeout(60)
def test_reserving_and_looking_at_once():
    """Memory moves only while nothing exports it; an exporter never sees it move."""
    state = filled(4, 8)
    stop = threading.Event()

    def work(which):
        moved = 0
        while which and not stop.is_set():
            assert (state.array[:, :, :4] == 7).all()
        for _ in range(0 if which else 2000):
            with contextlib.suppress(BufferError):
                state.reserve(state.capacity + 50)
                moved += 1
        stop.set()
        return moved

    moved = run_in_threads(work, 4)[0]
    assert (state.array == 7).all() and state.capacity == 8 + 50 * moved


# ---- memory ----

PEAK = """
import numpy as np
from mlstate.kv import KVState

state = KVState((4, 4, 2048, 512), 2048, np.float32)  # 128 MiB
base = status("VmRSS")
state.array[...] = 1
state.reserve(4096)
state.resize(4096)
state.array[:, :, 2048:] = 2
print(status("VmHWM") - base, state.array[:, :, :2048].min(), state.array[:, :, 2048:].min())
"""

UNUSED = """
import numpy as np
from mlstate.kv import KVState, RollingKVState

base = status("VmRSS")
tokens = np.ones((4, 4, 64, 512), np.float32)  # 2 of 256 MiB
grown = KVState.from_array(tokens, 8192)
rolled = RollingKVState((4, 4, 8192, 512), dtype=np.float32)
rolled.append(tokens)
print(status("VmRSS") - base, grown.reserved_nbytes, rolled.nbytes)
"""


@child.needs_status
@pytest.mark.slow
def test_the_peak_of_reserving_is_the_new_size():
    peak, old, new = child.run(child.STATUS + PEAK).split()
    assert (float(old), float(new)) == (1, 2)
    assert int(peak) < 1.15 * (256 << 20), "both sizes together would be 384 MiB"


@child.needs_status
def test_capacity_that_is_not_used_occupies_no_memory():
    occupied, *reserved = map(int, child.run(child.STATUS + UNUSED).split())
    assert reserved == [256 << 20] * 2
    assert occupied < 32 << 20


def test_a_page_shows_positions_dtype_and_both_sizes():
    state = KVState.from_array(np.zeros((36, 1, 256, 256), np.float16), 512)
    page = state._repr_html_()
    assert "<caption>KVState: 256 of 512 positions</caption>" in page
    for cell in ("36", "256", "512", "float16", "4.50 MiB", "9.00 MiB"):
        assert f">{cell}</td>" in page
    assert "<th class=r>head dimension</th>" in page
