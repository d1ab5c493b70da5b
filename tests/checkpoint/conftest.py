"""Fixtures of several tests of checkpoints."""

import pytest


@pytest.fixture
def path(tmp_path):
    """The folder of a checkpoint, which does not exist yet."""
    return tmp_path / "ckpt"
