"""The package's sources without a compiled module, as in a clone after `pip install .`."""

import os
import shutil
import sys
from pathlib import Path

import child
import numpy as np
import pytest

import mlstate

PACKAGE = Path(mlstate.__file__).parent


@pytest.fixture
def folder(tmp_path):
    for path in PACKAGE.rglob("*.py"):
        target = tmp_path / "mlstate" / path.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return tmp_path


def started(folder, *arguments):
    """Run Python in that folder, with NumPy, and without an editable installation of mlstate."""
    paths = os.pathsep.join([str(folder), str(Path(np.__file__).parents[1])])
    return child.finished([sys.executable, "-S", *arguments], folder=folder, PYTHONPATH=paths)


@pytest.mark.parametrize("how", [("-c", "import mlstate"), ("-m", "mlstate", "info")])
def test_missing_compiled_module_names_the_remedy(folder, how):
    done = started(folder, *how)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"{folder}{os.sep}mlstate has no compiled module" in last
    for part in ("from its source folder", "Leave the folder", "`make dev`"):
        assert part in last


def test_broken_compiled_module_reports_itself(folder):
    (folder / "mlstate" / "_core.so").write_text("none")
    done = started(folder, "-c", "import mlstate.kv")
    assert done.returncode == 1
    assert "_core.so" in done.stderr.splitlines()[-1] and "source folder" not in done.stderr
