"""Folders of torch_checkpointing, by one or several ranks, are read; none of their code runs."""

import functools
import importlib.util
import itertools
import zipfile

import gloo_ranks
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="it writes the files")
import torch.distributed as dist  # noqa: E402
from any_format import read_any, write_any  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor._dtensor_spec import (  # noqa: E402
    DTensorSpec,
    ShardOrderEntry,
    TensorMeta,
)
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import mlstate  # noqa: E402
from mlstate.cli import main  # noqa: E402
from mlstate.collectives import SingleGroup  # noqa: E402
from mlstate.errors import CompatibilityError, FormatError  # noqa: E402
from mlstate.integrations.torch._checkpoint.dtensor_shards import part_of  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("torch_checkpointing") is None,
    reason="torch_checkpointing is not installed",
)


def save_by_library(group, folder):
    """Save a model of DTensors whose rows or columns do not divide evenly, as one of its ranks."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    states = {"model": state, "optimizer": optimizer.state_dict(), "step": 3}
    states["rng"] = torch.ones(2) * group.rank
    if group.rank == 0:
        torch.save(states, f"{folder}.pt")
    if group.world_size > 1:
        mesh = init_device_mesh("cpu", (group.world_size,))
        cuts = {"0.weight": Shard(0), "0.bias": Shard(0), "1.weight": Shard(1)}
        for name, tensor in state.items():
            state[name] = distribute_tensor(tensor, mesh, [cuts.get(name, Replicate())])
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    config = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage)
    manager = CheckpointManager(config)
    manager.save(str(folder), states)
    manager.close()


@needs_library
@pytest.mark.parametrize("world", [1, 2])
def test_a_folder_of_the_library_is_read(tmp_path, world):
    folder = tmp_path / "c"
    if world == 1:
        save_by_library(SingleGroup(), folder)
    else:
        gloo_ranks.run(world, functools.partial(save_by_library, folder=folder))
        with pytest.raises(CompatibilityError, match=r"rng_0\.pt and .* different values"):
            mlstate.load(folder)
    assert main(["convert", str(folder), str(tmp_path / "own"), "--skip", "rng"]) == 0
    saved = torch.load(tmp_path / "c.pt", weights_only=True)
    loaded = mlstate.load(tmp_path / "own")
    assert loaded.metadata == {"step": 3}
    tensors = {name: tensor.view(torch.uint16).numpy() for name, tensor in saved["model"].items()}
    assert loaded.model.keys() == tensors.keys()
    for name, array in loaded.model.items():
        np.testing.assert_array_equal(array.view("u2"), tensors[name])
    expected = read_any(tmp_path / "c.pt").optimizer
    assert loaded.optimizer == expected


def write_entries(folder, **entries):
    """Write a folder as torch_checkpointing 0.1.1 does by default on one rank."""
    folder.mkdir(exist_ok=True)
    for name, value in entries.items():
        torch.save(value, folder / f"{name}_0.pt")
    return folder


def dtensor(local, mesh, placements, shape, shard_order=None):
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta, shard_order=shard_order)
    return DTensor(local, spec, requires_grad=False)


def write_parts(folder, tensor, shape, placements, ranks=None):
    """Write the files of a DTensor on a mesh of this shape, each as by its own rank."""
    folder.mkdir()
    world = int(np.prod(shape))
    for rank in range(world) if ranks is None else ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            mesh = init_device_mesh("cpu", shape)
            local, coordinate = tensor, mesh.get_coordinate()
            order = sorted(range(len(shape)), key=lambda n: hasattr(placements[n], "split_factor"))
            for number in order:
                if isinstance(placements[number], (Shard, _StridedShard)):
                    axis = placements[number].dim
                    chunks = local.tensor_split(shape[number], axis)
                    local = chunks[coordinate[number]].clone()
            part = dtensor(local, mesh, placements, tensor.shape)
            torch.save({"w": part, "same": torch.ones(2)}, folder / f"model_{rank}.pt")
        finally:
            dist.destroy_process_group()
    return folder


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Shard(1), Shard(1)]),
        ((2, 3), [Replicate(), Shard(0)]),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((3,), [Replicate()]),
        ((1,), [Shard(0)]),
    ],
)
def test_parts_on_any_mesh_are_joined(tmp_path, shape, placements):
    tensor = torch.arange(96.0).reshape(12, 8)
    folder = write_parts(tmp_path / "c", tensor, shape, placements)
    loaded = mlstate.load(folder)
    np.testing.assert_array_equal(loaded.model["w"], tensor.numpy())
    part = mlstate.load(folder, rank=1, world_size=4, layout="rows").model["w"]
    np.testing.assert_array_equal(part, tensor.numpy()[3:6])
    assert loaded.model["same"].tolist() == [1, 1]


@pytest.mark.parametrize("mesh_dims", [(0, 1), (1, 0)])
def test_a_division_in_another_order_than_the_mesh_is_refused(tmp_path, mesh_dims):
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=mesh_dims),)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        tensor = dtensor(torch.ones(2, 3), mesh, [Shard(0), Shard(0)], (8, 3), order)
        if mesh_dims == (0, 1):
            assert part_of("w", tensor).index == 1
        else:
            with pytest.raises(TypeError, match=r"'w' is a DTensor .* dimensions \(1, 0\) in this"):
                part_of("w", tensor)
        # flatten() gives a _StridedShard and the default order
        local = torch.arange(12.0).reshape(2, 6)[1:, :3].clone()  # of rank 1
        flat = DTensor.from_local(local, mesh, [Shard(1), Shard(0)]).flatten()
        if mesh_dims == (0, 1):
            part = part_of("w", flat)
            assert torch.equal(part.layout.take(torch.arange(12.0), part.index), part.array)
    finally:
        dist.destroy_process_group()


def test_an_incomplete_folder_is_refused(tmp_path):
    folder = write_parts(tmp_path / "c", torch.ones(4, 2), (2,), [Shard(0)], ranks=[0])
    with pytest.raises(CompatibilityError, match=r"'w' has 2 parts.*no file holds part 1"):
        mlstate.load(folder)
    folder = write_parts(tmp_path / "d", torch.ones(4, 2), (3,), [Shard(0)])
    (folder / "model_1.pt").unlink()
    with pytest.raises(mlstate.errors.StoreNotFoundError, match=r"rank 1 is missing.*model_1\.pt"):
        mlstate.load(folder)


@pytest.mark.parametrize(
    "values",
    [
        (torch.ones(2), torch.zeros(2)),
        (torch.ones(2), torch.ones(3)),
        ({"w": 1}, {"x": 1}),
        ([1], [1, 2]),
        (1, 1.0),
        (np.ones(1), np.zeros(1)),
    ],
)
def test_different_values_of_ranks_are_refused_or_left_out(tmp_path, values):
    folder = write_entries(tmp_path / "c", model={"w": torch.ones(1)}, extra=values[0])
    torch.save({"w": torch.ones(1)}, folder / "model_1.pt")
    torch.save(values[1], folder / "extra_1.pt")
    with pytest.raises(CompatibilityError, match=r"extra_0\.pt and .* different values"):
        mlstate.load(folder)
    for choice in (["--skip", "extra"], ["--only", "model"]):
        assert main(["convert", str(folder), str(tmp_path / choice[1]), *choice]) == 0
        assert mlstate.load(tmp_path / choice[1]).model["w"].tolist() == [1]


def test_equal_values_of_ranks_are_read_once(tmp_path):
    values = {"expanded": torch.ones(1).expand(3), "column": torch.arange(6).reshape(3, 2)[:, 1]}
    values |= {"nan": torch.tensor(float("nan")), "bits": torch.ones(2).to(torch.float8_e5m2)}
    folder = write_entries(tmp_path / "c", model=values)
    torch.save(values, folder / "model_1.pt")
    loaded = mlstate.load(folder).model
    assert {name: array.tolist() for name, array in loaded.items() if name != "nan"} == {
        "expanded": [1, 1, 1],
        "column": [1, 3, 5],
        "bits": [1, 1],
    }
    assert np.isnan(loaded["nan"])


def test_all_entries_of_a_folder_are_read(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    entries = {"step": 3, "config": {"a": [1]}, "raw": b"x", "ema_2": {"w": torch.ones(1)}}
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    folder = write_entries(tmp_path / "c", **states, **entries)
    assert main(["convert", str(folder), str(tmp_path / "own"), "--skip", "raw"]) == 0
    loaded = mlstate.load(tmp_path / "own")
    assert loaded.optimizer == mlstate.OptimizerStateDict.from_torch(optimizer)
    assert loaded.metadata == {"step": 3}
    assert loaded.states["config"] == {"a": [1]}
    assert loaded.states["ema_2"]["w"].tolist() == [1]
    assert mlstate.load(folder).states["raw"] == b"x"
    with pytest.raises(CompatibilityError, match="only read"):
        write_any(tmp_path / "n", {"w": np.ones(1)}, format="torch_checkpointing")


def test_files_of_other_formats_are_named(tmp_path):
    folder = write_entries(tmp_path / "c", model={"w": torch.ones(1)})
    (folder / "metadata.pkl").write_bytes(b"not read")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"not read: '?config\.json"):
        mlstate.load(folder)


class Custom:
    """An object that only unpickling can restore."""


def test_hostile_entries_are_refused(tmp_path):
    folder = write_entries(tmp_path / "c", model={"w": torch.ones(1)}, custom=Custom())
    with pytest.raises(CompatibilityError, match=r"'custom' is a .*Custom"):
        read_any(folder)
    (folder / "custom_0.pt").unlink()
    (folder / "custom_0.pt").symlink_to("/dev/zero")
    with pytest.raises(FormatError, match="not a regular file"):
        read_any(folder)
    (folder / "custom_0.pt").unlink()
    endless = []
    endless.append(endless)
    write_entries(folder, custom=endless)
    with pytest.raises(FormatError, match="cannot be joined: maximum recursion"):
        read_any(folder)


def test_parts_of_wrong_shapes_are_refused(tmp_path):
    whole = torch.ones(4, 2)
    for number, (placement, shape) in enumerate([(Shard(0), (6, 2)), (Replicate(), (1 << 40,))]):
        folder = write_parts(tmp_path / str(number), whole, (2,), [placement])
        for rank in range(2):
            tree = torch.load(folder / f"model_{rank}.pt", weights_only=True)
            local, mesh = tree["w"]._local_tensor, tree["w"].device_mesh
            lie = dtensor(local, mesh, [placement], shape)
            torch.save({"w": lie}, folder / f"model_{rank}.pt")
        with pytest.raises(FormatError, match="cannot be joined"):
            mlstate.load(folder)


def test_every_byte_of_a_pickle_flipped(tmp_path):
    folder = write_entries(tmp_path / "c", model={"w": torch.ones(2), "n": [1, {"k": 2.5}]})
    path = folder / "model_0.pt"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in members if name.endswith("data.pkl"))
    refused = 0
    for place, value in itertools.product(range(len(members[name])), (0x00, 0x51, 0xFF)):
        data = bytearray(members[name])
        data[place] = value
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in members.items():
                archive.writestr(member, bytes(data) if member == name else content)
        try:
            mlstate.load(folder)
        except (FormatError, CompatibilityError):
            refused += 1
    assert refused > len(members[name])
