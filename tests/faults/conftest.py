"""Fixtures: the shim, built once; a server for each scenario; the choice of cases to run."""

import contextlib
from typing import NamedTuple

import fault_harness
import pytest
import scenarios


def pytest_collection_modifyitems(config, items):
    """Deselect cases that are not the scenario's turn in an ordinary run (fault_harness.turns)."""
    others = []
    for function, cases in marked(items).items():
        for scenario, name in enumerate(dict.fromkeys(name for name, _ in cases)):
            scenario_items = [item for other, item in cases if other == name]
            turns = fault_harness.turns(scenario, len(scenario_items), function.turns)
            others += [item for number, item in enumerate(scenario_items) if number not in turns]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter):
    """Print how many faults were tried, as one test tries many."""
    for kind, count in fault_harness.TRIED.items():
        terminalreporter.write_line(f"{count:,} {kind} tried")


class Function(NamedTuple):
    """A test function, and the number of its cases that a scenario tries."""

    file: str
    name: str
    turns: int


def marked(items):
    """(scenario, item) of the items that take turns, by function."""
    functions = {}
    for item in items:
        mark = item.get_closest_marker("turns")
        if mark is not None:
            function = Function(str(item.path), item.originalname, *mark.args)
            functions.setdefault(function, []).append((item.callspec.params["bench"], item))
    return functions


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """The preloaded library that fails and records calls."""
    reason = fault_harness.unsupported()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("shim")
    return fault_harness.build(folder, "shim", "shim.c", "calls.c", "record.c")


@pytest.fixture(scope="session")
def alloc_shim(tmp_path_factory):
    """The preloaded library that fails allocations."""
    reason = fault_harness.unsupported()
    if reason:
        pytest.skip(reason)
    return fault_harness.build(tmp_path_factory.mktemp("alloc"), "alloc", "alloc.c")


@pytest.fixture(scope="session")
def make_bench(shim, tmp_path_factory):
    """A context manager that runs a scenario under faults."""

    @contextlib.contextmanager
    def make(scenario):
        reason = scenario.missing()
        if reason:
            pytest.skip(reason)
        bench = fault_harness.Bench(shim, scenario, tmp_path_factory.mktemp(scenario.name))
        yield bench
        bench.close()

    return make


PARAMS = [
    pytest.param(name, marks=[getattr(pytest.mark, mark) for mark in scenario.marks])
    for name, scenario in scenarios.ALL.items()
]


@pytest.fixture(scope="session", params=PARAMS)
def bench(request, make_bench):
    """The bench of each correct scenario."""
    with make_bench(scenarios.ALL[request.param]) as bench:
        yield bench
