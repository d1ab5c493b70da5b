"""Named states of sharded modules and optimizers: two processes over gloo."""

import gloo_ranks
import numpy as np
import pytest
import torch
from averaged_model import Ema
from block_codes import Codes, codes
from group_model import raises
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Placed

import mlstate
from mlstate import CompatibilityError
from mlstate.checkpoint._states.containers import equal_values

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]


def sharded(seed):
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))
    return fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


def trained(seed, group):
    module = sharded(seed)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 4) + group.rank).sum().backward()
    optimizer.step()
    return module, optimizer


def equal(a, b):
    return torch.equal(a.full_tensor(), b.full_tensor())


@gloo_ranks.run_on(2)
def test_sharded_models_optimizers_and_averages_are_states(group, tmp_path):
    model, optimizer = trained(0, group)
    critic, critic_opt = trained(1, group)
    ema = Ema(model)
    ema.count = 7
    rng = np.random.default_rng(group.rank)
    torch.manual_seed(group.rank)
    states = {
        "critic": critic,
        "critic_opt": critic_opt,
        "ema": ema,
        "rng": {"numpy": rng, "torch": torch.random},
    }
    mlstate.save(tmp_path / "c", model, optimizer, states=states, group=group)
    expected = rng.random(), torch.rand(3)

    other, other_opt = trained(2, group)
    critic2, critic2_opt = trained(3, group)
    ema2, rng2 = Ema(other), np.random.default_rng(9)
    torch.manual_seed(5)
    mlstate.load(
        tmp_path / "c",
        into={
            "model": other,
            "optimizer": other_opt,
            "states": {
                "critic": critic2,
                "critic_opt": critic2_opt,
                "ema": ema2,
                "rng": {"numpy": rng2, "torch": torch.random},
            },
        },
        group=group,
    )
    assert rng2.random() == expected[0] and torch.equal(torch.rand(3), expected[1])
    for a, b in ((model, other), (critic, critic2)):
        assert all(map(equal, a.parameters(), b.parameters()))
    for a, b in zip(critic.parameters(), critic2.parameters(), strict=True):
        assert equal(critic_opt.state[a]["exp_avg"], critic2_opt.state[b]["exp_avg"])
    assert ema2.count == 7
    assert all(map(equal, ema.shadow.values(), ema2.shadow.values()))
    shadow = mlstate.load(tmp_path / "c").states["ema"]["shadow"]
    full = {name: value.full_tensor().numpy() for name, value in ema.shadow.items()}
    assert all(np.array_equal(shadow[name], full[name]) for name in full)


@gloo_ranks.run_on(2)
def test_a_background_save_has_the_states_of_all_ranks(group, tmp_path):
    model, optimizer = trained(0, group)
    loader = {"rank": group.rank, "seen": np.arange(group.rank + 3)}
    handle = mlstate.checkpoint.save_async(
        tmp_path / "d", model, optimizer, states={"loader": loader, "ema": Ema(model)}, group=group
    )
    handle.staged()
    loader["rank"] = -1
    handle.wait()
    states = mlstate.load(tmp_path / "d", group=group).states
    assert states["loader"]["rank"] == group.rank
    assert len(states["loader"]["seen"]) == group.rank + 3
    assert states["ema"]["count"] == 0


def stage(number, seed):
    """A stage of a pipeline, whose optimizer only this rank has, and a parameter on all ranks."""
    torch.manual_seed(seed)
    names = {f"stage{number}": torch.nn.Linear(3, 2), "shared": torch.nn.Linear(2, 2)}
    return torch.nn.ModuleDict(names)


def two_groups(module, number, rate):
    shared = {"params": [*module["shared"].parameters()], "lr": rate}
    rank_group = {
        "params": [*module[f"stage{number}"].parameters()],
        "lr": rate + number,
        "odd": {number},
    }
    return torch.optim.SGD([shared, rank_group], momentum=0.9)


def step_all(module, optimizer):
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@gloo_ranks.run_on(2)
def test_groups_of_ranks_with_other_parameters_are_all_stored(group, tmp_path):
    number = group.rank
    module = stage(number, 0)
    optimizer = two_groups(module, number, 0.5)
    if number:
        optimizer.state[module["stage1"].bias]["nested"] = [None, "x"]
    step_all(module, optimizer)
    mlstate.save(tmp_path / "e", module, optimizer, group=group)
    saved = mlstate.load(tmp_path / "e").optimizer.param_groups
    assert sorted(name for each in saved for name in each["params"]) == [
        *("shared.bias", "shared.weight"),
        *("stage0.bias", "stage0.weight", "stage1.bias", "stage1.weight"),
    ]
    fresh = stage(number, 1)
    other = two_groups(fresh, number, 7.0)
    names = [f"stage{number}.*", "shared.*"]
    into = {"model": fresh, "optimizer": other}
    mlstate.load(tmp_path / "e", into=into, names=names, group=group)
    assert [each["lr"] for each in other.param_groups] == [0.5, 0.5 + number]
    assert other.param_groups[1]["odd"] == {number}
    state, original = other.state[fresh[f"stage{number}"].bias], optimizer.state
    assert torch.equal(
        state["momentum_buffer"], original[module[f"stage{number}"].bias]["momentum_buffer"]
    )
    assert state.get("nested") == ([None, "x"] if number else None)

    optimizer.param_groups[0]["lr"] = 0.25 + number
    raises(
        ValueError,
        "the group of 'shared.weight' has 'lr' = 0.25 on rank 0, and 1.25 on rank 1",
        mlstate.save,
        *(tmp_path / "f", module, optimizer),
        group=group,
    )


@gloo_ranks.run_on(2)
def test_zero_optimizer_is_stored_by_its_methods(group, tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    torch.manual_seed(0)
    module, fresh = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.1)
    step_all(module, optimizer)
    optimizer.consolidate_state_dict(to=0)
    error = TypeError if group.rank else mlstate.errors.CollectiveError
    text = "has not been consolidated"
    raises(error, text, mlstate.save, tmp_path / "g", module, optimizer, group=group)
    consolidated = optimizer.state_dict() if group.rank == 0 else None
    mlstate.save(tmp_path / "g", module, states={"zero": consolidated}, group=group)
    mlstate.load(tmp_path / "g", into={"model": fresh}, group=group)
    other = ZeroRedundancyOptimizer(fresh.parameters(), torch.optim.Adam, lr=0.5)
    state = mlstate.load(tmp_path / "g", rank=0, world_size=2, device="cpu").states["zero"]
    other.load_state_dict(state)
    step_all(module, optimizer)
    step_all(fresh, other)
    assert all(map(torch.equal, module.parameters(), fresh.parameters()))
    assert other.param_groups[0]["lr"] == 0.1


@gloo_ranks.run_on(2)
def test_sharded_parameters_keep_nested_states_and_values(group, tmp_path):
    model, optimizer = trained(0, group)
    weights = [p for p in model.parameters() if p.dim() == 2]
    optimizer.state[weights[1]]["history"] = [torch.ones(2), None, {"a": (1, 2)}]
    optimizer.state[weights[0]]["left"] = torch.full((7,), 2.0)
    optimizer.param_groups[0].update(rule={1: (2, 3)}, lr=torch.tensor(0.125))
    mlstate.save(tmp_path / "h", model, optimizer, group=group)
    other = sharded(3)
    split = [{"params": [p]} for p in reversed(list(other.parameters()))]
    other_opt = torch.optim.AdamW(split, lr=9.0)
    mlstate.load(tmp_path / "h", into={"model": other, "optimizer": other_opt}, group=group)
    for each in other_opt.param_groups:
        assert torch.equal(each["lr"], torch.tensor(0.125)) and each["rule"] == {1: (2, 3)}
    weights = [p for p in other.parameters() if p.dim() == 2]
    first, _, last = other_opt.state[weights[1]]["history"]
    assert torch.equal(first, torch.ones(2)) and last == {"a": (1, 2)}
    left = other_opt.state[weights[0]]["left"]
    assert torch.equal(left.full_tensor(), torch.full((7,), 2.0))


class Average:
    """An object with a sharded tensor."""

    def __init__(self, tensor):
        self.tensor = tensor

    def state_dict(self):
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.tensor = state["tensor"]


def with_codes(seed, group):
    """A trained optimizer whose first parameter has codes of the rows of this rank."""
    module = fully_shard(torch.nn.Linear(8, 8), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(2, 8) + group.rank).sum().backward()
    optimizer.step()
    weight = module.weight
    division = weight.device_mesh, weight.placements
    optimizer.state[weight]["codes"] = DTensor.from_local(
        codes(seed + group.rank), *division, run_check=False, shape=weight.shape, stride=(8, 1)
    )
    return module, optimizer


@gloo_ranks.run_on(2)
def test_block_scaled_states_are_loaded_by_as_many_ranks(group, tmp_path):
    module, optimizer = with_codes(0, group)
    mlstate.save(tmp_path / "codes", module, optimizer, group=group)
    fresh = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    trained_too = with_codes(5, group)
    for target in ((module, fresh), trained_too):
        into = dict(zip(["model", "optimizer"], target, strict=True))
        with torch.serialization.safe_globals([Codes]):
            mlstate.load(tmp_path / "codes", into=into, group=group)
        pairs = zip(module.parameters(), target[0].parameters(), strict=True)
        for source, parameter in pairs:
            expected, state = optimizer.state[source], target[1].state[parameter]
            buffers = expected["momentum_buffer"], state["momentum_buffer"]
            assert buffers[1].placements == parameter.placements and equal(*buffers)
        codes_of = target[1].state[target[0].weight]["codes"]
        assert codes_of.placements == module.weight.placements
        assert equal_values(codes_of._local_tensor, codes(group.rank))
    text = "is spread over 2 ranks, and 1 takes part: pass group="
    alone, states = tmp_path / f"alone {group.rank}", {"optimizer": optimizer}
    raises(ValueError, text, mlstate.save, alone, states=states)
    states = {"codes": [optimizer.state[module.weight]["codes"]]}
    raises(ValueError, f"states['codes'][0] {text}", mlstate.save, alone, states=states)
    module = torch.nn.Linear(8, 8)
    into = {"model": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1)}
    text = "differs between the 2 ranks that saved it"
    raises(CompatibilityError, text, mlstate.load, tmp_path / "codes", into=into)
    narrow = fully_shard(torch.nn.Linear(8, 6), mesh=init_device_mesh("cpu", (2,)))
    into = {"optimizer": torch.optim.SGD(narrow.parameters(), lr=0.1)}
    text = "is a part of shape (4, 8), and this rank's part of the parameter has shape (3, 8)"
    with torch.serialization.safe_globals([Codes]):
        raises(CompatibilityError, text, mlstate.load, tmp_path / "codes", into=into, group=group)


@gloo_ranks.run_on(2)
def test_dicts_of_sharded_tensors_are_saved_by_all_ranks_or_refused(group, tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    module = fully_shard(torch.nn.Linear(5, 7), mesh=mesh)
    module(torch.ones(2, 5)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    moments = {f"{name}.m": gradient for name, gradient in gradients.items()}
    states = {"flat": gradients, "nested": {"by name": [gradients]}}
    whole = {name: gradient.full_tensor() for name, gradient in gradients.items()}
    mlstate.save(tmp_path / "ranks", gradients, moments, states=states, group=group)
    loaded = mlstate.load(tmp_path / "ranks")
    for name, expected in whole.items():
        nested = loaded.states["nested"]["by name"][0][name]
        values = loaded.model[name], loaded.optimizer[f"{name}.m"], loaded.states["flat"][name]
        assert all(np.array_equal(value, expected) for value in (*values, nested))
    alone, text = tmp_path / f"alone {group.rank}", "is spread over 2 ranks, and 1 takes part"
    raises(ValueError, text, mlstate.save, alone, gradients)
    raises(ValueError, text, mlstate.save, alone, {"w": np.ones(1)}, moments)
    for name in states:
        raises(ValueError, text, mlstate.save, alone, states={name: states[name]})
    assert not alone.exists()


@gloo_ranks.run_on(2)
def test_sharded_tensors_in_containers_keep_their_layouts(group, tmp_path):
    mesh = init_device_mesh("cpu", (2,))

    def tensor(start, placement=None, shape=(4, 2)):
        values = torch.arange(start, start + 8.0).reshape(shape)
        return distribute_tensor(values, mesh, [placement or Placed(0)])

    def state(start, **keywords):
        items = [(1, tensor(start, **keywords)), ("1", tensor(start + 100, Replicate()))]
        items.append(("average", Average(tensor(start + 200, Placed(1)))))
        return dict(items[:: 1 if group.rank else -1])

    mlstate.save(tmp_path / "i", states={"x": state(0), "n": [group.rank]}, group=group)
    target = state(50)
    mlstate.load(tmp_path / "i", into={"states": {"x": target}}, group=group)
    expected = state(0)
    for key in (1, "1"):
        assert equal(target[key], expected[key])
        assert target[key].placements == expected[key].placements
    assert equal(target["average"].tensor, expected["average"].tensor)
    undivided = {
        1: torch.arange(8.0).reshape(4, 2),
        "1": torch.zeros(4, 2),
        "average": Average(None),
    }
    undivided["average"].tensor = undivided[1] + 200
    mlstate.save(tmp_path / "j", states={"x": undivided, "n": [group.rank]}, group=group)
    target = state(50)
    mlstate.load(tmp_path / "j", into={"states": {"x": target}}, group=group)
    assert equal(target[1], expected[1])
    assert equal(target["average"].tensor, expected["average"].tensor)
    raises(
        CompatibilityError,
        "'x/1': ",
        *(mlstate.load, tmp_path / "i"),
        into={"states": {"x": state(50, shape=(2, 4))}},
        group=group,
    )
