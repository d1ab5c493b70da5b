"""What the compiled module shows to the world, and what it can change."""

import re
import shutil
import subprocess
import sys

import house
import pytest

import mlstate._core

nm = shutil.which("nm")
needs_nm = pytest.mark.skipif(
    sys.platform != "linux" or nm is None, reason="reads ELF files with GNU nm"
)
# Instrumented builds bring symbols of their own.
FOREIGN = re.compile(r"^(_init|_fini|_edata|_end|__bss_start|__asan\w*|__gcov\w*|mangle_path)$")


@needs_nm
def test_only_the_init_function_is_exported():
    command = [nm, "-D", "--defined-only", mlstate._core.__file__]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = [line.split()[-1] for line in listing.splitlines()]
    assert [name for name in names if not FOREIGN.match(name)] == ["PyInit__core"]


@needs_nm
def test_the_core_has_no_writable_data():
    if shutil.which("make") is None or shutil.which("cc") is None:
        pytest.skip("needs make and a C compiler")
    # those of the C tests, where they were built
    make = ["make", "-s", "-j2", "-f", "tools/core.mk", "objects"]
    subprocess.run(make, cwd=house.ROOT, check=True, capture_output=True)
    sources = (house.ROOT / "csrc" / "core").glob("*.c")
    objects = [house.ROOT / "build" / "core" / "core" / f"{path.stem}.o" for path in sources]
    assert objects
    bad = []
    for path in objects:
        command = [nm, "--format=sysv", "--defined-only", str(path)]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for line in listing.splitlines():
            fields = [field.strip() for field in line.split("|")]
            # .data.rel.ro holds constant tables of pointers: read-only once loaded.
            if len(fields) == 7 and re.match(r"\.(data|bss|tdata|tbss)(?!\.rel\.ro)", fields[6]):
                bad.append(f"{path.stem}.c: {fields[0]} in {fields[6]}")
    assert not bad, "\n".join(bad)
