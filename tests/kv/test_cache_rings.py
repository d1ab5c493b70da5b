"""Rings that another library filled: the positions of their tokens, and how they go on."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kv_model import assert_refused, assert_same_bits
from mlx_ring import RECORDED, RotatingKVCache, run
from tries import tries

from mlstate import CapacityError, CompatibilityError
from mlstate.kv import CacheEntry, CacheSpec, CacheState, RollingKVState


def ring_state(keys, length, next_slot, *more, window=None, sinks=0):
    entry = CacheEntry(
        *("k", "sliding", keys.shape, keys.dtype), window=window, sinks=sinks, next_slot=next_slot
    )
    arrays = {"k": keys, **{e.name: np.zeros(e.shape, e.dtype) for e in more}}
    return CacheState(CacheSpec([entry, *more]), arrays, length)


def tokens_array(tokens):
    return np.array(tokens, np.float32).reshape(1, 1, -1, 1)


def state_of_mlx(cache):
    return ring_state(cache.keys, cache.offset, cache.idx, window=cache.max_size, sinks=cache.keep)


def assert_positions_are_the_tokens(state):
    """The element of each slot is the position of its token, in `tokens_array`."""
    positions, slots = state.positions("k"), state.arrays["k"].ravel()
    is_used = positions >= 0
    np.testing.assert_array_equal(slots[is_used], positions[is_used])
    np.testing.assert_array_equal(state.ordered("k").ravel(), np.sort(positions[is_used]))


# ---- mlx ----


@pytest.mark.parametrize("name", RECORDED)
def test_a_history_of_mlx_has_the_positions_of_its_tokens(name):
    max_size, keep, steps, offset, idx, slots = RECORDED[name]
    cache = run(max_size, keep, steps)
    assert (cache.offset, cache.idx) == (offset, idx)
    np.testing.assert_array_equal(cache.keys.ravel(), list(slots))  # as the original does
    state = state_of_mlx(cache)
    assert state.arrays["k"] is cache.keys
    assert_positions_are_the_tokens(state)
    assert np.count_nonzero(state.positions("k") >= 0) == min(offset, len(slots))


@settings(max_examples=tries(300), deadline=None)
@given(
    st.integers(2, 12),
    st.integers(0, 4),
    st.lists(st.one_of(st.just(1), st.integers(1, 20), st.integers(-5, -1)), min_size=1),
)
def test_any_history_of_mlx_has_the_positions_of_its_tokens(max_size, keep, steps):
    assume(keep < max_size)
    cache = RotatingKVCache(max_size, keep)
    for count in steps:
        if count > 0:
            first = cache.offset
            cache.update(tokens_array(range(first, first + count)))
        elif -count <= cache.offset < max_size:  # trimmable
            cache.trim(-count)
        if cache.keys is not None:
            assert_positions_are_the_tokens(state_of_mlx(cache))


def test_state_continues_like_mlx():
    """One token after the other, in the slots that mlx writes."""
    cache = run(8, 2, [5] + [1] * 9)
    state = state_of_mlx(cache)
    for token in range(14, 40):
        slot = cache.keep if cache.idx == cache.max_size else cache.idx
        assert state.next_slot("k") == slot
        cache.update(tokens_array([token]))  # in place: the state has the same array
        state.advance(1)
        assert_positions_are_the_tokens(state)
        assert state.positions("k")[slot] == token


def test_next_slot_at_the_end_wraps_to_the_first_slot_after_sinks():
    cache = run(8, 2, [8])
    assert cache.idx == 8
    assert state_of_mlx(cache).next_slot("k") == 2
    assert ring_state(cache.keys, 8, 2, sinks=2).next_slot("k") == 2


# ---- any ring ----


@settings(max_examples=tries(300), deadline=None)
@given(st.integers(1, 12), st.integers(0, 11), st.integers(0, 40), st.integers(0, 12))
def test_positions_follow_the_definition(size, sinks, length, next_slot):
    assume(sinks < size and sinks <= next_slot <= size)
    state = ring_state(tokens_array([0] * size), length, next_slot, sinks=sinks)
    window = size - sinks
    expected = [slot if slot < length else -1 for slot in range(sinks)]
    for slot in range(sinks, size):
        position = length - 1 - (next_slot - 1 - slot) % window
        expected.append(position if position >= sinks else -1)
    assert state.positions("k").tolist() == expected
    again = CacheState(state.spec, state.arrays, length)
    assert again.positions("k").tolist() == expected


@pytest.mark.parametrize("length", range(23))
def test_default_slot_follows_a_rolling_cache(length):
    ring = RollingKVState((2, 6, 5), dtype=np.float32, sinks=2)
    ring.append(np.arange(230, dtype=np.float32).reshape(2, 23, 5)[:, :length])
    slot = length if length < 2 else 2 + (length - 2) % 4
    for next_slot in (None, slot):
        entry = CacheEntry("k", "sliding", (2, 6, 5), "float32", 1, sinks=2, next_slot=next_slot)
        state = CacheState(CacheSpec([entry]), {"k": ring.array}, length)
        assert state.next_slot("k") == slot
        np.testing.assert_array_equal(state.positions("k"), ring.positions())
        assert_same_bits(state.ordered("k"), ring.ordered())
    assert state.view("k").shape == (2, min(length, 6), 5)


def test_tokens_in_order_are_returned_without_a_copy():
    in_order = tokens_array(range(13, 21))
    state = ring_state(in_order, 21, 0)
    assert np.shares_memory(state.ordered("k", copy=False), in_order)
    assert not np.shares_memory(state.ordered("k"), in_order)
    wrapped = ring_state(in_order, 21, 3)
    assert not np.shares_memory(wrapped.ordered("k", copy=False), in_order)
    assert_same_bits(state.ordered("k", copy=False), state.ordered("k"))
    few = ring_state(in_order, 5, 5)
    assert_same_bits(few.ordered("k", copy=False), in_order[:, :, :5])


def test_a_view_of_tokens_between_empty_slots_is_refused():
    state = ring_state(tokens_array([3, 4, -1, -1, 0, 1, 2]), 5, 2)
    assert_positions_are_the_tokens(state)
    assert_refused(state, CompatibilityError, r"k: .* not adjacent: use ordered\(\)", "view", "k")
    state = ring_state(tokens_array([-1, 0, 1, 2, -1]), 3, 4)
    assert state.view("k").ravel().tolist() == [0, 1, 2]


@pytest.mark.parametrize(("length", "slot"), [(9, 0), (9, 1), (1, 0), (0, 1)])
def test_next_slot_among_sinks_must_be_the_length(length, slot):
    with pytest.raises(CapacityError, match=f"k: next_slot {slot} is a slot of the 2 sinks") as got:
        ring_state(tokens_array(range(6)), length, slot, sinks=2)
    assert got.value.name == "k"
    assert ring_state(tokens_array(range(6)), slot, slot, sinks=2).next_slot("k") == slot


def test_only_a_sliding_entry_has_a_next_slot():
    full = CacheEntry("f", "full", (1, 8, 1), "float32")
    state = ring_state(tokens_array(range(4)), 4, 0, full)
    assert_refused(state, CompatibilityError, "f: a full entry is not a ring", "next_slot", "f")


def test_slot_is_ignored_by_equality_and_current_in_the_spec():
    shape = (1, 1, 8, 1)
    first, other = (CacheEntry("k", "sliding", shape, "float32", next_slot=slot) for slot in (1, 5))
    assert (
        first == other and hash(first) == hash(other) and CacheSpec([first]) == CacheSpec([other])
    )
    state = ring_state(tokens_array(range(8)), 8, 0)
    assert state.spec["k"].next_slot == 0
    state.advance(3)
    assert state.spec["k"].next_slot == 3 == state.next_slot("k")
    unset = ring_state(tokens_array(range(8)), 8, None)
    unset.advance(3)
    assert unset.spec["k"].next_slot is None


# ---- windows and arrays of other lengths ----


def test_array_beyond_its_window_keeps_the_newest_tokens():
    full = CacheEntry("f", "full", (1, 1, 64, 1), "float32")
    cache = run(32, 4, [40])
    state = ring_state(cache.keys, 40, cache.idx, full, window=32, sinks=4)
    assert state.view("k").shape[2] == 40
    state.resize(128)
    assert state.spec["k"].shape == (1, 1, 32, 1) and state.capacity == 128
    expected = [0, 1, 2, 3, *range(12, 40)]
    assert state.positions("k").tolist() == expected
    assert state.arrays["k"].ravel().tolist() == expected
    assert state.next_slot("k") == 4
    cache.update(tokens_array([40]))  # mlx drops the same tokens and writes to the same slot
    state.arrays["k"][:, :, state.next_slot("k")] = 40
    state.advance(1)
    assert_same_bits(state.arrays["k"], cache.keys)
    assert_positions_are_the_tokens(state)


@settings(max_examples=tries(200), deadline=None)
@given(
    st.integers(1, 14),
    st.integers(1, 14),
    st.integers(0, 5),
    st.integers(0, 40),
    st.integers(0, 14),
    st.integers(1, 20),
)
def test_resize_keeps_the_tokens_of_the_window(size, window, sinks, length, next_slot, capacity):
    assume(sinks < window and next_slot <= size)
    assume(length <= size or size >= window)
    assume(next_slot >= (sinks if sinks < size else 0))
    state = ring_state(tokens_array([0] * size), length, next_slot, window=window, sinks=sinks)
    positions = state.positions("k")
    state.arrays["k"][0, 0, :, 0] = positions  # the tokens, in their slots
    old_positions = sorted(p for p in positions.tolist() if p >= 0)
    needed = [p for p in old_positions if p < sinks or p >= length - (window - sinks)]
    target = min(capacity, window)
    if target != size and min(length, size, window) > target:
        assert_refused(state, CapacityError, "tokens do not fit", "resize", capacity)
        return
    state.resize(capacity)
    assert state.spec["k"].seq_length == target
    assert_positions_are_the_tokens(state)
    new_positions = sorted(p for p in state.positions("k").tolist() if p >= 0)
    assert set(needed) <= set(new_positions) <= set(old_positions)
    again = CacheState(state.spec, state.arrays, state.length)
    assert again.positions("k").tolist() == state.positions("k").tolist()


def test_a_rotated_ring_of_torch_is_moved_in_order():
    torch = pytest.importorskip("torch")
    tokens = torch.tensor([3.0, 4, 0, 1, 2], dtype=torch.bfloat16).reshape(1, 1, 5, 1)
    entry = CacheEntry("k", "sliding", (1, 1, 5, 1), "bfloat16", window=9, next_slot=2)
    state = CacheState(CacheSpec([entry]), {"k": tokens}, 5)
    state.resize(7)
    moved = state.arrays["k"]
    assert moved.dtype == torch.bfloat16 and moved.ravel().tolist() == [0, 1, 2, 3, 4, 0, 0]
    assert state.next_slot("k") == 5


def test_trim_is_limited_by_overwritten_tokens():
    state = ring_state(tokens_array(range(10)), 10, 10, window=16, sinks=4)
    state.trim(3)
    assert state.next_slot("k") == 7 and state.positions("k").tolist() == [*range(7), -1, -1, -1]
    longer = ring_state(tokens_array(range(40)), 40, 40, window=32)
    longer.trim(3)
    assert longer.length == 37
    wrapped = ring_state(tokens_array([0, 1, 7, 8, 9, 10]), 11, 6, window=5)
    assert_refused(wrapped, CompatibilityError, "k: .*evicted 5 tokens", "trim", 1)


def test_crop_explains_the_negative_number_of_transformers():
    state = ring_state(tokens_array(range(8)), 8, 0)
    assert_refused(state, CapacityError, r"at least 0, got -3: .* use trim\(3\)", "crop", -3)
