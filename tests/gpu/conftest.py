"""Tests of mlstate with tensors of a CUDA device; without one they are skipped: make test-gpu."""

import os
from pathlib import Path

import pytest

# cuBLAS reads it at its first use; without it, deterministic algorithms are refused.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

torch = pytest.importorskip("torch")
FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Ignore warnings of other packages, whose versions differ between machines with a GPU."""
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.torch)
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.filterwarnings("error::mlstate.errors.CheckpointWarning"))


@pytest.fixture(scope="session")
def device():
    """The CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def stream(device):
    """A stream of the device that nothing else uses."""
    return torch.cuda.Stream(device)


@pytest.fixture(autouse=True)
def deterministic():
    """Let torch compute the same bits in each run."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint"
