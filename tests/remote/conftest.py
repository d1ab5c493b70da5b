"""The object store of the tests in this folder."""

import pytest
from store_server import StoreServer


@pytest.fixture(scope="session")
def store():
    """Return a running object store with its fault proxy."""
    with StoreServer() as server:
        yield server


@pytest.fixture
def url(store, request):
    """Return the URL of a new checkpoint; no fault is injected at first."""
    store.faults.reset()
    yield f"s3://bucket/{abs(hash(request.node.nodeid)):x}"
    store.faults.reset()
