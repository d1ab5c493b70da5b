"""Modules of FSDP2, tensor parallelism and DDP publish: two and four processes over gloo."""

import gloo_ranks
import pytest
import torch
from group_model import shared_folder
from sharded_models import model, sharded, trained
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mlstate
from mlstate.checkpoint import Layout
from mlstate.follow import Follower, Publisher

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]


def whole(module):
    """The whole tensors of a module, which may be sharded or in DDP."""
    return {
        name.removeprefix("module."): (
            value.full_tensor() if isinstance(value, DTensor) else value
        ).clone()
        for name, value in module.state_dict().items()
    }


def follow_steps(group, module, copy, steps=3):
    """Train, publish, follow with another module, and compare."""
    folder = shared_folder(group) / "weights"
    publisher, follower = Publisher(folder, group=group), Follower(folder, into=copy)
    for step in range(steps):
        publisher.publish(step, module)
        assert follower.advance() == step
        follower.verify()
        copied = whole(copy)
        for name, value in whole(module).items():
            assert copied[name].dtype == value.dtype
            assert torch.equal(copied[name], value), (step, name)
        group.barrier()
        trained(module, make=torch.optim.SGD, dtype=next(module.parameters()).dtype)
    if group.rank == 0:
        assert mlstate.verify(folder)
    group.barrier()


@gloo_ranks.run_on(2)
def test_fsdp2_is_followed_by_an_ordinary_module(group):
    follow_steps(group, sharded(model()), model(seed=9))


@gloo_ranks.run_on(2)
def test_fsdp2_in_bfloat16_is_followed(group):
    follow_steps(group, sharded(model(torch.bfloat16)), model(torch.bfloat16, seed=9))


@gloo_ranks.run_on(2)
def test_fsdp2_is_followed_by_fsdp2(group):
    follow_steps(group, sharded(model()), sharded(model(seed=5)))


@gloo_ranks.run_on(2)
def test_ddp_is_followed_by_a_module(group):
    module = DistributedDataParallel(model())
    follow_steps(group, module, model(seed=9))


@gloo_ranks.run_on(4)
def test_fsdp2_and_tensor_parallel_ranks_are_followed_by_other_ranks(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    module = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 6))
    torch.manual_seed(3)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    module = parallelize_module(
        module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    fully_shard(module, mesh=mesh["fsdp"])
    folder = shared_folder(group) / "weights"
    publisher = Publisher(folder, group=group)
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    layouts = [
        (Layout.axis(axis, parts), rank)
        for axis in (0, 1)
        for parts in (2, 3)
        for rank in range(parts)
    ]
    followers = []
    for layout, rank in layouts:
        state = {name: torch.zeros(shape) for name, shape in shapes.items()}
        into = {
            name: layout.shard(value, rank) if value.ndim == 2 else value
            for name, value in state.items()
        }
        followers.append((layout, rank, Follower(folder, into=into)))
    for step in range(3):
        publisher.publish(step, module)
        expected = whole(module)
        for layout, rank, follower in followers:
            assert follower.advance() == step
            follower.verify()
            for name, value in expected.items():
                if value.ndim == 2:
                    value = layout.take(value, rank)
                assert torch.equal(follower.state[name], value), (step, name, layout, rank)
        group.barrier()
        with torch.no_grad():
            for parameter in module.parameters():
                local = parameter.to_local()
                if local.numel():
                    local.view(-1)[step % local.numel()] += 1
