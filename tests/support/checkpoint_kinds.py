"""Checkpoints of twelve kinds, each written and read by the library that it belongs to.

`KINDS` maps a name to a `Kind`. Libraries are imported when a kind is written.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Kind(NamedTuple):
    """How to write a checkpoint into a new folder, and how its own library reads it.

    `write` takes the folder and the width of the model, and returns the path. `read` returns the
    tensors by name. `has_ranges` tells whether a rank can read its part of the bytes alone.
    """

    write: Callable[[Path, int], Path]
    read: Callable[[Path], dict[str, Any]]
    modules: tuple[str, ...]
    has_ranges: bool

    def missing(self) -> str | None:
        """Return a module that is not installed; None if all are."""
        return next((m for m in self.modules if importlib.util.find_spec(m) is None), None)


def arrays_of(width: int) -> dict[str, np.ndarray]:
    """Return the tensors of a plain model: eight matrices and their biases."""
    rng = np.random.default_rng(0)
    state: dict[str, np.ndarray] = {}
    for layer in range(8):
        state[f"layers.{layer}.weight"] = rng.standard_normal((width, width), np.float32)
        state[f"layers.{layer}.bias"] = rng.standard_normal(width, np.float32)
    return state


def tensors_of(width: int) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays_of(width).items()}


# ---- mlstate, safetensors, NumPy, torch ----


def _write_mlstate(folder: Path, width: int) -> Path:
    import mlstate

    mlstate.save(folder / "ours", arrays_of(width))
    return folder / "ours"


def _read_mlstate(path: Path) -> dict[str, Any]:
    import mlstate

    return dict(mlstate.load(path).model)


def _write_safetensors(folder: Path, width: int) -> Path:
    from safetensors.numpy import save_file

    save_file(arrays_of(width), folder / "model.safetensors")
    return folder / "model.safetensors"


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(path))


def _write_npz(folder: Path, width: int) -> Path:
    np.savez(folder / "model.npz", **arrays_of(width))
    return folder / "model.npz"


def _read_npz(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return dict(file)


def _write_pt(folder: Path, width: int) -> Path:
    import torch

    torch.save(tensors_of(width), folder / "model.pt")
    return folder / "model.pt"


def _read_pt(path: Path) -> dict[str, Any]:
    import torch

    return dict(torch.load(path, weights_only=True))


def _write_dcp(folder: Path, width: int) -> Path:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.distributed is not initialized
        dcp.save(tensors_of(width), checkpoint_id=folder / "dcp")
    return folder / "dcp"


def _read_dcp(path: Path) -> dict[str, Any]:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in metadata.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)
    return state


# ---- transformers, diffusers, PEFT ----


def _llama(width: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(2, width // 64)
    config = LlamaConfig(
        vocab_size=width,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    return LlamaForCausalLM(config)


def _write_pretrained(folder: Path, width: int) -> Path:
    _llama(width).save_pretrained(folder / "hf")
    return folder / "hf"


def _write_sharded(folder: Path, width: int) -> Path:
    _llama(width).save_pretrained(folder / "hf", max_shard_size=8 * width * width)
    return folder / "hf"


def _read_pretrained(path: Path) -> dict[str, Any]:
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(path)
    return dict(model.state_dict())


def _write_diffusers(folder: Path, width: int) -> Path:
    import torch
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    channels = max(32, width // 4)
    model = AutoencoderKL(block_out_channels=(channels,), norm_num_groups=8)
    model.save_pretrained(folder / "vae", max_shard_size=16 * channels * channels * 9)
    return folder / "vae"


def _read_diffusers(path: Path) -> dict[str, Any]:
    from diffusers import AutoencoderKL

    return dict(AutoencoderKL.from_pretrained(path, low_cpu_mem_usage=False).state_dict())


def _write_adapter(folder: Path, width: int) -> Path:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=max(2, width // 8), target_modules=["q_proj", "v_proj"])
    get_peft_model(_llama(width), config).save_pretrained(folder / "adapter")
    return folder / "adapter"


def _read_adapter(path: Path) -> dict[str, Any]:
    from peft import load_peft_weights

    return dict(load_peft_weights(str(path), device="cpu"))


# ---- trainers ----


def _write_lightning(folder: Path, width: int) -> Path:
    import torch
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(8))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        trainer.strategy.connect(Module())
        trainer.save_checkpoint(folder / "last.ckpt", weights_only=True)
    return folder / "last.ckpt"


def _read_lightning(path: Path) -> dict[str, Any]:
    import torch

    return dict(torch.load(path, weights_only=False)["state_dict"])


def _write_trainer(folder: Path, width: int) -> Path:
    import torch
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2
    arguments = TrainingArguments(
        str(folder), max_steps=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(_llama(width), arguments, train_dataset=rows).train()
    return folder / "checkpoint-1"


# ---- mlx ----


def _write_prompt(folder: Path, width: int) -> Path:
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache, save_prompt_cache

    rng = np.random.default_rng(0)
    caches = []
    for _ in range(4):
        cache = KVCache()
        keys = mx.array(rng.standard_normal((1, 8, width, 64), np.float32))
        cache.update_and_fetch(keys, keys + 1)
        caches.append(cache)
    save_prompt_cache(str(folder / "prompt.safetensors"), caches)
    return folder / "prompt.safetensors"


def _read_prompt(path: Path) -> dict[str, Any]:
    import mlx.core as mx

    return {name: np.array(array) for name, array in mx.load(str(path)).items()}


_HF = ("torch", "transformers")
KINDS = {
    "mlstate": Kind(_write_mlstate, _read_mlstate, (), True),
    "safetensors": Kind(_write_safetensors, _read_safetensors, ("torch", "safetensors"), True),
    "Hugging Face": Kind(_write_pretrained, _read_pretrained, _HF, True),
    "Hugging Face, sharded": Kind(_write_sharded, _read_pretrained, _HF, True),
    "diffusers": Kind(_write_diffusers, _read_diffusers, ("torch", "diffusers"), True),
    "PEFT": Kind(_write_adapter, _read_adapter, (*_HF, "peft"), True),
    "torch DCP": Kind(_write_dcp, _read_dcp, ("torch",), False),
    "torch .pt": Kind(_write_pt, _read_pt, ("torch",), False),
    "NumPy .npz": Kind(_write_npz, _read_npz, (), False),
    "Lightning .ckpt": Kind(_write_lightning, _read_lightning, ("torch", "lightning"), False),
    "transformers' Trainer": Kind(_write_trainer, _read_pretrained, (*_HF, "accelerate"), True),
    "mlx prompt cache": Kind(_write_prompt, _read_prompt, ("mlx", "mlx_lm"), True),
}
