"""No memory, or no threads, at the n-th request of the library, of NumPy or of Python:
MemoryError and nothing lost, or the same result with fewer threads."""

import contextlib

import harness
import pytest
import scenarios
from test_faults import complain

OBJECTS = {"library": "mlstate/_core.", "NumPy": "_multiarray_umath."}


@pytest.fixture(scope="module", params=OBJECTS)
def where(request):
    return OBJECTS[request.param]


@pytest.fixture(scope="module", params=list(scenarios.ALL))
def bench(request, where, alloc_shim, tmp_path_factory):
    scenario = scenarios.ALL[request.param]
    if scenario.missing():
        pytest.skip(scenario.missing())
    folder = tmp_path_factory.mktemp(scenario.name)
    bench = harness.Bench(alloc_shim, scenario, folder, MLS_ALLOC_OBJECT=where)
    with contextlib.closing(bench):
        yield bench


@pytest.mark.parametrize(("call", "how"), [("memory", "ENOMEM"), ("thread", "EAGAIN")])
def test_saving_without(bench, call, how):
    complaints = []
    for rank, counts in enumerate(bench.counts()):
        for n in harness.spread(counts[call], harness.few(4, 20)):
            complaints += bench.try_fault(f"{call}:{n}:{how}", rank)
    complain(complaints)


@pytest.mark.parametrize(("call", "how"), [("memory", "ENOMEM"), ("thread", "EAGAIN")])
def test_loading_without(bench, call, how):
    complaints = []
    for n in harness.spread(bench.counts(None)[0][call], harness.few(4, 20)):
        complaints += bench.try_loading(f"{call}:{n}:{how}")
    complain(complaints)


@pytest.mark.parametrize("action", ["saving", "loading"])
def test_python_has_no_memory(bench, where, action):
    if where != OBJECTS["library"] or bench.scenario.heavy or bench.scenario.ranks > 1:
        pytest.skip("once is enough: it fails Python's own allocations")
    pytest.importorskip("_testcapi", reason="CPython's own hooks are not installed")
    attempt = bench.try_fault if action == "saving" else bench.try_loading
    complaints = []
    for n in harness.few((0, 7, 30), range(0, 200, 7), range(400)):
        complaints += attempt(f"python:{n}:ENOMEM")
    complain(complaints)
