"""The manager of models of several context sizes."""

import numpy as np
import pytest
from kv_model import assert_same_bits, cache, expand

from mlstate import CapacityError, CompatibilityError
from mlstate.kv import StateTransitionManager


@pytest.fixture
def manager():
    created = StateTransitionManager()
    for length in (512, 16, 8, 1024):  # in arbitrary order
        created.register_model(f"model_{length}", length)
    return created


def test_registered_models_are_listed():
    manager = StateTransitionManager()
    assert manager.models == {}
    manager.register_model("small", 256)
    manager.register_model(
        model_name="large", state_seq_length=512, num_layers=36, num_kv_heads=1, head_dim=64
    )
    assert manager.models == {
        "small": {
            "state_seq_length": 256, "num_layers": None, "num_kv_heads": None, "head_dim": None,
        },
        "large": {
            "state_seq_length": 512, "num_layers": 36, "num_kv_heads": 1, "head_dim": 64,
        },
    }  # fmt: skip
    manager.register_model("small", 128)
    assert manager.models["small"]["state_seq_length"] == 128
    assert StateTransitionManager().models == {}, "no model is shared between managers"


NUMBERS = ("state_seq_length", "num_layers", "num_kv_heads", "head_dim")


@pytest.mark.parametrize("value", [True, np.False_, 1.5, "4", np.ones(2, int)])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_model_with_a_wrong_number_is_not_registered(manager, name, value):
    before = dict(manager.models)
    with pytest.raises(TypeError, match=f"^{name} must be an integer"):
        manager.register_model("new", **{"state_seq_length": 4, name: value})
    with pytest.raises(CapacityError, match=f"^{name} must be at least 0"):
        manager.register_model("new", **{"state_seq_length": 4, name: -1})
    assert manager.models == before


@pytest.mark.parametrize("name", [None, 3, ["a"]])
def test_names_of_models_are_text(manager, name):
    with pytest.raises(TypeError, match="model_name must be a str"):
        manager.register_model(name, 4)
    with pytest.raises(ValueError, match="is not registered"):
        manager.get_transition_path(name, "model_8")


def test_transition(manager):
    source = cache()
    got = manager.transition(source, "model_8", "model_16", 5)
    assert_same_bits(got, expand(source, 16, 5))
    got = manager.transition(source, "model_8", "model_16", 5, 2.0)
    assert_same_bits(got, expand(source, 16, 5, 2.0))
    got = manager.transition(
        source_state=source, source_model="model_8", target_model="model_512",
        current_position=0, pad_value=-1,
    )  # fmt: skip
    assert_same_bits(got, expand(source, 512, 0, -1))
    assert manager.transition(source, "model_8", "model_8", 8) is source
    got = manager.transition(source, np.str_("model_8"), "model_16", np.uint8(5))
    assert_same_bits(got, expand(source, 16, 5))


def test_names_that_are_not_registered(manager):
    for names in (("model_9", "model_16"), ("model_8", "model_9")):
        with pytest.raises(ValueError, match="'model_9' is not registered; registered are: model"):
            manager.transition(cache(), *names, 5)
        with pytest.raises(ValueError, match="'model_9' is not registered"):
            manager.get_transition_path(*names)
    with pytest.raises(ValueError, match="none yet"):
        StateTransitionManager().get_transition_path("a", "b")


def test_states_that_are_not_the_models(manager):
    with pytest.raises(CompatibilityError, match=r"has 9 positions, but 'model_8' .*length 8"):
        manager.transition(cache(9), "model_8", "model_16", 5)
    with pytest.raises(CapacityError, match="target_seq_length 8 is smaller"):
        manager.transition(cache(16), "model_16", "model_8", 5)
    with pytest.raises(CompatibilityError, match="2 to 8 dimensions"):
        manager.transition(cache()[0, 0, 0], "model_8", "model_16", 5)
    for position in (-1, 9):
        with pytest.raises(CapacityError, match=f"current_position {position} is outside"):
            manager.transition(cache(), "model_8", "model_16", position)
    for position in (5.0, "5", None):
        with pytest.raises(TypeError, match="current_position must be an integer"):
            manager.transition(cache(), "model_8", "model_16", position)
    with pytest.raises(TypeError, match=r"source_state must be .* got list"):
        manager.transition([[[[1.0]]]], "model_8", "model_16", 5)


@pytest.mark.parametrize(
    ("field", "value"), [("num_layers", 2), ("num_kv_heads", 3), ("head_dim", 5)]
)
def test_registered_dimensions_are_checked(manager, field, value):
    manager.register_model("right", 16, **{field: value})
    manager.register_model("wrong", 16, **{field: value + 1})
    assert manager.transition(cache(), "model_8", "right", 5).shape == (2, 3, 16, 5)
    text = f"has {field} {value}, but 'wrong' was registered with {value + 1}"
    with pytest.raises(CompatibilityError, match=text):
        manager.transition(cache(), "model_8", "wrong", 5)
    with pytest.raises(CompatibilityError, match=text):
        manager.transition(cache(16), "wrong", "model_512", 5)
    assert manager.transition(cache(16), "right", "model_512", 5).shape == (2, 3, 512, 5)


def test_invalid_lengths_are_refused():
    manager = StateTransitionManager()
    with pytest.raises(CapacityError, match="must be at least 0, got -1"):
        manager.register_model("bad", -1)
    for length in (256.0, "256", None):
        with pytest.raises(TypeError, match="must be an integer"):
            manager.register_model("bad", length)
    assert manager.models == {}


def test_paths_lead_up(manager):
    assert manager.get_transition_path("model_8", "model_1024") == [
        "model_8", "model_16", "model_512", "model_1024",
    ]  # fmt: skip
    assert manager.get_transition_path("model_16", "model_512") == ["model_16", "model_512"]
    assert manager.get_transition_path("model_16", "model_16") == ["model_16"]
    with pytest.raises(CapacityError, match=r"'model_512' has 512 .* 'model_16' 16") as caught:
        manager.get_transition_path("model_512", "model_16")
    assert isinstance(caught.value, ValueError)


def test_paths_begin_and_end_where_asked(manager):
    """Other models with the length of an end are alternatives, and are not on the path."""
    manager.register_model("other_16", 16)
    path = manager.get_transition_path("model_16", "other_16")
    assert path[0] == "model_16" and path[-1] == "other_16"
    path = manager.get_transition_path("other_16", "model_16")
    assert path[0] == "other_16" and path[-1] == "model_16"
    path = manager.get_transition_path("other_16", "model_512")
    assert path[0] == "other_16" and path[-1] == "model_512"
