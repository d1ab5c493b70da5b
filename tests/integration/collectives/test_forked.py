"""The process that forks the ranks of other tests."""

import json
import os
import subprocess
import time

import forked
import pytest

PROGRAM = """
import os, sys, time
print(os.getppid(), sys.argv[1:], os.environ.get("OWN"), sys.stdin.read())
if sys.argv[1] == "wait":
    time.sleep(100)
sys.exit(int(sys.argv[1]))
"""


def job(folder, *processes):
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    return {"program": str(program), "folder": str(folder), "working_directory": str(folder),
            "processes": processes}  # fmt: skip


def test_one_process_forks_several_jobs(tmp_path):
    server = forked.Server(["json"], dict(os.environ))
    try:
        for number in (3, 4):
            folder = tmp_path / str(number)
            folder.mkdir()
            job_files = job(folder, ([str(number)], {}), (["0", "b"], {"OWN": "x"}))
            assert server.answer(job_files, 60) == [number, 0]
            parent = server.process.pid
            assert (folder / "out-0").read_text() == f"{parent} ['{number}'] None \n"
            assert (folder / "out-1").read_text() == f"{parent} ['0', 'b'] x \n"
            assert (folder / "err-1").read_text() == ""
    finally:
        server.stop()


def test_job_over_its_timeout_is_killed(tmp_path):
    server = forked.Server(["json"], dict(os.environ))
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired, match=r"program\.py"):
        server.answer(job(tmp_path, (["wait"], {})), 0.5)
    server.stop()
    assert time.monotonic() - began < 30


def test_a_module_that_is_missing_is_named(tmp_path):
    server = forked.Server(["no_such_module"], dict(os.environ))
    with pytest.raises(AssertionError, match="no_such_module"):
        server.answer(job(tmp_path, (["0"], {})), 60)
    server.stop()


def test_a_server_is_kept_while_the_environment_is_the_same(monkeypatch):
    started = []

    class Fake:
        def __init__(self, modules, environment):
            self.modules, self.environment = modules, environment
            started.append(json.dumps(environment))

        def stop(self):
            started.append("stopped")

    monkeypatch.setattr(forked, "Server", Fake)
    monkeypatch.setattr(forked, "_servers", [])
    first = forked.server_for(("json",), {"A": "1", "PYTEST_CURRENT_TEST": "this"})
    assert forked.server_for(("json",), {"A": "1", "PYTEST_CURRENT_TEST": "that"}) is first
    assert forked.server_for(("json",), {"A": "2"}) is not first
    assert started == ['{"A": "1"}', "stopped", '{"A": "2"}']
