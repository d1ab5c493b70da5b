"""Fixtures of several tests of checkpoints."""

import threading

import pytest


@pytest.fixture
def path(tmp_path):
    """The folder of a checkpoint, which does not exist yet."""
    return tmp_path / "ckpt"


@pytest.fixture
def blocking_callback():
    """A callback that blocks the writer until `held.go` is set, and sets `held.called`."""
    go, called = threading.Event(), threading.Event()

    def hold(count):
        called.set()
        assert go.wait(20)

    hold.go, hold.called = go, called
    yield hold
    go.set()
