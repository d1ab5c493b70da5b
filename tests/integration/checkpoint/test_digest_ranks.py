"""Sharded modules and optimizers have the digests of unsharded ones, on any layout."""

import gloo_ranks
import pytest
import torch
from group_model import raises, shared_folder
from sharded_models import flat, model, sharded, trained
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mlstate
from mlstate.testing import assert_same_bits

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]


def of_run(module, optimizer, group=None):
    return mlstate.digest({"model": module, "optimizer": optimizer}, group=group)


@gloo_ranks.run_on(2, 4)
def test_wrappers_do_not_change_the_digest(group):
    module = model()
    expected = of_run(module, trained(module))
    folder = shared_folder(group)
    for wrap in (sharded, flat):
        module = wrap(model())
        optimizer = trained(module)
        assert of_run(module, optimizer, group) == expected
        unsharded = model()
        states = [
            {"model": module, "optimizer": optimizer},
            {"model": unsharded, "optimizer": trained(unsharded)},
        ]
        assert_same_bits(*states, group=group)
        with torch.no_grad():
            unsharded[0].bias[4] += 1  # in the part of the second of two ranks, the third of four
        text = f"0.bias: rank {group.world_size // 2}: part "
        raises(AssertionError, text, assert_same_bits, *states, group=group)
        mlstate.save(folder / wrap.__name__, module, optimizer, group=group)
        assert mlstate.digest(folder / wrap.__name__, group=group) == expected


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)).bfloat16()


@gloo_ranks.run_on(4)
def test_fsdp_over_tensor_parallelism_does_not_change_the_digest(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = network()
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])
    assert mlstate.digest(module, group=group) == mlstate.digest(network())


@gloo_ranks.run_on(2)
def test_a_changed_replica_is_named(group):
    module = network()
    with torch.no_grad():
        module[1].bias[3] += group.rank
    text = "digest of '1.bias': the copies of ranks 0, 1 differ"
    raises(mlstate.CompatibilityError, text, mlstate.digest, module, group=group)


@gloo_ranks.run_on(2)
def test_partial_values_are_refused(group):
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": DTensor.from_local(torch.ones(2), mesh, [Partial()])}
    raises(TypeError, "redistribute() it first", mlstate.digest, state, group=group)


@gloo_ranks.run_on(2)
def test_an_export_proves_itself_against_the_sharded_model(group):
    folder = shared_folder(group)
    module = fully_shard(network())
    expected = mlstate.digest(module, group=group)
    mlstate.save(folder / "c", module, group=group)
    if group.rank == 0:
        mlstate.export_huggingface(folder / "hf", mlstate.load(folder / "c").model)
    group.barrier()
    assert mlstate.digest(folder / "hf", group=group) == expected
