"""Exports of Hugging Face folders by two and four processes over gloo."""

import os
from pathlib import Path

import gloo_ranks
import numpy as np
import pytest
import torch
from group_model import raises, remove_folder, shared_folder
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mlstate
from mlstate import StateDict, _core
from mlstate.checkpoint import Layout, export_huggingface, inspect
from mlstate.checkpoint._huggingface import export as export_module

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]


def names_in(folder):
    return [path.name for path in folder.iterdir()]


class Tied(torch.nn.Module):
    """An embedding that is also the head, layers of two dtypes, and a buffer."""

    def __init__(self, rows=16):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(rows, 8)
        self.up = torch.nn.Linear(8, 2 * rows)
        self.down = torch.nn.Linear(2 * rows, 8, bias=False, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(8, rows, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(3.0))


def expected(model=None):
    state = (Tied() if model is None else model).state_dict()
    return {name: value for name, value in state.items() if name != "head.weight"}


def check(group, module, expected_state=None, files=3, **keywords):
    """Export, and compare the folder with the unsharded state on every rank."""
    folder = shared_folder(group)
    export_huggingface(folder / "out", module, group=group, max_shard_bytes=1200, **keywords)
    expected_state = expected() if expected_state is None else expected_state
    model = mlstate.load(folder / "out").model
    assert set(model) == set(expected_state), (set(model), set(expected_state))
    for name, value in expected_state.items():
        tensor = StateDict({name: model[name]}).to_torch()[name]
        assert tensor.dtype == value.dtype, (name, tensor.dtype)
        assert torch.equal(tensor, value), (name, tensor, value)
    assert mlstate.verify(folder / "out")
    assert len(inspect(folder / "out").files()) == files, inspect(folder / "out").files()
    assert names_in(folder) == ["out"]
    remove_folder(group, folder)


def shard_linears(model, mesh):
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


# ---- one dimension ----


@gloo_ranks.run_on(2, 4)
def test_fsdp2_is_exported(group):
    check(group, fully_shard(Tied()))


@gloo_ranks.run_on(2, 4)
def test_uneven_rows_of_fsdp2_are_exported(group):
    check(group, fully_shard(Tied(5)), expected(Tied(5)), files=1)


@gloo_ranks.run_on(2)
def test_fsdp1_is_exported(group):
    unsharded = Tied().float()  # FSDP1 takes one dtype
    expected_state = {name: value.clone() for name, value in expected(unsharded).items()}
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    check(group, FullyShardedDataParallel(unsharded, **options), expected_state)


@gloo_ranks.run_on(2)
def test_tensor_parallel_is_exported(group):
    mesh = init_device_mesh("cpu", (group.world_size,))
    model = shard_linears(Tied(), mesh)
    assert model.down.weight.placements == (Shard(1),)
    check(group, model)


@gloo_ranks.run_on(2)
def test_replicas_are_exported_once(group):
    check(group, DistributedDataParallel(Tied()))
    check(group, Tied())


@gloo_ranks.run_on(2)
def test_shards_of_a_state_dict_are_exported(group):
    arrays = {"a": np.arange(35.0).reshape(7, 5), "b": np.arange(24).reshape(2, 3, 4)}
    for layout in (Layout.rows(group.world_size), Layout.flat(group.world_size)):
        state = {name: layout.shard(array, group.rank) for name, array in arrays.items()}
        state["whole"] = np.ones(3)
        folder = shared_folder(group)
        export_huggingface(
            folder / "out", state, group=group, rename={"a": "first.a"}, max_shard_bytes=300
        )
        model = mlstate.load(folder / "out").model
        assert set(model) == {"first.a", "b", "whole"}
        np.testing.assert_array_equal(model["first.a"], arrays["a"])
        np.testing.assert_array_equal(model["b"], arrays["b"])
        remove_folder(group, folder)


@gloo_ranks.run_on(2)
def test_ranks_with_different_tensors_are_merged(group):
    state = {f"stage{group.rank}.w": np.full(3, group.rank), "both": np.ones(2)}
    folder = shared_folder(group)
    export_huggingface(folder / "out", state, group=group)
    model = mlstate.load(folder / "out").model
    assert set(model) == {"both", *(f"stage{r}.w" for r in range(group.world_size))}
    assert all((model[f"stage{r}.w"] == r).all() for r in range(group.world_size))
    remove_folder(group, folder)


# ---- failures ----


@gloo_ranks.run_on(2, 4)
def test_failure_of_any_rank_leaves_no_files(group):
    folder = shared_folder(group)
    module = fully_shard(Tied())
    write, finish = _core.parts_write, export_module._finish

    def fails(*args):
        raise mlstate.StoreError(28, "No space left on device")

    for rank in range(group.world_size):
        if rank == group.rank:
            export_module._core = type("Core", (), {**vars(_core), "parts_write": fails})
        raises(OSError, "No space", export_huggingface, folder / "out", module, group=group)
        export_module._core = _core
        group.barrier()
        assert names_in(folder) == []
    export_module._finish = fails
    raises(OSError, "No space", export_huggingface, folder / "out", module, group=group)
    export_module._finish = finish
    group.barrier()
    assert names_in(folder) == []
    assert _core.parts_write is write
    remove_folder(group, folder)


@gloo_ranks.run_on(2)
def test_wrong_arguments_of_one_rank_are_an_error_on_all(group):
    folder = shared_folder(group)
    state = {"a": np.ones(3)}

    def refused(error, text, state, **options):
        raises(error, text, export_huggingface, folder / "out", state, group=group, **options)

    last = group.world_size - 1
    size = 100 if group.rank == last else 200
    refused(ValueError, "do not export the same", state, max_shard_bytes=size)
    wrong = {"a": np.ones(4 if group.rank == last else 3)}
    refused(ValueError, "'a' is float64 (3,) on rank 0", wrong)
    bad = {"a": None} if group.rank == last else state
    refused((TypeError, mlstate.CollectiveError), "'a' must be", bad)
    part = Layout.rows(3).shard(np.ones((3, 2)), 0)  # the same on every rank
    words = "'a' is incomplete: the ranks hold 16 of its 48"
    refused((ValueError, mlstate.CollectiveError), words, {"a": part})
    layout = Layout.rows(2) if group.rank == last else Layout.axis(1, 2)
    part = layout.shard(np.ones((4, 4)), 0)
    refused(ValueError, "'a' is float64 (4, 4) cut by [(1, 2)] on rank 0", {"a": part})
    group.barrier()
    if group.rank == 0:
        (folder / "out").mkdir()
        (folder / "out" / "mine").touch()
    group.barrier()
    refused(mlstate.StoreError, "exists already", state)
    assert names_in(folder) == ["out"]
    remove_folder(group, folder)


# ---- memory ----


def peak_growth(call):
    """Growth of the process's peak memory in bytes during a call."""
    Path("/proc/self/clear_refs").write_text("5")

    def peak(field):
        [line] = [
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith(field)
        ]
        return int(line.split()[1]) << 10

    before = peak("VmRSS")
    call()
    return peak("VmHWM") - before


@gloo_ranks.run_on(2, 4)
def test_memory_does_not_grow_with_the_ranks(group):
    if not os.access("/proc/self/clear_refs", os.W_OK):
        return
    folder = shared_folder(group)
    mesh = init_device_mesh("cpu", (group.world_size,))
    tensors = {f"w{i}": torch.randn(4096, 1024) for i in range(4)}  # 64 MiB
    layers = torch.nn.ParameterDict({
        name: torch.nn.Parameter(distribute_tensor(value, mesh, [Shard(int(name[1]) % 2)]))
        for name, value in tensors.items()
    })  # fmt: skip
    del tensors
    export_huggingface(folder / "first", layers, group=group)
    grown = peak_growth(lambda: export_huggingface(folder / "out", layers, group=group))
    assert grown < 4 << 20, grown  # of 64 MiB; the same for any number of ranks
    remove_folder(group, folder)


# ---- two dimensions: four ranks ----


@gloo_ranks.run_on(4)
def test_fsdp2_over_tensor_parallel_is_exported(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = shard_linears(Tied(), mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    kinds = {type(placement).__name__ for placement in model.up.weight.placements}
    assert "_StridedShard" in kinds, kinds
    check(group, model)


@gloo_ranks.run_on(4)
def test_hsdp_is_exported_once(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Tied(), mesh=mesh)
    assert model.up.weight.placements == (Replicate(), Shard(0))
    check(group, model)
