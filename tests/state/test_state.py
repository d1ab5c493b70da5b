"""The public module `mlstate.state`: its names, and one pass through all of them."""

import numpy as np

import mlstate
from mlstate import state


def test_every_public_name_is_there_and_the_main_ones_are_at_the_top():
    assert all(hasattr(state, name) for name in state.__all__)
    assert sorted(state.__all__) == state.__all__
    top = ["StateDict", "ModelStateDict", "OptimizerStateDict", "OptimizerType", "Stateful"]
    assert all(getattr(mlstate, name) is getattr(state, name) for name in top)


def test_a_wrapped_checkpoint_is_checked_renamed_loaded_and_saved(tmp_path):
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
