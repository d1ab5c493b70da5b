"""The extension module and the C library of kv.h; all metadata is in pyproject.toml.

Environment variables, all unset in a release build:
``MLSTATE_SANITIZE=address|thread``, ``MLSTATE_COVERAGE=1``, ``MLSTATE_DEBUG=1``,
``MLSTATE_WERROR=1``.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wconversion",
    "-Wstrict-prototypes",
    "-Wcast-qual",
    "-Wvla",
    "-Wundef",
]
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-fsanitize=thread"],
}


def flags():
    """Return compiler and linker flags for the variant selected by environment variables."""
    compile_args = ["-std=c11", "-ffp-contract=off", "-fvisibility=hidden", "-MMD", *WARNINGS]
    for foreign in (numpy.get_include(), sysconfig.get_path("include")):
        compile_args += ["-isystem", foreign]  # no warnings about headers of other projects
    link_args = []
    if os.environ.get("MLSTATE_WERROR"):
        compile_args.append("-Werror")
    sanitizer = os.environ.get("MLSTATE_SANITIZE")
    if sanitizer:
        if sanitizer not in SANITIZERS:
            sys.exit(f"MLSTATE_SANITIZE={sanitizer}: use one of {', '.join(SANITIZERS)}")
        compile_args += [*SANITIZERS[sanitizer], "-fno-omit-frame-pointer"]
        link_args += SANITIZERS[sanitizer]
    if os.environ.get("MLSTATE_COVERAGE"):
        compile_args += ["--coverage", "-fprofile-update=atomic"]
        link_args.append("--coverage")
    if sanitizer or os.environ.get("MLSTATE_DEBUG") or os.environ.get("MLSTATE_COVERAGE"):
        # Without inlining, gcovr can merge this build with the C tests'.
        level = "-O0" if os.environ.get("MLSTATE_COVERAGE") else "-O1"
        compile_args += ["-g", level, "-UNDEBUG"]
    else:
        compile_args += ["-g0", "-O2"]
        link_args += ["-Wl,-s"] if sys.platform == "linux" else []
    return compile_args, link_args


def modified_ns(path):
    """Return the time of a file's last change."""
    return Path(path).stat().st_mtime_ns


def is_current(obj):
    """Return whether an object is newer than the files that the compiler read for it."""
    try:
        rule = Path(obj).with_suffix(".d").read_text().replace("\\\n", " ")
        read = [name.replace("\\ ", " ") for name in re.split(r"(?<!\\)\s+", rule.strip())[1:]]
        return max(map(modified_ns, read)) < modified_ns(obj)
    except OSError:  # not compiled yet, or an included file is gone
        return False


def check_compiler(compiler):
    """Exit with the remedy if the compiler or Python's headers are missing."""
    remedy = "install them (Debian: apt install gcc python3-dev; macOS: xcode-select --install)"
    command = compiler.compiler_so[0]
    if shutil.which(command) is None:
        sys.exit(f"mlstate needs a C compiler; {command} was not found: {remedy} or set CC")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.c")
        source.write_text("int main(void) { return 0; }\n")
        call = [*compiler.compiler_so, "-std=c11", "-c", source, "-o", source.with_suffix(".o")]
        try:
            trial = subprocess.run(call, capture_output=True, check=False)
            reason, is_broken = trial.stderr.decode(errors="replace"), trial.returncode != 0
        except OSError as error:  # it is no program of this machine
            reason, is_broken = str(error), True
    if is_broken:
        reason = "".join(reason.strip().splitlines()[:1])
        text = f"mlstate needs a C11 compiler; {command} cannot compile an empty program"
        sys.exit(f"{text}{reason and f' ({reason})'}: {remedy} or set CC")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        sys.exit(f"mlstate needs the headers of Python; {headers} has no Python.h: {remedy}")


def page():
    """Return the README with absolute links, for places outside the repository."""
    urls = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    text = Path("README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?:|#)", f"]({urls['Source']}/blob/main/", text)


class IncrementalBuild(build_ext):
    """Compile the changed sources of the extension in parallel."""

    def build_extensions(self):
        """Build as setuptools does, but with a thread for each processor."""
        check_compiler(self.compiler)
        if self.editable_mode:  # pip would use a temporary folder
            self.build_temp = str(
                Path("build", f"temp.{self.plat_name}-{sys.implementation.cache_tag}")
            )
        self.compile_one = self.compiler.compile
        self.compiler.compile = self.compile_all
        [extension] = self.extensions
        flags = [*self.compiler.compiler_so, *extension.extra_compile_args]
        flags += [f"{name}={value}" for name, value in extension.define_macros]
        flags = "\n".join([*flags, numpy.__version__, sys.version])
        noted = Path(self.build_temp, "flags")  # with which the objects there were compiled
        if not noted.exists() or noted.read_text() != flags:
            self.force = True
            noted.parent.mkdir(parents=True, exist_ok=True)
            noted.unlink(missing_ok=True)
        super().build_extensions()
        noted.write_text(flags)
        self.archive_core(extension)
        self.build_kv_library(extension)

    def archive_core(self, extension):
        """Make libmlstate.a of the core's objects, so that the C tests need not compile them."""
        core = [source for source in extension.sources if source.startswith("csrc/core/")]
        objects = self.compiler.object_filenames(core, output_dir=self.build_temp)
        Path(self.build_temp, "libmlstate.a").unlink(missing_ok=True)
        self.compiler.create_static_lib(objects, "mlstate", output_dir=self.build_temp)

    def build_kv_library(self, extension):
        """Make the library of include/mlstate/kv.h, and copy the header, into the package.

        tools/core.mk lists the sources and `make install-kv` installs the same library. A wheel has
        no links, so its shared library has the name that programs load.
        """
        rules = Path("tools/core.mk").read_text(encoding="utf-8")
        header = Path("include/mlstate/kv.h")
        major = re.search(r"KV_VERSION_MAJOR (\d+)", header.read_text(encoding="utf-8"))[1]
        folders, left_out = (
            re.search(rf"^{name} := (.*)$", rules, re.MULTILINE)[1].split()
            for name in ("KV_FOLDERS", "KV_WITHOUT")
        )
        core = [s for f in folders for s in files(f"csrc/core/{f}/**/*.c") if s not in left_out]
        objects = self.compiler.compile(
            files("csrc/public/*.c"),
            output_dir=self.build_temp,
            include_dirs=["include", *extension.include_dirs],
            macros=extension.define_macros,
            extra_postargs=extension.extra_compile_args,
        )
        package = Path(self.get_ext_fullpath(extension.name)).parent
        folder = package / "lib"
        self.mkpath(str(folder))
        self.mkpath(str(package / "include" / "mlstate"))
        shutil.copy(header, package / "include" / "mlstate")
        archive = folder / "libmlstate_kv.a"
        archive.unlink(missing_ok=True)
        members = [*objects, *self.compiler.object_filenames(core, output_dir=self.build_temp)]
        self.compiler.create_static_lib(members, "mlstate_kv", output_dir=str(folder))
        linker = ["-dynamiclib" if word == "-bundle" else word for word in self.compiler.linker_so]
        if sys.platform == "darwin":
            shared = folder / f"libmlstate_kv.{major}.dylib"
            linker += ["-install_name", f"@rpath/{shared.name}"]
        else:
            shared = folder / f"libmlstate_kv.so.{major}"
            linker.append(f"-Wl,-soname,{shared.name}")
        libraries = [str(archive), "-lpthread", "-lm", *extension.extra_link_args]
        self.spawn([*linker, *objects, *libraries, "-o", str(shared)])

    def copy_extensions_to_source(self):
        """Copy the library to the sources too, for `build_ext --inplace` and editable installs."""
        super().copy_extensions_to_source()
        for folder in ("include", "lib"):
            shutil.copytree(
                Path(self.build_lib, "mlstate", folder), Path("mlstate", folder), dirs_exist_ok=True
            )

    def compile_all(self, sources, output_dir, **kwargs):
        """Compile those sources whose objects are not current; return all objects."""
        objects = self.compiler.object_filenames(sources, output_dir=output_dir)
        stale = [
            s for s, obj in zip(sources, objects, strict=True) if self.force or not is_current(obj)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            list(threads.map(lambda s: self.compile_one([s], output_dir, **kwargs), stale))
        return objects


def files(*patterns):
    """Return the source files that match the patterns, in a reproducible order."""
    return sorted(path.as_posix() for pattern in patterns for path in Path().glob(pattern))


compile_args, link_args = flags()
setup(
    long_description=page(),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension(
            "mlstate._core",
            sources=files("csrc/core/**/*.c", "csrc/python/**/*.c"),
            depends=files("csrc/core/**/*.h", "csrc/**/*.def", "csrc/python/**/*.h"),
            include_dirs=["csrc/core", "csrc/python"],
            define_macros=[
                ("_GNU_SOURCE", None),
                ("_DARWIN_C_SOURCE", None),
                ("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION"),
                ("NPY_TARGET_VERSION", "NPY_2_0_API_VERSION"),
                ("PY_ARRAY_UNIQUE_SYMBOL", "mlspy_array_api"),
            ],
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        )
    ],
    cmdclass={"build_ext": IncrementalBuild},
)
