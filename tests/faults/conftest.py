"""The shim, built once, and a server for each scenario."""

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


@pytest.fixture(scope="module", params=list(scenarios.ALL))
def bench(request, shim, tmp_path_factory):
    """A scenario to be run under faults."""
    scenario = scenarios.ALL[request.param]
    reason = scenario.missing()
    if reason:
        pytest.skip(reason)
    bench = harness.Bench(shim, scenario, tmp_path_factory.mktemp(scenario.name))
    yield bench
    bench.close()
