"""Folders of torch.distributed.checkpoint as torch's own tutorial writes and reads them."""

import numpy as np
import pytest
from test_torch_entries import assert_same_run, trained, write

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from any_format import read_any, write_any  # noqa: E402

import mlstate  # noqa: E402
from mlstate.cli import main  # noqa: E402
from mlstate.state import OptimizerStateDict, StateDict  # noqa: E402

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # torch warns that there is only one process
]


class AppState:
    """The wrapper of the tutorial: an object of torch's Stateful protocol."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


def test_the_tutorials_folder_converts_and_resumes(tmp_path):
    run = trained(0, 3)
    dcp.save({"app": AppState(*run)}, checkpoint_id=tmp_path / "a.dcp")
    assert main(["convert", str(tmp_path / "a.dcp"), str(tmp_path / "ckpt")]) == 0
    other = trained(1, 1)
    mlstate.load(tmp_path / "ckpt", into={"model": other[0], "optimizer": other[1]})
    assert_same_run(run, other)


def test_values_of_the_application_are_metadata(tmp_path):
    more = {"epoch": 3, "name": "x", "none": None, "flag": True}
    dcp.save({"app": AppState(*trained(0, 1)), **more}, checkpoint_id=tmp_path / "a.dcp")
    model, optimizer, metadata, *_ = read_any(tmp_path / "a.dcp")
    assert len(model) == 4 and len(optimizer) == 12 and metadata == more


def test_values_among_tensors_are_metadata(tmp_path):
    tree = {"w": torch.ones(2), "note": "text", "deep": {"none": None, "n": 2}}
    for form in ("pt", "dcp"):
        model, optimizer, metadata, *_ = read_any(write(form, tree, tmp_path / "a"))
        assert sorted(model) == ["w"] and optimizer is None
        assert metadata == {"note": "text", "deep.none": None, "deep.n": 2}


def test_two_applications_are_not_mixed(tmp_path):
    tree = {"a": {"model": {"w": torch.ones(1)}}, "b": {"model": {"w": torch.zeros(1)}}}
    dcp.save(tree, checkpoint_id=tmp_path / "a.dcp")
    model, *_ = read_any(tmp_path / "a.dcp")
    assert sorted(model) == ["a.model.w", "b.model.w"]


@pytest.mark.parametrize("form", ["pt", "dcp"])
@pytest.mark.parametrize("other", ["application", "entry of the same name"])
def test_several_models_with_optimizers_become_named_states(tmp_path, form, other):
    first, second = trained(0, 1), trained(1, 1)
    states = [dict(zip(("model", "optimizer"), get_state_dict(*run), strict=True))
              for run in (first, second)]  # fmt: skip
    tree = {"gen": states[0], "disc": states[1]}
    if other != "application":
        tree = {"gen": {**states[0], "disc": torch.zeros(2)}, "disc": torch.ones(3)}
    source = write(form, tree, tmp_path / "a")
    parts = read_any(source)
    assert parts.model is None and parts.optimizer is None
    assert main(["convert", str(source), str(tmp_path / "ckpt")]) == 0
    loaded = mlstate.load(tmp_path / "ckpt").states
    assert sorted(loaded) == ["disc", "gen"]
    for name, tensor in first[0].state_dict().items():
        assert np.array_equal(loaded["gen"]["model"][name], tensor)


def test_dcp_functions_read_the_converted_folder(tmp_path):
    run = trained(0, 3)
    mlstate.save(tmp_path / "ckpt", *run, metadata={"epoch": 3})
    assert main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "out.dcp")]) == 0
    other = trained(1, 1)
    model, optimizer = get_state_dict(*other)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=tmp_path / "out.dcp")
    set_state_dict(*other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_same_run(run, other)


def test_flat_files_warn_of_named_states(tmp_path):
    states = {"values": np.ones(2), "plain": {"a": [1]}}
    mlstate.save(tmp_path / "c", {"w": np.ones(2)}, states=states)
    parts = read_any(tmp_path / "c")
    with pytest.warns(UserWarning, match="named states are not converted: values;"):
        write_any(tmp_path / "a.safetensors", *parts[:4])
    assert read_any(tmp_path / "a.safetensors").metadata == {"plain": {"a": [1]}}
    write_any(tmp_path / "a.dcp", *parts[:4])  # without a warning


def as_lists(value):
    """The value, with lists in place of arrays."""
    if hasattr(value, "keys"):
        return {key: as_lists(value[key]) for key in value}
    return [*map(as_lists, value)] if isinstance(value, list) else np.asarray(value).tolist()


W, MOMENT = {"w": np.ones(2)}, {"w.m": np.ones(2)}


@pytest.mark.parametrize("suffix", [".dcp", ".pt"])
@pytest.mark.parametrize(
    ("model", "optimizer", "states"),
    [
        ({}, None, {}),
        ({}, MOMENT, {"app": {"model": W}}),
        (W, {}, {"ema": {}, "run": {"a": {}, "b": [np.ones(2)]}}),
        (None, MOMENT, {"state_dict": W}),
    ],
    ids=["empty model", "state with a model", "empty states", "state named as a model"],
)
def test_empty_parts_are_restored(tmp_path, suffix, model, optimizer, states):
    path = tmp_path / f"a{suffix}"
    model = model if model is None else StateDict(model)
    optimizer = optimizer if optimizer is None else OptimizerStateDict(optimizer)
    write_any(path, model, optimizer, {"epoch": 3}, states)
    parts = read_any(path)
    for part, expected in zip(parts[:4], (model, optimizer, {"epoch": 3}, states), strict=True):
        assert as_lists(part) == as_lists(expected)


@pytest.mark.parametrize("suffix", [".dcp", ".pt"])
@pytest.mark.parametrize("name", ["seen", ".seen", "seen.", "w..m"])
def test_optimizer_array_of_no_parameter_is_refused(tmp_path, suffix, name):
    match = rf"arrays that are not named .*: {name};"
    with pytest.raises(mlstate.CompatibilityError, match=match) as caught:
        write_any(tmp_path / f"a{suffix}", None, {"w.m": np.ones(2), name: np.ones(1)})
    assert caught.value.name == name and not list(tmp_path.iterdir())


def test_empty_dict_in_a_list_is_refused_before_the_folder_is_written(tmp_path):
    states = {"run": {"steps": [{"a": {}}, np.ones(2)]}}
    with pytest.raises(mlstate.CompatibilityError, match=r"run\.steps\.a is a list"):
        write_any(tmp_path / "a.dcp", StateDict({"w": np.ones(2)}), None, {}, states)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["[[0]", '["model", 3]', '[["model", "w", "x"]]', "5", "[" * 9999])
def test_malformed_record_of_empty_parts_is_refused(tmp_path, text):
    tree = {"model": {"w": torch.ones(2)}, "mlstate": {"version": "1", "empty": text}}
    dcp.save(tree, checkpoint_id=tmp_path / "a.dcp")
    with pytest.raises(mlstate.FormatError, match="'mlstate' does not describe the file"):
        read_any(tmp_path / "a.dcp")
