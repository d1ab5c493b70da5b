"""The store of the tests in this folder."""

import pytest
from toy_caches import store_at


@pytest.fixture
def store(tmp_path):
    """A new store of the toy model."""
    with store_at(tmp_path) as opened:
        yield opened
