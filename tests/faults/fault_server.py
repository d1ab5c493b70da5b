"""The process under test: prepares one scenario, then forks a child for each request.

    LD_PRELOAD=shim.so python fault_server.py save_file

A request is one line of JSON on standard input: the folder, the state to save (or null to load),
and the shim's settings for each rank. The child arms the shim, saves or loads, writes a report to
its pipe, and exits without cleaning up. The server prints the report and the exit status as one
line on standard output. Modules are imported once, so a fault costs milliseconds.
"""

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import scenarios
from fault_children import SHIM, start_child, wait_for


def calls():
    """Names of the calls that the shim counts, read from its header."""
    text = (Path(__file__).parent / "shim.h").read_text(encoding="utf-8")
    return [line.split("(")[1].split(",")[0] for line in text.split("\n") if "    X(" in line]


CALLS = [*calls(), "change", "memory", "thread"]


def describe(error):
    """A description of an exception, for judging it in another process."""
    return {
        "raised": [cls.__name__ for cls in type(error).__mro__],
        "errno": getattr(error, "errno", None),
        "text": str(error),
    }


def act(scenario, request):
    """Save or load as requested; return the report."""
    root = Path(request["root"])
    if request["which"]:
        scenario.save(root, request["which"])
        SHIM.mls_shim_note(b"returned")
        return {"returned": True}
    which, arrays = scenario.load(root, **({"mmap": True} if request["mmap"] else {}))
    SHIM.mls_shim_disarm()
    wrong = scenarios.differences(arrays, scenario.states[which])
    return {"returned": True, "loaded": which, "wrong": wrong}


def run_out(settings):
    """Make one of Python's own allocations fail, if the settings request it."""
    call, _, number = settings.get("MLS_FAULT", "").partition(":")
    if call != "python":
        return None
    import _testcapi

    os.environ["MLS_FAULT"] = ""
    n = int(number.partition(":")[0])
    return lambda: _testcapi.set_nomemory(n, n + 1)


def act_under_fault(scenario, request, rank, report):
    """Arm the shim, save or load, and report; in a child."""
    scenario.enter(rank, scenario.ranks, request["meeting"])
    os.environ |= request["settings"][rank]
    start = run_out(request["settings"][rank])
    SHIM.mls_shim_arm()
    try:
        if start:
            start()
        with warnings.catch_warnings(record=True) as warned:
            told = act(scenario, request)
        told["warned"] = [str(warning.message) for warning in warned]
    except BaseException as error:
        if start:
            sys.modules["_testcapi"].remove_mem_hooks()
        told = describe(error)
    if start:
        sys.modules["_testcapi"].remove_mem_hooks()
    SHIM.mls_shim_disarm()
    told["counts"] = {name: SHIM.mls_shim_count(name.encode()) for name in CALLS}
    told["hits"] = SHIM.mls_shim_hits()
    report("told", told)


def run(scenario, request):
    """Fork a child for each rank; return the status and the report of each."""
    acts = [partial(act_under_fault, scenario, request, rank) for rank in range(scenario.ranks)]
    children = [start_child(act) for act in acts]
    ends = []
    for child in children:
        reports, status = wait_for(*child, request["seconds"])
        told = dict(reports)
        ends.append({"exit": status, "told": told.get("told", told)})
    return ends


def import_all():
    """Import what a save or load would import first: CPython cannot compile without memory."""
    import socket  # the lock names this machine  # noqa: F401

    import mlstate

    for name in mlstate.__all__:
        getattr(mlstate, name)


def main():
    scenario = {**scenarios.ALL, **scenarios.BAD}[sys.argv[1]]
    import_all()
    scenario.prepare()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(scenario, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
