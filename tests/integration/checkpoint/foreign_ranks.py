"""Two ranks that write sharded checkpoints by torch, for tests/support/foreign_folders.py."""

import pickle
import random

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from foreign_kinds import network
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.fsdp import fully_shard


def join_shards(tree):
    """Return a tree whose DTensors are joined."""
    if isinstance(tree, dict):
        return {key: join_shards(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(join_shards(value) for value in tree)
    return tree.full_tensor() if hasattr(tree, "full_tensor") else tree


def write_all(group, folder):
    model, optimizer, scheduler = network(shard=fully_shard)
    state, moments = get_state_dict(model, optimizer)
    expected = {"model": state, "optimizer": optimizer.state_dict()}
    expected = join_shards({**expected, "scheduler": scheduler.state_dict()})
    if group.rank == 0:
        torch.save(expected, folder / "expected.pt")

    dcp.save({"model": state, "optim": moments}, checkpoint_id=folder / "fsdp2")

    # torchtitan 0.3, components/checkpointer/dcp.py: the model's names at the top
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    titan = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    titan["train_state"] = {"step": 2, "ntokens_seen": 12}
    titan["lr_scheduler"] = {"last_epoch": 2}
    titan["dataloader"] = {
        f"dp_rank_{group.rank}": pickle.dumps({"n": group.rank}),
        "world_size": 2,
    }
    dcp.save({**state, **titan}, checkpoint_id=folder / "titan" / "step-2")

    for name, options in {
        "hf-shards": {"save_distributed": True},
        "hf-consolidated": {"save_distributed": True, "enable_consolidation": True},
    }.items():
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder / name, **options))
    full = join_shards(state)
    if group.rank == 0:
        writer = HuggingFaceStorageWriter(folder / "hf-whole")
        dcp.save(full, storage_writer=writer, no_dist=True)

    # verl 0.9, utils/checkpoint/fsdp_checkpoint_manager.py, and SkyRL 0.4, fsdp_strategy.py
    torch.manual_seed(group.rank)
    generators = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state()}
    generators["random"] = random.getstate()
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": generators}
    skyrl = {"client_state": {"epoch": 3}, "tag": "step", "fsdp_strategy": "fsdp2"}
    skyrl |= {"world_size": 2, "rank": group.rank}
    for name, added in {"verl/global_step_2/actor": {}, "skyrl": skyrl}.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        parts = {"model": state, "optim": optimizer.state_dict(), "extra_state": extra | added}
        for part, value in parts.items():
            torch.save(value, folder / name / f"{part}_world_size_2_rank_{group.rank}.pt")
