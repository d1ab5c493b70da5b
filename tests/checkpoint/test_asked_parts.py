"""A model or optimizer that `into=` asks for and a load cannot restore is an error in any case."""

import numpy as np
import pytest
from weight_folder import write_folder, write_weight_file

import mlstate
from mlstate import CompatibilityError
from mlstate.follow import Follower, Publisher

MODEL = {"a.w": np.arange(6.0), "a.b": np.ones(2)}
MOMENTS = {"a.w.m": np.arange(6.0)}


def own_folder(path, model, optimizer):
    mlstate.save(path, model, optimizer)


def weights_file(path, model, optimizer):
    write_weight_file(path.with_suffix(".safetensors"), model)


def weights_folder(path, model, optimizer):
    write_folder(path, model)


WRITERS = [own_folder, weights_file, weights_folder]


def refused(path, text, strict, **into):
    """Check that a load is refused, and changes no array."""
    before = {part: {n: a.copy() for n, a in arrays.items()} for part, arrays in into.items()}
    with pytest.raises(CompatibilityError, match=text) as caught:
        mlstate.load(path, into=into, strict=strict)
    assert caught.value.path in (str(path), str(path.parent))
    for part, arrays in into.items():
        assert all(np.array_equal(array, before[part][name]) for name, array in arrays.items())


def zeros(names):
    return {name: np.zeros_like(array) for name, array in names.items()}


@pytest.mark.parametrize("strict", [True, False])
def test_a_part_that_was_not_saved_is_an_error(tmp_path, strict):
    mlstate.save(tmp_path / "optimizer", None, MOMENTS)
    mlstate.save(tmp_path / "model", MODEL)
    model, moments = zeros(MODEL), zeros(MOMENTS)
    for name, text in (("optimizer", "holds no model"), ("model", "holds no optimizer")):
        refused(tmp_path / name, text, strict, model=model, optimizer=moments)
    refused(tmp_path / "optimizer", "holds no model", strict, model=model)
    refused(tmp_path / "model", "holds no optimizer", strict, optimizer=moments)


@pytest.mark.parametrize("write", WRITERS)
def test_a_model_without_a_name_in_common_is_an_error(tmp_path, write):
    path = tmp_path / "model"
    write(path, {name: array.astype(np.float32) for name, array in MODEL.items()}, None)
    path = next(tmp_path.iterdir())
    model = {"net.a.w": np.zeros(6, np.float32), "net.a.b": np.zeros(2, np.float32)}
    text = r"(?s)model: .* no name in common, and strict=False.*Missing.*Unexpected.*rename="
    refused(path, text, False, model=model)
    model["a.b"] = np.zeros(2, np.float32)
    assert mlstate.load(path, into={"model": model}, strict=False).model["a.b"].all()
    assert mlstate.load(path, into={"model": {}}, strict=False).model == {}
    loaded = mlstate.load(path, into={"model": model}, strict=False, rename={"a": "net.a"})
    assert loaded.model["net.a.w"].any()


def test_an_optimizer_or_state_without_a_name_in_common_is_an_error(tmp_path):
    mlstate.save(tmp_path, MODEL, MOMENTS, states={"ema": MODEL})
    model = zeros(MODEL)
    refused(tmp_path, "optimizer: ", False, model=model, optimizer={"w.m": np.zeros(6)})
    with pytest.raises(CompatibilityError, match=r"states\['ema'\]: .*no name in common"):
        states = {"ema": {"w": np.zeros(6)}}
        mlstate.load(tmp_path, into={"model": model, "states": states}, strict=False)
    assert not model["a.w"].any()
    # names= may choose tensors of one target alone
    into = {"model": model, "optimizer": {"a.w.m": np.zeros(6)}}
    mlstate.load(tmp_path, into=into, names="a.b", strict=False)
    assert model["a.b"].all() and not into["optimizer"]["a.w.m"].any()


def test_a_part_without_tensors_is_an_error_for_a_target_with_tensors(tmp_path):
    mlstate.save(tmp_path, {}, {})
    for strict in (True, False):
        refused(tmp_path, "a.w", strict, model=zeros(MODEL))
    assert mlstate.load(tmp_path, into={"model": {}, "optimizer": {}}).model == {}


def write_whole(path, arrays, torch):
    """Write a file that is read whole, by its suffix."""
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".pt":
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    else:
        mlstate.save_file(arrays, path)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("suffix", [".npz", ".pt", ""])
def test_a_part_that_a_file_lacks_is_an_error(tmp_path, torch, suffix, strict):
    path = tmp_path / f"model{suffix}"
    write_whole(path, MODEL, torch)
    refused(path, "holds no optimizer", strict, optimizer=zeros(MOMENTS))


@pytest.mark.parametrize("suffix", [".npz", ".pt", ""])
def test_a_file_without_a_name_in_common_is_an_error(tmp_path, torch, suffix):
    path = tmp_path / f"model{suffix}"
    write_whole(path, MODEL, torch)
    refused(path, "no name in common", False, model={"b": np.zeros(6)})


@pytest.mark.parametrize("suffix", [".npz", ".pt", ""])
def test_names_of_one_memory_need_equal_tensors_in_a_file(tmp_path, torch, suffix):
    path = tmp_path / f"model{suffix}"
    write_whole(path, {"a": np.arange(6.0), "b": np.arange(6.0) + 1}, torch)
    tied = np.zeros(6)
    refused(path, "model.'a'. and model.'b'. share memory", True, model={"a": tied, "b": tied})


def test_a_load_of_a_published_delta_names_the_ways_to_its_weights(tmp_path):
    weights, target = np.zeros(10_000), {"w": np.zeros(10_000)}
    publisher = Publisher(tmp_path / "p")
    for step in (3, 5, 6):
        weights[step] = step
        publisher.publish(step, {"w": weights})
    text = r"step 6 is a published delta.*Follower\(.*step=3$"
    for options in ({}, {"names": "w"}, {"step": 6}, {"into": {"model": target}}):
        with pytest.raises(CompatibilityError, match=text):
            mlstate.load(tmp_path / "p", **options)
    assert not target["w"].any()
    assert mlstate.load(tmp_path / "p", step=3).model["w"].sum() == 3
    Follower(tmp_path / "p", into=target).advance()
    assert target["w"].sum() == 14
    publisher.publish(7, {"w": weights + 1})  # an anchor, since all elements changed
    assert mlstate.load(tmp_path / "p").model["w"][0] == 1


def test_a_loaded_module_is_shown_by_its_class(tmp_path, torch):
    module = torch.nn.Linear(2, 2)
    mlstate.save(tmp_path, module)
    loaded = mlstate.load(tmp_path, into={"model": module})
    assert "model=<Linear>, " in repr(loaded)
    assert "<p>Linear</p>" in loaded._repr_html_()
