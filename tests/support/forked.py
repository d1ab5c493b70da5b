"""Run a program as several processes that share one import of torch, which takes seconds.

`python forked.py MODULES` imports the modules, separated by commas, and reads jobs, one line of
JSON each. It forks a process for each pair of arguments and variables in the job. Each process runs
the program as Python would, with its output in out-N and err-N of the job's folder. When all have
ended, it prints their exit codes. The imports must not start threads.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

TORCH = ("torch", "torch.distributed", "mlstate.integrations.torch")
OPTIMIZERS = ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch._dynamo")


class Server:
    """A process that has imported modules and forks jobs until it is stopped."""

    def __init__(self, modules, environment):
        self.modules, self.environment = modules, environment
        self.process = subprocess.Popen(
            [sys.executable, __file__, ",".join(modules)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment, start_new_session=True,
        )  # fmt: skip

    def answer(self, job, limit_seconds):
        """Return the exit codes of a job's processes."""
        with contextlib.suppress(BrokenPipeError):  # the answer is missing too
            print(json.dumps(job), file=self.process.stdin, flush=True)
        if not select.select([self.process.stdout], [], [], limit_seconds)[0]:
            raise subprocess.TimeoutExpired(job["program"], limit_seconds)
        line = self.process.stdout.readline()
        assert line, self.stop()
        return json.loads(line)

    def stop(self):
        """Kill the server and all its children; return what it wrote to stderr."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.communicate()[1]


_servers = []  # one at most, because each takes the memory of torch


def server_for(modules, environment):
    """Return the server for these arguments; any other one is stopped."""
    variables = {name: text for name, text in environment.items() if name != "PYTEST_CURRENT_TEST"}
    if not _servers or (_servers[0].modules, _servers[0].environment) != (modules, variables):
        stop_server()
        _servers.append(Server(modules, variables))
    return _servers[0]


@atexit.register
def stop_server():
    """Stop the server that was kept for more jobs."""
    while _servers:
        _servers.pop().stop()


def run(program, arguments, environment, limit_seconds, modules=TORCH, variables=None):
    """Run a program once for each list of arguments; (exit code, stdout, stderr) of each.

    `variables` may add a dict of environment variables for each process.

    The standard input of a process ends when the previous process has ended, that of the first one
    at once. Every process has ended when this returns: those that take too long are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        variable_sets = variables or [{}] * len(arguments)
        lists = [[str(text) for text in texts] for texts in arguments]
        job = {
            "program": str(program), "folder": folder, "working_directory": str(Path.cwd()),
            "processes": list(zip(lists, variable_sets, strict=True)),
        }  # fmt: skip
        try:
            statuses = server_for(modules, environment).answer(job, limit_seconds)
        except BaseException:
            stop_server()
            raise
        path = Path(folder)
        return [
            (status, (path / f"out-{n}").read_text(), (path / f"err-{n}").read_text())
            for n, status in enumerate(statuses)
        ]


def become(job, number, inputs):
    """In a forked process: become the program."""
    os.dup2(inputs[number][0], 0)
    for descriptor in (end for pair in inputs for end in pair):
        os.close(descriptor)
    for target, name in ((1, "out"), (2, "err")):
        path = f"{job['folder']}/{name}-{number}"
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, target)
        os.close(descriptor)
    arguments, variables = job["processes"][number]
    os.environ.update(variables)
    os.chdir(job["working_directory"])
    sys.argv = [job["program"], *arguments]
    sys.path[0] = str(Path(job["program"]).parent)


def serve(jobs):
    """Fork the processes of each job, wait for them and print their exit codes.

    In each forked process it returns the program to run; after the last job it returns None.
    """
    for line in jobs:
        job = json.loads(line)
        inputs = [os.pipe() for _ in job["processes"]]
        pids = []
        for number in range(len(inputs)):
            pids.append(os.fork())
            if pids[-1] == 0:
                become(job, number, inputs)
                return job["program"]
        statuses = []
        for pid, (beginning, end) in zip(pids, inputs, strict=True):
            os.close(end)
            os.close(beginning)
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        print(json.dumps(statuses), flush=True)
    return None


def main():
    """Import the modules and serve."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about torch's internals
        for module in sys.argv[1].split(","):
            importlib.import_module(module)
    gc.freeze()  # otherwise each process copies the modules when it exits, which takes a second
    with os.fdopen(os.dup(0)) as jobs:  # forked processes get another standard input
        return serve(jobs)


if __name__ == "__main__":
    exit_status = main()
    if exit_status:
        runpy.run_path(exit_status, run_name="__main__")
