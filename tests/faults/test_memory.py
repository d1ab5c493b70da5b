"""The n-th allocation of the library, of NumPy or of Python fails, or the n-th thread creation.

The call raises MemoryError and loses nothing, or returns the same result with fewer threads.
"""

import contextlib

import fault_harness
import pytest
import scenarios
from test_faults import complain

pytestmark = pytest.mark.long

OBJECTS = {"library": "mlstate/_core.", "NumPy": "_multiarray_umath."}


CASES = [
    pytest.param((name, where), marks=[getattr(pytest.mark, mark) for mark in scenario.marks])
    for number, (name, scenario) in enumerate(scenarios.ALL.items())
    for where in OBJECTS
    # in the ordinary test run NumPy's allocations fail in a third of the scenarios
    if where == "library" or number % fault_harness.amount(3, 1, 1) == fault_harness.amount(1, 0, 0)
]
# Python's allocator is shared by all callers, so one object and the light scenarios suffice.
LIGHT = [
    (name, "library") for name, s in scenarios.ALL.items() if not s.heavy and s.ranks == 1
]  # fmt: skip


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def bench(request, alloc_shim, tmp_path_factory):
    name, where = request.param
    scenario = scenarios.ALL[name]
    if scenario.missing():
        pytest.skip(scenario.missing())
    folder = tmp_path_factory.mktemp(scenario.name)
    bench = fault_harness.Bench(alloc_shim, scenario, folder, MLS_ALLOC_OBJECT=OBJECTS[where])
    with contextlib.closing(bench):
        yield bench


@pytest.mark.parametrize(("call", "how"), [("memory", "ENOMEM"), ("thread", "EAGAIN")])
def test_saving_without(bench, call, how):
    complaints = []
    for rank, counts in enumerate(bench.counts()):
        for n in fault_harness.spread(counts[call], bench.most(2, 8)):
            complaints += bench.try_fault(f"{call}:{n}:{how}", rank)
    complain(complaints)


@pytest.mark.parametrize(("call", "how"), [("memory", "ENOMEM"), ("thread", "EAGAIN")])
def test_loading_without(bench, call, how):
    complaints = []
    for n in fault_harness.spread(bench.counts(None)[0][call], bench.most(2, 6)):
        complaints += bench.try_loading(f"{call}:{n}:{how}")
    complain(complaints)


@pytest.mark.turns(1)
@pytest.mark.parametrize("bench", LIGHT, ids="-".join, indirect=True)
@pytest.mark.parametrize("action", ["saving", "loading"])
def test_python_has_no_memory(bench, action):
    pytest.importorskip("_testcapi", reason="CPython's own hooks are not installed")
    attempt = bench.try_fault if action == "saving" else bench.try_loading
    complaints = []
    for n in fault_harness.amount((0, 7, 30), range(0, 200, 20), range(400)):
        complaints += attempt(f"python:{n}:ENOMEM")
    complain(complaints)
