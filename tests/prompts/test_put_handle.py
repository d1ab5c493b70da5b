"""The handle of an asynchronous put behaves as `concurrent.futures.Future`."""

import copy
import threading
from concurrent.futures import CancelledError, Future

import pytest
from toy_caches import FULL, TOKENS, empty_state, prefill, store_at

from mlstate.errors import StoreError
from mlstate.prompts._put_handle import PutHandle


def prefilled(count):
    state = empty_state(FULL)
    prefill(state, TOKENS[:count])
    return state


@pytest.fixture
def store(tmp_path):
    with store_at(tmp_path) as store:
        yield store


def test_it_has_the_public_methods_of_a_future():
    methods = {name for name in dir(Future) if not name.startswith("_")}
    methods -= {"set_result", "set_exception", "set_running_or_notify_cancel"}
    assert methods <= set(dir(PutHandle))


def test_no_lock_of_the_standard_library_is_shared():
    handle = PutHandle()
    types = (threading.Condition, type(threading.Lock()), type(threading.RLock()))
    values = [getattr(handle, name) for name in PutHandle.__slots__ if name != "__weakref__"]
    assert not any(isinstance(value, types) for value in values)


def test_results_callbacks_and_states(store, monkeypatch):
    begins, write, called = threading.Event(), store._write, []
    monkeypatch.setattr(store, "_write", lambda *put: (begins.wait(10), write(*put))[1])
    handle = store.put(TOKENS[:50], prefilled(50), asynchronous=True)
    handle.add_done_callback(called.append)
    handle.add_done_callback(lambda _: 1 / 0)  # logged
    with pytest.raises(TimeoutError, match="it continues"):
        handle.result(0.01)
    assert not handle.done() and not handle.cancelled()
    begins.set()
    assert handle.result(10) == 50 and handle.exception() is None
    assert handle.done() and not handle.running() and not handle.cancel()
    assert repr(handle) == "PutHandle(50 tokens)"
    handle.add_done_callback(called.append)
    store._pending.close()
    assert called == [handle, handle]
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(handle)


def test_an_error_is_raised_each_time(store, monkeypatch):
    error = StoreError(28, "disk full")

    def fail(*_):
        raise error

    monkeypatch.setattr(store, "_write", fail)
    handle = store.put(TOKENS[:50], prefilled(50), asynchronous=True)
    for _ in range(2):
        with pytest.raises(StoreError, match="disk full"):
            handle.result(10)
    assert handle.exception() is error and "failed: " in repr(handle)


def test_a_cancelled_put_is_not_written(store, monkeypatch):
    begins, write, called = threading.Event(), store._write, []
    monkeypatch.setattr(store, "_write", lambda *put: (begins.wait(10), write(*put))[1])
    first, second = (store.put(TOKENS[:n], prefilled(n), asynchronous=True) for n in (20, 90))
    second.add_done_callback(called.append)
    assert second.cancel() and second.cancel() and called == [second]
    with pytest.raises(CancelledError):
        second.result()
    begins.set()
    assert first.result(10) == 20
    store._pending.close()
    with store.match(TOKENS, full=True) as match:
        assert match.length == 20


def append_result(results, call):
    results.append((call, call()))


def test_one_of_cancel_and_start_wins():
    for _ in range(300):
        handle, results = PutHandle(), []
        calls = [handle.cancel, handle.start] * 4
        threads = [threading.Thread(target=append_result, args=(results, c)) for c in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(result is (call == handle.start) for call, result in results) or all(
            result is (call == handle.cancel) for call, result in results
        )
        if handle.cancelled():
            assert handle.done() and not handle.running()


def test_many_threads_wait(store):
    handle = PutHandle()
    lengths = []
    threads = [
        threading.Thread(target=lambda: lengths.append(handle.result(20))) for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    handle.finish(7)
    for thread in threads:
        thread.join(20)
    assert lengths == [7] * 20
