"""Starts a program as several processes that share the seconds which importing torch takes.

`python forked.py MODULES FOLDER PROGRAM ARGUMENTS` imports the modules, given by commas, and forks
a process for each pair of a list and variables in ARGUMENTS, which is JSON. Each runs the program
as Python would, with what it prints in FOLDER/out-N and FOLDER/err-N. What is imported starts no
threads.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

TORCH = ("torch", "torch.distributed", "mlstate.integrations.torch")
OPTIMIZERS = ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch._dynamo")


def run(program, arguments, environment, limit_seconds, modules=TORCH, variables=None):
    """Run a program once for each list of arguments; (exit code, stdout, stderr) of each.

    Beside the environment of all, each may have variables of its own: a dict for each list.

    The standard input of a process ends when the process before it has ended, that of the first
    one at once. Every process has ended when this returns: those that take too long are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = variables or [{}] * len(arguments)
        lists = [[str(text) for text in texts] for texts in arguments]
        texts = json.dumps(list(zip(lists, own, strict=True)))
        process = subprocess.Popen(
            [sys.executable, __file__, ",".join(modules), folder, str(program), texts],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=limit_seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        assert process.returncode == 0, err
        path = Path(folder)
        return [
            (status, (path / f"out-{n}").read_text(), (path / f"err-{n}").read_text())
            for n, status in enumerate(json.loads(out))
        ]


def become(program, arguments, inputs, number, folder):
    """In a forked process: take the program's place."""
    os.dup2(inputs[number][0], 0)
    for descriptor in (end for pair in inputs for end in pair):
        os.close(descriptor)
    for target, name in ((1, "out"), (2, "err")):
        descriptor = os.open(f"{folder}/{name}-{number}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).parent)


def main():
    """Fork the processes, wait for them and print their exit codes; return where there is a
    program to run."""
    modules, folder, program, texts = sys.argv[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own internals
        for module in modules.split(","):
            importlib.import_module(module)
    processes = json.loads(texts)
    inputs = [os.pipe() for _ in processes]
    pids = []
    for number, (arguments, variables) in enumerate(processes):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(variables)
            become(program, arguments, inputs, number, folder)
            return program
    statuses = []
    for pid, (_, end) in zip(pids, inputs, strict=True):
        os.close(end)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(json.dumps(statuses))
    return None


if __name__ == "__main__":
    mine = main()
    if mine:
        runpy.run_path(mine, run_name="__main__")
