"""The public module `mlstate.state`: one pass through its functions."""

import numpy as np

import mlstate
from mlstate import state


def test_wrapped_checkpoint_is_renamed_loaded_and_saved(tmp_path):
    rng = np.random.default_rng(0)
    saved = state.ModelStateDict(
        {f"module.layers.{i}.w": rng.standard_normal((8, 8), np.float32) for i in range(3)},
        model_type="example",
        layer_count=3,
    )
    model = state.ModelStateDict({f"layers.{i}.w": np.zeros((8, 8), np.float32) for i in range(3)})
    renames = state.check_compatibility(saved, model).renames
    state.load_into(model, state.rename(saved, renames))
    assert state.diff(model, state.rename(saved, renames)).identical
    mlstate.save_file(saved, tmp_path / "model.safetensors")
    back = mlstate.load_file(tmp_path / "model.safetensors")
    assert type(back) is state.ModelStateDict and back == saved
    assert (back.model_type, back.layer_count) == ("example", 3)
    assert back.get_layer_state("module.layers.1") == model.get_layer_state("layers.1")
