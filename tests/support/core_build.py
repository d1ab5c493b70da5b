"""Build the C tests, for the tests that run them.

They are linked with the core of the extension module, unless a source has changed since it was
built. `make lint` also builds the C tests with gcc. If it did, its folder is used with the same
flags, so that a complete check compiles them once.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINTED = "build/lint/gcc/core"  # same as in tools/lint.sh
PLAIN = "build/core"
EXTENSION = f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"  # of setup.py


def missing():
    """The build tool that is missing, or None."""
    for tool in ("make", os.environ.get("CC", "cc").split()[0]):
        if shutil.which(tool) is None:
            return f"no {tool} here"
    return None


def extension_core():
    """Return the library of the core that setup.py made; None if a source is newer."""
    library = ROOT / EXTENSION / "libmlstate.a"
    sources = (ROOT / "csrc" / "core").rglob("*.[chd]*")
    newest = max(path.stat().st_mtime_ns for path in sources)
    current = library.exists() and library.stat().st_mtime_ns > newest
    return library if current else None


def make(*goals):
    """Build "objects" or "tests", all that compile; return their folder, and the output."""
    command = ["make", "--no-print-directory", "-f", "tools/core.mk", "-k", f"-j{os.cpu_count()}"]
    folder = PLAIN
    if (ROOT / LINTED).exists() and os.environ.get("CC", "cc") in ("cc", "gcc"):
        folder = LINTED
        command += ["CC=gcc", "EXTRA=-Werror", "OPT=-O2"]
    if library := extension_core():
        command.append(f"LIB={library.relative_to(ROOT)}")
    # An outer `make` would pass on its own jobs and variables.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "core.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # `make lint` may build at the same time
        done = subprocess.run(
            [*command, f"BUILD={folder}", *goals],
            cwd=ROOT, env=inherited, capture_output=True, text=True,
        )  # fmt: skip
    return ROOT / folder, done.stdout + done.stderr


def core_objects():
    """Return the folder of the core's objects, laid out as csrc, and the compiler's output."""
    if library := extension_core():
        return library.parent / "csrc", ""
    return make("objects")
