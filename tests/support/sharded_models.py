"""A small torch model, its training, and its wrappers that shard it."""

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


def model(dtype=torch.float32, seed=0):
    """Five rows: uneven on two ranks, none for the last of four."""
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.LayerNorm(5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
    )
    layers.register_buffer("scale", torch.arange(3.0) + seed)
    return layers.to(dtype)


def train(module, optimizer, steps=2, dtype=torch.float32):
    torch.manual_seed(7)  # the same data on all ranks, so that sums have the same bits
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(4, 3, dtype=dtype)).square().sum().backward()
        optimizer.step()


def trained(module, make=torch.optim.Adam, **keywords):
    """Train a module; return its optimizer."""
    optimizer = make(module.parameters())
    train(module, optimizer, **keywords)
    return optimizer


def flat(module, original=False, **keywords):
    keywords = {"device_id": torch.device("cpu"), "use_orig_params": original, **keywords}
    return FullyShardedDataParallel(module, **keywords)


def sharded(module, **keywords):
    fully_shard(module[0], **keywords)
    return fully_shard(module, **keywords)
