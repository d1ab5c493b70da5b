"""The extra memory of stores is at most 16 MiB."""

import weakref
from functools import partial

import numpy as np
import pytest
from checkpoint_model import flipped
from toy_caches import HYBRID, TOKENS, empty_state, prefilled, same, spec_of
from traced_memory import traced

from mlstate._core import PromptLog
from mlstate.errors import CompatibilityError
from mlstate.kv import CacheEntry, CacheSpec, CacheState
from mlstate.prompts import _transfer

MOST = 16 << 20


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
    monkeypatch.setattr(_transfer, "_STAGED", 16)
    monkeypatch.setattr(_transfer.Request, "target", lambda _: None)
    before = prefilled(HYBRID, TOKENS)
    before.arrays["1.state"][...] = np.random.default_rng(1).random((1, 3, 5))
    store.put(TOKENS, before)
    path = tmp_path / "store" / "segment-00000001"
    data = path.read_bytes()
    for byte in range(0, before.arrays["1.state"].nbytes, 7):
        path.write_bytes(flipped(data, data.index(before.arrays["1.state"].tobytes()) + byte))
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


# ---- another device ----


def put_part(log, part, end=4):
    return log.put(b"x", np.arange(end), 4, [(0, end, b"", [part])], None, 1.0)


def test_a_part_is_fetched_when_it_is_written(tmp_path):
    log = PromptLog(tmp_path / "log", True)
    rng = np.random.default_rng(1)
    arrays = [rng.random((3, n)).astype(np.float32) for n in (5, 1, 0, 700)]
    calls = []

    def fetch(number):
        calls.append(number)
        return arrays[number].copy()

    parts = [(a.nbytes, partial(fetch, i)) if i != 1 else a for i, a in enumerate(arrays)]
    records = [(0, 4, b"", parts)]
    assert log.put(b"x", np.arange(4), 4, records, None, 1.0) == [1]
    assert calls == [0, 3]
    assert log.put(b"x", np.arange(4), 4, records, None, 1.0) == [0]
    assert calls == [0, 3]  # a stored record is not fetched
    match = log.match(b"x", np.arange(4), 4)
    for number, array in enumerate(arrays):
        target = np.ones_like(array)
        assert match.read([(0, number, target)]) == [] and np.array_equal(target, array)


def raise_error():
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ((4, raise_error), RuntimeError),
        ((4, lambda: np.zeros(5, "u1")), CompatibilityError),
        ((4, lambda: "text"), TypeError),
        ((-1, raise_error), TypeError),
        ((4, 5), TypeError),
        ((4,), TypeError),
    ],
)
def test_a_part_that_cannot_be_fetched_leaves_the_log_unchanged(tmp_path, part, error):
    log = PromptLog(tmp_path / "log", True)
    put_part(log, np.ones(4, "u1"))
    before = log.stats()["live_bytes"]
    with pytest.raises(error):
        put_part(log, part, 8)
    assert log.stats()["live_bytes"] == before and log.verify() == []
    assert put_part(log, (4, lambda: np.ones(4, "u1")), 8) == [1]


class Copies:
    """The bytes that copies of a device's tensors use now, and did at most."""

    now = most = count = 0


def device_class(torch):
    """A class of tensors that claim to be on a GPU, and count their copies."""

    class DeviceTensor(torch.Tensor):
        device = property(lambda _: torch.device("cuda"))

        def cpu(self):
            copy = self.as_subclass(torch.Tensor).clone()
            Copies.count += 1
            Copies.now += copy.nbytes
            Copies.most = max(Copies.most, Copies.now)
            weakref.finalize(copy.untyped_storage(), self.forget, copy.nbytes)
            return copy

        @staticmethod
        def forget(nbytes):
            Copies.now -= nbytes

    return DeviceTensor


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_put_from_a_device_copies_one_part_at_a_time(store, monkeypatch, asynchronous):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(Copies, "now", 0)
    monkeypatch.setattr(Copies, "most", 0)
    monkeypatch.setattr(Copies, "count", 0)
    plain = torch.rand(2, 3, 64, 4)
    cache = plain.as_subclass(device_class(torch))
    done = store.put(TOKENS[:50], cache, asynchronous=asynchronous)
    assert (done.result(60) if asynchronous else done) == 50
    assert Copies.count == 4  # three blocks and the rest
    assert asynchronous or Copies.most == 16 * 2 * 3 * 4 * 4
    target = np.ones((2, 3, 64, 4), np.float32)
    with store.match(TOKENS[:50], full=True) as match:
        assert store.restore(match, into=target) == 50
    assert np.array_equal(target[:, :, :50], plain.numpy()[:, :, :50])
    store.put(TOKENS[:64], cache)
    assert Copies.count == 5  # the new block only
