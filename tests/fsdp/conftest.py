"""A test that takes `group` runs on all ranks at the same time, each with its own group.

Its parameters `world` and `engine` set the number of ranks (2) and the kind of the groups.
"""

import pytest
from gradient_model import run

EACH_RANK = object()


@pytest.fixture
def group():
    """The group of the rank that runs the test."""
    return EACH_RANK


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test on all ranks if it takes `group`."""
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if arguments.get("group") is not EACH_RANK:
        return None
    how = {"world_size": arguments.get("world", 2), "engine": arguments.get("engine", "messages")}
    run(lambda group: pyfuncitem.obj(**arguments | {"group": group}), **how)
    return True
