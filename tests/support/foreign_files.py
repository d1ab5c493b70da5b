"""Files and folders of other programs: how each is written, and what mlstate does with it.

`KINDS` maps a title to a `Kind`, whose `write` writes into a new folder and returns a `Sample`: the
path, and the values that the program's own reader returns. Programs that the tests do not install
wrote the files of tests/golden/foreign. `python tests/support/foreign_files.py` prints the table of
docs/coming_from.md.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import io
import json
import pickle
import shutil
import tarfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STORED = Path(__file__).parents[1] / "golden" / "foreign"
VERIFIED = {  # answers of `verify`: cells of the table
    "good": "good: checksums compared",
    "structure": "good: structure only",
    "intact": "intact, not loadable (3)",
    "damaged": "damaged, or no checkpoint (1)",
    "unparsed": "refused (2)",
}


class Sample(NamedTuple):
    """A written file or folder, and the tensors and values that its own reader returns.

    `optimizer` has keys ``"<parameter>.<state>"``. `metadata` may lack entries that do not matter.
    `by_rank` are values of which each rank saved another. If `fills`, the file holds the run of
    `network`.
    """

    path: Path
    model: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    states: dict[str, Any] = {}  # noqa: RUF012 (not changed)
    metadata: dict[str, Any] = {}  # noqa: RUF012
    by_rank: tuple[Any, ...] = ()
    fills: bool = False


class Kind(NamedTuple):
    """What mlstate does with one kind of file.

    `holds` names what `load` returns; it is empty if `load` refuses the file with an error that
    contains all `words`. `verify` is a key of `VERIFIED`. A load warns with text that matches
    `warns`, or not at all.
    """

    title: str
    write: Callable[[Path], Sample | Path]
    holds: str
    words: tuple[str, ...]
    verify: str
    warns: str | None
    needs: tuple[str, ...]

    def missing(self) -> str | None:
        """Return a module that is not installed; None if all are."""
        return next((m for m in self.needs if importlib.util.find_spec(m) is None), None)

    def sample(self, folder: Path) -> Sample:
        """Write the files without the warnings of the programs that write them."""
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            sample = self.write(folder)
        return sample if isinstance(sample, Sample) else Sample(sample)


KINDS: dict[str, Kind] = {}


def loads(title, holds, verify="good", *, warns=None, needs=("torch",)):
    """Register the writer of a kind that `load` reads."""

    def register(write):
        KINDS[title] = Kind(title, write, holds, (), verify, warns, needs)
        return write

    return register


def refused(title, verify, *words, needs=()):
    """Register the writer of a kind that `load` refuses with an error that has these words."""

    def register(write):
        KINDS[title] = Kind(title, write, "", words, verify, None, needs)
        return write

    return register


def table() -> str:
    """Return the table of docs/coming_from.md."""
    rows = ["| file or folder | load, inspect, convert | verify |", "| --- | --- | --- |"]
    for title, _, holds, words, verify, warns, _ in KINDS.values():
        cell = holds or "refused" + (", naming " if words else "") + ", ".join(words)
        cell += "; warns of the rest" if warns else ""
        rows.append(f"| {title} | {cell} | {VERIFIED[verify]} |")
    return "\n".join(rows)


# ---- values ----


def network(seed=0, steps=2, shard=lambda model: model):
    """Return a trained model, its optimizer, and its scheduler; `shard` divides the model."""
    import torch

    torch.manual_seed(seed)
    layers = OrderedDict(first=torch.nn.Linear(3, 4), second=torch.nn.Linear(4, 2))
    model = shard(torch.nn.Sequential(layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def moments(optimizer):
    """Return the tensors of a state dict of torch by ``"<parameter>.<state>"``."""
    return {
        f"{f'param_{key}' if str(key).isdigit() else key}.{name}": value
        for key, states in optimizer["state"].items()
        for name, value in states.items()
    }


def read_dcp(path):
    """Return the tree of a folder of DCP, as torch's own reader returns it."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    tree: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(tree, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)
    return tree


def read_safetensors(*paths):
    from safetensors.torch import load_file

    return {name: value for path in paths for name, value in load_file(path).items()}


def read_torch(path):
    import torch

    return torch.load(path, weights_only=False)


def text_file(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def stored(name, folder):
    """Unpack the files that a program wrote, of tests/golden/foreign; return the only entry."""
    with zipfile.ZipFile(STORED / f"{name}.zip") as archive:
        archive.extractall(folder)
    [path] = folder.iterdir()
    return path


# ---- files of torch.save ----


def run_tree():
    model, optimizer, _ = network()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def run_sample(path, tree):
    """Return the sample of a tree of model, optimizer and epoch that `path` holds."""
    optimizer = moments(tree["optimizer"])
    return Sample(path, tree["model"], optimizer, metadata={"epoch": 3}, fills=True)


def saved(path, value, **options):
    """Write a file by ``torch.save``; return its path, and what ``torch.load`` returns."""
    import torch

    torch.save(value, path, **options)
    return path, torch.load(path, weights_only=False)


@loads("`torch.save` of a state dict", "model")
def _(folder):
    return Sample(*saved(folder / "a.pt", network()[0].state_dict()))


@loads("the same in the format before torch 1.6", "model", "structure")
def _(folder):
    options = {"_use_new_zipfile_serialization": False}
    return Sample(*saved(folder / "a.pt", network()[0].state_dict(), **options))


@loads("`torch.save` of model, optimizer and numbers", "model, optimizer")
def _(folder):
    return run_sample(*saved(folder / "a.pth.tar", run_tree()))


@loads("the same in the format before torch 1.6, optimizer", "model, optimizer", "structure")
def _(folder):
    return run_sample(*saved(folder / "a.pth", run_tree(), _use_new_zipfile_serialization=False))


@loads("tensors and numbers in one dict", "model")
def _(folder):
    import torch

    numbers = {"epoch": 3, "lr": 0.5, "flag": True, "note": "n", "none": None}
    path, tree = saved(folder / "a.th", {"w": torch.ones(2), **numbers})
    return Sample(path, {"w": tree["w"]}, metadata=numbers)


@loads(
    "model, optimizer, EMA, scheduler and generators", "model, optimizer, states ema, rng, sched"
)
def _(folder):
    import torch

    model, _, scheduler = network()
    states = {"ema": model.state_dict(), "sched": scheduler.state_dict()}
    states["rng"] = torch.get_rng_state()
    path, tree = saved(folder / "a.tar", {**run_tree(), **states})
    return run_sample(path, tree)._replace(states={name: tree[name] for name in states})


@loads("a model of tied and expanded tensors, bf16 and float8", "model")
def _(folder):
    import torch

    base = torch.arange(6.0).reshape(2, 3)
    tree = {"tied": base, "same": base, "column": base[:, 1], "wide": torch.ones(1).expand(3)}
    tree |= {"half": base.bfloat16(), "small": base.to(torch.float8_e4m3fn), "none": base[:0]}
    return Sample(*saved(folder / "a.model", tree))


@loads("`optimizer.bin`: an optimizer alone", "optimizer")
def _(folder):
    path, tree = saved(folder / "optimizer.bin", network()[1].state_dict())
    return Sample(path, optimizer=moments(tree))


@refused("a model with a conjugated view", "intact", "'view'", "resolve_conj", needs=("torch",))
def _(folder):
    import torch

    return saved(folder / "a.pt", {"view": torch.tensor([1 + 2j]).conj()})[0]


@refused("a model of a meta tensor", "intact", "'w'", "meta", needs=("torch",))
def _(folder):
    import torch

    return saved(folder / "a.pt", {"w": torch.ones(2, device="meta"), "v": torch.ones(2)})[0]


@refused("a model with a sparse tensor", "intact", "'w'", "sparse", needs=("torch",))
def _(folder):
    import torch

    return saved(folder / "a.pt", {"w": torch.eye(2).to_sparse(), "v": torch.ones(2)})[0]


@refused("a model quantized by torchao", "intact", "'0.weight'", "Int8Tensor", needs=("torch",))
def _(folder):
    return stored("torchao", folder)


@loads("an 8-bit optimizer of bitsandbytes", "model, optimizer")
def _(folder):
    path = stored("bitsandbytes-optimizer", folder)
    tree = read_torch(path)
    return Sample(path, tree["model"])  # its states are nested dicts, and have no names


@refused("`training_args.bin` of transformers", "intact", "TrainingArguments",
         needs=("torch", "transformers"))  # fmt: skip
def _(folder):
    from transformers import TrainingArguments

    arguments = TrainingArguments(str(folder), report_to=[], use_cpu=True)
    return saved(folder / "training_args.bin", arguments)[0]


@refused("`torch.save` of an `argparse.Namespace`", "intact", needs=("torch",))
def _(folder):
    return saved(folder / "args.pt", argparse.Namespace(lr=1e-3))[0]


@refused("`torch.save` of a module", "intact", "Sequential", needs=("torch",))
def _(folder):
    return saved(folder / "module.pt", network()[0])[0]


@refused("TorchScript", "intact", "TorchScript", needs=("torch",))
def _(folder):
    import torch

    torch.jit.trace(network()[0], torch.ones(1, 3)).save(folder / "module.pt")
    return folder / "module.pt"


@refused("`torch.export` (`.pt2`)", "intact", "torch.export", needs=("torch",))
def _(folder):
    import torch

    torch.export.save(torch.export.export(network()[0], (torch.ones(1, 3),)), folder / "a.pt2")
    return folder / "a.pt2"


# ---- flat files ----


@loads("safetensors of torch", "model", "structure", needs=("torch", "safetensors"))
def _(folder):
    from safetensors.torch import save_file

    path = folder / "a.safetensors"
    save_file(network()[0].state_dict(), path, {"note": "n"})
    return Sample(path, read_safetensors(path), metadata={"note": "n"})


@loads("safetensors named `pytorch_model.bin`", "model", "structure", needs=("safetensors",))
def _(folder):
    from safetensors.numpy import load_file, save_file

    save_file({"w": np.arange(6.0).reshape(2, 3), "n": np.array(3)}, folder / "pytorch_model.bin")
    return Sample(folder / "pytorch_model.bin", load_file(folder / "pytorch_model.bin"))


@loads("safetensors of mlx", "model", "structure", needs=("mlx",))
def _(folder):
    import mlx.core as mx

    mx.save_safetensors(str(folder / "a.safetensors"), {"w": mx.ones((2, 3)), "n": mx.arange(3)})
    values = mx.load(str(folder / "a.safetensors"))
    return Sample(folder / "a.safetensors", {name: np.array(a) for name, a in values.items()})


def npz(path, write, **arrays):
    write(path, **arrays)
    with np.load(path) as file:
        return Sample(path, dict(file))


@loads("`numpy.savez`", "model", needs=())
def _(folder):
    return npz(folder / "a.npz", np.savez, w=np.arange(6.0).reshape(2, 3).T, n=np.array(3))


@loads("`numpy.savez_compressed`", "model", needs=())
def _(folder):
    return npz(folder / "a.npz", np.savez_compressed, w=np.ones((2, 3), np.float16))


@refused("`numpy.savez` of bfloat16 of ml_dtypes", "intact", "'w'", "cast=", needs=("ml_dtypes",))
def _(folder):
    import ml_dtypes

    np.savez(folder / "a.npz", w=np.ones(2, ml_dtypes.bfloat16))
    return folder / "a.npz"


@refused("`numpy.savez` of objects", "intact", "'w'", "object")
def _(folder):
    np.savez(folder / "a.npz", w=np.array([{}, None], object))
    return folder / "a.npz"


@loads("`mlstate.save_file`", "model", needs=())
def _(folder):
    import mlstate

    arrays = {"w": np.arange(6.0).reshape(2, 3)}
    mlstate.save_file(arrays, folder / "a.safetensors")
    return Sample(folder / "a.safetensors", arrays)


# ---- Hugging Face ----


def llama():
    import torch
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


HF = ("torch", "transformers")


@loads("`save_pretrained` of transformers", "model", "structure", needs=HF)
def _(folder):
    return pretrained(folder / "model")


@loads("the same in several files", "model", "structure", needs=HF)
def _(folder):
    return pretrained(folder / "model", max_shard_size="2KB")


@loads("the same, and checksums of `mlstate checksum`", "model", needs=HF)
def _(folder):
    from mlstate.cli import main

    sample = pretrained(folder / "model", max_shard_size="2KB")
    assert main(["checksum", str(sample.path)]) == 0
    return sample


@loads("a folder of `pytorch_model.bin` (transformers 4)", "model", needs=HF)
def _(folder):
    sample = pretrained(folder / "model")
    saved(sample.path / "pytorch_model.bin", sample.model)
    (sample.path / "model.safetensors").unlink()
    return sample


@loads("a folder of `pytorch_model-0000N-of-0000M.bin`", "model", needs=HF)
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


@loads("`models--a--b` of the Hub's cache", "model", needs=HF)
def _(folder):
    return hub_cache(folder)[0]


@loads("a snapshot of the Hub's cache", "model", needs=HF)
def _(folder):
    sample, snapshot = hub_cache(folder)
    return sample._replace(path=snapshot)


@refused("a snapshot whose link leads nowhere", "damaged", "model.safetensors", "blobs", needs=HF)
def _(folder):
    _, snapshot = hub_cache(folder)
    (snapshot / "model.safetensors").resolve().unlink()
    return snapshot


@refused("a folder whose index names a missing file", "damaged",
         "model-00001-of-", needs=HF)  # fmt: skip
def _(folder):
    path = pretrained(folder / "model", max_shard_size="2KB").path
    min(path.glob("model-00001-of-*")).unlink()
    return path


@loads("an adapter of PEFT", "model", "structure", needs=(*HF, "peft"))
def _(folder):
    from peft import LoraConfig, get_peft_model, load_peft_weights

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    get_peft_model(llama(), config).save_pretrained(folder / "adapter")
    return Sample(folder / "adapter", load_peft_weights(str(folder / "adapter"), device="cpu"))


@loads("8-bit weights of bitsandbytes", "model", "structure", needs=HF)
def _(folder):
    path = stored("bitsandbytes-8", folder)
    return Sample(path, read_safetensors(path / "model.safetensors"))


@loads("4-bit weights of bitsandbytes", "model", "structure", needs=HF)
def _(folder):
    path = stored("bitsandbytes-4", folder)
    return Sample(path, read_safetensors(path / "model.safetensors"))


@loads("sentence-transformers: the first module", "model", "structure",
       warns=r"2_Dense", needs=HF)  # fmt: skip
def _(folder):
    path = stored("sentence-transformers", folder)
    return Sample(path, read_safetensors(path / "model.safetensors"))


@loads("a model of diffusers", "model", "structure", needs=("torch", "diffusers"))
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


@refused("a pipeline of diffusers", "unparsed", "unet", needs=("torch", "diffusers"))
def _(folder):
    from diffusers import DDPMPipeline, DDPMScheduler

    DDPMPipeline(unet(), DDPMScheduler()).save_pretrained(folder / "pipeline")
    return folder / "pipeline"


# ---- trainers ----


def lightning_sample(path, count):
    """Write a checkpoint of Lightning with `count` optimizers."""
    import torch
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
    needs=("torch", "lightning"),
)
def _(folder):
    sample, [optimizer] = lightning_sample(folder / "a.ckpt", 1)
    return sample._replace(optimizer=optimizer)


@loads("`.ckpt` of Lightning with two optimizers",
       "model, states callbacks, loops, lr_schedulers, optimizer_0, optimizer_1",
       needs=("torch", "lightning"))  # fmt: skip
def _(folder):
    sample, optimizers = lightning_sample(folder / "a.ckpt", 2)
    return sample._replace(states={f"optimizer_{n}": each for n, each in enumerate(optimizers)})


TRAINER = (*HF, "accelerate")


def trainer_run(folder):
    """Train two steps by transformers, with a checkpoint of each."""
    import torch
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2
    options = {"max_steps": 2, "save_steps": 1, "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(str(folder / "run"), use_cpu=True, **options)
    Trainer(llama(), arguments, train_dataset=rows).train()
    return folder / "run"


@loads("a step of transformers' Trainer", "model, optimizer, states rng_state, scheduler",
       "structure", warns=r"training_args\.bin", needs=TRAINER)  # fmt: skip
def _(folder):
    path = trainer_run(folder) / "checkpoint-2"
    sample = read_pretrained(path)
    optimizer = moments(read_torch(path / "optimizer.pt"))
    files = {"rng_state": "rng_state.pth", "scheduler": "scheduler.pt"}
    states = {name: read_torch(path / file) for name, file in files.items()}
    metadata = {"global_step": 2}
    return sample._replace(optimizer=optimizer, states=states, metadata=metadata)


@refused("the folder of a Trainer's steps", "unparsed", "checkpoint-1", "checkpoint-2",
         needs=TRAINER)  # fmt: skip
def _(folder):
    return trainer_run(folder)


class Counter:
    """An object that accelerate saves beside model and optimizer."""

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


@loads("`save_state` of accelerate", ACCELERATE, "structure", needs=("torch", "accelerate"))
def _(folder):
    return accelerate_state(folder / "state")


@loads("the same with `safe_serialization=False`", ACCELERATE, needs=("torch", "accelerate"))
def _(folder):
    return accelerate_state(folder / "state", safe_serialization=False)


@loads("`save_state` of accelerate with two models", f"{ACCELERATE}, model_1, optimizer_1, …",
       "structure", needs=("torch", "accelerate"))  # fmt: skip
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


@loads("DeepSpeed, ZeRO 1: the model", "model, states ds_config, …", warns="optim_states")
def _(folder):
    return deepspeed(folder, 1)[0]


@loads("DeepSpeed, ZeRO 2: the model", "model, states ds_config, …", warns="optim_states")
def _(folder):
    return deepspeed(folder, 2)[0]


@loads("`mp_rank_00_model_states.pt` of DeepSpeed", "model, states ds_config, …")
def _(folder):
    sample, _ = deepspeed(folder, 2)
    return sample._replace(path=sample.path / "global_step2" / "mp_rank_00_model_states.pt")


@refused("DeepSpeed, ZeRO 3", "intact", "zero_to_fp32.py", needs=("torch",))
def _(folder):
    return stored("deepspeed-3", folder)


def megatron(folder):
    """Write a run as Megatron-LM's checkpointing.py does, by its names (core 0.15)."""
    import torch

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


@refused("the folder of Megatron-LM's steps", "unparsed", "iter_0000005", needs=("torch",))
def _(folder):
    return megatron(folder)[0].parents[2]


# ---- torch.distributed.checkpoint ----


def dcp_folder(path, tree):
    import torch.distributed.checkpoint as dcp

    dcp.save(tree, checkpoint_id=path)
    return path, read_dcp(path)


@loads("DCP of a state dict", "model", "structure")
def _(folder):
    return Sample(*dcp_folder(folder / "c", network()[0].state_dict()))


@loads("DCP of model, optimizer and numbers", "model, optimizer", "structure")
def _(folder):
    return run_sample(*dcp_folder(folder / "c", run_tree()))


@loads("DCP of `AppState`, as in torch's tutorial", "model, optimizer, states rng", "structure")
def _(folder):
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(*network()[:2])
    app = {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state(), "epoch": 3}
    path, tree = dcp_folder(folder / "c", {"app": app})
    return run_sample(path, tree["app"])._replace(states={"rng": tree["app"]["rng"]})


@loads("a folder of torch_checkpointing", "model, optimizer", needs=("torch_checkpointing",))
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
    import rank_jobs

    if not _ranks:
        place = folder / "ranks"
        place.mkdir()
        program = Path(__file__).parents[1] / "integration" / "checkpoint" / "foreign_ranks.py"
        rank_jobs.check(
            rank_jobs.run_ranks(program, 2, ["write_all"], place / "store"), "write_all"
        )
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


@loads("`HuggingFaceStorageWriter` of torch", "model", "structure")
def _(folder):
    return hf_writer("hf-whole", folder)


@loads("the same with `save_distributed=True`", "model", "structure")
def _(folder):
    return hf_writer("hf-shards", folder)


@loads("the same with `enable_consolidation=True`", "model", "structure")
def _(folder):
    return hf_writer("hf-consolidated", folder)


@refused("one file of `save_distributed=True`", "intact", "shard", needs=("torch",))
def _(folder):
    return min(of_ranks("hf-shards", folder)[0].glob("*.safetensors"))


def rank_files(name, folder):
    """Return the folder of verl or SkyRL that two ranks wrote."""
    path, expected = of_ranks(name, folder)
    files = [path / f"extra_state_world_size_2_rank_{rank}.pt" for rank in range(2)]
    rngs = tuple(read_torch(file)["rng"]["cpu"] for file in files)
    states = {"lr_scheduler": expected["scheduler"]}
    optimizer = moments(expected["optimizer"])
    return Sample(path, expected["model"], optimizer, states, by_rank=rngs, fills=True)


@loads("rank files of verl", "model, optimizer, states lr_scheduler, rng")
def _(folder):
    return rank_files("verl/global_step_2/actor", folder)


@loads("rank files of SkyRL", "model, optimizer, states client_state, lr_scheduler, rank, rng")
def _(folder):
    return rank_files("skyrl", folder)


@refused("rank files without those of one rank", "damaged", "rank_1", needs=("torch",))
def _(folder):
    path = of_ranks("skyrl", folder)[0]
    (path / "model_world_size_2_rank_1.pt").unlink()
    return path


# ---- formats that mlstate does not read ----


def stored_kind(title, name, *words):
    """Register a kind that is recognised and not parsed, of tests/golden/foreign."""
    refused(title, "unparsed", *words)(lambda folder: stored(name, folder))


stored_kind("GGUF", "gguf", "GGUF")
stored_kind("Keras `.keras`", "keras", "Keras")
stored_kind("Keras `.weights.h5`", "keras-weights", "HDF5")
stored_kind("Keras `.h5`", "keras-h5", "HDF5")
stored_kind("ONNX", "onnx", "ONNX")
stored_kind("msgpack of flax", "flax", "flax")
stored_kind("orbax", "orbax", "orbax")
stored_kind("the steps of orbax's manager", "orbax-manager", "orbax")
stored_kind("Zarr 2", "zarr-2", "Zarr")
stored_kind("Zarr 3", "zarr-3", "Zarr")
stored_kind("a checkpoint of TensorFlow", "tensorflow-checkpoint", "TensorFlow")
stored_kind("a saved model of TensorFlow", "tensorflow-saved-model", "TensorFlow")
stored_kind("joblib of scikit-learn", "scikit-learn", "pickle")


@refused("a bare pickle", "unparsed", "pickle")
def _(folder):
    (folder / "a.pkl").write_bytes(pickle.dumps({"w": np.ones(2)}))
    return folder / "a.pkl"


def nemo(path, mode):
    """Write an archive as NeMo does: the configuration and the weights of a model."""
    with tarfile.open(path, mode) as archive:
        for name in ("model_config.yaml", "model_weights.ckpt"):
            info = tarfile.TarInfo(f"./{name}")
            info.size = 4
            archive.addfile(info, io.BytesIO(b"a: 1"))
    return path


@refused("`.nemo` (a tar archive)", "unparsed", "tar")
def _(folder):
    return nemo(folder / "model.nemo", "w")


@refused("a compressed tar archive", "unparsed", "gzip")
def _(folder):
    return nemo(folder / "model.tar.gz", "w:gz")


# ---- what is not a checkpoint, or damaged ----

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 12345\n".format("ab" * 32)
TEXTS = {
    "a pointer of git-LFS": ("model.safetensors", LFS, "git-lfs", "git lfs pull"),
    "a pointer of Xet": (
        "model.safetensors",
        "# xet version 0\nfilesize = 12345\nhash = '{}'\n".format("ab" * 32),
        "Xet",
    ),
    "a page of HTML": ("model.pt", "<!DOCTYPE html>\n<html><body>404</body></html>\n", "HTML"),
    "an error in XML": (
        "model.npz",
        '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>\n',
        "XML",
        "AccessDenied",
    ),
    "an error in JSON": ("model.bin", '{"error": "Repository not found"}\n', "JSON", "not found"),
    "an empty file": ("model.safetensors", "", "empty"),
    "a file of zeros": ("model.pt", "\0" * 4096, "zeros"),
    "a text": ("model.ckpt", "these are not weights\n", "text"),
}
for _title, (_name, _text, *_words) in TEXTS.items():
    refused(_title, "damaged", *_words)(
        lambda folder, name=_name, text=_text: text_file(folder / name, text)
    )


@refused("a folder that holds only a pointer of git-LFS", "damaged", "git lfs pull")
def _(folder):
    text_file(folder / "config.json", "{}")
    text_file(folder / "model.safetensors", LFS)
    return folder


def cut(title, whole):
    """Register the first half of the file that another kind writes."""

    def write(folder):
        path = KINDS[whole].sample(folder).path
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        return path

    refused(title, "damaged", "truncated", needs=KINDS[whole].needs)(write)


cut("safetensors cut short", "safetensors of torch")
cut("`.npz` cut short", "`numpy.savez`")
cut("a file of `torch.save` cut short", "`torch.save` of a state dict")
cut("a file of torch before 1.6 cut short", "the same in the format before torch 1.6")


@refused("an empty folder", "damaged", "empty")
def _(folder):
    (folder / "model").mkdir()
    return folder / "model"


@refused("a folder of unknown files", "damaged", "tokens.arrow")
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


@loads("a run of `CheckpointManager`", "model", needs=())
def _(folder):
    from mlstate.checkpoint import CheckpointManager

    with CheckpointManager(folder / "run") as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.full(3, step)})
    return Sample(folder / "run", {"w": np.full(3, 2)})


if __name__ == "__main__":
    print(table())
