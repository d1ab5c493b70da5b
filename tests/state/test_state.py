"""The public module `mlstate.state`: one pass through its functions."""

import numpy as np
import pytest

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


@pytest.mark.parametrize(
    ("name", "rules", "expected"),
    [
        ("module.a", {"module": ""}, "a"),
        ("module.a", {"module.": ""}, "a"),
        ("a._orig_mod.b", {"*_orig_mod": ""}, "a.b"),
        ("module._orig_mod.b", {"module": "", "_orig_mod": ""}, "b"),
        ("a..b", {"a": "c"}, "c..b"),
    ],
)
def test_a_removed_prefix_takes_its_dot_along(name, rules, expected):
    assert list(state.rename({name: np.ones(1)}, rules)) == [expected]


@pytest.mark.parametrize(
    ("name", "rules", "text"),
    [
        ("enc.a", {"enc": "layers."}, r"'layers..a' of the name 'enc.a'.*mean \{'enc.': 'layers.'"),
        ("x.enc.a", {"*enc": "layers."}, r"mean \{'\*enc.': 'layers.'\}"),
        ("enc.a", {"": "."}, r"'.enc.a' of the name 'enc.a', with an empty part$"),
        ("a.bias", {"*bias": ""}, "'a.' of the name 'a.bias'"),
    ],
)
def test_a_rename_to_an_empty_part_is_refused(name, rules, text):
    with pytest.raises(ValueError, match=text):
        state.rename({name: np.ones(1)}, rules)


def test_a_path_names_the_functions_that_read_it(tmp_path):
    for call in (state.diff, state.load_into):
        with pytest.raises(TypeError, match=r"got 'a'.*mlstate.load .*mlstate.diff compares"):
            call({"w": np.ones(1)}, "a")
        with pytest.raises(TypeError, match=r"mlstate.diff compares"):
            call(tmp_path, {"w": np.ones(1)})
