"""Functions that take a mapping of arrays take a torch module too."""

import numpy as np
import pytest

import mlstate
from mlstate.errors import CompatibilityError
from mlstate.state import check_compatibility

torch = pytest.importorskip("torch")


class Counting(torch.nn.Linear):
    """A layer with an extra state."""

    seen = None

    def get_extra_state(self):
        return {"n": 3}

    def set_extra_state(self, state):
        self.seen = state


def pair():
    return torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)


def test_load_fills_a_module(tmp_path):
    a, b = pair()
    mlstate.save(tmp_path / "run", a)
    assert mlstate.load(tmp_path / "run", into=b).model is b
    assert mlstate.diff(a, b).identical
    with pytest.raises(CompatibilityError, match="weight"):
        mlstate.load(tmp_path / "run", into=torch.nn.Linear(4, 2))


def test_reading_functions_take_a_module(tmp_path):
    a, b = pair()
    state = dict(a.state_dict())
    assert not mlstate.diff(a, b).identical and mlstate.diff(a, state).identical
    assert mlstate.StateDict(a) == mlstate.StateDict(state)
    assert mlstate.ModelStateDict(a, model_type="x") == mlstate.ModelStateDict(
        state, model_type="x"
    )
    assert list(mlstate.rename(a, {"": "m."})) == ["m.weight", "m.bias"]
    assert check_compatibility(a, b).is_loadable()
    mlstate.save_file(a, tmp_path / "w.safetensors")
    assert mlstate.diff(mlstate.load_file(tmp_path / "w.safetensors"), a).identical


def test_load_into_fills_and_reads_a_module():
    a, b = pair()
    mlstate.load_into(a, b)
    assert mlstate.diff(a, b).identical
    arrays = {name: np.zeros(value.shape, np.float32) for name, value in b.state_dict().items()}
    mlstate.load_into(arrays, b)
    assert mlstate.diff(arrays, b).identical
    doubled = {name: value.double() * 2 for name, value in b.state_dict().items()}
    with pytest.raises(CompatibilityError, match="dtype mismatch for weight"):
        mlstate.load_into(a, doubled)
    assert mlstate.diff(a, b).identical
    mlstate.load_into(a, doubled, cast=True)
    assert torch.equal(a.weight, b.weight * 2)


def test_load_into_calls_the_own_methods_of_submodules():
    a, b = (torch.nn.Sequential(torch.nn.Linear(2, 2), Counting(2, 2)) for _ in range(2))
    mlstate.load_into(a, b)
    assert a[1].seen == {"n": 3}
    assert all(map(torch.equal, a.parameters(), b.parameters()))
    wrong = {name: value for name, value in b.state_dict().items() if name != "_extra_state"}
    wrong["1.weight"] = wrong["1.weight"].double()
    before = mlstate.StateDict({name: p.detach().clone() for name, p in a.named_parameters()})
    with pytest.raises(CompatibilityError, match=r"dtype mismatch for 1\.weight"):
        mlstate.load_into(a, wrong)
    assert before == dict(a.named_parameters())


def test_entries_that_are_no_tensors_are_named(tmp_path):
    module = torch.nn.Sequential(Counting(2, 2))
    for call in (
        lambda: mlstate.StateDict(module),
        lambda: mlstate.save_file(module, tmp_path / "w.safetensors"),
    ):
        with pytest.raises(TypeError, match=r"0\._extra_state"):
            call()
