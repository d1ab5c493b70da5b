"""Builds the C core and its tests, for the tests that look at them.

`make lint` builds both with gcc, too: where it did, its folder is brought up to date and taken,
by the same flags, so that a whole check compiles them once.
"""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINTED = "build/lint/gcc/core"  # as in tools/lint.sh
PLAIN = "build/core"


def missing():
    """What is not here to build with, or None."""
    for tool in ("make", os.environ.get("CC", "cc").split()[0]):
        if shutil.which(tool) is None:
            return f"no {tool} here"
    return None


def make(goal):
    """Build "objects" or "tests" as far as they build: their folder, and what was said."""
    command = ["make", "--no-print-directory", "-f", "tools/core.mk", "-k", f"-j{os.cpu_count()}"]
    folder = PLAIN
    if (ROOT / LINTED).exists() and os.environ.get("CC", "cc") in ("cc", "gcc"):
        folder = LINTED
        command += ["CC=gcc", "EXTRA=-Werror", "OPT=-O2"]
    # A `make` above would hand down its own jobs and variables.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "core.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # `make lint` may build at the same time
        done = subprocess.run(
            [*command, f"BUILD={folder}", goal],
            cwd=ROOT, env=inherited, capture_output=True, text=True,
        )  # fmt: skip
    return ROOT / folder, done.stdout + done.stderr
