"""What a restore writes into targets of other axes, sizes and kinds of memory."""

import numpy as np
import pytest

from mlstate import CompatibilityError
from mlstate.kv import CacheEntry, CacheSpec, CacheState, KVState, RollingKVState
from mlstate.prompts import PromptStore

TOKENS = np.arange(9)


@pytest.fixture
def store(tmp_path):
    with PromptStore(tmp_path / "store", model="m", block_tokens=4) as opened:
        yield opened


def restore(store, into, tokens=TOKENS):
    with store.match(np.append(tokens, 0)) as match:
        return store.restore(match, into=into)


def ring(capacity, sinks, token_count, start=1):
    cache = RollingKVState((1, 1, capacity, 1), dtype=np.float32, sinks=sinks)
    tokens = np.arange(start, start + token_count, dtype=np.float32)
    cache.append(tokens.reshape(1, 1, token_count, 1))
    return cache


@pytest.mark.parametrize("sinks", [0, 1])
def test_a_ring_with_one_more_slot_does_not_hold_the_token_that_is_not_stored(store, sinks):
    store.put(TOKENS, ring(3, sinks, 9))
    cache = ring(4, sinks, 7, start=70)
    assert restore(store, cache) == 9
    positions = [0, 7, 8] if sinks else [6, 7, 8]
    assert sorted(cache.positions()) == [-1, *positions] and cache.next_position == 9
    np.testing.assert_array_equal(cache.ordered().ravel(), np.float32(positions) + 1)
    with pytest.raises(CompatibilityError, match="the window has a gap"):
        store.put(TOKENS, cache)
    expected = ring(4, sinks, 10)
    cache.append(np.full((1, 1, 1, 1), 10, np.float32))
    np.testing.assert_array_equal(cache.positions(), expected.positions())
    np.testing.assert_array_equal(cache.array, expected.array)


def test_a_restore_clears_the_slot_of_a_token_that_is_not_stored(store):
    spec = CacheSpec([CacheEntry("cache", "sliding", (1, 1, 4, 1), "float32", next_slot=2)])
    old = np.array([70, 71, 72, 73], np.float32).reshape(1, 1, 4, 1)
    state = CacheState(spec, {"cache": old}, 9)
    store.put(TOKENS, ring(3, 0, 9))
    assert restore(store, state) == 9
    np.testing.assert_array_equal(state.ordered("cache").ravel(), [7, 8, 9])
    assert sorted(state.positions("cache")) == [-1, 6, 7, 8] and state.spec[0].unwritten == 1
    with pytest.raises(CompatibilityError, match="feed one more token first"):
        store.put(TOKENS, state)


def test_a_kv_state_is_stored_along_its_sequence_axis(tmp_path):
    spec = CacheSpec([CacheEntry("kv", "full", (1, 1, 4, 4), "float32")])
    array = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    innermost = np.ascontiguousarray(array.swapaxes(2, 3))
    for source in (array, KVState.from_array(innermost, seq_axis=3)):
        with PromptStore(tmp_path / type(source).__name__, model="m", spec=spec) as store:
            store.put(TOKENS[:3], source)
            cache, target = (
                KVState((1, 1, 4, 4), dtype=np.float32, seq_axis=3),
                np.zeros_like(array),
            )
            assert restore(store, cache, TOKENS[:3]) == restore(store, target, TOKENS[:3]) == 3
            np.testing.assert_array_equal(cache.array[..., :3], innermost[..., :3])
            np.testing.assert_array_equal(target[:, :, :3], array[:, :, :3])


@pytest.mark.parametrize("kind", ["conjugated", "negated"])
def test_tensors_that_are_conjugated_or_negated_when_read_keep_their_values(store, kind):
    torch = pytest.importorskip("torch")
    lazy = torch.randn(2, 1, 10, 3, dtype=torch.complex64).conj()
    target = torch.zeros(2, 1, 10, 3, dtype=torch.complex64).conj()
    if kind == "negated":
        lazy, target = lazy.imag, target.imag
    store.put(TOKENS, lazy)
    assert restore(store, target) == 9
    assert torch.equal(target[:, :, :9], lazy[:, :, :9])
