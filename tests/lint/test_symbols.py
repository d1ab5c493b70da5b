"""The symbols that the compiled module exports, and its writable data."""

import re
import shutil
import subprocess
import sys

import core_build
import house
import pytest

import mlstate._core

nm = shutil.which("nm")
needs_nm = pytest.mark.skipif(
    sys.platform != "linux" or nm is None, reason="reads ELF files with GNU nm"
)
# Instrumented builds add symbols.
FOREIGN = re.compile(r"^(_init|_fini|_edata|_end|__bss_start|__asan\w*|__gcov\w*|mangle_path)$")


@needs_nm
def test_only_the_init_function_is_exported():
    command = [nm, "-D", "--defined-only", mlstate._core.__file__]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = [line.split()[-1] for line in listing.splitlines()]
    assert [name for name in names if not FOREIGN.match(name)] == ["PyInit__core"]


@needs_nm
def test_the_core_has_no_writable_data():
    if core_build.missing():
        pytest.skip(core_build.missing())
    folder, log = core_build.core_objects()
    sources = (house.ROOT / "csrc" / "core").rglob("*.c")
    objects = [folder / path.relative_to(house.ROOT / "csrc").with_suffix(".o") for path in sources]
    assert objects and all(path.exists() for path in objects), log
    command = [nm, "--format=sysv", "--defined-only", *map(str, objects)]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    bad, name = [], ""
    for line in listing.splitlines():
        name = line if line.startswith("Symbols from") else name
        fields = [field.strip() for field in line.split("|")]
        # .data.rel.ro holds constant tables of pointers: read-only after loading.
        if len(fields) == 7 and re.match(r"\.(data|bss|tdata|tbss)(?!\.rel\.ro)", fields[6]):
            bad.append(f"{name} {fields[0]} in {fields[6]}")
    assert name.startswith("Symbols from")
    assert not bad, "\n".join(bad)
