"""The ranks of test_torch_states.py."""

import sys
from pathlib import Path

import numpy as np
import torch
from averaged_model import Ema
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_processes import main, scenario

import mlstate

FOLDER = Path(sys.argv[1]).parent


def path(name):
    return FOLDER / name


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


@scenario
def sharded_models_optimizers_and_averages_are_states(group):
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
    mlstate.save(path("c"), model, optimizer, states=states, group=group)
    expected = rng.random(), torch.rand(3)

    other, other_opt = trained(2, group)
    critic2, critic2_opt = trained(3, group)
    ema2, rng2 = Ema(other), np.random.default_rng(9)
    torch.manual_seed(5)
    mlstate.load(
        path("c"),
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
    whole = mlstate.load(path("c")).states["ema"]["shadow"]
    full = {name: value.full_tensor().numpy() for name, value in ema.shadow.items()}
    assert all(np.array_equal(whole[name], full[name]) for name in full)


@scenario
def a_background_save_has_the_states_of_all_ranks(group):
    model, optimizer = trained(0, group)
    loader = {"rank": group.rank, "seen": np.arange(group.rank + 3)}
    handle = mlstate.checkpoint.save_async(
        path("d"), model, optimizer, states={"loader": loader, "ema": Ema(model)}, group=group
    )
    handle.staged()
    loader["rank"] = -1
    handle.wait()
    found = mlstate.load(path("d"), group=group).states
    assert found["loader"]["rank"] == group.rank
    assert len(found["loader"]["seen"]) == group.rank + 3
    assert found["ema"]["count"] == 0


if __name__ == "__main__":
    main()
