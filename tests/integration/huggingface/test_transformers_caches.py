"""The layers of transformers' caches as rings: no copy, and the positions of their tokens."""

import numpy as np
import pytest
from needs import needs

from mlstate.kv import CacheEntry, CacheSpec, CacheState

pytestmark = [pytest.mark.torch, needs("transformers")]
torch = pytest.importorskip("torch", reason="transformers needs it")

WINDOW = 8
# The tokens of each call of `update`.
HISTORIES = {
    "short prefill": [5],
    "exact": [8],
    "long prefill": [20],
    "decode": [5] + [1] * 12,
    "two prefills": [5, 7],
    "prefill when full": [20, 3, 1],
}


def filled(layer, steps):
    """The layer after the steps; the key of the token at position p is p."""
    position = 0
    for count in steps:
        keys = torch.arange(position, position + count, dtype=torch.float32).reshape(1, 1, -1, 1)
        layer.update(keys, keys)
        position += count
    return position


def state_of(layer, length, next_slot, window):
    keys = layer.keys
    entry = CacheEntry("k", "sliding", keys.shape, keys.dtype, window=window, next_slot=next_slot)
    return CacheState(CacheSpec([entry]), {"k": keys}, length)


def assert_positions_are_the_tokens(state, count):
    positions, slots = state.positions("k"), state.arrays["k"].ravel().numpy()
    is_used = positions >= 0
    assert np.count_nonzero(is_used) == count
    np.testing.assert_array_equal(slots[is_used], positions[is_used])
    np.testing.assert_array_equal(state.ordered("k").ravel(), np.sort(positions[is_used]))
    assert state.ordered("k", copy=False).data_ptr() == state.arrays["k"].data_ptr()


@pytest.mark.parametrize("name", HISTORIES)
def test_a_dynamic_sliding_layer_is_in_order(name):
    from transformers.cache_utils import DynamicSlidingWindowLayer

    layer = DynamicSlidingWindowLayer(sliding_window=WINDOW)
    length = filled(layer, HISTORIES[name])
    state = state_of(layer, length, 0, WINDOW - 1)
    assert_positions_are_the_tokens(state, min(length, WINDOW - 1))
    assert layer.get_seq_length() == state.length


@pytest.mark.parametrize("name", HISTORIES)
def test_a_static_sliding_layer_is_in_order(name):
    from transformers.cache_utils import StaticSlidingWindowLayer

    layer = StaticSlidingWindowLayer(max_cache_len=64, sliding_window=WINDOW)
    length = filled(layer, HISTORIES[name])
    slot = length % WINDOW if length < WINDOW else 0
    assert_positions_are_the_tokens(state_of(layer, length, slot, WINDOW), min(length, WINDOW))


def test_a_static_layer_is_a_full_entry():
    from transformers.cache_utils import StaticLayer

    layer = StaticLayer(max_cache_len=16)
    length = filled(layer, [5, 1, 1])
    entry = CacheEntry("k", "full", layer.keys.shape, layer.keys.dtype)
    state = CacheState(CacheSpec([entry]), {"k": layer.keys}, length)
    assert_positions_are_the_tokens(state, 7)


def test_layer_recording_its_past_exceeds_its_window():
    from transformers.cache_utils import DynamicSlidingWindowLayer

    layer = DynamicSlidingWindowLayer(sliding_window=WINDOW)
    layer.activate_past_recording()
    length = filled(layer, [12, 4])
    state = state_of(layer, length, 0, WINDOW - 1)
    assert state.spec["k"].shape[2] == 16
    assert_positions_are_the_tokens(state, 16)
    layer.crop(-3)
    state.trim(3)
    assert layer.get_seq_length() == state.length == 13
    cropped = state_of(layer, 13, 0, WINDOW - 1)
    newest = state.ordered("k")[:, :, -7:]
    np.testing.assert_array_equal(cropped.ordered("k"), newest)


@pytest.mark.parametrize("inference", [False, True])
def test_a_snapshot_takes_a_hybrid_back(inference):
    """Layers that write in place: keys of all tokens, a convolution and a recurrent state."""
    from transformers.cache_utils import LinearAttentionLayer, StaticLayer

    full, linear = StaticLayer(max_cache_len=32), LinearAttentionLayer()
    with torch.inference_mode(inference):  # its tensors refuse writes outside of it
        filled(full, [10])
        linear.update_recurrent_state(torch.ones(1, 2, 4, 4))
        linear.update_conv_state(torch.ones(1, 6, 4))
    arrays = {"k": full.keys, "r": linear.recurrent_states[0], "c": linear.conv_states[0]}
    spec = CacheSpec(
        [
            CacheEntry("k", "full", arrays["k"].shape, arrays["k"].dtype),
            CacheEntry("r", "recurrent", arrays["r"].shape, arrays["r"].dtype),
            CacheEntry("c", "conv", arrays["c"].shape, arrays["c"].dtype),
        ]
    )
    state = CacheState(spec, arrays, 10)
    before = state.snapshot()
    with torch.inference_mode(inference):
        filled(full, [1])
        arrays["r"].mul_(3)
        arrays["c"].zero_()
    state.advance(1)
    state.restore(before)
    assert state.length == 10 and (arrays["r"] == 1).all() and (arrays["c"] == 1).all()
