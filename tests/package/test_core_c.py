"""The C tests of the core: one pytest test for each file of tests/core."""

import sys

import child
import core_build
import pytest
from core_build import ROOT

CORE = ROOT / "tests" / "core"
FILES = sorted(CORE.rglob("test_*.c"))
assert FILES


@pytest.fixture(scope="module")
def built():
    """Build all tests that compile; return their folder, and the compiler's output."""
    if core_build.missing():
        pytest.skip(core_build.missing())
    return core_build.make("tests")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_core(path, built):
    if path.stem.endswith("_failure") and sys.platform == "darwin":
        pytest.skip("replacing calls at link time needs GNU ld")
    folder, log = built
    program = (folder / "tests" / path.relative_to(CORE)).with_suffix("")
    lines = [line for line in log.splitlines() if path.name in line or "csrc/" in line]
    assert program.exists(), "not built:\n" + "\n".join(lines)
    assert program.stat().st_mtime >= path.stat().st_mtime, "not rebuilt:\n" + "\n".join(lines)
    done = child.finished([program], folder=ROOT)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
