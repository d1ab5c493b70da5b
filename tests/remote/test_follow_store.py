"""Publishers and followers over an object store."""

import pytest
from published_weights import check_version, model_of, zeros

from mlstate.errors import StoreError
from mlstate.follow import Follower, Publisher


def test_a_follower_of_a_store_reads_few_objects_for_each_step(url, options, store):
    publisher = Publisher(url, anchor_every=4, storage_options=options)
    into = zeros()
    follower = Follower(url, into=into, storage_options=options)
    assert follower.poll() is None
    for step in range(7):
        publisher.publish(step, model_of(step))
        store.faults.reset()
        assert follower.poll() == step
        assert store.faults.requests == 1
        store.faults.reset()
        assert follower.advance() == step
        if step:
            assert store.faults.requests <= 4, store.faults.log
            assert store.faults.nbytes["GET"] < 12_000
        assert check_version(follower, into) == step
    late = zeros()
    follower = Follower(url, into=late, storage_options=options)
    assert follower.advance() == check_version(follower, late) == 6


def test_two_publishers_in_a_store_are_one_clear_error(url, options):
    first, second = (Publisher(url, storage_options=options) for _ in range(2))
    first.publish(0, model_of(0))
    second.publish(1, model_of(1))
    with pytest.raises(StoreError, match="another publisher"):
        first.publish(2, model_of(2))
    into = zeros()
    assert Follower(url, into=into, storage_options=options).advance() == 1


@pytest.mark.parametrize("kind", ["truncated", "500", "drop"])
def test_faults_of_a_store_leave_the_old_version_or_the_new(url, options, store, kind):
    publisher = Publisher(url, storage_options=options)
    into = zeros()
    follower = Follower(url, into=into, storage_options=options)
    publisher.publish(0, model_of(0))
    follower.advance()
    for step in (1, 2, 3):
        publisher.publish(step, model_of(step))
        store.faults.reset(lambda number, method, path: kind if number % 3 == 1 else None)
        try:
            follower.advance()
        except StoreError:
            assert follower.version == step - 1
        check_version(follower, into)
        store.faults.reset()
        assert follower.advance() == step
        assert check_version(follower, into) == step
