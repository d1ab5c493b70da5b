"""The process under test: prepares one scenario, then forks a child for each request.

    LD_PRELOAD=shim.so python fault_server.py save_file

A request is one line of JSON on standard input: the folder, the state to save (or null to load),
and the shim's settings for each rank. The child arms the shim, saves or loads, writes a report to
its pipe, and exits without cleaning up. The server prints the report and the exit status as one
line on standard output. Modules are imported once, so a fault costs milliseconds.
"""

import ctypes
import json
import os
import selectors
import signal
import sys
import time
import warnings
from pathlib import Path

import scenarios

SHIM = ctypes.CDLL(None)
HANG = "hang"


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


def act_under_fault(scenario, request, rank, pipe):
    """Arm the shim, save or load, report. Runs in a child, and never returns."""
    try:
        scenario.enter(rank, scenario.ranks, request["meeting"])
        for name, value in request["settings"][rank].items():
            os.environ[name] = value
        counts = SHIM.mls_shim_count
        counts.restype = ctypes.c_long
        start = run_out(request["settings"][rank])
        SHIM.mls_shim_arm()
        try:
            if start:
                start()
            with warnings.catch_warnings(record=True) as warned:
                report = act(scenario, request)
            report["warned"] = [str(warning.message) for warning in warned]
        except BaseException as error:
            if start:
                sys.modules["_testcapi"].remove_mem_hooks()
            report = describe(error)
        if start:
            sys.modules["_testcapi"].remove_mem_hooks()
        SHIM.mls_shim_disarm()
        report["counts"] = {name: counts(name.encode()) for name in CALLS}
        report["hits"] = SHIM.mls_shim_hits()
    except BaseException as error:
        report = {"broken": repr(error)}
    os.write(pipe, json.dumps(report).encode())
    os._exit(0)


def read_all(pipes, deadline):
    """The data from each pipe until it was closed, or until the deadline."""
    texts = [b""] * len(pipes)
    with selectors.DefaultSelector() as waiting:
        for index, pipe in enumerate(pipes):
            waiting.register(pipe, selectors.EVENT_READ, index)
        while waiting.get_map() and time.monotonic() < deadline:
            for key, _ in waiting.select(deadline - time.monotonic()):
                piece = os.read(key.fd, 1 << 16)
                texts[key.data] += piece
                if not piece:
                    waiting.unregister(key.fd)
    return texts


def run(scenario, request):
    """Fork a child for each rank; how each ended: a code as in subprocess, or a hang."""
    pids, pipes = [], []
    for rank in range(scenario.ranks):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            act_under_fault(scenario, request, rank, write_end)
        os.close(write_end)
        pids.append(pid)
        pipes.append(read_end)
    deadline = time.monotonic() + request["seconds"]
    texts = read_all(pipes, deadline)
    ends = []
    for pid, pipe, text in zip(pids, pipes, texts, strict=True):
        os.close(pipe)
        done, status = os.waitpid(pid, 0 if text or time.monotonic() < deadline else os.WNOHANG)
        if done == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        exit_code = HANG if done == 0 else os.waitstatus_to_exitcode(status)
        ends.append({"exit": exit_code, "told": json.loads(text) if text else {}})
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
