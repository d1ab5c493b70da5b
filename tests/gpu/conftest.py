"""Tests of mlstate with tensors of a CUDA device; without one they are skipped: make test-gpu."""

import os
from pathlib import Path

import pytest

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
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def stream(device):
    """A stream of the device that nothing else uses."""
    import torch

    return torch.cuda.Stream(device)


@pytest.fixture(autouse=True)
def deterministic(device, monkeypatch):
    """Let torch compute the same bits in each run.

    It only warns of operations that have no such algorithm, since other packages run too, and an
    earlier test may have used cuBLAS, which reads its setting once.
    """
    import torch

    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(name, os.environ.get(name, ":4096:8"))
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before, warn_only=warns)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint"
