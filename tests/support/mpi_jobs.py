"""MPI jobs with the installations of tools/mpi.sh: a separate folder for each MPI."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import mlstate

ENGINES = ("mpich", "openmpi")
LIMIT_SECONDS = 300
ROOT = Path(__file__).resolve().parents[2]


def home(engine):
    """The folder of an MPI, or None if it is not installed for this Python."""
    folder = Path(os.environ.get("MLSTATE_MPI", ROOT / "build" / "mpi")) / engine
    package = packages(folder) / "mpi4py"
    return folder if package.is_dir() and (folder / "bin" / "mpiexec").exists() else None


def skip_if_missing(engine, target="make test"):
    """Skip the test if an MPI is not installed; `target` runs the tests that need it."""
    import pytest  # benchmarks import this module, too, and do without pytest

    if home(engine) is None:
        pytest.skip(f"{engine} is not installed; tools/mpi.sh does that for `{target}`")


def put_in_path(monkeypatch, engine=None):
    """Let `run_ranks` use an MPI (None: any that is installed), or skip the test."""
    engine = engine or next(filter(home, ENGINES), ENGINES[0])
    skip_if_missing(engine)
    for name, value in environment(engine).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(home(engine) / "bin"), prepend=os.pathsep)


def packages(folder):
    """The folder below a prefix where pip installs packages."""
    scheme = {"base": str(folder), "platbase": str(folder)}
    return Path(sysconfig.get_path("platlib", "posix_prefix", vars=scheme))


def library(folder):
    """The MPI library for mpi4py to load."""
    name = "libmpi*.dylib" if sys.platform == "darwin" else "libmpi.so.*"
    return min((folder / "lib").glob(name), key=lambda path: len(path.name))


def environment(engine):
    """The variables for a process that imports the same mlstate, and this MPI's mpi4py."""
    folder = home(engine)
    python_path = os.environ.get("PYTHONPATH")
    paths = [
        Path(mlstate.__file__).parents[1],
        packages(folder),
        ROOT / "tests" / "support",
        python_path,
    ]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("OMPI_")},
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "MPI4PY_LIBMPI": str(library(folder)),
        "OMP_NUM_THREADS": "1",
    }


def command(engine, ranks, *arguments):
    """The command line that runs Python on `ranks` ranks of this machine."""
    start = [str(home(engine) / "bin" / "mpiexec"), "-n", str(ranks)]
    if engine == "openmpi":  # more ranks than cores; root in a container
        start[1:1] = ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
        if os.geteuid() == 0:
            start[1:1] = ["--allow-run-as-root"]
    return [*start, sys.executable, *arguments]


def run(engine, ranks, *arguments, limit_seconds=LIMIT_SECONDS, **variables):
    """Run a job with a time limit; return (exit status, output, error output)."""
    process = subprocess.Popen(
        command(engine, ranks, *arguments),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**environment(engine), **variables},
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpiexec ends its ranks
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        err = f"not done after {limit_seconds} s\n{err}"
    return process.returncode, out, err
