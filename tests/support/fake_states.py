"""Models of Core ML and arrays of Core AI that need neither."""

from types import SimpleNamespace

import numpy as np

from mlstate.coreai import _state_manager
from mlstate.coreml import FakeMLState


def fake_model(specs, actual=None):
    """A model of Core ML that declares these states; its states have the shapes `actual`."""
    return SimpleNamespace(get_spec=lambda: specs, make_state=lambda: FakeMLState(actual or specs))


class FakeArray:
    """Copies what enters and leaves it, as Core AI's NDArray."""

    def __init__(self, data):
        self.data = np.array(data)
        self.shape = self.data.shape

    def numpy(self):
        return self.data.copy()


def use_fake_arrays(monkeypatch):
    """Let states of Core AI have fake arrays."""
    fake = SimpleNamespace(NDArray=FakeArray)
    monkeypatch.setattr(_state_manager, "import_coreai", lambda name: fake)
