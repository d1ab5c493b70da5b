"""The symbols that the compiled files of an installed wheel need from the system."""

import importlib.metadata
import re
import shutil
import subprocess

import pytest

WHEEL = importlib.metadata.distribution("mlstate").read_text("WHEEL") or ""
GLIBC = [tuple(map(int, numbers)) for numbers in re.findall(r"-manylinux_(\d+)_(\d+)_", WHEEL)]

pytestmark = [
    pytest.mark.skipif(not GLIBC, reason="installed from no manylinux wheel"),
    pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf here"),
]


def symbols():
    """Return the names, with versions, that the compiled files need of other files."""
    files = importlib.metadata.files("mlstate") or []
    compiled = [file.locate() for file in files if re.search(r"\.so(\.\d+)?$", file.name)]
    assert len(compiled) == 2, compiled  # the module and the C library
    command = ["readelf", "-W", "--dyn-syms", *map(str, compiled)]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in listing.splitlines()]
    return [row[7] for row in rows if len(row) > 7 and row[6] == "UND" and row[4] != "WEAK"]


def test_no_file_needs_a_newer_glibc_than_the_wheel_names():
    versions = {
        tuple(map(int, numbers))
        for name in symbols()
        for numbers in re.findall(r"@GLIBC_(\d+)\.(\d+)", name)
    }
    assert versions and max(versions) <= min(GLIBC)


def test_every_needed_symbol_has_a_version_or_is_of_python():
    """A symbol without a version would be missing on systems with an older C library."""
    names = [name for name in symbols() if "@" not in name]
    assert names and not [name for name in names if not re.match("_?Py", name)]
