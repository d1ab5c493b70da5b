"""The shim, built once, and a server for each scenario."""

import contextlib

import harness
import pytest
import scenarios


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """The preloaded library that fails calls and records them."""
    reason = harness.unsupported()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("shim")
    return harness.build(folder, "shim", "shim.c", "calls.c", "record.c")


@pytest.fixture(scope="session")
def alloc_shim(tmp_path_factory):
    """The preloaded library that fails allocations."""
    reason = harness.unsupported()
    if reason:
        pytest.skip(reason)
    return harness.build(tmp_path_factory.mktemp("alloc"), "alloc", "alloc.c")


@pytest.fixture(scope="session")
def make_bench(shim, tmp_path_factory):
    """A context in which a scenario is run under faults."""

    @contextlib.contextmanager
    def make(scenario):
        reason = scenario.missing()
        if reason:
            pytest.skip(reason)
        bench = harness.Bench(shim, scenario, tmp_path_factory.mktemp(scenario.name))
        yield bench
        bench.close()

    return make


PARAMS = [
    pytest.param(name, marks=[getattr(pytest.mark, mark) for mark in scenario.marks])
    for name, scenario in scenarios.ALL.items()
]


@pytest.fixture(scope="session", params=PARAMS)
def bench(request, make_bench):
    """Each good scenario."""
    with make_bench(scenarios.ALL[request.param]) as bench:
        yield bench
