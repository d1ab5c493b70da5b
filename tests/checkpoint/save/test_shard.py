"""Arguments of `Shard`."""

import numpy as np
import pytest

from mlstate.checkpoint import Shard

REFUSED = [
    ({"version": 1.5}, TypeError, "version must be an int, got float"),
    ({"version": True}, TypeError, "version must be an int, got bool"),
    ({"version": 0}, ValueError, "version must be 1 or more, got 0"),
    ({"replica": True}, TypeError, "replica must be an int, got bool"),
    ({"replica": -1}, ValueError, "replica must be 0 or more, got -1"),
    ({"shape": (4.7,)}, TypeError, "a length in shape must be an int, got float"),
    ({"shape": "4"}, TypeError, "a length in shape must be an int, got str"),
]


@pytest.mark.parametrize(("keywords", "error", "text"), REFUSED)
def test_numbers_of_a_shard_are_not_truncated(keywords, error, text):
    with pytest.raises(error, match=text):
        Shard(np.ones(4), **keywords)


def test_integers_of_numpy_are_numbers_of_a_shard():
    shard = Shard(np.ones(4), shape=(np.int64(4),), version=np.int32(3), replica=np.uint8(1))
    assert (shard.shape, shard.version, shard.replica) == ((4,), 3, 1)
