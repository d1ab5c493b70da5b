"""The extension module; all metadata is in pyproject.toml.

Environment variables, all unset in a release build:
``MLSTATE_SANITIZE=address|thread``, ``MLSTATE_COVERAGE=1``, ``MLSTATE_DEBUG=1``,
``MLSTATE_WERROR=1``.
"""

import os
import sys
import sysconfig
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
    compile_args = ["-std=c11", "-ffp-contract=off", "-fvisibility=hidden", *WARNINGS]
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
        compile_args.append("--coverage")
        link_args.append("--coverage")
    if sanitizer or os.environ.get("MLSTATE_DEBUG") or os.environ.get("MLSTATE_COVERAGE"):
        # Without inlining, gcovr can merge this build with the C tests'.
        level = "-O0" if os.environ.get("MLSTATE_COVERAGE") else "-O1"
        compile_args += ["-g", level, "-UNDEBUG"]
    else:
        compile_args += ["-g0", "-O2"]
        link_args += ["-Wl,-s"] if sys.platform == "linux" else []
    return compile_args, link_args


class ParallelBuild(build_ext):
    """Compile the sources of the extension in parallel; setuptools compiles them in turn."""

    def build_extensions(self):
        """Build as setuptools does, with a thread for each processor."""
        compile_one = self.compiler.compile

        def compile_all(sources, *args, **kwargs):
            with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
                jobs = [threads.submit(compile_one, [s], *args, **kwargs) for s in sources]
                return [obj for job in jobs for obj in job.result()]

        self.compiler.compile = compile_all
        super().build_extensions()


def files(*patterns):
    """Return the source files that match the patterns, in a reproducible order."""
    return sorted(path.as_posix() for pattern in patterns for path in Path().glob(pattern))


compile_args, link_args = flags()
setup(
    ext_modules=[
        Extension(
            "mlstate._core",
            sources=files("csrc/core/**/*.c", "csrc/python/**/*.c"),
            depends=files("csrc/core/**/*.h", "csrc/python/**/*.h"),
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
    cmdclass={"build_ext": ParallelBuild},
)
