"""Modules that load their own entries, on two ranks over gloo."""

import gloo_ranks
import pytest
import random_modules
import torch
from group_model import raises, shared_folder
from sharded_models import flat
from test_torch_random_modules import content, difference
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mlstate
from mlstate import CollectiveError, CompatibilityError
from mlstate.distributed import DistributedStateCollector
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]


class Row(torch.nn.Linear):
    """Stores its weight under another name."""

    def __init__(self):
        super().__init__(2, 5)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "rows"] = destination.pop(prefix + "weight")

    def _load_from_state_dict(self, state, prefix, *rest):
        state[prefix + "weight"] = state.pop(prefix + "rows")
        super()._load_from_state_dict(state, prefix, *rest)


def model(extra, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 2), random_modules.Extra(extra), Row())


def same(module, expected):
    state = expected.state_dict()
    for name, value in module.state_dict().items():
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        equal = torch.equal(full, state[name]) if hasattr(full, "shape") else full == state[name]
        assert equal, (name, full, state[name])


@gloo_ranks.run_on(2)
def test_fsdp2_checkpoint_loads_sharded_and_unsharded(group):
    folder = shared_folder(group)
    source = model({"scale": 2.0})
    mlstate.save(folder, fully_shard(model({"scale": 2.0})), group=group)
    target = fully_shard(model(None, seed=1))
    mlstate.load(folder, into={"model": target}, group=group)
    same(target, source)
    unsharded = model(None, seed=1)
    mlstate.load(folder, into={"model": unsharded})
    same(unsharded, source)


@gloo_ranks.run_on(2)
def test_fsdp1_modules_with_own_entries_are_refused(group):
    folder = shared_folder(group)
    mlstate.save(folder, model(torch.ones(2)), group=group)
    target = flat(model(torch.zeros(2), seed=1))
    into = {"model": target}
    raises(CompatibilityError, "'1' (Extra)", mlstate.load, folder, into=into, group=group)


@gloo_ranks.run_on(2)
def test_ddp_ranks_keep_separate_extra_states(group):
    folder = shared_folder(group)
    mlstate.save(folder, DistributedDataParallel(model({"rank": group.rank})), group=group)
    target = DistributedDataParallel(model(None, seed=1))
    mlstate.load(folder, into={"model": target}, group=group)
    same(target.module, model({"rank": group.rank}))
    alone = model(None)
    raises(CompatibilityError, "2 ranks", mlstate.load, folder, into={"model": alone})
    group.barrier()


@gloo_ranks.run_on(2)
def test_refusal_of_one_rank_leaves_all_ranks_unchanged(group):
    folder = shared_folder(group)
    mlstate.save(folder, model(3), group=group)
    target = model(5, seed=1)
    if group.rank == 1:
        target[1] = random_modules.Picky(4)
    before = content(target, calls=False)
    raises(CompatibilityError, "odd", mlstate.load, folder, into={"model": target}, group=group)
    assert difference(before, content(target, calls=False)) is None


@gloo_ranks.run_on(2)
def test_broadcast_modules_load_their_entries(group):
    module = model(torch.full((2,), float(group.rank)), seed=group.rank)
    DistributedStateCollector(group).broadcast_state(module)
    same(module, model(torch.zeros(2)))


@gloo_ranks.run_on(2)
def test_all_ranks_notice_a_parameter_that_one_replaced(group):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    units = {
        name: FSDPShardingUnit(name, tuple(p.shape), "float32", group.rank)
        for name, p in module.named_parameters()
    }
    with FSDPBackwardHook(FSDP(group)) as hook:
        hook.register_hooks(module, units, gradients="full")
        module(torch.ones(1, 2)).sum().backward()
        if group.rank == 1:
            module[0].load_state_dict(module[0].state_dict(), assign=True)
        loss = module(torch.ones(1, 2)).sum()
        raises(CollectiveError, "'0.weight' was replaced", loss.backward)
