"""A slot of a ring whose token was never written is not a token, until the next one is."""

import copy
import pickle

import numpy as np
import pytest

import mlstate
from mlstate.errors import CapacityError, CompatibilityError
from mlstate.kv import CacheEntry, CacheSpec, CacheState

SIZE = 4


def ring_state(length=7, sinks=0, next_slot=None, unwritten=1, size=SIZE, window=None):
    entry = CacheEntry(
        "keys",
        "sliding",
        (1, 1, size, 1),
        "float32",
        sinks=sinks,
        next_slot=next_slot,
        unwritten=unwritten,
        window=window,
    )
    state = CacheState(CacheSpec([entry]), {"keys": np.zeros((1, 1, size, 1), "f4")}, length)
    positions = state.positions("keys")
    state.arrays["keys"][0, 0, :, 0] = np.where(positions < 0, 99, positions)
    return state


@pytest.mark.parametrize("sinks", [0, 1, 2])
@pytest.mark.parametrize("length", [4, 5, 6, 7, 11])
@pytest.mark.parametrize("next_slot", [None, 3])
def test_the_slot_is_not_a_token_until_the_next_token(sinks, length, next_slot):
    full = ring_state(length, sinks, next_slot, unwritten=0)
    state = ring_state(length, sinks, next_slot)
    slot = state.next_slot("keys")
    expected = full.positions("keys")
    expected[slot] = -1
    assert state.positions("keys").tolist() == expected.tolist()
    assert state.ordered("keys").ravel().tolist() == sorted(expected[expected >= 0])
    assert state.ordered("keys", copy=False).ravel().tolist() == sorted(expected[expected >= 0])
    for other in (state.copy(), copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert other.positions("keys").tolist() == expected.tolist()
        assert other.spec[0].unwritten == 1 and other.spec == state.spec
    state.arrays["keys"][0, 0, slot, 0] = length
    state.advance(1)
    assert state.spec[0].unwritten == 0
    assert state.positions("keys").tolist() == state.arrays["keys"].ravel().tolist()


def test_operations_that_would_use_the_slot_are_refused():
    state = ring_state(SIZE, window=8)
    for call in (
        lambda: state.trim(1),
        lambda: state.crop(2),
        lambda: state.resize(6),
        lambda: state.resize(2),
        state.snapshot,
    ):
        with pytest.raises(CompatibilityError, match="the slot of its oldest token is not written"):
            call()
    assert state.length == SIZE and state.spec[0].unwritten == 1
    state.trim(0)
    state.resize(SIZE)


def test_a_checkpoint_keeps_the_slot(tmp_path):
    state = ring_state()
    mlstate.save(tmp_path / "saved", {}, states={"cache": state})
    loaded = mlstate.load(tmp_path / "saved").states["cache"]
    assert loaded.positions("keys").tolist() == state.positions("keys").tolist()
    target = ring_state(unwritten=0)
    mlstate.load(tmp_path / "saved", into={"states": {"cache": target}})
    assert target.positions("keys").tolist() == state.positions("keys").tolist()


def test_a_restore_of_a_snapshot_has_all_tokens():
    state = ring_state()
    state.arrays["keys"][0, 0, state.next_slot("keys"), 0] = 7
    state.advance(1)
    before = state.snapshot()
    state.advance(1)
    state.restore(before)
    assert sorted(state.positions("keys")) == [4, 5, 6, 7]


@pytest.mark.parametrize("kind", ["full", "recurrent"])
def test_only_rings_have_an_unwritten_slot(kind):
    with pytest.raises(CompatibilityError, match="unwritten 1 does not fit"):
        CacheEntry("keys", kind, (1, 1, 4, 1), "float32", unwritten=1)


def test_wrong_numbers_are_refused():
    with pytest.raises(CompatibilityError, match="unwritten 2"):
        CacheEntry("keys", "sliding", (1, 1, 4, 1), "float32", unwritten=2)
    with pytest.raises(CapacityError):
        CacheEntry("keys", "sliding", (1, 1, 4, 1), "float32", unwritten=-1)
    with pytest.raises(CompatibilityError, match="3 tokens leave"):
        ring_state(3)
