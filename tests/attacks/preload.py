"""Build the preloaded libraries, and run operations in a process that has them."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
WARNINGS = (
    "-Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wcast-qual -Wvla -Wundef -Werror"
)


def unsupported():
    """Why libraries cannot be preloaded on this machine, or None."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return "the shim is for 64-bit Linux"
    if "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or ""):
        return "the shim is for glibc"
    if os.environ.get("MLSTATE_UNDER_SANITIZER"):
        return "sanitizers preload a library of their own"
    if shutil.which(os.environ.get("CC", "cc")) is None:
        return "no C compiler"
    return None


def build(folder, name, *sources):
    """Compile sources of this folder into `folder`/`name`.so."""
    library = folder / f"{name}.so"
    command = [
        os.environ.get("CC", "cc"), "-std=c11", "-O1", "-g", "-fPIC", "-shared",
        "-fvisibility=hidden", "-D_GNU_SOURCE", *WARNINGS.split(),
        *(str(HERE / source) for source in sources), "-o", str(library), "-ldl", "-lpthread",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


def environment(library, **more):
    """The environment of a child: the same modules, the preloaded library, no threads of NumPy."""
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "LD_PRELOAD": str(library), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
        "MLS_FAULT_HINT": "lock", **more,
    }  # fmt: skip


class Attacker:
    """A process that has prepared one operation, and attacks it on request."""

    def __init__(self, operation, folder, library):
        self.errors = folder / "errors.txt"
        with self.errors.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", str(HERE / "attack.py"), operation, folder],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=environment(library, MLS_FAULT_SYNC="no", MLS_ALLOC_OBJECT="mlstate/_core."),
            )  # fmt: skip

    def attack(self, name, *arguments):
        """Return the number of points tried, and complaints."""
        with contextlib.suppress(BrokenPipeError):  # the answer is missing too
            print(json.dumps([name, *arguments]), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("tried "):
                return json.loads(line.removeprefix("tried "))
        raise RuntimeError(f"the process ended: {self.errors.read_text()[-3000:]}")

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()
