"""Masked arrays are refused, because a cache would lose their mask."""

import tempfile

import numpy as np
import pytest

from mlstate.kv import (
    CacheEntry,
    CacheSpec,
    CacheState,
    KVState,
    RollingKVState,
    compact_kv_state,
    create_attention_size_mask,
    rotate_keys,
    transition_kv_state,
)
from mlstate.prompts import PromptStore

SHAPE = (1, 1, 4, 2)


def state_of(array):
    return CacheState(CacheSpec([CacheEntry("k", "full", SHAPE, "float32")]), {"k": array}, 2)


def put(tokens, cache):
    with tempfile.TemporaryDirectory() as folder, PromptStore(folder, model="m") as store:
        return store.put(tokens, cache)


ONES = np.ones(SHAPE, np.float32)
CALLS = {
    "expand": lambda masked: transition_kv_state(masked, 8, 2),
    "identity": lambda masked: transition_kv_state(masked, 4),
    "compact": lambda masked: compact_kv_state(masked, 3, 2),
    "out": lambda masked: compact_kv_state(ONES, 4, 2, out=masked),
    "from_array": KVState.from_array,
    "append": lambda masked: RollingKVState(SHAPE, dtype=np.float32).append(masked),
    "state": state_of,
    "rotate": lambda masked: rotate_keys(masked, 1),
    "shift": lambda masked: rotate_keys(ONES, np.ma.array([1, 2], mask=[1, 0])),
    "mask": lambda masked: create_attention_size_mask(4, 1, 0, out=masked.reshape(1, 1, 2, 4)),
    "put": lambda masked: put([1, 2], masked),
    "tokens": lambda masked: put(np.ma.array([1, 2], mask=[0, 1]), ONES),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_masked_array_is_refused(call):
    masked = np.ma.array(ONES.copy(), mask=False)
    masked[0, 0, 1] = np.ma.masked
    with pytest.raises(TypeError, match="is a masked array, whose mask would be lost"):
        call(masked)
    np.testing.assert_array_equal(masked.data, ONES)
