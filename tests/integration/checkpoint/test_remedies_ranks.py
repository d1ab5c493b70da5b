"""Errors about sharded modules and tensors on ranks, and the remedies that they name."""

import gloo_ranks
import numpy as np
import pytest
import torch
import torch.distributed as dist
from group_model import raises, shared_folder
from sharded_models import flat
from test_torch_module_ranks import model as extra_model
from test_torch_module_ranks import same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import mlstate
from mlstate import CompatibilityError

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]
WHOLE = torch.arange(16.0).reshape(8, 2)


# ---- FSDP1: "use fully_shard" ----


@gloo_ranks.run_on(2)
def test_fully_shard_loads_modules_with_own_methods(group):
    folder = shared_folder(group)
    source = extra_model({"scale": 2.0})
    mlstate.save(folder, source, group=group)
    text = "use fully_shard (FSDP2), or load into the module before wrapping it"
    into = {"model": flat(extra_model(torch.zeros(2), seed=1))}
    raises(CompatibilityError, text, mlstate.load, folder, into=into, group=group)
    sharded = fully_shard(extra_model(None, seed=1))
    mlstate.load(folder, into={"model": sharded}, group=group)
    same(sharded, source)
    module = extra_model(None, seed=1)
    mlstate.load(folder, into={"model": module}, group=group)
    same(module, source)
    flat(module)


class OwnLoader(torch.optim.SGD):
    def load_state_dict(self, state):
        super().load_state_dict(state)


def trained(shard, seed):
    torch.manual_seed(seed)
    module = shard(torch.nn.Linear(2, 4))
    optimizer = OwnLoader(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    return module, optimizer


def buffers(optimizer):
    """The momentum of each parameter, with the parts of all ranks."""
    parameters = optimizer.param_groups[0]["params"]
    return [optimizer.state[each]["momentum_buffer"].full_tensor() for each in parameters]


@gloo_ranks.run_on(2)
def test_fully_shard_loads_optimizers_with_own_methods(group):
    folder = shared_folder(group)
    mlstate.save(folder, *trained(flat, 0), group=group)
    into = dict(zip(["model", "optimizer"], trained(flat, 1), strict=True))
    text = "cannot load states of FSDP1's flat parameters: use fully_shard (FSDP2)"
    raises(TypeError, text, mlstate.load, folder, into=into, group=group)
    module, target = trained(fully_shard, 1)
    expected = buffers(trained(fully_shard, 0)[1])
    assert not torch.equal(buffers(target)[0], expected[0])
    mlstate.load(folder, into={"model": module, "optimizer": target}, group=group)
    assert all(map(torch.equal, buffers(target), expected))


@gloo_ranks.run_on(2)
def test_fully_shard_loads_over_tensor_parallelism(group):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def parallel(seed):
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU())
        return parallelize_module(module, mesh["tp"], {"0": ColwiseParallel()})

    folder = shared_folder(group)
    source = fully_shard(parallel(0), mesh=mesh["dp"])
    mlstate.save(folder, source, group=group)
    text = "is cut by tensor parallelism under FSDP1: use fully_shard (FSDP2)"
    into = {"model": flat(parallel(1), device_mesh=mesh["dp"])}
    raises(TypeError, text, mlstate.load, folder, into=into, group=group)
    target = fully_shard(parallel(1), mesh=mesh["dp"])
    mlstate.load(folder, into={"model": target}, group=group)
    for pair in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(*(parameter.full_tensor() for parameter in pair))


# ---- DTensors: "redistribute()", "use a plain tensor" ----


def refused_then_stored(group, name, text, tensor, *remedied):
    """Check that a save refuses `tensor` with `text`, and stores each of `remedied` as `WHOLE`."""
    parent = shared_folder(group)
    states = {"x": [tensor]}
    raises(TypeError, text, mlstate.save, parent / name, states=states, group=group)
    for number, each in enumerate(remedied):
        folder = parent / f"{name} {number}"
        mlstate.save(folder, states={"x": [each]}, group=group)
        assert np.array_equal(mlstate.load(folder).states["x"][0], WHOLE)


def placed(local, mesh, *placements):
    """A DTensor of the shape of `WHOLE`; torch does not check the part of this rank."""
    shape = {"shape": WHOLE.shape, "stride": WHOLE.stride()}
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, **shape)


@gloo_ranks.run_on(2)
def test_redistributed_partial_sums_are_stored(group):
    tensor = placed(WHOLE / 2, init_device_mesh("cpu", (2,)), Partial())
    text = "only Shard and Replicate can be collected; redistribute() it first"
    remedied = (tensor.redistribute(placements=[each]) for each in (Replicate(), Shard(0)))
    refused_then_stored(group, "partial", text, tensor, *remedied)


@gloo_ranks.run_on(2)
def test_redistributed_strided_shards_are_stored(group):
    local = WHOLE.reshape(2, 2, 2, 2)[:, group.rank].reshape(4, 2)
    tensor = placed(local, init_device_mesh("cpu", (2,)), _StridedShard(0, split_factor=2))
    text = "strides of 2 cannot be described by a Layout; redistribute() it"
    remedied = (tensor.redistribute(placements=[each]) for each in (Replicate(), Shard(0)))
    refused_then_stored(group, "strided", text, tensor, *remedied)


@gloo_ranks.run_on(4)
def test_redistributed_orders_of_the_mesh_are_stored(group):
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    meta = TensorMeta(WHOLE.shape, WHOLE.stride(), WHOLE.dtype)
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    rows = (Shard(0), Shard(0))
    spec = DTensorSpec(mesh, rows, tensor_meta=meta, shard_order=order)
    first, second = mesh.get_coordinate()
    local = WHOLE.chunk(4)[second * 2 + first].contiguous()
    tensor = DTensor(local, spec, requires_grad=False)
    text = "in this order; redistribute() it to Replicate first, then to the order of the mesh"
    whole = tensor.redistribute(placements=[Replicate(), Replicate()])
    remedied = whole.redistribute(placements=rows)
    assert remedied.to_local().shape == (2, 2)
    refused_then_stored(group, "order", text, tensor, whole, remedied)


@gloo_ranks.run_on(2)
def test_parts_divided_by_torch_are_stored(group):
    local = WHOLE[:6] if group.rank == 0 else WHOLE[6:]
    mesh = init_device_mesh("cpu", (2,))
    tensor = placed(local, mesh, Shard(0))
    text = "join the parts, and divide the whole by distribute_tensor()"
    parts = [None, None]
    dist.all_gather_object(parts, tensor.to_local())
    remedied = distribute_tensor(torch.cat(parts), mesh, [Shard(0)])
    refused_then_stored(group, "uneven", text, tensor, remedied)


@gloo_ranks.run_on(2)
def test_full_tensors_in_groups_are_stored(group):
    folder = shared_folder(group)
    module, optimizer = trained(fully_shard, 0)
    tensor = distribute_tensor(WHOLE, init_device_mesh("cpu", (2,)), [Shard(0)])
    optimizer.param_groups[0]["scale"] = tensor
    text = "param_groups[0]['scale'] contains a DTensor: use a plain tensor, its full_tensor()"
    raises(TypeError, text, mlstate.save, folder, module, optimizer, group=group)
    optimizer.param_groups[0]["scale"] = tensor.full_tensor()
    mlstate.save(folder, module, optimizer, group=group)
    module, target = trained(fully_shard, 1)
    target.param_groups[0]["scale"] = torch.zeros(8, 2)
    mlstate.load(folder, into={"model": module, "optimizer": target}, group=group)
    assert torch.equal(target.param_groups[0]["scale"], WHOLE)
    assert all(map(torch.equal, buffers(target), buffers(optimizer)))
