"""Run code in a new Python, if a process can do or measure it only once."""

import os
import subprocess
import sys


def run(code, *, timeout=120, **variables):
    """Run `code` and return its output; fail with its error output if it fails."""
    done = attempt(code, timeout=timeout, **variables)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def attempt(code, *, timeout=120, **variables):
    """Run `code` and return the finished process, however it ended."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
