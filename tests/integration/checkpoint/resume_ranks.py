"""One rank of the jobs of test_resume.py and benchmarks/resume_table.py.

A job trains a small transformer:

    {"do": "train", "kind": "fsdp2", "optimizer": "adam", "until": 6, "out": PATH}
    {"do": "save",  ..., "until": 3, "folder": FOLDER}: trains, saves, stores the full state
    {"do": "save",  ..., "staging": BYTES}: trains on while the save is written
    {"do": "resume", ..., "folder": FOLDER}: loads into a new module, then trains on

PATH.RANK.json receives the losses of each step, bit for bit; PATH.pt the full state, gathered by
torch.
"""

import json
import math
import os
import signal
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import mlstate
from mlstate.checkpoint import save_async

WORDS, WIDTH, HEADS, LENGTH, BATCH = 37, 20, 2, 10, 8  # neither 2 nor 4 divides the rows
OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.three, self.back = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.wide = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 50), torch.nn.GELU(), torch.nn.Linear(50, WIDTH)
        )

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.three(self.before(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.back(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.wide(self.between(x))


class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.gain = torch.nn.Parameter(torch.ones(3))  # fewer rows than ranks
        self.out = torch.nn.Linear(WIDTH, WORDS)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        self.calls += 1
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x) * self.gain.mean()


def wrapped(kind, world):
    """The same module in every kind, for any number of ranks."""
    torch.manual_seed(0)
    module = Transformer()
    if kind == "plain":
        # otherwise DDP reorders its buckets after its first step, and so the sums of four ranks
        keywords = {"find_unused_parameters": True}
        return DistributedDataParallel(module, **keywords) if world > 1 else module
    if kind == "fsdp2":
        for block in module.blocks:
            fully_shard(block)
        return fully_shard(module)
    keywords = {"use_orig_params": kind == "fsdp1-orig", "device_id": torch.device("cpu")}
    for number, block in enumerate(module.blocks):
        module.blocks[number] = FullyShardedDataParallel(block, **keywords)
    return FullyShardedDataParallel(module, **keywords)


def batch_of(step, rank, world):
    """The sequences of a rank at a step: all ranks together have the same ones in every world."""
    torch.manual_seed(1000 + step)
    tokens = torch.randint(WORDS, (BATCH, LENGTH + 1))
    tokens[:, 1:] = (tokens[:, :-1] * 3 + 1) % WORDS  # a rule that can be learned
    return tokens[rank::world]


class Run:
    """One rank's module, optimizer and schedule."""

    def __init__(self, job, group):
        self.group = group
        self.module = wrapped(job["kind"], group.world_size)
        self.optimizer = OPTIMIZERS[job["optimizer"]](self.module.parameters())
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.step = 0
        self.losses = []

    def train(self, until):
        while self.step < until:
            tokens = batch_of(self.step, self.group.rank, self.group.world_size)
            self.optimizer.zero_grad()
            logits = self.module(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            self.losses.append(loss.item())

    def save(self, folder, function=mlstate.save, **options):
        return function(
            folder,
            model=self.module,
            optimizer=self.optimizer,
            metadata={"step": self.step, "schedule": self.schedule.state_dict()},
            group=self.group,  # a group that the module does not use
            **options,
        )

    def load(self, folder):
        """Load into the module in place."""
        before = [p.data_ptr() for p in self.module.parameters()]
        into = {"model": self.module, "optimizer": self.optimizer}
        loaded = mlstate.load(folder, into=into, group=self.group)
        assert loaded.model is self.module and loaded.optimizer is self.optimizer
        assert [p.data_ptr() for p in self.module.parameters()] == before
        self.step = loaded.metadata["step"]
        self.schedule.load_state_dict(loaded.metadata["schedule"])

    def full(self):
        """The full state, gathered by torch without mlstate."""
        options = StateDictOptions(full_state_dict=True)
        model = get_model_state_dict(self.module, options=options)
        states = get_optimizer_state_dict(self.module, self.optimizer, options=options)
        return {"model": model, "optimizer": states}

    def write_results(self, out):
        torch.save(self.full(), f"{out}.{self.group.rank}.pt")
        with Path(f"{out}.{self.group.rank}.json").open("w") as file:
            json.dump([float(loss).hex() for loss in self.losses], file)
        assert all(math.isfinite(loss) for loss in self.losses)


def run_all(group, jobs, is_killed):
    """Run jobs one after the other; then, if `is_killed`, kill this process."""
    for job in jobs:
        run(job, group)
    if is_killed:
        group.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def run(job, group):
    training = Run(job, group)
    if job["do"] == "resume":
        training.load(job["folder"])
        if "loaded" in job:
            training.write_results(job["loaded"])
    training.train(job["until"])
    handle = None
    if "staging" in job:
        handle = training.save(job["folder"], save_async, max_staging_bytes=job["staging"])
        handle.staged()
    elif job["do"] == "save":
        training.save(job["folder"])
    training.write_results(job["out"])
    if job["do"] == "save":
        training.train(job["until"] + 1)  # the save must not contain the later step
    if handle is not None:
        assert handle.wait().world_size == group.world_size
