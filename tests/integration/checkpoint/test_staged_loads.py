"""Loads through other memory, as into tensors on a device; here the tensors are on the host."""

import pytest

torch = pytest.importorskip("torch")

from device_training import Training, bits_of  # noqa: E402

import mlstate  # noqa: E402
from mlstate.checkpoint import _load_targets, export_huggingface  # noqa: E402
from mlstate.integrations.torch._checkpoint import load_targets  # noqa: E402
from mlstate.state import load_into  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def staged(monkeypatch):
    """Treat all tensors as tensors on a device."""
    for module in (_load_targets, load_targets):
        monkeypatch.setattr(module, "_is_on_device", lambda each: isinstance(each, torch.Tensor))


def trained(seed):
    training = Training(CPU, seed)
    training.run(0, 2)
    return training


def test_all_tensors_are_filled_in_place(tmp_path):
    source, target = trained(1), trained(2)
    mlstate.save(tmp_path / "c", source.model, source.optimizer, states=source.states())
    places = target.places()
    mlstate.load(tmp_path / "c", into=target.targets())
    assert target.bits() == source.bits() and target.places() == places


@pytest.mark.parametrize("way", ["names", "strict", "load_into", "mapping"])
def test_tensors_that_are_not_loaded_keep_their_bits(tmp_path, way):
    source, target = trained(1).model, trained(2).model
    expected = bits_of({**target.state_dict(), "up.weight": source.up.weight})
    part = {"up.weight": source.up.weight.detach()}
    mlstate.save(tmp_path / "all", source)
    mlstate.save(tmp_path / "part", part)
    if way == "names":
        mlstate.load(tmp_path / "all", names="up.weight", into={"model": target})
    elif way == "strict":
        mlstate.load(tmp_path / "part", strict=False, into={"model": target})
    elif way == "load_into":
        load_into(target, part, strict=False)
    else:
        into = {"model": target.state_dict()}
        mlstate.load(tmp_path / "all", names="up.weight", into=into)
    assert bits_of(dict(target.state_dict())) == expected


def test_a_mapping_is_filled_with_its_strides_and_ties(tmp_path):
    wide = torch.arange(12.0).reshape(3, 4)
    mlstate.save(tmp_path / "c", {"w": wide, "tied": wide, "half": wide.half()})
    zeros = torch.zeros(4, 3).t()
    into = {"w": zeros, "tied": zeros, "half": torch.zeros(3, 4)}
    mlstate.load(tmp_path / "c", into={"model": into}, cast=True)
    assert all(torch.equal(each, wide) for each in into.values()) and zeros.stride() == (1, 3)
    with pytest.raises(ValueError, match="'w'"):
        target = torch.zeros(3, 1).expand(3, 4)
        mlstate.load(tmp_path / "c", names="w", into={"model": {"w": target}})


def test_tied_weights_that_a_folder_has_under_one_name(tmp_path):
    source, target = trained(1).model, trained(2).model
    state = source.state_dict()
    del state["head.weight"]
    export_huggingface(tmp_path / "hf", state)
    mlstate.load(tmp_path / "hf", into={"model": target})
    assert bits_of(dict(target.state_dict())) == bits_of(dict(source.state_dict()))


def test_states_that_were_not_saved_become_zeros(tmp_path):
    source, target = trained(1), trained(2)
    states = mlstate.OptimizerStateDict.from_torch(source.optimizer, source.model)
    del states["up.weight.exp_avg"]
    mlstate.save(tmp_path / "c", source.model, states)
    into = {"model": target.model, "optimizer": target.optimizer}
    mlstate.load(tmp_path / "c", into=into, missing="zeros")
    own, expected = target.tensors(), source.tensors()
    assert not own.pop("up.weight.exp_avg").any() and expected.pop("up.weight.exp_avg").any()
    assert bits_of(own) == bits_of(expected)
