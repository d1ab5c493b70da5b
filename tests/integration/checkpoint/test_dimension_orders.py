"""The order of a tensor's dimensions in memory is stored in nested states and optimizers."""

import numpy as np
import pytest

import mlstate
from mlstate import OptimizerStateDict
from mlstate._common.arrays import dimension_order, with_order

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="torch is the peer to agree with")


def padded():
    return torch.arange(12.0).reshape(3, 4)[:, :3]


TENSORS = {
    "C": lambda: torch.randn(2, 3, 4),
    "transposed": lambda: torch.randn(6, 4).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one channel": lambda: torch.randn(8, 1, 3, 3).to(memory_format=torch.channels_last),
    "length 1": lambda: torch.randn(6, 1).t(),
    "bfloat16": lambda: torch.randn(3, 5).bfloat16().t(),
}
OTHERS = {
    "padded": padded,
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
}


def trained(seed=0):
    torch.manual_seed(seed)
    module = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(1, 4)).sum().backward()
    return module, optimizer


@pytest.mark.parametrize("make", {**TENSORS, **OTHERS}.values(), ids={**TENSORS, **OTHERS})
@pytest.mark.parametrize("present", [False, True])
def test_states_keep_the_order_of_dimensions(tmp_path, make, present):
    tensor = make()
    expected = tensor if make in TENSORS.values() else torch.zeros(tensor.shape)
    source, target = trained(), trained(1)
    source[1].state[source[0].weight].update(flat=tensor, nested=[tensor])
    if present:  # in C order
        other = torch.zeros(tensor.shape, dtype=tensor.dtype)
        target[1].state[target[0].weight].update(flat=other, nested=[other])
    mlstate.save(tmp_path, *source, states={"tree": {"a": [tensor]}})
    tree = {"a": [torch.zeros(()).expand(tensor.shape)]}
    into = {"model": target[0], "optimizer": target[1], "states": {"tree": tree}}
    mlstate.load(tmp_path, into=into)
    state = target[1].state[target[0].weight]
    loaded = (state["flat"], state["nested"][0], tree["a"][0])
    assert [each.stride() for each in loaded] == [expected.stride()] * 3
    assert all(torch.equal(each, tensor) for each in loaded)


def test_an_optimizer_in_c_order_replaces_another_order(tmp_path):
    source, target = trained(), trained(1)
    tensor = torch.randn(4, 3)
    source[1].state[source[0].weight]["q"] = tensor
    target[1].state[target[0].weight]["q"] = torch.zeros(3, 4).t()
    mlstate.save(tmp_path, *source)
    mlstate.load(tmp_path, into={"model": target[0], "optimizer": target[1]})
    assert target[1].state[target[0].weight]["q"].stride() == tensor.stride()


def test_weights_keep_the_order_of_the_target(tmp_path):
    source, target = torch.nn.Conv2d(3, 2, 3), torch.nn.Conv2d(3, 2, 3)
    target.to(memory_format=torch.channels_last)
    mlstate.save(tmp_path, source)
    mlstate.load(tmp_path, into={"model": target})
    assert torch.equal(source.weight, target.weight)
    assert target.weight.is_contiguous(memory_format=torch.channels_last)


def test_adam_over_channels_last_equals_torchs_round_trip(tmp_path):
    module = torch.nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    targets = [torch.nn.Conv2d(3, 2, 3) for _ in range(2)]
    optimizers = [torch.optim.Adam(each.parameters()) for each in targets]
    mlstate.save(tmp_path, module, optimizer)
    mlstate.load(tmp_path, into={"model": targets[0], "optimizer": optimizers[0]})
    optimizers[1].load_state_dict(optimizer.state_dict())
    first, second = (
        {name: each.state[p]["exp_avg"].stride() for name, p in target.named_parameters()}
        for each, target in zip(optimizers, targets, strict=True)
    )
    assert first == second


def test_loaded_optimizers_give_torch_the_order(tmp_path):
    source, target = trained(), trained(1)
    source[1].state[source[0].weight]["q"] = torch.randn(4, 3).t()
    mlstate.save(tmp_path, *source)
    loaded = mlstate.load(tmp_path).optimizer
    for state in (loaded, OptimizerStateDict.from_torch(source[1], source[0])):
        tensor = state.to_torch(target[1], target[0])["state"][0]["q"]
        assert tensor.stride() == (1, 3)
        assert torch.equal(tensor, source[1].state[source[0].weight]["q"])


@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (3, 1), (2, 1, 3), (2, 3, 4), (1, 1, 2)])
def test_orders_of_all_permutations_return(shape):
    import itertools

    for order in itertools.permutations(range(len(shape))):
        array = with_order(np.arange(np.prod(shape)).reshape(shape), list(order))
        for each in (array, torch.from_numpy(array.copy(order="K"))):
            again = with_order(each, dimension_order(each))
            assert np.array_equal(again, array)
        tensor = with_order(torch.zeros(shape), list(order))
        assert with_order(tensor, dimension_order(tensor)).stride() == tensor.stride()


class Extra(torch.nn.Module):
    """Has a tensor as its extra state."""

    def __init__(self, value=None):
        super().__init__()
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_extra_states_keep_the_order_of_dimensions(tmp_path, make):
    source, target = torch.nn.Sequential(Extra(make())), torch.nn.Sequential(Extra())
    mlstate.save(tmp_path, source)
    mlstate.load(tmp_path, into={"model": target})
    value = target[0].value
    assert value.stride() == source[0].value.stride() and torch.equal(value, source[0].value)
