"""Plans on models sharded by FSDP2 or replicated by DDP: two processes over gloo."""

import random

import gloo_ranks
import pytest
import torch
from planned_models import (
    assert_same_bits,
    chain_of,
    loss_of,
    perceptron,
    random_steps,
    segments,
    transformer,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mlstate.activation import Plan
from mlstate.fsdp import FSDP, FSDPBackwardHook, sharding_units

pytestmark = [pytest.mark.torch, pytest.mark.timeout(250)]

BLOCKS = 4


def plans():
    """Plans that keep every block or every second one, and a plan that no planner would make."""
    yield segments(BLOCKS, 1)
    yield segments(BLOCKS, 2)
    for seed in range(3):
        yield random_steps(BLOCKS, random.Random(seed))


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train(model, x, rank, call=None, passes=2):
    torch.manual_seed(10 + rank)
    gradients = []
    for _ in range(passes):
        out = (call or model)(x + rank)
        loss_of(out).backward()
        gradients.append(out.detach())
    gradients += [local(parameter.grad).clone() for parameter in model.parameters()]
    gradients += [buffer.clone() for buffer in model.buffers()]
    return gradients


def compare(make, group, **options):
    model, x = make()
    expected = train(model, x, group.rank)
    for steps in plans():
        model, x = make()
        seen = []
        plan = Plan(chain_of(BLOCKS), steps)
        with plan.apply(model, observe=lambda *step, seen=seen: seen.append(step), **options):
            assert_same_bits(expected, train(model, x, group.rank))
        assert seen == [*steps, *steps]


@gloo_ranks.run_on(2)
def test_sharded_by_fsdp2(group):
    for after in (True, False):

        def make(after=after):
            model, x = transformer(BLOCKS, width=16)
            mesh = init_device_mesh("cpu", (group.world_size,))
            for block in model:
                fully_shard(block, mesh=mesh, reshard_after_forward=after)
            return fully_shard(model, mesh=mesh), x

        compare(make, group)


@gloo_ranks.run_on(2)
def test_sharded_by_fsdp2_with_inner_modules(group):
    def make():
        model, x = transformer(BLOCKS, width=16)
        mesh = init_device_mesh("cpu", (group.world_size,))
        for block in model:
            fully_shard(block.up, mesh=mesh)
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh), x

    compare(make, group)


@gloo_ranks.run_on(2)
def test_replicated_by_ddp(group):
    def make():
        model, x = perceptron(BLOCKS)
        return DistributedDataParallel(model, broadcast_buffers=False), x

    compare(make, group, blocks="module.*")


@gloo_ranks.run_on(2)
def test_gradients_reduced_by_hooks_of_mlstate(group):
    def run(steps):
        model, x = perceptron(BLOCKS)
        hook = FSDPBackwardHook(FSDP(group))
        units = sharding_units(model, group)
        hook.register_hooks(model, units)
        if steps is not None:
            Plan(chain_of(BLOCKS), steps).apply(model)
        torch.manual_seed(group.rank)
        loss_of(model(x + group.rank)).backward()
        gradients = [torch.as_tensor(unit.local_gradient).clone() for unit in units.values()]
        hook.close()
        return gradients

    expected = run(None)
    for steps in plans():
        assert_same_bits(expected, run(steps))
