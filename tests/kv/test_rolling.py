"""A cache that evicts its oldest tokens, compared with a plain list of tokens."""

import gc

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_model import ALL_DTYPES, LAYOUTS, assert_same_bits, dtype_of, random_bits
from thread_team import run_in_threads
from tries import tries

from mlstate import CapacityError, CompatibilityError
from mlstate.kv import RollingKVState


class TokenList:
    """The definition: a list of (position, token) that drops its oldest token after the sinks."""

    def __init__(self, shape, capacity, dtype, sinks, axis):
        self.shape, self.capacity, self.dtype = list(shape), capacity, np.dtype(dtype)
        self.sinks, self.axis = sinks, axis % len(shape)
        self.held, self.next, self.evicted = [], 0, 0

    def append(self, tokens):
        for i in range(tokens.shape[self.axis]):
            if len(self.held) == self.capacity:
                del self.held[self.sinks]
                self.evicted += 1
            self.held.append((self.next, np.take(tokens, [i], self.axis)))
            self.next += 1

    def trim(self, n):
        for _ in range(n):
            self.next, _ = self.held.pop()

    def ordered(self):
        empty = np.empty([*self.shape[: self.axis], 0, *self.shape[self.axis + 1 :]], self.dtype)
        values = [empty, *(token for _, token in self.held)]
        return np.concatenate(values, self.axis).astype(self.dtype)  # concatenate swaps bytes

    def slot(self, position):
        over = position - self.sinks
        return position if over < 0 else self.sinks + over % (self.capacity - self.sinks)

    def positions(self):
        positions = np.full(self.capacity, -1)
        for position, _ in self.held:
            positions[self.slot(position)] = position
        return positions

    def array(self):
        self.shape[self.axis] = self.capacity
        slots = np.zeros(self.shape, self.dtype)
        moved = np.moveaxis(slots, self.axis, 0)
        for position, token in self.held:
            moved[self.slot(position)] = np.moveaxis(token, self.axis, 0)[0]
        return slots


def assert_same(state, model):
    assert (state.length, state.evicted) == (len(model.held), model.evicted)
    assert state.next_position == model.next
    assert_same_bits(state.ordered(), model.ordered())
    assert_same_bits(state.array, model.array())
    assert_same_bits(state.positions(), model.positions())


def both(shape, capacity=None, dtype=np.float16, *, sinks=0, axis=-2):
    state = RollingKVState(shape, capacity, dtype, sinks=sinks, seq_axis=axis)
    capacity = shape[axis] if capacity is None else capacity
    return state, TokenList(shape, capacity, dtype, sinks, axis)


def tokens_of(state, count, seed=0):
    shape = list(state.shape)
    shape[state.seq_axis] = count
    return random_bits(shape, state.dtype, seed)


def test_begins_empty():
    state = RollingKVState((2, 3, 8, 5))
    assert (state.capacity, state.length, state.evicted, state.sinks) == (8, 0, 0, 0)
    assert (state.dtype, state.seq_axis, state.shape) == (np.float16, 2, (2, 3, 8, 5))
    assert not state.array.any() and (state.positions() == -1).all()
    assert state.positions().dtype == np.int64 and state.ordered().shape == (2, 3, 0, 5)
    assert state.nbytes == 2 * 3 * 8 * 5 * 2


@pytest.mark.parametrize("length", [0, 3, 40])
def test_the_capacity_replaces_the_sequence_length(length):
    state = RollingKVState((2, 3, length, 5), 12, np.float32, sinks=2)
    assert state.shape == (2, 3, 12, 5) and state.capacity == 12


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_every_dtype(name):
    state, model = both((2, 3, 4, 5), dtype=dtype_of(name), sinks=1)
    assert state.dtype == model.dtype
    for count in (3, 4):
        tokens = tokens_of(state, count, count)
        state.append(tokens)
        model.append(tokens)
    state.trim(2)
    model.trim(2)
    assert_same(state, model)


@pytest.mark.parametrize("rank", range(2, 9))
def test_every_rank_and_axis(rank):
    shape = (2, 3, 2, 4, 1, 2, 3, 2)[:rank]
    for axis in range(-rank, rank):
        state, model = both(shape, 5, np.int16, sinks=2, axis=axis)
        assert state.seq_axis == axis % rank
        for count in (3, 1, 4, 1):
            tokens = tokens_of(state, count, count)
            state.append(tokens)
            model.append(tokens)
            assert_same(state, model)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("axis", [-2, -1])
def test_tokens_of_any_layout(name, axis):
    values = np.arange(1, 1 + 2 * 3 * 7 * 7, dtype=np.float32).reshape(2, 3, 7, 7)
    state, model = both((2, 3, 7, 7), 5, np.float32, sinks=1, axis=axis)
    source = LAYOUTS[name](values)
    state.append(source)
    model.append(values)
    assert_same(state, model)
    source.setflags(write=False)
    state.append(source)  # tokens are only read
    model.append(values)
    assert_same(state, model)


@pytest.mark.parametrize("token_dtype", ["<f4", ">f4"])
@pytest.mark.parametrize("state_dtype", ["<f4", ">f4"])
def test_either_byte_order(token_dtype, state_dtype):
    state = RollingKVState((1, 1, 2, 3), dtype=state_dtype)
    state.append(np.arange(9, dtype=token_dtype).reshape(1, 1, 3, 3))
    assert state.dtype == np.dtype(state_dtype)
    assert_same_bits(state.ordered(), np.arange(3, 9, dtype=state_dtype).reshape(1, 1, 2, 3))


def test_tokens_of_torch():
    torch = pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    state = RollingKVState((1, 2, 3, 4), dtype="bfloat16")
    tokens = torch.arange(8.0).reshape(1, 2, 1, 4)
    state.append(tokens.to(torch.bfloat16))
    assert (state.ordered().astype(np.float32) == tokens.numpy()).all()
    with pytest.raises(CompatibilityError, match="tokens are float32, the cache is bfloat16"):
        state.append(tokens)


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 3, 4, 0)])
def test_empty_axes(shape):
    state = RollingKVState(shape, sinks=1)
    state.append(np.empty((*shape[:2], 9, shape[3]), np.float16))
    state.trim(1)
    assert (state.length, state.evicted) == (3, 5)
    assert state.ordered().shape == (*shape[:2], 3, shape[3])


# ---- trimming ----


def test_evicted_tokens_do_not_come_back():
    state = RollingKVState((1, 1, 4, 1), dtype=np.int8, sinks=1)
    state.append(np.arange(1, 11, dtype=np.int8).reshape(1, 1, 10, 1))
    state.trim(2)
    assert state.ordered().ravel().tolist() == [1, 8]
    assert sorted(state.array.ravel().tolist()) == [0, 0, 1, 8]
    assert (state.next_position, state.evicted) == (8, 6)
    state.trim(1)
    assert (state.next_position, state.length) == (7, 1)
    state.append(np.full((1, 1, 1, 1), 99, np.int8))
    assert state.positions().tolist() == [0, 7, -1, -1]
    state.trim(2)  # reaches the sink: the sequence begins again
    assert (state.next_position, state.length, state.evicted) == (0, 0, 6)


def test_trimming_too_much_keeps_the_state():
    state, model = both((2, 3, 6, 5), sinks=2)
    tokens = tokens_of(state, 9)
    state.append(tokens)
    model.append(tokens)
    with pytest.raises(CapacityError, match="cannot drop 7 tokens: the cache holds 6") as caught:
        state.trim(7)
    assert (caught.value.expected, caught.value.got) == ("0..6", "7")
    for n, error in ((-1, CapacityError), (2**70, CapacityError), (1.0, TypeError)):
        with pytest.raises(error):
            state.trim(n)
    assert_same(state, model)


# ---- errors ----


@pytest.mark.parametrize(
    ("shape", "options", "error", "text"),
    [
        ((2, 3, 8, 5), {"capacity": 0}, CapacityError, "at least 1 position, got 0"),
        ((2, 3, 0, 5), {}, CapacityError, "at least 1 position, got 0"),
        ((2, 3, 8, 5), {"sinks": -1}, CapacityError, "sinks -1 is negative"),
        ((2, 3, 8, 5), {"sinks": 8}, CapacityError, "8 sinks leave no room"),
        ((2, 3, 8, 5), {"sinks": 3, "capacity": 2}, CapacityError, "3 sinks leave no room"),
        ((2, 3, 8, 5), {"sinks": None}, TypeError, "sinks must be an integer"),
    ],
)
def test_caches_that_cannot_be(shape, options, error, text):
    with pytest.raises(error, match=text):
        RollingKVState(shape, **options)


def test_refused_tokens_keep_the_state():
    state, model = both((2, 3, 6, 5), sinks=2)
    tokens = tokens_of(state, 9)
    state.append(tokens)
    model.append(tokens)
    for bad, error, text in (
        (tokens[0], CompatibilityError, r"tokens have shape \(3, 9, 5\), the cache"),
        (tokens[..., :4], CompatibilityError, r"may differ only in axis 2, the sequence"),
        (tokens[:1], CompatibilityError, r"\(1, 3, 9, 5\)"),
        (tokens.astype(np.float32), CompatibilityError, "tokens are float32, the cache is float16"),
        (tokens.astype(object), CompatibilityError, "not supported"),
        (state.array[:, :, :1], ValueError, "pass a copy of them"),
        ([[[[1.0]]]], TypeError, "tokens"),
        (None, TypeError, "tokens"),
    ):
        with pytest.raises(error, match=text):
            state.append(bad)
        assert_same(state, model)


def test_the_buffer_takes_no_keywords():
    from mlstate import _core

    with pytest.raises(TypeError):
        _core.RollingBuffer((1, 1), None, "f2", 0, seq_axis=0)
    with pytest.raises(TypeError):
        _core.RollingBuffer((1, 1), None)
    with pytest.raises(TypeError):
        type("Sub", (_core.RollingBuffer,), {})


# ---- lifetime and conversion ----


def test_the_array_is_a_view_that_outlives_the_state():
    state = RollingKVState((2, 3, 6, 5), sinks=1)
    array = state.array
    assert type(array) is np.ndarray and array.flags.writeable and array.flags.c_contiguous
    assert not array.flags.owndata and np.shares_memory(array, state.array)
    state.append(np.ones((2, 3, 8, 5), np.float16))
    assert (array == 1).all()
    array[1, 2, 3, 4] = 9
    assert state.ordered()[..., 4].max() == 9
    del state
    gc.collect()
    assert array.sum() == 2 * 3 * 6 * 5 + 8


def test_ordered_and_positions_are_copies():
    state = RollingKVState((2, 3, 6, 5))
    state.append(np.ones((2, 3, 2, 5), np.float16))
    ordered, positions = state.ordered(), state.positions()
    assert ordered.flags.c_contiguous and not np.shares_memory(ordered, state.array)
    ordered[...] = 0
    positions[...] = 7
    assert (state.ordered() == 1).all() and state.positions().tolist() == [0, 1, -1, -1, -1, -1]


def test_repr_and_page():
    state = RollingKVState((2, 3, 1024, 5), dtype=np.float32, sinks=4)
    state.append(np.ones((2, 3, 1200, 5), np.float32))
    assert repr(state) == (
        "RollingKVState(shape=(2, 3, 1024, 5), length=1024, dtype=float32, sinks=4, seq_axis=2)"
    )
    page = state._repr_html_()
    assert "<caption>RollingKVState: 1,024 of 1,024 positions</caption>" in page
    for cell in ("(2, 3, 1024, 5)", "176", "1,200", "float32", "120.00 KiB"):
        assert f">{cell}</td>" in page


# ---- any sequence of calls ----


class Rolling(RuleBasedStateMachine):
    """A state compared with the list of tokens."""

    @initialize(
        shape=st.lists(st.integers(1, 3), min_size=2, max_size=8),
        capacity=st.integers(1, 9),
        sinks=st.integers(0, 8),
        axis=st.integers(-8, 7),
        dtype=st.sampled_from(["float16", "float64", "int8", ">f4"]),
    )
    def begin(self, shape, capacity, sinks, axis, dtype):
        axis = axis % len(shape) - len(shape)
        self.state, self.model = both(shape, capacity, dtype, sinks=sinks % capacity, axis=axis)
        self.seed = 0

    @rule(count=st.one_of(st.just(1), st.integers(0, 30)), layout=st.sampled_from(list(LAYOUTS)))
    def append(self, count, layout):
        self.seed += 1
        tokens = tokens_of(self.state, count, self.seed)
        is_direct = layout in ("heads_last", "sequence_first", "swapped")
        self.state.append(tokens if is_direct else LAYOUTS[layout](tokens))
        self.model.append(tokens)

    @rule(n=st.integers(0, 10))
    def trim(self, n):
        if n > len(self.model.held):
            with pytest.raises(CapacityError):
                self.state.trim(n)
            return
        self.state.trim(n)
        self.model.trim(n)

    @invariant()
    def is_the_model(self):
        if hasattr(self, "state"):
            assert_same(self.state, self.model)


TestRolling = Rolling.TestCase
TestRolling.settings = settings(deadline=None, max_examples=tries(60), stateful_step_count=20)


# ---- threads ----


@pytest.mark.timeout(60)
def test_eight_threads_append_to_one_state():
    """Every token is whole, and the number of tokens is exact."""
    state = RollingKVState((4, 2, 32, 64), sinks=2)

    def work(which):
        for i in range(200):
            if which < 5:
                state.append(np.full((4, 2, 1 + i % 3, 64), which + 1, np.float16))
            elif which == 5:
                ordered = state.ordered()
                assert (ordered == ordered[:1, :1, :, :1]).all(), "a torn token"
            elif which == 6:
                positions = np.sort(state.positions())
                later = positions[positions >= 2]
                assert (np.diff(later) == 1).all()
            else:
                assert 0 <= state.length <= 32 and len(repr(state)) > 20

    run_in_threads(work, 8)
    total = 5 * sum(1 + i % 3 for i in range(200))
    assert (state.next_position, state.evicted) == (total, total - 32)
