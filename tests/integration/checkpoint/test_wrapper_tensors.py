"""Tensors that torch's `__tensor_flatten__` divides into parts are stored as these."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is the peer to agree with")

from block_codes import Codes, codes  # noqa: E402

import mlstate  # noqa: E402
from mlstate import CompatibilityError  # noqa: E402
from mlstate.checkpoint._states.containers import equal_values  # noqa: E402

pytestmark = pytest.mark.torch


class Refusing(torch.optim.SGD):
    """Has its own load, which can fail."""

    fails = False

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.fails:
            raise RuntimeError("no")


def trained(seed, make=torch.optim.SGD, **states):
    torch.manual_seed(seed)
    module = torch.nn.Linear(8, 4)
    optimizer = make(module.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[module.weight].update(states)
    return module, optimizer


def load(path, target):
    mlstate.load(path, into={"model": target[0], "optimizer": target[1]})
    return target[1].state[target[0].weight]


@pytest.mark.parametrize("make", [torch.optim.SGD, Refusing])
def test_states_of_a_fresh_optimizer_are_made_of_their_parts(tmp_path, make):
    source = trained(0, make, flat=codes(1), nested=[codes(2)])
    mlstate.save(tmp_path, *source)
    manifest = json.loads((tmp_path / "manifest.json").read_bytes())
    assert manifest["format_version"] == 3
    with torch.serialization.safe_globals([Codes]):
        state = load(tmp_path, trained(1, make))
    assert equal_values(dict(state), dict(source[1].state[source[0].weight]))
    text = r"'weight\.\w+': .* a tensor of .*Codes, .*add_safe_globals\(\[class\]\)"
    with pytest.raises(CompatibilityError, match=text):
        load(tmp_path, trained(1, make))


def test_the_class_comes_from_the_target(tmp_path):
    source = trained(0, flat=codes(1))
    mlstate.save(tmp_path, *source)
    state = load(tmp_path, trained(1, flat=codes(3)))
    assert equal_values(state["flat"], codes(1))


def test_another_block_size_is_refused(tmp_path):
    mlstate.save(tmp_path, *trained(0, flat=codes(1)))
    target = trained(1, flat=codes(3, block=8))
    with pytest.raises(CompatibilityError, match=r"'weight.flat' is stored as .*block size"):
        load(tmp_path, target)
    assert equal_values(target[1].state[target[0].weight]["flat"], codes(3, block=8))


def test_a_failed_load_restores_the_parts(tmp_path):
    mlstate.save(tmp_path, *trained(0, Refusing, flat=codes(1)))
    target = trained(1, Refusing, flat=codes(3))
    target[1].fails = True
    with pytest.raises(CompatibilityError, match="no"):
        load(tmp_path, target)
    assert equal_values(target[1].state[target[0].weight]["flat"], codes(3))


def weights(seed):
    module = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    module[0].weight = torch.nn.Parameter(codes(seed), requires_grad=False)
    return module


def test_weights_are_filled_in_place(tmp_path):
    source, target = weights(1), weights(2)
    parts = target[0].weight.codes
    mlstate.save(tmp_path, source)
    mlstate.load(tmp_path, into={"model": target})
    assert target[0].weight.codes is parts and torch.equal(parts, codes(1).codes)
    assert torch.equal(target[1].weight, source[1].weight)
    with pytest.raises(CompatibilityError):
        mlstate.load(
            tmp_path, into={"model": torch.nn.Sequential(*map(torch.nn.Linear, (8, 4), (4, 2)))}
        )


def test_without_torch_tensors_the_parts_are_arrays(tmp_path):
    mlstate.save(tmp_path, states={"x": [codes(1)]})
    parts = mlstate.load(tmp_path).states["x"][0]
    assert np.array_equal(parts["codes"], codes(1).codes) and parts.keys() == {"codes", "scale"}
