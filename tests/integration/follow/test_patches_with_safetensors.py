"""Patches that safetensors and torch read without mlstate, as the receiver of TRL does."""

import pytest
from foreign_deltas import bases, encoded_deltas, news

from mlstate.checkpoint import save_file
from mlstate.follow._formats.weight_patch import SUFFIXES, write_weight_patch

torch = pytest.importorskip("torch", reason="applies patches to torch tensors")
safetensors = pytest.importorskip("safetensors", reason="reads the files")
pytestmark = pytest.mark.torch


def as_tensor(array):
    """A torch tensor of bfloat16 from an array of ml_dtypes."""
    return torch.from_numpy(array.view("<i2").copy()).view(torch.bfloat16)


def assert_new_version(parameters):
    for name, new in news().items():
        assert torch.equal(parameters[name].view(torch.int16), as_tensor(new).view(torch.int16))


@pytest.mark.parametrize("encoding", ["gap_delta", "raw"])
@pytest.mark.parametrize("suffixes", SUFFIXES)
def test_written_patches_are_applied_by_safetensors_and_torch(tmp_path, encoding, suffixes):
    tensors, metadata = write_weight_patch(
        encoded_deltas(), 3, encoding=encoding, suffixes=suffixes
    )
    save_file(tensors, tmp_path / "patch.safetensors", metadata)
    parameters = {name: as_tensor(base) for name, base in bases().items()}
    with safetensors.safe_open(tmp_path / "patch.safetensors", framework="pt") as file:
        assert file.metadata()["model_version"] == "3"
        for name, parameter in parameters.items():
            indices = file.get_tensor(name + suffixes[0]).to(torch.int64)
            if encoding == "gap_delta":
                indices = torch.cumsum(indices + 1, 0) - 1
            parameter.index_copy_(0, indices, file.get_tensor(name + suffixes[1]))
    assert_new_version(parameters)
