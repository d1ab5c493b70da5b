"""Build the C core and its tests, for the tests that examine them.

`make lint` also builds both with gcc. If it did, its folder is brought up to date and used with the
same flags, so that a complete check compiles them once.
"""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINTED = "build/lint/gcc/core"  # same as in tools/lint.sh
PLAIN = "build/core"


def missing():
    """The build tool that is missing, or None."""
    for tool in ("make", os.environ.get("CC", "cc").split()[0]):
        if shutil.which(tool) is None:
            return f"no {tool} here"
    return None


def make(goal):
    """Build all "objects" or "tests" that compile; return their folder, and the output."""
    command = ["make", "--no-print-directory", "-f", "tools/core.mk", "-k", f"-j{os.cpu_count()}"]
    folder = PLAIN
    if (ROOT / LINTED).exists() and os.environ.get("CC", "cc") in ("cc", "gcc"):
        folder = LINTED
        command += ["CC=gcc", "EXTRA=-Werror", "OPT=-O2"]
    # An outer `make` would pass on its own jobs and variables.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "core.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # `make lint` may build at the same time
        done = subprocess.run(
            [*command, f"BUILD={folder}", goal],
            cwd=ROOT, env=inherited, capture_output=True, text=True,
        )  # fmt: skip
    return ROOT / folder, done.stdout + done.stderr
