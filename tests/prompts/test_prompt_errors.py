"""Errors of the system during a restore: they are raised, and are not taken for damage."""

import contextlib
import errno
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from interruption import raise_once, split_condition
from toy_caches import (
    FULL,
    HYBRID,
    TOKENS,
    flip,
    is_zero,
    prefilled,
    same,
    spec_of,
)

from mlstate.errors import StoreError
from mlstate.prompts import _pending, _store


@contextlib.contextmanager
def unreadable_segments():
    """Every read of an open segment fails meanwhile: its descriptor is open for writing only."""
    if sys.platform != "linux":
        pytest.skip("needs /proc")
    names = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing
            names[int(link.name)] = str(link.readlink())
    copies = []
    for fd, name in names.items():
        if "/segment-" in name:
            copies.append((os.dup(fd), fd))
            write_only = os.open(name, os.O_WRONLY)
            os.dup2(write_only, fd)
            os.close(write_only)
    assert copies
    try:
        yield
    finally:
        for copy, fd in copies:
            os.dup2(copy, fd)
            os.close(copy)


def test_a_header_that_the_disk_cannot_read_is_an_error_and_stays_stored(store):
    store.put(TOKENS, prefilled(FULL, TOKENS))
    with unreadable_segments(), pytest.raises(StoreError, match="segment-00000001") as caught:
        store.match(TOKENS)
    assert caught.value.errno == errno.EBADF and str(store.path) in str(caught.value)
    with store.match(TOKENS, full=True) as match:
        assert match.length == len(TOKENS)


@pytest.mark.parametrize("spec", [FULL, HYBRID], ids=["full", "hybrid"])
def test_a_payload_that_the_disk_cannot_read_is_an_error_and_the_cache_is_zero(store, spec):
    before = prefilled(spec, TOKENS)
    store.put(TOKENS, before)
    target = prefilled(spec, TOKENS[:50])
    with store.match(TOKENS, full=True) as match:
        with unreadable_segments(), pytest.raises(StoreError, match="segment-00000001"):
            store.restore(match, into=target)
        assert target.length == 0 and is_zero(target)
        assert store.restore(match, into=target) == len(TOKENS)  # it is not taken for damage
    assert same(target, before)


def test_a_listing_does_not_leave_out_records_that_the_disk_cannot_read(store):
    store.put(TOKENS, prefilled(FULL, TOKENS))
    with store.match(TOKENS), unreadable_segments(), pytest.raises(StoreError):
        store._log.records()


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_restore_that_fails_half_way_leaves_a_cache_of_zeros(store, monkeypatch, error):
    store.put(TOKENS, prefilled(HYBRID, TOKENS))
    run_requests = _store.run_requests

    def fail(match, requests):
        run_requests(match, requests)
        raise error

    monkeypatch.setattr(_store, "run_requests", fail)
    target = prefilled(HYBRID, TOKENS[:50])
    with store.match(TOKENS, full=True) as match, pytest.raises(error):
        store.restore(match, into=target)
    assert target.length == 0 and is_zero(target)


def test_an_older_snapshot_that_does_not_fit_is_left_out_after_damage(store, tmp_path, caplog):
    small, large = (spec_of("sliding", "full", window=window) for window in (8, 16))
    store.put(TOKENS[:40], prefilled(small, TOKENS[:40]))
    newest = prefilled(large, TOKENS[:60])
    newest.arrays["0.keys"][...] = np.random.default_rng(1).random((1, 2, 16, 4))
    store.put(TOKENS[:60], newest)
    row = newest.arrays["0.keys"][0, 0, newest.next_slot("0.keys")]
    flip(tmp_path, np.ascontiguousarray(row).tobytes())
    target = prefilled(large, TOKENS)
    with store.match(TOKENS) as match:
        assert match.length == 60
        assert store.restore(match, into=target) == 0
    assert target.length == 0 and is_zero(target)
    assert "needs 16 tokens" in caplog.text and "damaged" in caplog.text


@pytest.mark.timeout(20)
def test_puts_continue_after_an_interrupted_put(store, monkeypatch):
    state = prefilled(FULL, TOKENS)
    with split_condition(monkeypatch):
        store.put(TOKENS, state, asynchronous=True)
    assert store.put(TOKENS, state, asynchronous=True).result(10) == len(TOKENS)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("step", ["copied", "put"])
def test_an_interrupted_put_takes_no_room_of_the_queue(store, monkeypatch, step):
    state = prefilled(FULL, TOKENS)
    if step == "copied":
        raise_once(monkeypatch, _pending, "copied")
    else:
        raise_once(monkeypatch, _pending.OperationQueue, "run")
    make, puts = _pending._Put, []
    monkeypatch.setattr(_pending, "_Put", lambda *put: puts.append(make(*put)) or puts[-1])
    with pytest.raises(KeyboardInterrupt):
        store.put(TOKENS, state, asynchronous=True)
    assert store.stats()["pending_bytes"] == 0
    store._pending._most = puts[0].nbytes  # full with one put
    assert store.put(TOKENS, state, asynchronous=True).result(10) == len(TOKENS)
    with store.match(TOKENS, full=True) as match:
        assert match.length == len(TOKENS)


def test_a_cancelled_put_takes_no_room_of_the_queue(store, monkeypatch):
    begins, write = threading.Event(), store._write
    monkeypatch.setattr(store, "_write", lambda *put: (begins.wait(10), write(*put))[1])
    futures = [
        store.put(TOKENS[:stop], prefilled(FULL, TOKENS[:stop]), asynchronous=True)
        for stop in (50, 60)
    ]
    assert futures[1].cancel()
    begins.set()
    store._pending.close()
    assert futures[0].result() == 50 and store.stats()["pending_bytes"] == 0
