"""Hooks of a module after an interrupted registration."""

import pytest
import torch
from interruption import signal_once

from mlstate.collectives import SingleGroup
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
from mlstate.integrations.torch._gradients import backward


@pytest.mark.parametrize("gradients", ["shard", "full"])
@pytest.mark.parametrize("step", ["_NodeHook", "get_gradient_edge", "_make_live"])
def test_a_module_trains_after_an_interrupted_registration(monkeypatch, gradients, step):
    model = torch.nn.Linear(2, 1)
    units = {
        name: FSDPShardingUnit(name, tuple(p.shape), "float32", 0)
        for name, p in model.named_parameters()
    }
    hook = FSDPBackwardHook(FSDP(SingleGroup()))
    owners = {"_NodeHook": backward, "get_gradient_edge": torch.autograd.graph}
    with monkeypatch.context() as patch:
        signal_once(patch, owners.get(step, backward.ModuleHooks), step)
        if gradients == "full" or step == "_make_live":
            with pytest.raises(KeyboardInterrupt):
                hook.register_hooks(model, units, gradients=gradients)
    model(torch.ones(3, 2)).sum().backward()  # without hooks
    assert model.bias.grad.item() == 3
    model.zero_grad()
    hook.register_hooks(model, units, gradients=gradients)
    model(torch.ones(3, 2)).sum().backward()
    part = model.bias.grad if gradients == "full" else units["bias"].local_gradient
    assert part.tolist() == [3]
    hook.close()
