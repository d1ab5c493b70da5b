"""The memory that stores need beside the cache: 16 MiB at most."""

import numpy as np
import pytest
from toy_caches import HYBRID, TOKENS, empty_state, prefilled, same, spec_of, store_at
from traced_memory import traced

from mlstate.kv import CacheEntry, CacheSpec, CacheState
from mlstate.prompts import _transfer

MOST = 16 << 20


@pytest.fixture
def store(tmp_path):
    with store_at(tmp_path) as opened:
        yield opened


SPECS = {
    "hybrid": HYBRID,
    "sliding": spec_of("sliding", "full"),
    "sinks": spec_of("sliding", sinks=3),
}


@pytest.mark.parametrize("most", [4, 32, 100, 400])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_parts_that_are_read_in_pieces_come_back(store, monkeypatch, spec, most):
    monkeypatch.setattr(_transfer, "_STAGED", most)
    monkeypatch.setattr(_transfer.Request, "target", lambda _: None)
    for count in (1, 17, 48, 99):
        before = prefilled(spec, TOKENS[:count])
        store.put(TOKENS[:count], before)
        after = empty_state(spec, np.ones)
        with store.match(TOKENS[:count], full=True) as match:
            assert store.restore(match, into=after) == count
        assert same(before, after)


def test_damage_in_a_part_that_is_read_in_pieces_is_noticed(store, tmp_path, monkeypatch):
    monkeypatch.setattr(_transfer, "_STAGED", 100)
    before = prefilled(HYBRID, TOKENS)
    before.arrays["1.state"][...] = np.random.default_rng(1).random((1, 3, 5))
    store.put(TOKENS, before)
    path = tmp_path / "store" / "segment-00000001"
    data = bytearray(path.read_bytes())
    for byte in range(0, before.arrays["1.state"].nbytes, 7):
        at = data.index(before.arrays["1.state"].tobytes()) + byte
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with store.match(TOKENS, full=True) as match:
            assert store.restore(match, into=empty_state(HYBRID)) == 0
    path.write_bytes(data)
    with store.match(TOKENS, full=True) as match:
        assert store.restore(match, into=empty_state(HYBRID)) == 100


def large_ring(length):
    """A window of 40 MiB in one array, whose oldest token is in the middle."""
    spec = CacheSpec([CacheEntry("keys", "sliding", (1, 20, 64, 8192), "float32", window=64)])
    array = np.zeros((1, 20, 64, 8192), np.float32)
    array[...] = np.arange(64 * 8192, dtype=np.float32).reshape(64, 8192)
    return CacheState(spec, {"keys": array}, length)


def test_a_restore_of_large_parts_needs_little_memory(store):
    before = large_ring(90)
    store.put(TOKENS[:90], before)
    after = large_ring(0)
    after.arrays["keys"][...] = 1
    with traced() as trace, store.match(TOKENS[:90], full=True) as match:
        after._cache.shifts["keys"] = 3  # the parts go to several places of the ring
        assert store.restore(match, into=after) == 90
    assert trace.peak < MOST
    assert np.array_equal(after.ordered("keys"), before.ordered("keys"))


def test_finding_damaged_records_needs_little_memory(store, tmp_path):
    store.put(TOKENS[:90], large_ring(90))
    with store.match(TOKENS[:90], full=True) as match, traced() as trace:
        assert not _transfer.has_damage(match._log_match, 5)
    assert trace.peak < MOST
