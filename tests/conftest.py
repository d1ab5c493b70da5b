"""Settings for all tests."""

import gc
import os
import signal
import sys

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


def pytest_collection_finish():
    """Exempt modules and tests from garbage collection, so that `gc.collect()` takes no time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def torch():
    """The module torch; tests that take it are skipped if it is not installed."""
    return pytest.importorskip("torch")
