"""Fixtures: the preloaded libraries, built once, and a process for each operation."""

import contextlib

import pytest
from amounts import TRIED
from preload import Attacker, build, unsupported


def pytest_terminal_summary(terminalreporter):
    """Print how many points were tried, as one test tries many."""
    for kind, count in TRIED.items():
        terminalreporter.write_line(f"{count:,} points tried: {kind}")
    if TRIED:
        terminalreporter.write_line(f"{sum(TRIED.values()):,} points tried in all")


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """The preloaded library that fails and records calls."""
    reason = unsupported()
    if reason:
        pytest.skip(reason)
    return build(tmp_path_factory.mktemp("shim"), "shim", "shim.c", "calls.c", "record.c")


@pytest.fixture(scope="session")
def alloc_shim(tmp_path_factory):
    """The preloaded library that fails allocations."""
    reason = unsupported()
    if reason:
        pytest.skip(reason)
    return build(tmp_path_factory.mktemp("alloc"), "alloc", "alloc.c")


@pytest.fixture
def attack(tmp_path):
    """A function that attacks an operation, and returns complaints."""

    def run(operation, name, *arguments, library):
        with contextlib.closing(Attacker(operation, tmp_path, library)) as attacker:
            tried, complaints = attacker.attack(name, *arguments)
        TRIED[name] += tried
        return [f"{operation}, {text}" for text in complaints]

    return run
