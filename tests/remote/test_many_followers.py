"""Many followers of one store: the requests that docs/follow.md counts."""

from contextlib import nullcontext

import numpy as np
import pytest

from mlstate.errors import CheckpointWarning
from mlstate.follow import Follower, Publisher


def weights_of(step):
    weights = {f"layers.{i}": np.zeros((40, 50), np.float16) for i in range(3)}
    for array in weights.values():
        array.flat[: 7 * step] = step
    return weights


def followers_of(url, count, options):
    copies = [weights_of(0) for _ in range(count)]
    return [Follower(url, into=copy, storage_options=options) for copy in copies], copies


def requests_of_advances(followers, copies, store, step):
    """Requests of each follower's `advance`; the copies must be those of the step."""
    requests = []
    for follower, copy in zip(followers, copies, strict=True):
        requests.append(store.requests_of(follower.advance))
        assert follower.version == step
        assert all(np.array_equal(copy[name], array) for name, array in weights_of(step).items())
    return requests


def test_each_follower_asks_once_and_takes_a_step_with_two_more_requests(url, options, store):
    publisher = Publisher(url, storage_options=options)
    followers, copies = followers_of(url, 5, options)
    publisher.publish(0, weights_of(0))
    assert requests_of_advances(followers, copies, store, 0) == [4] * 5
    for step in (1, 2):
        publisher.publish(step, weights_of(step))
        assert requests_of_advances(followers, copies, store, step) == [3] * 5
    for step in (3, 4, 5):
        publisher.publish(step, weights_of(step))
    assert requests_of_advances(followers, copies, store, 5) == [9] * 5
    assert requests_of_advances(followers, copies, store, 5) == [1] * 5
    assert [copy.poll() for copy in followers] == [None] * 5
    assert store.faults.nbytes["GET"] < 5 * 1200


def test_a_publisher_of_a_long_chain_sends_few_requests(url, options, store):
    publisher = Publisher(url, anchor_every=20, storage_options=options)
    requests = [
        store.requests_of(lambda step=step: publisher.publish(step, weights_of(step)))
        for step in range(8)
    ]
    assert requests[1:] == [requests[1]] * 7 and requests[1] <= 20, requests


def test_followers_with_one_cache_read_the_elements_of_a_step_once(url, options, store, tmp_path):
    publisher = Publisher(url, storage_options=options)
    shared = {**options, "cache_folder": str(tmp_path / "cache")}
    followers, copies = followers_of(url, 5, shared)
    for step in range(4):
        publisher.publish(step, weights_of(step))
        first = 3 if step else 4  # an anchor has the model too
        assert requests_of_advances(followers, copies, store, step) == [first, 1, 1, 1, 1]


def test_followers_of_a_relay_send_no_request(url, options, store, tmp_path):
    publisher, relay = Publisher(url, storage_options=options), Publisher(tmp_path / "relay")
    [follower], [copy] = followers_of(url, 1, options)
    local = weights_of(0)
    last = Follower(tmp_path / "relay", into=local)
    for step in (3, 4, 2):
        publisher.publish(step, weights_of(step))
        with pytest.warns(CheckpointWarning, match="lineage") if step == 2 else nullcontext():
            relay.publish(follower.advance(), copy)
            store.faults.reset()
            assert last.advance() == step
        assert store.faults.requests == 0
        assert all(np.array_equal(local[name], array) for name, array in weights_of(step).items())
