"""Files and folders as other trainers write them: model, optimizer, states, metadata."""

import functools
import json
import warnings

import gloo_ranks
import numpy as np
import pytest
from test_torch_checkpointing import dtensor
from test_torch_entries import assert_same_run, trained

torch = pytest.importorskip("torch", reason="it writes the files")
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from any_format import read_any  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import Shard, init_device_mesh  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402

import mlstate  # noqa: E402
from mlstate.checkpoint._layouts.entries import sort_entries  # noqa: E402
from mlstate.checkpoint._layouts.training_step import step_entries  # noqa: E402
from mlstate.cli import main  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # torch's about single processes
]


def convert(source, target, *options):
    assert main(["convert", str(source), str(target), *options]) == 0
    return target


def resume(folder, run):
    """Load a converted folder into a new run, and compare it with the run that was saved."""
    other = trained(seed=1, steps=1)
    mlstate.load(folder, into={"model": other[0], "optimizer": other[1]})
    assert_same_run(run, other)


def assert_equal(arrays, tensors):
    """Arrays are equal to torch's tensors, bit for bit."""
    assert sorted(arrays) == sorted(tensors)
    for name, tensor in tensors.items():
        expected = np.ascontiguousarray(tensor.numpy())
        assert np.asarray(arrays[name]).tobytes() == expected.tobytes(), name
        assert (arrays[name].shape, arrays[name].dtype) == (tensor.shape, expected.dtype)


# ---- one rule for the model ----


@pytest.mark.parametrize("form", ["pt", "dcp"])
@pytest.mark.parametrize("is_flat", [True, False])
def test_tensors_next_to_an_optimizer_are_the_model(tmp_path, form, is_flat):
    """As torchtitan stores them."""
    run = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    state = {
        **run[0].state_dict(),
        "optimizer": get_optimizer_state_dict(*run, options=options),
        "train_state": {"step": torch.tensor(5)},
        "lr_scheduler": {"last_epoch": 3},
        "dataloader": {"dp_rank_0": b"x"},
    }
    path = tmp_path / ("c.pt" if form == "pt" else "c")
    if form == "pt":
        torch.save(state, path)
    else:
        dcp.save(state, checkpoint_id=path)
    loaded = mlstate.load(path)
    assert_equal(loaded.model, run[0].state_dict())
    assert sorted(loaded.states) == ["dataloader", "lr_scheduler", "train_state"]
    other = trained(seed=1)[0]
    mlstate.load(path, into={"model": other})
    for name, tensor in run[0].state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    resume(convert(path, tmp_path / "own"), run)
    parts = mlstate.load(convert(path, tmp_path / "part", "--only", "model"))
    assert (len(parts.model), parts.optimizer, parts.states) == (4, None, {})


@pytest.mark.parametrize("form", ["pt", "dcp"])
def test_generator_state_is_not_a_model(tmp_path, form):
    _, optimizer = trained()
    state = {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), "epoch": 3}
    if form == "pt":
        torch.save(state, tmp_path / "c.pt")
    else:
        dcp.save(state, checkpoint_id=tmp_path / "c.pt")
    loaded = read_any(tmp_path / "c.pt", format="torch" if form == "pt" else "dcp")
    assert (loaded.model, loaded.metadata, list(loaded.states)) == (None, {"epoch": 3}, ["rng"])


def test_model_with_numbers_at_the_top(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 3, "lr": 0.5}, tmp_path / "a.pt")
    loaded = mlstate.load(tmp_path / "a.pt")
    assert (sorted(loaded.model), loaded.metadata) == (["w"], {"epoch": 3, "lr": 0.5})


class Extra(torch.nn.Module):
    """Has an extra state, and stores a plain number as an entry."""

    def __init__(self, extra, number):
        super().__init__()
        self.inner = torch.nn.BatchNorm1d(2)
        self.extra, self.number = extra, number

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.extra = extra

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}number"] = self.number

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.number = state_dict.pop(f"{prefix}number")
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.mark.parametrize("extra", [3, "text", {"scale": torch.ones(2), "n": [1, None]}, (1, 2.5)])
@pytest.mark.parametrize("key", [None, "model"])
@pytest.mark.parametrize("form", ["pt", "dcp"])
def test_extra_states_and_numbers_of_a_module_load_as_torch_loads_them(tmp_path, extra, key, form):
    module = torch.nn.ModuleDict({"a": Extra(extra, 7)})
    state = module.state_dict() if key is None else {key: module.state_dict()}
    path = tmp_path / "c.pt"
    torch.save(state, path) if form == "pt" else dcp.save(state, checkpoint_id=path)
    kind = "torch" if form == "pt" else "dcp"
    parts = read_any(path, format=kind)
    assert sorted(parts.model) == sorted(
        name for name, value in module.state_dict().items() if hasattr(value, "shape")
    )
    name = "a.number" if key is None else "model.a.number"
    assert parts.metadata == {name: 7}
    target = torch.nn.ModuleDict({"a": Extra(None, 0)})
    if form == "pt":
        mlstate.load(path, into={"model": target})
        twin = torch.nn.ModuleDict({"a": Extra(None, 0)})
        twin.load_state_dict(torch.load(path)[key] if key else torch.load(path))
        assert repr(target["a"].extra) == repr(twin["a"].extra)
        assert target["a"].number == twin["a"].number == 7


def test_numbers_at_any_level_are_metadata(tmp_path):
    tree = {"w": torch.ones(2), "epoch": 3, "lr": 0.5, "on": True, "deep": {"n": 2, "t": "x"}}
    torch.save(tree, tmp_path / "a.pt")
    loaded = mlstate.load(tmp_path / "a.pt")
    assert list(loaded.model) == ["w"]
    assert loaded.metadata == {"epoch": 3, "lr": 0.5, "on": True, "deep.n": 2, "deep.t": "x"}


# ---- entries that cannot be read ----


class Custom:
    """An object that only unpickling can restore."""


NEIGHBOURS = {
    "sparse": lambda: torch.ones(2).to_sparse(),
    "meta": lambda: torch.ones(2, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "set": lambda: {1, 2},
    "object": Custom,
    "subclass": lambda: TwoTensor(torch.ones(2), torch.ones(2)),
}


@pytest.mark.parametrize("kind", NEIGHBOURS)
@pytest.mark.parametrize("reader", ["pt", "model", "ranks", "dcp"])
def test_names_skips_unreadable_entries(tmp_path, kind, reader):
    tree = {"w": NEIGHBOURS[kind](), "v": torch.ones(2)}
    path = tmp_path / "a.pt"
    if reader == "ranks":
        path = tmp_path / "c"
        path.mkdir()
        for rank in range(2):
            torch.save(tree, path / f"model_world_size_2_rank_{rank}.pt")
    elif reader == "dcp":
        if kind not in ("set", "object"):
            pytest.skip("torch does not store it")
        path = tmp_path / "c"
        dcp.save(tree, checkpoint_id=path)
    else:
        torch.save({"model": tree} if reader == "model" else tree, path)
    assert list(mlstate.load(path, names="v").model) == ["v"]
    for options in ({}, {"names": "w"}, {"names": ["v", "w"]}, {"into": {"model": {}}}):
        with pytest.raises(mlstate.CompatibilityError, match="'w' is ") as caught:
            mlstate.load(path, **options)
        assert caught.value.name == "w" and str(path) in str(caught.value)
    assert list(mlstate.load(path, names="b", rename={"v": "b"}).model) == ["b"]
    with pytest.raises(mlstate.CompatibilityError, match="'w' is "):
        mlstate.load(path, names="b", rename={"w": "b"})


def test_objects_of_other_classes_hinder_only_their_entry(tmp_path):
    run = trained()
    tree = {"model": run[0].state_dict(), "optimizer": run[1].state_dict(), "args": Custom()}
    torch.save(tree, tmp_path / "a.pt")
    other = trained(seed=1)[0]
    mlstate.load(tmp_path / "a.pt", into={"model": other})
    assert torch.equal(other[0].weight, run[0][0].weight)
    with pytest.warns(mlstate.errors.CheckpointWarning, match="not read: args"):
        assert len(mlstate.load(tmp_path / "a.pt").model) == 4
    loaded = mlstate.load(convert(tmp_path / "a.pt", tmp_path / "own", "--skip", "args"))
    assert len(loaded.optimizer) == 12


def test_an_optimizer_that_cannot_be_read_hinders_no_model(tmp_path):
    model, optimizer = trained()
    state = optimizer.state_dict()
    state["state"][0]["a.b"] = torch.ones(1)
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "a.pt")
    assert len(mlstate.load(tmp_path / "a.pt", names="*").model) == 4
    for options in ({}, {"into": {"optimizer": {}}}):
        with pytest.raises(mlstate.CompatibilityError, match=r"a state named 'a\.b'"):
            mlstate.load(tmp_path / "a.pt", **options)


def test_an_intact_file_of_another_object_is_not_damaged(tmp_path):
    torch.save(Custom(), tmp_path / "training_args.bin")
    with pytest.raises(mlstate.CompatibilityError, match=r"holds a \S+Custom"):
        mlstate.load(tmp_path / "training_args.bin")


def test_numpys_bfloat16_is_named_or_read_by_cast(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.arange(4).astype(ml_dtypes.bfloat16)
    np.savez(tmp_path / "b.npz", w=values, v=np.ones(2))
    with pytest.raises(mlstate.CompatibilityError, match=r"'w' is \|V2.*cast='bfloat16'"):
        mlstate.load(tmp_path / "b.npz")
    with pytest.raises(mlstate.CompatibilityError, match=r"'w' is \|V2"):
        mlstate.load(tmp_path / "b.npz", names="w", cast="float32")
    assert list(mlstate.load(tmp_path / "b.npz", names="v").model) == ["v"]
    assert np.array_equal(mlstate.load(tmp_path / "b.npz", cast="bfloat16").model["w"], values)


# ---- DeepSpeed ----


def write_deepspeed(folder, ranks=1, *, name="mp_rank_{:02d}_model_states.pt"):
    """Write a folder as DeepSpeed's engine does with ZeRO 1 or 2; return the module."""
    run = trained()
    step = folder / "global_step5"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step5")
    shapes = {name: each.shape for name, each in run[0].named_parameters()}
    for rank in range(ranks):
        states = {
            "module": run[0].state_dict(),
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": [shapes],
            "frozen_param_shapes": None,
            "shared_params": {},
            "lr_scheduler": {"last_batch_iteration": 4},
            "sparse_tensor_module_names": set(),
            "skipped_steps": 0,
            "global_steps": 5,
            "dp_world_size": 2,
            "mp_world_size": ranks,
            "ds_config": {"zero_optimization": {"stage": 2}},
            "ds_version": "0.17.0",
        }
        torch.save(states, step / name.format(rank))
    partition = {"optimizer_state_dict": Custom(), "ds_version": "0.17.0"}
    torch.save(partition, step / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return run[0]


@pytest.mark.parametrize("inner", ["", "global_step5"])
def test_the_model_of_deepspeed_is_read(tmp_path, inner):
    module = write_deepspeed(tmp_path / "c")
    with pytest.warns(mlstate.errors.CheckpointWarning, match=r"not read: 'bf16_zero_pp_rank_0_"):
        loaded = mlstate.load(tmp_path / "c" / inner)
    assert_equal(loaded.model, module.state_dict())
    assert (loaded.step, loaded.optimizer) == (5, None)
    assert loaded.states["lr_scheduler"] == {"last_batch_iteration": 4}
    folder = convert(tmp_path / "c", tmp_path / "own")
    assert_equal(mlstate.load(folder).model, module.state_dict())
    file = tmp_path / "c/global_step5/mp_rank_00_model_states.pt"
    assert_equal(mlstate.load(file).model, module.state_dict())
    with pytest.raises(mlstate.CompatibilityError, match="holds no optimizer"):
        mlstate.load(tmp_path / "c", into={"optimizer": {}})


def test_divided_models_of_deepspeed_are_refused(tmp_path):
    write_deepspeed(tmp_path / "tensor", ranks=2)
    with pytest.raises(mlstate.CompatibilityError, match="divided among ranks"):
        mlstate.load(tmp_path / "tensor")
    write_deepspeed(tmp_path / "zero3", name="zero_pp_rank_0_mp_rank_{:02d}_model_states.pt")
    with pytest.raises(mlstate.CompatibilityError, match=r"zero_to_fp32\.py"):
        mlstate.load(tmp_path / "zero3")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/latest").write_text("../tensor")
    with pytest.raises(mlstate.CompatibilityError, match=r"names '\.\./tensor', not a subfolder"):
        mlstate.load(tmp_path / "other")


# ---- verl and SkyRL ----


def write_ranks(folder, world=2):
    """Write a folder of verl's FSDP workers; return model, optimizer and generators by rank."""
    folder.mkdir()
    run = trained()
    generators = [torch.Generator().manual_seed(rank).get_state() for rank in range(world)]
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            mesh = init_device_mesh("cpu", (world,))

            def divided(value, rank=rank, mesh=mesh):
                if isinstance(value, dict):
                    return {key: divided(each) for key, each in value.items()}
                if not isinstance(value, torch.Tensor) or not value.ndim:
                    return value
                part = value.detach().chunk(world)[rank].clone()
                return dtensor(part, mesh, [Shard(0)], value.shape)

            model = divided(run[0].state_dict())
            optimizer = run[1].state_dict()
            optimizer = {**optimizer, "state": divided(optimizer["state"])}
            extra = {
                "lr_scheduler": {"last_epoch": 3, "_last_lr": [0.5]},
                "rng": {"cpu": generators[rank], "numpy": np.random.RandomState(rank).get_state()},
            }
            for kind, value in (("model", model), ("optim", optimizer), ("extra_state", extra)):
                torch.save(value, folder / f"{kind}_world_size_{world}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    return run, generators


def test_files_of_ranks_are_joined(tmp_path):
    run, generators = write_ranks(tmp_path / "c")
    (tmp_path / "c/fsdp_config.json").write_text("{}")
    with pytest.warns(mlstate.errors.CheckpointWarning, match=r"not read: 'fsdp_config\.json'"):
        loaded = mlstate.load(tmp_path / "c")
    assert_equal(loaded.model, run[0].state_dict())
    assert loaded.optimizer == read_optimizer(tmp_path, run[1])
    assert sorted(loaded.states) == ["lr_scheduler", "rng"]
    assert loaded.states["lr_scheduler"] == {"last_epoch": 3, "_last_lr": [0.5]}
    for rank, state in enumerate(generators):
        assert torch.equal(loaded.states["rng"][rank]["cpu"], state)
    converted = mlstate.load(convert(tmp_path / "c", tmp_path / "own"))
    assert np.array_equal(converted.states["rng"][1]["cpu"], generators[1])
    part = mlstate.load(convert(tmp_path / "c", tmp_path / "part", "--skip", "rng"))
    assert list(part.states) == ["lr_scheduler"]


def read_optimizer(folder, optimizer):
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return read_any(folder / "optimizer.pt").optimizer


def test_files_of_one_rank_are_read(tmp_path):
    run, generators = write_ranks(tmp_path / "c", world=1)
    loaded = mlstate.load(tmp_path / "c")
    assert_equal(loaded.model, run[0].state_dict())
    assert torch.equal(loaded.states["rng"]["cpu"], generators[0])


def test_a_missing_file_of_a_rank_is_named(tmp_path):
    write_ranks(tmp_path / "c")
    (tmp_path / "c/optim_world_size_2_rank_1.pt").unlink()
    with pytest.raises(mlstate.errors.StoreNotFoundError, match=r"optim_world_size_2_rank_1\.pt"):
        mlstate.load(tmp_path / "c")
    loaded = mlstate.load(convert(tmp_path / "c", tmp_path / "own", "--only", "model"))
    assert len(loaded.model) == 4
    loaded = mlstate.load(convert(tmp_path / "c", tmp_path / "rng", "--only", "model,rng"))
    assert list(loaded.states) == ["rng"]
    torch.save({}, tmp_path / "c/model_world_size_3_rank_0.pt")
    with pytest.raises(mlstate.CompatibilityError, match="jobs of 2 and 3 ranks"):
        mlstate.load(tmp_path / "c")


# ---- accelerate and transformers' Trainer ----


def test_a_state_of_accelerate_is_read(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    runs = [trained(seed) for seed in range(2)]
    scheduler = torch.optim.lr_scheduler.StepLR(runs[0][1], 3)
    prepared = accelerator.prepare(*runs[0], *runs[1], scheduler)
    accelerator.register_for_checkpointing(torch.nn.Linear(1, 1))
    accelerator.save_state(tmp_path / "c")
    assert prepared
    parts = read_any(tmp_path / "c")
    assert_equal(parts.model, runs[0][0].state_dict())
    assert parts.optimizer == read_optimizer(tmp_path, runs[0][1])
    assert_equal(parts.states["model_1"], runs[1][0].state_dict())
    assert parts.states["optimizer_1"] == read_optimizer(tmp_path, runs[1][1])
    assert parts.states["scheduler"]["step_size"] == 3
    assert "weight" in parts.states["custom_checkpoint_0"]
    saved = torch.load(tmp_path / "c/random_states_0.pkl", weights_only=False)
    generators = parts.states["random_states"]
    assert generators["random_state"] == saved["random_state"]
    assert torch.equal(generators["torch_manual_seed"], saved["torch_manual_seed"])
    resume(convert(tmp_path / "c", tmp_path / "own"), runs[0])


def test_a_step_of_a_trainer_is_read(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path, max_steps=2, save_steps=2, use_cpu=True, report_to=[],
        disable_tqdm=True, per_device_train_batch_size=2,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    folder = tmp_path / "checkpoint-2"
    with pytest.warns(mlstate.errors.CheckpointWarning, match=r"not read: 'training_args\.bin'"):
        parts = read_any(folder)
    assert len(parts.model) == len(mlstate.load(folder).model)
    saved = torch.load(folder / "optimizer.pt")
    moments = [entry["exp_avg"] for entry in saved["state"].values()]
    loaded = [a for name, a in parts.optimizer.items() if name.endswith(".exp_avg")]
    assert all(map(np.array_equal, loaded, moments)) and len(loaded) == len(moments)
    assert parts.step == 2 and parts.metadata["max_steps"] == 2
    assert sorted(parts.states) == ["rng_state", "scheduler"]
    assert parts.states["scheduler"]["last_epoch"] == 2
    with pytest.raises(ValueError, match="convert it"):
        mlstate.checkpoint.reshard(folder, tmp_path / "cut", layout="rows", world_size=2)
    with pytest.raises(ValueError, match="reads all of it"):
        mlstate.checkpoint.plan_load(folder)
    converted = mlstate.load(convert(folder, tmp_path / "own"))
    assert converted.step == 2 and sorted(converted.states) == ["rng_state", "scheduler"]
    assert main(["diff", str(folder), str(tmp_path / "own")]) == 0


def test_generators_of_all_ranks_are_demanded(tmp_path):
    mlstate.export_huggingface(tmp_path / "c", {"w": np.ones(2, np.float32)})
    for rank in (0, 2, 10):
        torch.save({"cpu": torch.full((2,), rank)}, tmp_path / f"c/rng_state_{rank}.pth")
    with pytest.raises(mlstate.errors.StoreNotFoundError, match=r"rank 1 .*rng_state_1\.pth"):
        read_any(tmp_path / "c")
    (tmp_path / "c/rng_state_10.pth").rename(tmp_path / "c/rng_state_1.pth")
    states = read_any(tmp_path / "c").states["rng_state"]
    assert [int(state["cpu"][0]) for state in states] == [0, 10, 2]


def test_folder_of_weights_has_no_training_entries(tmp_path):
    mlstate.export_huggingface(tmp_path / "c", {"w": np.ones(2, np.float32)})
    torch.save({"w": torch.ones(2)}, tmp_path / "c/pytorch_model.bin")
    assert step_entries([path.name for path in (tmp_path / "c").iterdir()]) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = read_any(tmp_path / "c")
    assert (list(parts.model), parts.optimizer, parts.states) == (["w"], None, {})


# ---- parts of tensors in safetensors ----


def write_parts(group, folder):
    """Write a folder by torch, as one of its ranks."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    state = {"w": torch.arange(12.0).reshape(4, 3), "b": torch.arange(5).to(torch.bfloat16)}
    state |= {"c": torch.ones(2, 4), "n": torch.tensor(3)}
    cuts = {"w": Shard(0), "b": Shard(0), "c": Shard(1), "n": Replicate()}
    mesh = init_device_mesh("cpu", (group.world_size,))
    state = {name: distribute_tensor(each, mesh, [cuts[name]]) for name, each in state.items()}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(folder, save_distributed=True))


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    """A folder that two ranks of torch wrote."""
    path = tmp_path_factory.mktemp("divided")
    gloo_ranks.run(2, functools.partial(write_parts, folder=path))
    return path


def test_parts_in_safetensors_are_joined(divided):
    expected = {
        "w": torch.zeros(4, 3),
        "b": torch.zeros(5, dtype=torch.bfloat16),
        "c": torch.zeros(2, 4),
        "n": torch.tensor(0),
    }
    dcp.load(expected, storage_reader=dcp.HuggingFaceStorageReader(divided), no_dist=True)
    loaded = mlstate.load(divided).model
    assert sorted(loaded) == sorted(expected)
    assert np.array_equal(loaded.pop("b").astype("f4"), expected.pop("b").float())
    assert_equal(loaded, expected)
    part = mlstate.load(divided, rank=1, world_size=2, layout="rows").model["w"]
    assert np.array_equal(part, expected["w"][2:])


def test_one_file_of_parts_is_refused(divided):
    for file in divided.glob("*.safetensors"):
        with pytest.raises(mlstate.CompatibilityError, match=r"one rank's parts.*pass the folder"):
            mlstate.load(file)


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ({"w": {"saved_offsets": [1, 0]}}, "overlap, or do not cover"),
        ({"w": {"saved_offsets": [3, 0]}}, "overlap, or do not cover"),
        ({"w": {"saved_offsets": [1 << 60, 0]}}, "overlap, or do not cover"),
        ({"w": {"saved_offsets": [2]}}, "no position of 'w'"),
        ({"w": {"saved_offsets": [-2, 0]}}, "negative position"),
        ({"w": 3}, "not one of torch"),
        ([], "not one of torch"),
    ],
)
def test_parts_that_overlap_or_leave_gaps_are_refused(tmp_path, offsets, text):
    half = {"w": np.ones((2, 3))}
    first = json.dumps({"w": {"saved_offsets": [0, 0]}})
    for number, info in enumerate((first, json.dumps(offsets))):
        name = f"shard-{number + 1:05d}-model-00001-of-00001.safetensors"
        mlstate.save_file(half, tmp_path / name, {"DCP_SHARDING_INFO": info})
    with pytest.raises(mlstate.FormatError, match=text):
        mlstate.load(tmp_path)


# ---- nothing is silently missing ----


def random_tree(draw):
    """A random dict of entries as programs write them, and its tensors and numbers by value."""
    values = iter(range(2, 1000))
    tensors, numbers = [], []

    def tensor():
        tensors.append(next(values))
        return torch.full(draw.choice([(), (1,), (2, 2)]), float(tensors[-1]))

    def number():
        numbers.append(next(values))
        return numbers[-1]

    def state_dict(depth=0):
        kinds = [tensor, tensor, number, lambda: None, lambda: b"x", lambda: {"k": tensor()}]
        kinds += [lambda: [tensor(), number()], lambda: state_dict(depth + 1)] if depth < 2 else []
        return {f"n{i}": draw.choice(kinds)() for i in range(draw.randrange(1, 4))}

    def optimizer():
        names = draw.choice([["a.w", "b"], [0, 1]])
        states = {name: {"m": tensor(), "step": number()} for name in names}
        groups = [{"lr": 0.5, "params": names}]
        if draw.random() < 0.3:
            flat = {f"param_groups.{name}.lr": 0.5 for name in names}
            for name, state in states.items():
                flat |= {f"state.{name}.{key}": value for key, value in state.items()}
            return flat
        return {"state": states, "param_groups": groups}

    entries = {
        "model": state_dict, "state_dict": state_dict, "ema": state_dict, "w.a": tensor,
        "v": tensor, "opt": lambda: {"inner": optimizer()}, "optimizer": optimizer,
        "optim": optimizer, "optimizer_0": optimizer,
        "optimizer_1": optimizer, "optimizer_states": lambda: [optimizer() for _ in range(2)],
        "epoch": number, "rng": tensor, "sched": lambda: {"last": number()}, "module": state_dict,
        "ds_version": lambda: "0.1", "_extra_state": lambda: {"t": tensor(), "n": number()},
    }  # fmt: skip
    names = draw.sample(sorted(entries), draw.randrange(1, 6))
    tree = {name: entries[name]() for name in names}
    return {"app": tree} if draw.random() < 0.2 else tree, tensors, numbers


def values_in(value):
    """Yield the values of all arrays and numbers inside loaded parts."""
    if isinstance(value, dict):
        for each in value.values():
            yield from values_in(each)
        for group in getattr(value, "param_groups", ()):
            yield from values_in(group)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from values_in(each)
    elif hasattr(value, "tolist") or isinstance(value, int | float):
        yield from np.asarray(value).reshape(-1)[:1].tolist()


def optimizers_in(value):
    """Yield the optimizers in a random tree."""
    if isinstance(value, dict) and any(key.startswith("param_groups") for key in value):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from optimizers_in(each)


@pytest.mark.parametrize("seed", range(300))
def test_no_entry_is_silently_missing(tmp_path, seed):
    import random
    from collections import Counter

    tree, tensors, numbers = random_tree(random.Random(seed))
    try:
        parts = sort_entries(tree, tmp_path)
    except mlstate.CompatibilityError as error:
        assert "two entries have the name" in str(error)
        return
    assert parts.unreadable == {}
    counts = Counter(values_in(list(parts[:4])))
    assert all(counts[value] == 1 for value in tensors + numbers), (tree, parts)
    flat = [each for value in (parts.model or {}).values() for each in values_in(value)]
    assert not set(flat) & set(numbers)
    moments = {each for value in optimizers_in(tree) for each in values_in(value)}
    assert not set(flat) & moments & set(tensors)
