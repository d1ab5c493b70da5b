"""The C tests of the core, one pytest test for each file of tests/core."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAKE = ["make", "--no-print-directory", "-f", "tools/core.mk"]
FILES = sorted((ROOT / "tests" / "core").glob("test_*.c"))


@pytest.fixture(scope="module")
def build_log():
    """Build all tests, as far as they build."""
    compiler = os.environ.get("CC", "cc").split()[0]
    for tool in ("make", compiler):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} here")
    # A `make` above would hand down its own jobs and variables.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    command = [*MAKE, "-k", f"-j{os.cpu_count()}", "tests"]
    done = subprocess.run(command, cwd=ROOT, env=inherited, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_core(path, build_log):
    if path.stem.endswith("_alloc_failure") and sys.platform == "darwin":
        pytest.skip("replacing malloc at link time needs GNU ld")
    program = ROOT / "build" / "core" / "tests" / path.stem
    lines = [line for line in build_log.splitlines() if path.name in line or "csrc/" in line]
    assert program.exists(), "not built:\n" + "\n".join(lines)
    built = program.stat().st_mtime
    assert built >= path.stat().st_mtime, "not rebuilt:\n" + "\n".join(lines)
    done = subprocess.run([program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
