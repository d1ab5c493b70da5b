"""The object store of the tests in this folder."""

import collections

import pytest
from store_server import StoreServer

COUNTS = collections.Counter()


@pytest.fixture(scope="session")
def store():
    """Return a running object store with its fault proxy."""
    with StoreServer() as server:
        yield server
    COUNTS.update(server.faults.counts)


@pytest.fixture
def url(store, request):
    """Return the URL of a new checkpoint; no fault is injected at first."""
    store.faults.reset()
    yield f"s3://bucket/{abs(hash(request.node.nodeid)):x}"
    store.faults.reset()


def pytest_terminal_summary(terminalreporter):
    """Print the number of injected faults by kind, as one test injects many."""
    for kind, count in sorted(COUNTS.items()):
        terminalreporter.write_line(f"{count:,} requests: {kind}")
