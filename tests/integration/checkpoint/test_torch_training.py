"""Loading into torch modules and optimizers, in one process."""

import numpy as np
import pytest

import mlstate
from mlstate import CompatibilityError, OptimizerStateDict
from mlstate.checkpoint import Layout

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="its modules are what is filled")


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def step(module, optimizer, count=1):
    for _ in range(count):
        optimizer.zero_grad()
        module(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()


def trained(make, count=2, seed=0):
    module = model(seed)
    optimizer = make(module.parameters())
    step(module, optimizer, count)
    return module, optimizer


def same_states(first, second):
    a, b = first.state_dict(), second.state_dict()
    assert a["state"].keys() == b["state"].keys()
    for number, states in a["state"].items():
        assert states.keys() == b["state"][number].keys()
        for name, value in states.items():
            other = b["state"][number][name]
            assert type(value) is type(other)
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), name


def test_existing_states_are_filled_in_place(tmp_path):
    module, adam = trained(torch.optim.Adam)
    mlstate.save(tmp_path / "a", module, adam)
    fresh = model(1)
    other = torch.optim.Adam(fresh.parameters(), lr=0.5)
    step(fresh, other, 3)
    previous = {p: dict(states) for p, states in other.state.items()}
    mlstate.load(tmp_path / "a", into={"model": fresh, "optimizer": other})
    same_states(other, adam)
    assert other.param_groups[0]["lr"] == 1e-3
    for parameter, states in previous.items():
        for name, value in states.items():
            assert other.state[parameter][name] is value
    step(fresh, other)
    step(module, adam)
    same_states(other, adam)


def test_new_states_follow_the_parameters_dtype_and_strides(tmp_path):
    module = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    adam = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 3, 5, 5)).sum().backward()
    adam.step()
    mlstate.save(tmp_path / "a", module, adam)
    fresh = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    other = torch.optim.Adam(fresh.parameters())
    mlstate.load(tmp_path / "a", into={"model": fresh, "optimizer": other})
    state = other.state[fresh.weight]["exp_avg"]
    assert state.stride() == fresh.weight.stride()
    assert torch.equal(state, adam.state[module.weight]["exp_avg"])
    assert torch.equal(fresh.weight, module.weight)


def test_numbers_stay_numbers(tmp_path):
    module, asgd = trained(torch.optim.ASGD)
    for states in asgd.state.values():
        states["rate"] = float(states["eta"])
        states["count"] = 7
    mlstate.save(tmp_path / "a", module, asgd)
    fresh, other = trained(torch.optim.ASGD, 0, seed=1)
    mlstate.load(tmp_path / "a", into={"model": fresh, "optimizer": other})
    same_states(other, asgd)
    assert other.state[fresh[0].weight]["count"] == 7
    other.state[fresh[0].weight]["count"] = 1
    mlstate.load(tmp_path / "a", into={"model": fresh, "optimizer": other})
    assert other.state[fresh[0].weight]["count"] == 7
    asgd.state[module[0].weight]["eta"] = 0.5
    mlstate.save(tmp_path / "a", module, asgd)
    mlstate.load(tmp_path / "a", into={"model": fresh, "optimizer": other})
    assert isinstance(other.state[fresh[0].weight]["eta"], torch.Tensor)  # as torch converts it


def test_missing_states_are_dropped_zeroed_or_refused(tmp_path):
    module, adam = trained(torch.optim.Adam)
    del adam.state[module[0].bias]
    adam.state[module[2].bias]["count"] = 3
    mlstate.save(tmp_path / "a", module, adam)
    fresh, other = trained(torch.optim.Adam, 4)
    into = {"model": fresh, "optimizer": other}
    with pytest.raises(CompatibilityError, match=r'Missing key.*"0.bias.step"'):
        mlstate.load(tmp_path / "a", into=into, missing="error")
    assert other.state[fresh[0].bias]["step"] == 4
    mlstate.load(tmp_path / "a", into=into, missing="zeros")
    zeros = other.state[fresh[0].bias]
    assert zeros["step"] == 0 and not zeros["exp_avg"].any()
    assert other.state[fresh[2].bias]["count"] == 3
    mlstate.load(tmp_path / "a", into=into)
    same_states(other, adam)
    assert fresh[0].bias not in other.state


def test_missing_states_cover_trained_parameters(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    frozen = torch.nn.Linear(4, 2).requires_grad_(False)
    module.append(frozen)
    adam = torch.optim.Adam(p for p in module.parameters() if p.requires_grad)
    module(torch.randn(5, 3)).sum().backward()
    adam.step()
    mlstate.save(tmp_path / "a", module, adam)
    expected = sorted(mlstate.load(tmp_path / "a", missing="error").optimizer)
    assert sorted(mlstate.load(tmp_path / "a", missing="zeros").optimizer) == expected

    del adam.state[module[0].bias]
    mlstate.save(tmp_path / "a", module, adam)
    text = r'Missing key.*"0\.bias\.exp_avg", "0\.bias\.exp_avg_sq"\.'
    fresh = torch.optim.Adam(p for p in module.parameters() if p.requires_grad)
    for into in (None, {"model": module, "optimizer": fresh}):
        with pytest.raises(CompatibilityError, match=text):
            mlstate.load(tmp_path / "a", into=into, missing="error")
    assert not fresh.state
    mlstate.load(tmp_path / "a", into={"model": module})
    states = mlstate.load(tmp_path / "a", missing="zeros").optimizer
    assert not states["0.bias.exp_avg"].any() and "1.running_mean.exp_avg" not in states


def test_partial_load_handles_missing_states_like_a_full_load(tmp_path):
    module, adam = trained(torch.optim.Adam)
    del adam.state[module[0].bias], adam.state[module[2].bias]
    mlstate.save(tmp_path / "a", module, adam)
    fresh, other = trained(torch.optim.Adam, 4)
    into = {"model": fresh, "optimizer": other}
    with pytest.raises(CompatibilityError, match=r'Missing key.*"0.bias.step"'):
        mlstate.load(tmp_path / "a", into=into, names="0", missing="error")
    mlstate.load(tmp_path / "a", into=into, names="0", missing="zeros")
    assert other.state[fresh[0].bias]["step"] == 0
    mlstate.load(tmp_path / "a", into=into, names="0")
    assert fresh[0].bias not in other.state
    assert other.state[fresh[2].bias]["step"] == 4
    with pytest.raises(CompatibilityError, match=r'Unexpected key.*"0\.weight"'):
        mlstate.load(tmp_path / "a", into={"model": fresh[0]}, names="0")


def test_a_part_by_name_leaves_the_rest(tmp_path):
    module, adam = trained(torch.optim.Adam)
    mlstate.save(tmp_path / "a", module, adam)
    fresh, other = trained(torch.optim.Adam, 4)
    exp_avg = other.state[fresh[2].weight]["exp_avg"].clone()
    weight = fresh[2].weight.detach().clone()
    mlstate.load(tmp_path / "a", into={"model": fresh, "optimizer": other}, names="0")
    assert torch.equal(fresh[0].weight, module[0].weight)
    assert torch.equal(fresh[2].weight, weight)
    assert torch.equal(other.state[fresh[2].weight]["exp_avg"], exp_avg)
    assert other.state[fresh[0].weight]["step"] == 2
    assert other.state[fresh[2].weight]["step"] == 4


def test_mismatch_keeps_all_targets(tmp_path):
    module, adam = trained(torch.optim.Adam)
    state = OptimizerStateDict.from_torch(adam, module)
    wrong = dict(state) | {"2.bias.exp_avg": np.zeros(2, np.float64)}
    mlstate.save(tmp_path / "a", module.state_dict(), wrong)
    fresh, other = trained(torch.optim.Adam, 4)
    before = [p.detach().clone() for p in fresh.parameters()]
    with pytest.raises(CompatibilityError, match=r"float64.*float32") as caught:
        mlstate.load(tmp_path / "a", into={"model": fresh, "optimizer": other})
    assert caught.value.name == "2.bias.exp_avg"
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), before, strict=True))
    assert other.state[fresh[0].weight]["step"] == 4
    wrong = dict(state) | {"2.bias.exp_avg": np.zeros(3, np.float32)}
    mlstate.save(tmp_path / "a", module.state_dict(), wrong, overwrite=True)
    with pytest.raises(CompatibilityError, match=r"size mismatch for 2.bias.exp_avg"):
        mlstate.load(tmp_path / "a", into={"model": fresh, "optimizer": other})
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), before, strict=True))
    extra = {"w.exp_avg": np.zeros(3, np.float32)}
    mlstate.save(tmp_path / "a", module.state_dict(), extra, overwrite=True)
    with pytest.raises(CompatibilityError, match=r"Unexpected parameter\(s\): 'w'"):
        mlstate.load(tmp_path / "a", into={"model": fresh, "optimizer": other})


def test_arrays_and_optimizers_are_both_looked_at_before_either_is_filled(tmp_path):
    mlstate.save(tmp_path / "a", {"w": np.ones(3)}, {"w.m": np.ones(3)})
    arrays, states = {"w": np.zeros(3)}, {"w.m": np.zeros(4)}
    with pytest.raises(CompatibilityError, match="w"):
        mlstate.load(tmp_path / "a", into={"model": arrays, "optimizer": states})
    assert not arrays["w"].any()


def test_a_module_that_has_parts_by_hand_is_cut_by_layout(tmp_path):
    module, adam = trained(torch.optim.Adam)
    mlstate.save(tmp_path / "a", module, adam)
    part = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    other = torch.optim.Adam(part.parameters())
    into = {"model": part, "optimizer": other}
    mlstate.load(tmp_path / "a", into=into, layout="rows", rank=1, world_size=2)
    assert torch.equal(part[0].weight, module[0].weight[3:])
    assert torch.equal(
        other.state[part[0].weight]["exp_avg"], adam.state[module[0].weight]["exp_avg"][3:]
    )
    assert other.state[part[0].weight]["step"] == 2
    mlstate.save(tmp_path / "b", module, adam, layout=Layout.rows(4))
    mlstate.load(tmp_path / "b", into=into, rank=0, world_size=2)
    assert torch.equal(part[0].weight, module[0].weight[:3])


def test_schedules_go_into_metadata(tmp_path):
    module, sgd = trained(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 2)
    for _ in range(3):
        step(module, sgd)
        schedule.step()
    mlstate.save(tmp_path / "a", module, sgd, metadata={"schedule": schedule.state_dict()})
    fresh = model(1)
    other = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    again = torch.optim.lr_scheduler.StepLR(other, 2)
    loaded = mlstate.load(tmp_path / "a", into={"model": fresh, "optimizer": other})
    again.load_state_dict(loaded.metadata["schedule"])
    for _ in range(3):
        step(module, sgd)
        schedule.step()
        step(fresh, other)
        again.step()
        assert sgd.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    assert torch.equal(fresh[0].weight, module[0].weight)
