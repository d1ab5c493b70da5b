"""from_pretrained of exports from four meshes, by two and four processes over gloo."""

import gloo_ranks
import pytest
import torch
from group_model import remove_folder, shared_folder
from needs import needs
from small_models import small_models
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mlstate
from mlstate.checkpoint import export_huggingface

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(300), needs("transformers")]

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj",
           "mlp.up_proj")  # fmt: skip
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def model():
    torch.manual_seed(11)
    return small_models()["llama-tied"]()


def tensor_parallel(module, mesh):
    plan = dict.fromkeys(COLUMNS, ColwiseParallel()) | dict.fromkeys(ROWS, RowwiseParallel())
    for layer in module.model.layers:
        parallelize_module(layer, mesh, plan)
    return module


def shard(module, mesh=None):
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def check(group, module):
    """Export; rank 0 loads it with from_pretrained, all ranks load their own parts of it."""
    folder = shared_folder(group)
    source = model()
    if group.rank == 0:
        source.config.save_pretrained(folder / "source")
    export_huggingface(
        folder / "out", module, group=group, files_from=folder / "source", max_shard_bytes=20_000
    )
    loaded = type(source).from_pretrained(folder / "out").state_dict()
    assert loaded.keys() == source.state_dict().keys()
    for name, value in source.state_dict().items():
        assert torch.equal(loaded[name], value), name
    before = {name: value.to_local().clone() if hasattr(value, "to_local") else value.clone()
              for name, value in module.state_dict().items()}  # fmt: skip
    with torch.no_grad():
        for value in module.parameters():
            value.fill_(-1)
    mlstate.load(folder / "out", into={"model": module}, group=group)
    for name, value in module.state_dict().items():
        local = value.to_local() if hasattr(value, "to_local") else value
        assert torch.equal(local, before[name]), name
    remove_folder(group, folder)


@gloo_ranks.run_on(2)
def test_fsdp2_loads_with_from_pretrained(group):
    check(group, shard(model()))


@gloo_ranks.run_on(2)
def test_tensor_parallel_loads_with_from_pretrained(group):
    check(group, tensor_parallel(model(), init_device_mesh("cpu", (group.world_size,))))


@gloo_ranks.run_on(4)
def test_fsdp2_over_tensor_parallel_loads_with_from_pretrained(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    check(group, shard(tensor_parallel(model(), mesh["tp"]), mesh["dp"]))


@gloo_ranks.run_on(4)
def test_hsdp_loads_with_from_pretrained(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check(group, shard(model(), mesh))
