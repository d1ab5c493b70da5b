"""Run programs in processes that `run_ranks` would use: forked after the import of torch."""

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

from mlstate.testing._gloo_processes import PRELOADED


def run(program, *processes, seconds=240):
    """Run a program for each (arguments, variables); return (exit code, output, errors) of each.

    The variables are added to `os.environ`. All processes have ended when this returns.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for number, (arguments, variables) in enumerate(processes):
            outputs = [f"{folder}/{kind}-{number}" for kind in ("out", "err")]
            words = [str(program), *map(str, arguments)]
            environment = os.environ | variables
            start = words, environment, str(Path.cwd()), outputs
            process = context.Process(target=become, args=start, daemon=True)
            process.start()
            started.append((process, outputs))
        results = []
        for process, outputs in started:
            process.join(seconds)
            if process.exitcode is None:
                process.kill()
                process.join()
            results.append((process.exitcode, *(Path(path).read_text() for path in outputs)))
        return results


def become(words, environment, folder, outputs):
    """In a new process: run the program as Python would."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for descriptor, path in enumerate(outputs, 1):
        with Path(path).open("w") as file:
            os.dup2(file.fileno(), descriptor)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
