"""Run code in a new Python, if a process can do or measure it only once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PATHS = {"PYTHONPATH": os.pathsep.join(sys.path)}  # for code that imports helpers of tests

# For code that measures memory: status("VmRSS") are its resident bytes, status("VmHWM") its peak.
STATUS = """
def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024
"""
needs_status = pytest.mark.skipif(
    not Path("/proc/self/status").exists() or "MLSTATE_UNDER_SANITIZER" in os.environ,
    reason="measures resident memory, which only Linux reports and a sanitizer changes",
)
counts_reads = pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="counts bytes as Linux does"
)


def bytes_read():
    """Return the number of bytes that this process has requested from the system by reads."""
    text = Path("/proc/self/io").read_text(encoding="ascii")
    return int(text.partition("rchar: ")[2].split()[0])


def run(code, *arguments, timeout=120, **variables):
    """Run `code` and return its output; fail with its error output if it fails."""
    done = attempt(code, *arguments, timeout=timeout, **variables)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def attempt(code, *arguments, timeout=120, **variables):
    """Run `code` and return the finished process, however it ended."""
    return finished([sys.executable, "-c", code, *arguments], timeout=timeout, **variables)


def finished(command, *, folder=None, timeout=120, **variables):
    """Run a command, in a folder, and return the finished process, however it ended."""
    return subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
