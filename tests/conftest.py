"""Settings for all tests."""

import gc
import os
import shutil
import signal
import sys
import tempfile
import zlib

import hypothesis
import pytest
from tries import tries

# Keep compiled modules: each worker and each command would compile the same files again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Idle threads of OpenMP spin: with several workers, some tests of torch took five times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background processes with SIGINT ignored; Python then raises nothing on Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# If it is set, `print` writes the line end separately, and lines of ranks that share a pipe mix.
os.environ.pop("PYTHONUNBUFFERED", None)

# No deadline: pytest limits the time of each test, and an example may take long on a busy machine.
hypothesis.settings.register_profile(
    "mlstate", max_examples=tries(hypothesis.settings.default.max_examples), deadline=None
)
hypothesis.settings.load_profile("mlstate")


def folder_in_memory():
    """Return a new folder in memory, or None if memory has no room for the files of all tests.

    Waiting for a disk took more time than computing. Some tests run programs that they compile
    there.
    """
    memory, least = "/dev/shm", 8 << 30
    if not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < least:
        return None
    if os.statvfs(memory).f_flag & os.ST_NOEXEC:
        return None
    return tempfile.mkdtemp(prefix="mls-", dir=memory)


# of this process and of all that it starts, such as the workers; a user may choose another one
own_folder = None if "TMPDIR" in os.environ else folder_in_memory()
if own_folder is not None:
    os.environ["TMPDIR"] = own_folder
    tempfile.tempdir = None

SLOW_FOLDERS = {"integration", "package", "attacks", "remote"}


def pytest_addoption(parser):
    """Add `--part I/N`: run one of N parts of the tests, such as 1/4."""
    parser.addoption("--part", default="1/1", help="run part I of N of the tests: I/N")


def pytest_collection_modifyitems(config, items):
    """Keep and order the tests of the part; a test is in the same part on every machine."""
    part, parts = map(int, config.getoption("--part").split("/"))
    groups = [[], []]  # tests of the part, and the others
    for item in items:
        groups[zlib.crc32(item.nodeid.encode()) % parts != part - 1].append(item)
    # Files that start processes or compile begin first, so that no worker waits for one at the end.
    items[:] = sorted(groups[0], key=lambda item: not SLOW_FOLDERS & {*item.path.parts})
    config.hook.pytest_deselected(items=groups[1])


def pytest_unconfigure():
    if own_folder is not None:
        shutil.rmtree(own_folder, ignore_errors=True)


def pytest_collection_finish():
    freeze_modules()


def pytest_runtest_setup():
    """Remove Hypothesis's callback, in which the exception of a signal handler would be lost."""
    gc.callbacks.clear()
    if len(sys.modules) > frozen_count + 100:  # such as transformers, which tests import late
        freeze_modules()


def freeze_modules():
    """Exempt modules and tests from garbage collection, so that `gc.collect()` takes no time."""
    global frozen_count
    gc.collect()
    gc.freeze()
    frozen_count = len(sys.modules)


@pytest.fixture(scope="session")
def torch():
    """The module torch; tests that take it are skipped if it is not installed."""
    return pytest.importorskip("torch")
