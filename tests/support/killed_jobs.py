"""Run a job that resumes, and kill it at random steps.

The ordinary tests kill each job once; `make faults` kills it four times, on one and two ranks.
"""

import contextlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
import threading
import time

FULL = os.environ.get("MLSTATE_FAULTS") == "all"


def module_of(path):
    """Import a file by its path, such as a job whose classes run in this process too."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(arguments):
    """Start a job and its children as a process group; return the process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def kill(process):
    """Kill a job with all of its ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(arguments, *, lines=None, delay=0.0, seconds=240):
    """Run a job until it ends, or until `delay` seconds after it has printed `lines` lines.

    Returns the printed lines, and whether the job ended. A job that fails is an error.
    """
    process = start(arguments)
    timer = threading.Timer(seconds, kill, (process,))
    timer.start()
    printed, errors = [], []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True)
    reader.start()
    try:
        for line in process.stdout:
            printed.append(line.strip())
            if lines is not None and len(printed) >= lines:
                time.sleep(delay)
                kill(process)
                return printed, False
        process.wait()
        reader.join(10)
        assert process.returncode == 0, "".join(errors)[-3000:]
        return printed, True
    finally:
        timer.cancel()
        kill(process)
        reader.join(10)
        process.stdout.close()
        process.stderr.close()


def run_killed(arguments, *, most_lines, seed, most_delay=0.05):
    """Run a job, kill it at random moments, and let it finish; return its last line."""
    random_source = random.Random(seed)
    for _ in range(4 if FULL else 1):
        lines = random_source.randint(1, most_lines)
        printed, ended = run(arguments, lines=lines, delay=random_source.uniform(0, most_delay))
        if ended:
            return printed[-1]
    return run(arguments)[0][-1]
