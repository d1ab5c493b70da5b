"""Checkpoints of twelve kinds, written by their own libraries, load whole and in parts."""

import numpy as np
import pytest
from checkpoint_kinds import KINDS

import mlstate

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
RANKS = 8


def array_of(tensor):
    """The bytes of a tensor as an array of its shape, for a comparison bit by bit."""
    if hasattr(tensor, "detach"):
        import torch

        tensor = tensor.detach().contiguous()
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.int16)
        tensor = tensor.numpy()
    return np.asarray(tensor)


def bits(array):
    return array.shape, array.tobytes()


@pytest.fixture(params=KINDS, scope="module")
def written(request, tmp_path_factory):
    kind = KINDS[request.param]
    if kind.missing():
        pytest.skip(f"{kind.missing()} is not installed")
    path = kind.write(tmp_path_factory.mktemp("kind"), 64)
    return path, {name: array_of(tensor) for name, tensor in kind.read(path).items()}


def test_load_equals_the_read_of_the_own_library(written):
    path, expected = written
    model = mlstate.load(path).model
    stored = {name: array_of(model[name]) for name in model}
    tied = expected.keys() - stored.keys()  # its library stores tied tensors once
    assert {expected[name].tobytes() for name in tied} <= {a.tobytes() for a in stored.values()}
    for name, array in stored.items():
        assert bits(array) == bits(expected[name])


def test_rows_of_eight_ranks_join_to_the_whole(written):
    path, expected = written
    parts = [
        mlstate.load(path, rank=rank, world_size=RANKS, layout="rows").model
        for rank in range(RANKS)
    ]
    assert parts[3]
    for name in parts[0]:
        arrays = [array_of(part[name]) for part in parts if name in part]
        if expected[name].ndim:
            assert bits(np.concatenate(arrays)) == bits(expected[name])
        else:
            assert all(bits(array) == bits(expected[name]) for array in arrays)
