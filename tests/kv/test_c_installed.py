"""The C library in the package, and after `make install-kv`, for pkg-config and CMake."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import core_build
import pytest
from core_build import ROOT

import mlstate

CC = os.environ.get("CC", "cc").split()
EXAMPLES = ROOT / "examples" / "c"
HEADER = Path(mlstate.get_include(), "mlstate", "kv.h")
PACKAGED = Path(mlstate.get_library_dir())
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

pytestmark = [
    pytest.mark.skipif(shutil.which(CC[0]) is None, reason="no C compiler here"),
    pytest.mark.skipif(not EXAMPLES.exists(), reason="no C examples beside these tests"),
]
needs_elf = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("readelf") is None, reason="reads ELF files"
)


@pytest.fixture(scope="module", autouse=True)
def without_instrumentation():
    if re.search(rb"__(asan|gcov)_", (PACKAGED / "libmlstate_kv.a").read_bytes()):
        pytest.skip("an instrumented library needs the flags of its build")


def run(*command, **variables):
    """Return the output of a command that must succeed without a warning."""
    environment = {**os.environ, "PATH": TOOLS, **variables}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower(), done.stdout + done.stderr
    return done.stdout


def needs(tool):
    if shutil.which(tool, path=TOOLS) is None:
        pytest.skip(f"no {tool} here")
    return tool


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """Install for /opt/mlstate into a folder, move the result elsewhere, and return its place."""
    if core_build.missing() or not (ROOT / "tools" / "core.mk").exists():
        pytest.skip(core_build.missing() or "no sources beside these tests")
    staged = tmp_path_factory.mktemp("staged")
    _, log = core_build.make(
        "install-kv", "PREFIX=/opt/mlstate", "LIBDIR=lib/cpu", f"DESTDIR={staged}"
    )
    assert [path.name for path in staged.iterdir()] == ["opt"], log
    return Path(shutil.move(staged / "opt" / "mlstate", tmp_path_factory.mktemp("moved")))


@pytest.fixture
def build(tmp_path):
    """Return a function that compiles the example with some flags, runs it, and checks it."""

    def build(*flags):
        program = tmp_path / "transition"
        run(*CC, "-std=c11", "-Wall", "-Wextra", EXAMPLES / "transition.c", *flags, "-o", program)
        check_program(program)

    return build


def check_program(program):
    assert "token 179: 181.500, next: 0.000" in run(program).splitlines()


@pytest.mark.parametrize("static", [False, True], ids=["shared", "static"])
def test_pkg_config_gives_the_flags_of_a_moved_installation(static, prefix, build):
    libraries = prefix / "lib" / "cpu"
    command = [needs("pkg-config"), "--cflags", "--libs", "mlstate-kv"]
    command += ["--static"] if static else []
    flags = run(*command, PKG_CONFIG_PATH=str(libraries / "pkgconfig")).split()
    build(*flags, "-static" if static and sys.platform == "linux" else f"-Wl,-rpath,{libraries}")


@pytest.mark.parametrize("library", ["mlstate::kv", "mlstate::kv_static"])
def test_cmake_finds_a_moved_installation(library, prefix, tmp_path):
    variables = [f"-Dmlstate_DIR={prefix / 'lib/cpu/cmake/mlstate'}", f"-DLIBRARY={library}"]
    run(needs("cmake"), "-S", EXAMPLES, "-B", tmp_path, *variables)
    run("cmake", "--build", tmp_path)
    check_program(tmp_path / "transition")


def test_cmake_refuses_a_newer_version(prefix, tmp_path):
    text = (EXAMPLES / "CMakeLists.txt").read_text(encoding="utf-8")
    asked = {"1.0": True, "1.2": False, "2.0": False}
    for version, is_found in asked.items():
        source = tmp_path / version
        source.mkdir()
        shutil.copy(EXAMPLES / "transition.c", source)
        (source / "CMakeLists.txt").write_text(
            text.replace("mlstate 1.1 REQ", f"mlstate {version} REQ")
        )
        command = [needs("cmake"), "-S", source, "-B", source / "build"]
        command.append(f"-Dmlstate_DIR={prefix / 'lib/cpu/cmake/mlstate'}")
        done = subprocess.run(command, env={**os.environ, "PATH": TOOLS}, capture_output=True)
        assert (done.returncode == 0) == is_found, version


def test_package_contains_all_that_a_program_links(build):
    shared = [path for path in PACKAGED.iterdir() if path.suffix != ".a"]
    assert len(shared) == 1 and not shared[0].is_symlink()  # wheels hold no links
    include = f"-I{mlstate.get_include()}"
    build(include, f"-L{PACKAGED}", "-lmlstate_kv", "-lpthread", "-lm")
    build(include, shared[0], f"-Wl,-rpath,{PACKAGED}")


@pytest.fixture(params=["package", "prefix"])
def shared_library(request):
    """Return the shared library in the package, and the one from `make install-kv`."""
    if request.param == "package":
        return PACKAGED / "libmlstate_kv.so.1"
    return request.getfixturevalue("prefix") / "lib" / "cpu" / "libmlstate_kv.so.1"


@needs_elf
def test_shared_library_exports_the_functions_of_the_header(shared_library):
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
    declared = sorted(re.findall(r"\b(mlstate_kv_\w+)\(", text))
    assert len(declared) == 12
    listing = run("nm", "-D", "--defined-only", shared_library)
    assert sorted(line.split()[-1] for line in listing.splitlines()) == declared


@needs_elf
def test_shared_library_names_itself_and_the_libraries_that_it_calls(shared_library):
    entries = re.findall(r"\((SONAME|NEEDED)\).*\[(.*)\]", run("readelf", "-d", shared_library))
    assert ("SONAME", "libmlstate_kv.so.1") in entries
    needed = {name for kind, name in entries if kind == "NEEDED"}
    assert "libm.so.6" in needed
    assert needed <= {"libc.so.6", "libm.so.6", "libpthread.so.0"}
