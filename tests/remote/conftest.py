"""The object store of the tests in this folder."""

import collections

import pytest
from s3_fault_proxy import StoreServer

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


@pytest.fixture
def options(store):
    """Return the `storage_options` of the store."""
    return store.options()


@pytest.fixture
def environment(store, monkeypatch):
    """Give the commands the store by the engine's environment variables."""
    options = store.options()
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret_access_key"])
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")


def pytest_terminal_summary(terminalreporter):
    """Print the number of injected faults by kind, as one test injects many."""
    for kind, count in sorted(COUNTS.items()):
        terminalreporter.write_line(f"{count:,} requests: {kind}")
    if COUNTS:
        terminalreporter.write_line(f"{sum(COUNTS.values()):,} requests in all")
