"""Train a small transformer whose state is divided among ranks, and print its loss.

    python examples/train_sharded.py --ranks 2
    python examples/train_sharded.py --ranks 2 --engine gloo --method fsdp2+mlstate
    mpiexec -n 2 python examples/train_sharded.py --engine mpi

The model learns to predict the next byte of source files of Python's standard library.  Three
methods compute the same steps; on two ranks their losses have the same bits:

    mlstate        mlstate's hooks reduce the gradients; each rank updates its parts
    fsdp2          torch's fully_shard with torch's reduce-scatter
    fsdp2+mlstate  torch's fully_shard; mlstate reduces the gradients
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import mlstate
from mlstate.checkpoint import Shard
from mlstate.collectives import LocalGroup
from mlstate.fsdp import FSDP, FSDPBackwardHook, sharding_units
from mlstate.integrations.torch import TorchGroup, reduce_scatter_with

CONTEXT, BATCH = 64, 8
SOURCES = ("argparse.py", "ast.py", "dataclasses.py", "inspect.py", "tarfile.py", "typing.py")


class Model(nn.Module):
    def __init__(self, width=66, heads=3, blocks=2):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        settings = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **settings) for _ in range(blocks)
        )

    def forward(self, text):
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        x = self.embedding(text) + self.positions.weight
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return x @ self.embedding.weight.T  # tied to the input embedding


def read_sources():
    folder = Path(sysconfig.get_path("stdlib"))
    data = b"".join((folder / name).read_bytes() for name in SOURCES)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batch_of(data, step, rank):
    """Return inputs and targets; the samples depend only on the step and the rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator)
    rows = torch.stack([data[i : i + CONTEXT + 1] for i in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


# ---- the methods: each wraps the model, and updates it after each backward pass ----


class WithHooks:
    """Every rank holds all parameters, but only its part of the gradients and of Adam's state."""

    def __init__(self, model, group, layout):
        self.model, self.group, self.layout = model, group, layout
        self.units = sharding_units(model, group, layout=layout)
        FSDPBackwardHook(FSDP(group, op="mean")).register_hooks(model, self.units)
        self.whole = {name: model.get_parameter(name).detach() for name in self.units}
        self.parts = {  # views of the parameters, so the optimizer updates these in place
            name: nn.Parameter(unit.layout.take(self.whole[name], group.rank))
            for name, unit in self.units.items()
        }
        self.optimizer = torch.optim.AdamW(self.parts.values(), lr=3e-3)

    def step(self):
        for name, unit in self.units.items():
            self.parts[name].grad = unit.local_gradient  # the mean over all ranks
        self.optimizer.step()
        self.spread()

    def spread(self):
        """Gather the parts that the other ranks updated."""
        for name, unit in self.units.items():
            part = self.parts[name].detach().flatten().clone()
            self.group.all_gather(part, counts=unit.counts, out=self.whole[name].view(-1))

    def state(self):
        """Return the state to save: this rank's parts of the parameters and of Adam's state."""
        model, optimizer = {}, {}
        for name, part in self.parts.items():
            layout, shape = self.units[name].layout, self.units[name].shape
            model[name] = Shard(part.detach(), layout, self.group.rank, shape=shape)
            for kind, value in self.optimizer.state[part].items():
                if value.dim():  # Adam's step count has no dimensions
                    value = Shard(value, layout, self.group.rank, shape=shape)
                optimizer[f"{name}.{kind}"] = value
        return {"model": model, "optimizer": optimizer}

    def resume(self, path):
        """Load a checkpoint of any number of ranks; return its step."""
        saved = mlstate.load(path, group=self.group, layout=self.layout)
        for name, part in self.parts.items():
            part.data.copy_(torch.from_numpy(saved.model[name]))
            self.optimizer.state[part] = {
                kind: torch.from_numpy(saved.optimizer[f"{name}.{kind}"])
                for kind in ("step", "exp_avg", "exp_avg_sq")
            }
        self.spread()
        return saved.step


class WithFSDP2:
    """FSDP2 shards the model; `group` or torch reduces the gradients."""

    def __init__(self, model, group, uses_mlstate):
        mesh = init_device_mesh("cpu", (group.world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)
        if uses_mlstate:
            reduce_scatter_with(self.model, group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(group, options):
    """Train one rank's model; the first rank prints the mean loss of all."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same initial weights on all ranks
    if options.method == "mlstate":
        trained = WithHooks(Model(), group, options.layout)
    else:
        trained = WithFSDP2(Model(), group, uses_mlstate=options.method == "fsdp2+mlstate")
    path, done = options.checkpoint, 0
    if path and Path(path, "manifest.json").exists():
        done = trained.resume(path)
    data = read_sources()
    for step in range(done, options.steps):
        text, following = batch_of(data, step, group.rank)
        logits = trained.model(text)
        loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten())
        loss.backward()
        trained.step()
        mean = group.all_reduce(loss.detach().reshape(1), op="mean")
        if group.rank == 0:
            print(f"{step:5d}  {mean.item()}", flush=True)
    if path:
        mlstate.save(path, **trained.state(), step=options.steps, group=group)


def work(group, options, folder):
    """Run one rank; `group` connects the processes, and is replaced for another engine."""
    if options.engine == "gloo" or options.method != "mlstate":
        rank, world = group.rank, group.world_size
        store = dist.FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        if options.engine == "gloo":
            group = TorchGroup(dist.new_group())
    train(group, options)
    group.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes; mpiexec has its own -n")
    parser.add_argument("--engine", choices=["local", "gloo", "mpi"], default="local")
    methods = ["mlstate", "fsdp2", "fsdp2+mlstate"]
    parser.add_argument("--method", choices=methods, default="mlstate")
    parser.add_argument("--layout", choices=["rows", "flat"], default="rows", help="for mlstate")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", help="folder to go on from and save to, for mlstate")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.engine == "mpi":
            from mlstate.integrations.mpi import MPIGroup

            with MPIGroup() as group:  # all ranks use the folder of rank 0
                work(group, options, group.gather_bytes(folder.encode())[0].decode())
        else:
            LocalGroup.run(work, options.ranks, options, folder)


if __name__ == "__main__":
    main()
