"""Starts a program as several processes that share the seconds which importing torch takes.

`python forked.py MODULES` imports the modules, given by commas, and reads jobs: a line of JSON for
each. It forks a process for each pair of arguments and variables in the job; each runs the program
as Python would, with what it prints in out-N and err-N of the job's folder. When all have ended it
prints their exit codes. What is imported starts no threads.
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
    """A process that has imported modules and forks jobs, until this one ends."""

    def __init__(self, modules, environment):
        self.modules, self.environment = modules, environment
        self.process = subprocess.Popen(
            [sys.executable, __file__, ",".join(modules)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment, start_new_session=True,
        )  # fmt: skip

    def answer(self, job, limit_seconds):
        """Return the exit codes of a job's processes."""
        with contextlib.suppress(BrokenPipeError):  # there is no answer either
            print(json.dumps(job), file=self.process.stdin, flush=True)
        if not select.select([self.process.stdout], [], [], limit_seconds)[0]:
            raise subprocess.TimeoutExpired(job["program"], limit_seconds)
        line = self.process.stdout.readline()
        assert line, self.stop()
        return json.loads(line)

    def stop(self):
        """Kill it, and all that it forked; return what it wrote to stderr."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.communicate()[1]


_servers = []  # one at most: each takes the memory of torch


def server_for(modules, environment):
    """Return a server that was started like this; the one before it ends."""
    kept = {name: text for name, text in environment.items() if name != "PYTEST_CURRENT_TEST"}
    if not _servers or (_servers[0].modules, _servers[0].environment) != (modules, kept):
        stop_server()
        _servers.append(Server(modules, kept))
    return _servers[0]


@atexit.register
def stop_server():
    """End the process that was kept for more jobs."""
    while _servers:
        _servers.pop().stop()


def run(program, arguments, environment, limit_seconds, modules=TORCH, variables=None):
    """Run a program once for each list of arguments; (exit code, stdout, stderr) of each.

    Beside the environment of all, each may have variables of its own: a dict for each list.

    The standard input of a process ends when the process before it has ended, that of the first
    one at once. Every process has ended when this returns: those that take too long are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = variables or [{}] * len(arguments)
        lists = [[str(text) for text in texts] for texts in arguments]
        job = {
            "program": str(program), "folder": folder, "working_directory": str(Path.cwd()),
            "processes": list(zip(lists, own, strict=True)),
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
    """In a forked process: take the program's place."""
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

    Returns a program to run in each forked process, and None after the last job.
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
        warnings.simplefilter("ignore")  # torch warns of its own internals
        for module in sys.argv[1].split(","):
            importlib.import_module(module)
    gc.freeze()  # or each process copies the modules' memory when it ends, which takes a second
    with os.fdopen(os.dup(0)) as jobs:  # what is forked gets another standard input
        return serve(jobs)


if __name__ == "__main__":
    mine = main()
    if mine:
        runpy.run_path(mine, run_name="__main__")
