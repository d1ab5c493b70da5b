"""Loads through other memory, as into tensors on a device; here the tensors are on the host."""

import pytest

torch = pytest.importorskip("torch")

from device_training import Training, bits_of  # noqa: E402

import mlstate  # noqa: E402
from mlstate._common import staged_targets  # noqa: E402
from mlstate.checkpoint import export_huggingface  # noqa: E402
from mlstate.errors import MLStateError  # noqa: E402
from mlstate.integrations.torch import _tensors  # noqa: E402
from mlstate.state import load_into  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def staged(monkeypatch):
    """Treat all tensors as tensors on a device; the tensors that were staged are returned."""
    staged = []
    new_packed = staged_targets.new_packed

    def counted(target, shape):
        staged.append(target)
        return new_packed(target, shape)

    def detached(state):
        return {
            name: each.detach() if isinstance(each, torch.Tensor) else each
            for name, each in state.items()
        }

    monkeypatch.setattr(staged_targets, "is_on_device", lambda each: isinstance(each, torch.Tensor))
    monkeypatch.setattr(staged_targets, "new_packed", counted)
    monkeypatch.setattr(_tensors, "arrays_of", detached)
    yield staged
    assert staged


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


@pytest.mark.parametrize("other", [7, 8])
def test_views_of_one_memory_need_equal_stored_values(tmp_path, staged, other):
    mlstate.save(tmp_path / "c", {"a": torch.full((8,), 7), "b": torch.full((8,), other)})
    tensor = torch.zeros(8, dtype=torch.int64)
    views = {"b": tensor[:], "a": tensor[:]}
    if other == 7:
        mlstate.load(tmp_path / "c", into={"model": views})
        assert (tensor == 7).all() and len(staged) == 1
        return
    with pytest.raises(
        mlstate.CompatibilityError, match=r"model\['a'\] and model\['b'\] share memory, as tied"
    ):
        mlstate.load(tmp_path / "c", into={"model": views})
    assert not tensor.any()


@pytest.mark.parametrize("kind", ["mapping", "module", "two states"])
def test_targets_that_overlap_are_refused_and_stay_unchanged(tmp_path, kind):
    tensor = torch.zeros(15)
    views = {"a": tensor[:8], "b": tensor[7:]}
    values = {name: torch.ones(8) for name in views}
    mlstate.save(tmp_path / "c", values, states={"ema": values})
    into = {"model": views}
    if kind == "module":
        into = {"model": torch.nn.ParameterDict(views)}
    elif kind == "two states":
        views["b"] = torch.zeros(8)
        into["states"] = {"ema": {"a": torch.zeros(8), "b": tensor[1:9]}}
    with pytest.raises(ValueError, match=r"'[ab]'.*'b'.*share memory, but are not one tensor"):
        mlstate.load(tmp_path / "c", into=into)
    assert not tensor.any()


def test_interleaved_targets_are_filled(tmp_path):
    matrix = torch.zeros(4, 6)
    mlstate.save(tmp_path / "c", {"even": torch.ones(4, 3), "odd": torch.full((4, 3), 2.0)})
    mlstate.load(tmp_path / "c", into={"model": {"even": matrix[:, ::2], "odd": matrix[:, 1::2]}})
    assert (matrix[:, ::2] == 1).all() and (matrix[:, 1::2] == 2).all()


def test_a_target_whose_elements_share_memory_is_refused(tmp_path):
    mlstate.save(tmp_path / "c", {"w": torch.ones(3, 4)})
    target = torch.zeros(3, 1).expand(3, 4)
    with pytest.raises(ValueError, match=r"'w'.*elements that share memory"):
        mlstate.load(tmp_path / "c", into={"model": {"w": target}})
    assert not target.any()


def test_tensors_of_a_mapping_that_are_not_read_keep_their_versions(tmp_path):
    mlstate.save(tmp_path / "c", {"a": torch.ones(8), "b": torch.ones(8)})
    into = {"a": torch.zeros(8), "b": torch.zeros(8)}
    before = {name: tensor._version for name, tensor in into.items()}
    mlstate.load(tmp_path / "c", names="a", into={"model": into})
    assert into["a"]._version > before["a"] and into["b"]._version == before["b"]


class OwnLoad(torch.nn.Linear):
    """A layer that loads its entries itself."""

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)


@pytest.mark.parametrize("way", ["load", "verified load", "load_into"])
def test_a_failing_device_is_reported_with_the_tensor(tmp_path, monkeypatch, way):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), OwnLoad(4, 4))
    module[0].alias = torch.nn.Parameter(module[0].weight.data)
    before = module[2].weight.detach().clone()
    values = {name: torch.ones_like(each) for name, each in module.state_dict().items()}
    mlstate.save(tmp_path / "c", values)
    overwrite = staged_targets.overwrite

    def failing(target, source):
        if target.data_ptr() == module[1].weight.data_ptr():
            raise torch.OutOfMemoryError("no memory left")
        overwrite(target, source)

    monkeypatch.setattr(staged_targets, "overwrite", failing)
    out = (module[0].alias ** 2).sum()
    with pytest.raises(
        MLStateError, match=r"'1\.(weight|bias)'.*partly loaded.*no memory left"
    ) as caught:
        if way == "load_into":
            load_into(module, values)
        else:
            verify = "first" if way == "verified load" else True
            mlstate.load(tmp_path / "c", into={"model": module}, verify=verify)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert torch.equal(module[2].weight, before)  # its own load is undone
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


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
