"""Folders of other programs, for `foreign_kinds.KINDS`; as a program, it prints the table."""

import argparse
import functools
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from foreign_files import LFS, text_file
from foreign_kinds import (
    Sample,
    loads,
    moments,
    network,
    read_safetensors,
    read_torch,
    refused,
    run_sample,
    run_tree,
    saved,
    stored,
    table,
)

# ---- Hugging Face ----


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=1, **sizes))


def pretrained(path, **options):
    """Write a folder by transformers; return what its own reader returns."""
    llama().save_pretrained(path, **options)
    return read_pretrained(path)


def read_pretrained(path):
    from transformers import LlamaForCausalLM

    return Sample(path, dict(LlamaForCausalLM.from_pretrained(path).state_dict()))


loads("`save_pretrained` of transformers", "model", "structure")(
    lambda folder: pretrained(folder / "model")
)


loads("`save_pretrained` in several files", "model", "structure")(
    lambda folder: pretrained(folder / "model", max_shard_size="2KB")
)


@loads("`save_pretrained`, and `mlstate checksum` after it", "model")
def _(folder):
    from mlstate.cli import main

    sample = pretrained(folder / "model", max_shard_size="2KB")
    assert main(["checksum", str(sample.path)]) == 0
    return sample


@loads("a folder of `pytorch_model.bin` (transformers 4)", "model")
def _(folder):
    sample = pretrained(folder / "model")
    saved(sample.path / "pytorch_model.bin", sample.model)
    (sample.path / "model.safetensors").unlink()
    return sample


@loads("a folder of `pytorch_model-0000N-of-0000M.bin`", "model")
def _(folder):
    sample = pretrained(folder / "model")
    (sample.path / "model.safetensors").unlink()
    files = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    places = {name: files[n % 2] for n, name in enumerate(sample.model)}
    for file in files:
        saved(sample.path / file, {n: v for n, v in sample.model.items() if places[n] == file})
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    text_file(sample.path / "pytorch_model.bin.index.json", json.dumps(index))
    return sample


def hub_cache(folder):
    """Return the folder of a model in the Hub's cache, and its snapshot of links to blobs."""
    root = folder / "models--a--b"
    snapshot = root / "snapshots" / ("c" * 40)
    for place in (snapshot, root / "refs", root / "blobs"):
        place.mkdir(parents=True)
    text_file(root / "refs" / "main", "c" * 40)
    sample = pretrained(folder / "plain")
    for path in sample.path.iterdir():
        blob = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.move(path, root / "blobs" / blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
    shutil.rmtree(sample.path)
    return sample._replace(path=root), snapshot


loads("`models--a--b` of the Hub's cache", "model")(lambda folder: hub_cache(folder)[0])


@loads("a snapshot of the Hub's cache", "model")
def _(folder):
    sample, snapshot = hub_cache(folder)
    return sample._replace(path=snapshot)


@refused("a snapshot whose link leads nowhere", "damaged", "model.safetensors", "blobs")
def _(folder):
    _, snapshot = hub_cache(folder)
    (snapshot / "model.safetensors").resolve().unlink()
    return snapshot


@refused("a folder whose index names a missing file", "damaged", "model-00001-of-")
def _(folder):
    path = pretrained(folder / "model", max_shard_size="2KB").path
    min(path.glob("model-00001-of-*")).unlink()
    return path


@loads("an adapter of PEFT", "model", "structure")
def _(folder):
    from peft import LoraConfig, get_peft_model, load_peft_weights

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    get_peft_model(llama(), config).save_pretrained(folder / "adapter")
    return Sample(folder / "adapter", load_peft_weights(str(folder / "adapter"), device="cpu"))


def stored_model(name, folder):
    """Unpack a folder of one file of weights."""
    path = stored(name, folder)
    return Sample(path, read_safetensors(path / "model.safetensors"))


for _title, _name, _warns in (
    ("8-bit weights of bitsandbytes", "bitsandbytes-8", None),
    ("4-bit weights of bitsandbytes", "bitsandbytes-4", None),
    ("sentence-transformers: the first module", "sentence-transformers", "2_Dense"),
):
    loads(_title, "model", "structure", _warns)(
        lambda folder, name=_name: stored_model(name, folder)
    )


@loads("a model of diffusers", "model", "structure")
def _(folder):
    from diffusers import UNet2DModel

    unet().save_pretrained(folder / "unet")
    model = UNet2DModel.from_pretrained(folder / "unet", low_cpu_mem_usage=False)
    return Sample(folder / "unet", dict(model.state_dict()))


def unet():
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    sizes = {"block_out_channels": (4,), "layers_per_block": 1, "norm_num_groups": 2}
    return UNet2DModel(sample_size=4, add_attention=False, **blocks, **sizes)


@refused("a pipeline of diffusers", "unparsed", "unet")
def _(folder):
    from diffusers import DDPMPipeline, DDPMScheduler

    DDPMPipeline(unet(), DDPMScheduler()).save_pretrained(folder / "pipeline")
    return folder / "pipeline"


# ---- trainers ----


def lightning_sample(path, count):
    """Write a checkpoint of Lightning with `count` optimizers."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.optimizer, self.scheduler = network()
            self.automatic_optimization = count == 1

        def configure_optimizers(self):
            return [self.optimizer, torch.optim.SGD([self.model.first.bias], momentum=0.5)][:count]

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    module = Module()
    module.trainer = trainer
    trainer.strategy.connect(module)
    trainer.strategy.setup_optimizers(trainer)
    trainer.save_checkpoint(path)
    tree = read_torch(path)
    optimizers = [moments(each) for each in tree["optimizer_states"]]
    metadata = {"epoch": 0, "global_step": 0}
    return Sample(path, dict(tree["state_dict"]), metadata=metadata), optimizers


@loads(
    "`.ckpt` of Lightning",
    "model, optimizer, states callbacks, loops, lr_schedulers",
)
def _(folder):
    sample, [optimizer] = lightning_sample(folder / "a.ckpt", 1)
    return sample._replace(optimizer=optimizer)


@loads(
    "`.ckpt` of Lightning with two optimizers",
    "model, states callbacks, loops, lr_schedulers, optimizer_0, optimizer_1",
)
def _(folder):
    sample, optimizers = lightning_sample(folder / "a.ckpt", 2)
    return sample._replace(states={f"optimizer_{n}": each for n, each in enumerate(optimizers)})


def trainer_run(folder):
    """Train two steps by transformers, with a checkpoint of each."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2
    options = {"max_steps": 2, "save_steps": 1, "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(str(folder / "run"), use_cpu=True, **options)
    Trainer(llama(), arguments, train_dataset=rows).train()
    return folder / "run"


@loads(
    "a step of transformers' Trainer",
    "model, optimizer, states rng_state, scheduler",
    "structure",
    warns=r"training_args\.bin",
)
def _(folder):
    path = trainer_run(folder) / "checkpoint-2"
    sample = read_pretrained(path)
    optimizer = moments(read_torch(path / "optimizer.pt"))
    files = {"rng_state": "rng_state.pth", "scheduler": "scheduler.pt"}
    states = {name: read_torch(path / file) for name, file in files.items()}
    metadata = {"global_step": 2}
    return sample._replace(optimizer=optimizer, states=states, metadata=metadata)


refused("the folder of a Trainer's steps", "unparsed", "checkpoint-1", "checkpoint-2")(
    lambda folder: trainer_run(folder)
)


class Counter:
    """An object that accelerate saves with model and optimizer."""

    def state_dict(self):
        return {"count": 5}

    def load_state_dict(self, state):
        """Do nothing: no test loads it by accelerate."""


def accelerate_state(path, models=1, **options):
    """Write a folder by accelerate of one or several models."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True)
    for seed in range(models):
        accelerator.prepare(*network(seed))
    accelerator.register_for_checkpointing(Counter())
    accelerator.save_state(str(path), **options)
    model = read_safetensors(path / "model.safetensors") if not options else None
    model = model or read_torch(path / "pytorch_model.bin")
    files = {"scheduler": "scheduler.bin", "random_states": "random_states_0.pkl"}
    files["custom_checkpoint_0"] = "custom_checkpoint_0.pkl"
    states = {name: read_torch(path / file) for name, file in files.items()}
    states["random_states"].pop("random_state")
    optimizer = moments(read_torch(path / "optimizer.bin"))
    return Sample(path, model, optimizer, states, fills=models == 1)


ACCELERATE = "model, optimizer, states custom_checkpoint_0, random_states, scheduler"


loads("`save_state` of accelerate", ACCELERATE, "structure")(
    lambda folder: accelerate_state(folder / "state")
)


loads("`save_state` with `safe_serialization=False`", ACCELERATE)(
    lambda folder: accelerate_state(folder / "state", safe_serialization=False)
)


@loads(
    "`save_state` of accelerate with two models",
    f"{ACCELERATE}, model_1, optimizer_1, …",
    "structure",
)
def _(folder):
    sample = accelerate_state(folder / "state", models=2)
    second = {"model_1": read_safetensors(sample.path / "model_1.safetensors")}
    second["optimizer_1"] = moments(read_torch(sample.path / "optimizer_1.bin"))
    return sample._replace(states=sample.states | second)


def deepspeed(folder, stage):
    """Unpack a run of DeepSpeed; return it with what its file of the model holds."""
    path = stored(f"deepspeed-{stage}", folder)
    [file] = path.glob("global_step2/*model_states.pt")
    tree = read_torch(file)
    metadata = {"epoch": 3, "global_steps": 2}
    return Sample(path, dict(tree["module"]), metadata=metadata), tree


@loads("DeepSpeed without ZeRO", "model, optimizer, states ds_config, …")
def _(folder):
    sample, tree = deepspeed(folder, 0)
    return sample._replace(optimizer=moments(tree["optimizer"]))


loads("DeepSpeed, ZeRO 1: the model", "model, states ds_config, …", warns="optim_states")(
    lambda folder: deepspeed(folder, 1)[0]
)


loads("DeepSpeed, ZeRO 2: the model", "model, states ds_config, …", warns="optim_states")(
    lambda folder: deepspeed(folder, 2)[0]
)


@loads("`mp_rank_00_model_states.pt` of DeepSpeed", "model, states ds_config, …")
def _(folder):
    sample, _ = deepspeed(folder, 2)
    return sample._replace(path=sample.path / "global_step2" / "mp_rank_00_model_states.pt")


refused("DeepSpeed, ZeRO 3", "intact", "zero_to_fp32.py")(
    lambda folder: stored("deepspeed-3", folder)
)


def megatron(folder):
    """Write a run as Megatron-LM's checkpointing.py does, by its names (core 0.15)."""
    numbers = {"iteration": 5, "checkpoint_version": 3.0, "num_floating_point_operations_so_far": 0}
    model = {"embedding.word_embeddings.weight": torch.ones(4, 2)}
    model |= {"decoder.layers.0.mlp.linear_fc1.weight": torch.zeros(2, 2)}
    tree = {"args": argparse.Namespace(lr=0.5), "model": model, **numbers}
    tree["opt_param_scheduler"] = {"max_lr": 0.5, "num_steps": 20}
    path = folder / "run" / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    text_file(folder / "run" / "latest_checkpointed_iteration.txt", "5")
    return saved(path, tree)


@loads("`model_optim_rng.pt` of Megatron-LM", "model, states args, opt_param_scheduler")
def _(folder):
    path, tree = megatron(folder)
    states = {"args": {"lr": 0.5}, "opt_param_scheduler": tree["opt_param_scheduler"]}
    return Sample(path, tree["model"], states=states, metadata={"iteration": 5})


refused("the folder of Megatron-LM's steps", "unparsed", "iter_0000005")(
    lambda folder: megatron(folder)[0].parents[2]
)


# ---- torch.distributed.checkpoint ----


def read_dcp(path):
    """Return the tree of a folder of DCP, as torch's own reader returns it."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    tree = {}
    reader, planner = dcp.FileSystemReader(path), _EmptyStateDictLoadPlanner()
    _load_state_dict(tree, storage_reader=reader, planner=planner, no_dist=True)
    return tree


def dcp_folder(path, tree):
    dcp.save(tree, checkpoint_id=path)
    return path, read_dcp(path)


loads("DCP of a state dict", "model", "structure")(
    lambda folder: Sample(*dcp_folder(folder / "c", network()[0].state_dict()))
)


loads("DCP of model, optimizer and numbers", "model, optimizer", "structure")(
    lambda folder: run_sample(*dcp_folder(folder / "c", run_tree()))
)


@loads("DCP of `AppState`, as in torch's tutorial", "model, optimizer, states rng", "structure")
def _(folder):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(*network()[:2])
    app = {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state(), "epoch": 3}
    path, tree = dcp_folder(folder / "c", {"app": app})
    return run_sample(path, tree["app"])._replace(states={"rng": tree["app"]["rng"]})


@loads("a folder of torch_checkpointing", "model, optimizer")
def _(folder):
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    config = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage)
    manager = CheckpointManager(config)
    manager.save(str(folder / "c"), run_tree())
    manager.close()
    files = {"model": "model_0.pt", "optimizer": "optimizer_0.pt"}
    return run_sample(folder / "c", {k: read_torch(folder / "c" / f) for k, f in files.items()})


_ranks: list[Path] = []  # the folder that two ranks have written, once for all kinds


def of_ranks(name, folder):
    """Return a copy of a folder that two ranks wrote, and the expected values of all of them."""
    import foreign_ranks
    import gloo_ranks

    if not _ranks:
        place = folder / "ranks"
        place.mkdir()
        gloo_ranks.run(2, functools.partial(foreign_ranks.write_all, folder=place))
        _ranks.append(place)
    path = shutil.copytree(_ranks[0] / name, folder / "copy" / name)
    return path, read_torch(_ranks[0] / "expected.pt")


@loads("DCP of FSDP2", "model, optimizer", "structure")
def _(folder):
    path, expected = of_ranks("fsdp2", folder)
    optimizer = moments(read_dcp(path)["optim"])
    return Sample(path, expected["model"], optimizer, fills=True)


TITAN = "model, optimizer, states dataloader, lr_scheduler, train_state"


@loads("a step of torchtitan", TITAN, "structure")
def _(folder):
    path, expected = of_ranks("titan/step-2", folder)
    tree = read_dcp(path)
    optimizer = {
        key.removeprefix("state."): value
        for key, value in tree["optimizer"].items()
        if key.startswith("state.")
    }
    states = {name: tree[name] for name in ("train_state", "lr_scheduler", "dataloader")}
    return Sample(path, expected["model"], optimizer, states, fills=True)


def hf_writer(name, folder):
    path, expected = of_ranks(name, folder)
    return Sample(path, expected["model"])


loads("`HuggingFaceStorageWriter` of torch", "model", "structure")(
    lambda folder: hf_writer("hf-whole", folder)
)


loads("`HuggingFaceStorageWriter(save_distributed=True)`", "model", "structure")(
    lambda folder: hf_writer("hf-shards", folder)
)


loads("the same, and `enable_consolidation=True`", "model", "structure")(
    lambda folder: hf_writer("hf-consolidated", folder)
)


refused("one file of `save_distributed=True`", "unparsed", "all ranks")(
    lambda folder: min(of_ranks("hf-shards", folder)[0].glob("*.safetensors"))
)


def rank_files(name, folder):
    """Return the folder of verl or SkyRL that two ranks wrote."""
    path, expected = of_ranks(name, folder)
    files = [path / f"extra_state_world_size_2_rank_{rank}.pt" for rank in range(2)]
    rngs = tuple(read_torch(file)["rng"]["cpu"] for file in files)
    states = {"lr_scheduler": expected["scheduler"]}
    optimizer = moments(expected["optimizer"])
    return Sample(path, expected["model"], optimizer, states, by_rank=rngs, fills=True)


loads("rank files of verl", "model, optimizer, states lr_scheduler, rng")(
    lambda folder: rank_files("verl/global_step_2/actor", folder)
)


loads("rank files of SkyRL", "model, optimizer, states client_state, lr_scheduler, rank, rng")(
    lambda folder: rank_files("skyrl", folder)
)


@refused("rank files of SkyRL, one missing", "damaged", "rank_1")
def _(folder):
    path = of_ranks("skyrl", folder)[0]
    (path / "model_world_size_2_rank_1.pt").unlink()
    return path


# ---- formats that mlstate does not read ----

for _title, _name, _word in (
    ("orbax", "orbax", "orbax"),
    ("the steps of orbax's manager", "orbax-manager", "steps 3"),
    ("Zarr 2", "zarr-2", "Zarr"),
    ("Zarr 3", "zarr-3", "Zarr"),
    ("a checkpoint of TensorFlow", "tensorflow-checkpoint", "TensorFlow"),
    ("a saved model of TensorFlow", "tensorflow-saved-model", "TensorFlow"),
):
    refused(_title, "unparsed", _word)(lambda folder, name=_name: stored(name, folder))


# ---- not a checkpoint ----


@refused("a folder that holds only a pointer of git-LFS", "damaged", "git lfs pull")
def _(folder):
    text_file(folder / "config.json", "{}")
    text_file(folder / "model.safetensors", LFS)
    return folder


@refused("an empty folder", "unparsed", "empty")
def _(folder):
    (folder / "model").mkdir()
    return folder / "model"


@refused("a folder of unknown files", "unparsed", "tokens.arrow")
def _(folder):
    (folder / "data").mkdir()
    (folder / "data" / "tokens.arrow").write_bytes(b"ARROW1\0\0" + bytes(range(64)))
    return folder / "data"


# ---- mlstate ----


@loads("a checkpoint of mlstate", "model, optimizer, states scheduler")
def _(folder):
    import mlstate

    model, optimizer, scheduler = network()
    states = {"scheduler": scheduler}
    mlstate.save(folder / "c", model, optimizer, states=states, metadata={"epoch": 3})
    named = dict(zip(range(4), model.state_dict(), strict=True))
    tensors = {"state": {named[n]: v for n, v in optimizer.state_dict()["state"].items()}}
    states = {"scheduler": scheduler.state_dict()}
    return Sample(
        folder / "c", model.state_dict(), moments(tensors), states, {"epoch": 3}, fills=True
    )


@loads("a run of `CheckpointManager`", "model")
def _(folder):
    from mlstate.checkpoint import CheckpointManager

    with CheckpointManager(folder / "run") as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.full(3, step)})
    return Sample(folder / "run", {"w": np.full(3, 2)})


if __name__ == "__main__":
    print(table())
