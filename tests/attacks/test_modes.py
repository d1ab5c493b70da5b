"""File systems without permissions, such as FAT and CIFS, refuse every change of a mode."""

import subprocess
import sys

import preload
import pytest

CHILD = """
import ctypes, sys
import numpy as np, mlstate
from pathlib import Path
path = Path(sys.argv[1]) / "w.safetensors"
mlstate.save_file({"w": np.zeros(3)}, path)
path.chmod(int(sys.argv[2], 8))
shim = ctypes.CDLL(None)
shim.mls_shim_arm()
try:
    mlstate.save_file({"w": np.ones(3)}, path)
finally:
    shim.mls_shim_disarm()
    assert shim.mls_shim_count(b"mode") > 0
    print(mlstate.load_file(path)["w"][0])
"""


@pytest.mark.parametrize(
    ("mode", "fault", "value"),
    [("644", "EPERM", "1.0"), ("644", "ENOTSUP", "1.0"), ("600", "EPERM", "0.0")],
)
def test_a_refused_mode_is_an_error_only_if_it_differs(shim, tmp_path, mode, fault, value):
    root = tmp_path / "root"
    root.mkdir()
    done = subprocess.run(
        ["sh", "-c", 'umask 022; exec "$@"', "sh", sys.executable, "-c", CHILD, str(root), mode],
        env=preload.environment(
            shim, MLS_FAULT_ROOT=str(root), MLS_FAULT=f"mode:1:{fault}"
        ),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == value, done.stderr
    assert ("cannot keep the old file's permissions" in done.stderr) == (value == "0.0")
    assert [path.name for path in root.iterdir()] == ["w.safetensors"]
