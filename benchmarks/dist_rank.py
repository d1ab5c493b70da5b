"""One rank of `bench_dist.py`, and its ways to reduce gradients: mlstate and other packages.

Each method follows the documentation of its package. It keeps its memory from one step to the next,
as a training loop does. With MPI, the rank is MPI's; the argument is ignored.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from checkpoint_states import keep_memory
from processes import answer
from resident import forget_peak, peak, trim
from rows import settle

from mlstate import _core
from mlstate.collectives import LocalGroup
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit

BUCKET_BYTES = 25 << 20
LIMIT_SECONDS = 60.0
LEAVES = 8  # micro-batches of a rank in a step


# ---- GPT-2 small as its 148 parameters ----

WORLD = 2
PERIOD = 1_000_003  # length of the repeated numbers: divides no size of the model
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, torch.Tensor]


def shapes_of(quick: bool) -> Shapes:
    """Shapes by name, in the order of the forward pass; a small model for a quick look."""
    width, tokens = (64, 5_003) if quick else (768, 50_257)
    shapes: Shapes = {"wte": (tokens, width), "wpe": (1024, width)}
    for block in range(12):
        for name, shape in (
            ("ln_1", (width,)),
            ("attn.c_attn", (width, 3 * width)),
            ("attn.c_proj", (width, width)),
            ("ln_2", (width,)),
            ("mlp.c_fc", (width, 4 * width)),
            ("mlp.c_proj", (4 * width, width)),
        ):
            shapes[f"h.{block}.{name}.weight"] = shape
            shapes[f"h.{block}.{name}.bias"] = shape[-1:]
    return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def size_text(quick: bool, dtype: str) -> str:
    """Describe the amount of data to reduce."""
    shapes = shapes_of(quick)
    count = sum(map(prod, shapes.values()))
    size = count * DTYPES[dtype].itemsize
    amount = f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
    return f"{len(shapes)} parameters, {count / 1e6:.3g} M elements, {dtype}, {amount} a rank"


def gradients_one_by_one(
    rank: int, shapes: Shapes, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Full gradients of one rank, separately allocated; any process can make any rank's."""
    noise = torch.Generator().manual_seed(rank)
    numbers = torch.randn(PERIOD, generator=noise).to(dtype)
    at = 0
    for name, shape in shapes.items():
        repeats = -(-(at + prod(shape)) // PERIOD)
        flat = numbers.repeat(repeats)[at : at + prod(shape)].clone()
        at = (at + prod(shape)) % PERIOD
        yield name, flat.view(shape)


def sums_in_order(shapes: Shapes, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Sums in the order of ranks, in float32, rounded once, one parameter at a time."""
    everyones = [gradients_one_by_one(rank, shapes, dtype) for rank in range(WORLD)]
    for (name, first), *others in zip(*everyones, strict=True):
        total = first.float()
        for _, of in others:
            total = total + of.float()
        yield name, total.to(dtype)


def buckets_of(shapes: Shapes, item_bytes: int, most: int) -> list[list[str]]:
    """Names by bucket, in the order of the backward pass; a bucket has at least `most` bytes."""
    buckets: list[list[str]] = []
    size = most
    for name, shape in reversed(shapes.items()):
        if size >= most:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += prod(shape) * item_bytes
    return buckets


class Rank:
    """This process: its rank, its gradients and its groups."""

    def __init__(self, engine: str, job: str, rank: int, folder: Path) -> None:
        self.engine, self.rank, self.folder = engine, rank, folder
        self.local = LocalGroup.join(job, rank, WORLD, operation_timeout=LIMIT_SECONDS)
        self.group: Any = self.local
        if engine == "gloo":
            from mlstate.integrations.torch import TorchGroup

            self.group = TorchGroup(torch.distributed.new_group())
        elif engine != "local":
            from mlstate.integrations.mpi import MPIGroup

            self.group = MPIGroup()
        self.shapes: Shapes = {}
        self.dtype = torch.float32
        self.gradients: Tensors = {}
        self.ways: dict[str, Reduction] = {}

    # ---- commands of the benchmark ----

    def load(self, dtype: str, quick: bool) -> None:
        """Make gradients, and free all memory of an earlier part."""
        for way in self.ways.values():
            way.close()
        self.ways, self.gradients = {}, {}
        gc.collect()
        trim()
        self.dtype, self.shapes = DTYPES[dtype], shapes_of(quick)
        self.gradients = dict(gradients_one_by_one(self.rank, self.shapes, self.dtype))

    def make(self, name: str) -> dict[str, Any]:
        """Make a way, call it once, and return its memory and the bits of its results."""
        gc.collect()
        trim()
        before = forget_peak()
        way = self.ways[name] = WAYS[name](self)
        self.time(name)
        return {"mib": peak() - before, "bits": way.check()}

    def time(self, name: str) -> float:
        """Call a way at the same moment as the other rank; return milliseconds a step."""
        gc.collect()
        gc.disable()
        settle()  # as a training loop would be busy
        self.local.barrier()
        start = time.perf_counter_ns()
        self.ways[name].call()
        elapsed = time.perf_counter_ns() - start
        gc.enable()
        return elapsed * 1e-6


def serve(pipe: Connection, engine: str, job: str, rank: int, folder: Path) -> None:
    """Join all groups, and run commands."""
    warnings.simplefilter("ignore")
    keep_memory()
    torch.set_num_threads(1)
    if engine == "gloo":
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/{job}", rank=rank, world_size=WORLD
        )
    elif engine != "local":
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
    of_rank = Rank(engine, job, rank, folder)
    answer(pipe, {"load": of_rank.load, "make": of_rank.make, "time": of_rank.time})


class Reduction(ABC):
    """A way to reduce; `call` is timed, on every rank at the same moment."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    @abstractmethod
    def call(self) -> None:
        """Reduce the gradients once."""

    def parts(self) -> Tensors | None:
        """This rank's parts of the sums, flat, by parameter; None if there is nothing to check."""
        return None

    def close(self) -> None:  # noqa: B027 - most ways have nothing to give back
        """Release resources other than memory."""

    def check(self) -> str:
        """Compare with sums in the order of ranks: this rank has one of equal chunks."""
        parts = self.parts()
        if parts is None:
            return ""
        differ = count = 0
        for name, total in sums_in_order(self.rank.shapes, self.rank.dtype):
            expected = total.view(-1).chunk(WORLD)[self.rank.rank]
            same = bits(parts[name].view(-1)) == bits(expected)
            differ += len(same) - int(same.sum())
            count += len(same)
        return "same" if differ == 0 else f"{100 * differ / count:.0f} % differ"


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Elements as integers."""
    size = torch.int32 if tensor.element_size() == 4 else torch.int16
    integers: np.ndarray = tensor.contiguous().view(size).numpy()
    return integers


# ---- the limit ----


class Shared(Reduction):
    """Every rank's gradients in shared memory: each rank adds up its half."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        count = sum(map(prod, rank.shapes.values()))
        self.paths = [rank.folder / f"{type(self).__name__}-{number}" for number in range(WORLD)]
        arrays = [shared(path, count, rank.dtype) for path in self.paths]
        torch.cat([g.view(-1) for g in rank.gradients.values()], out=arrays[rank.rank])
        half = count // WORLD
        self.sources = [array[rank.rank * half : (rank.rank + 1) * half] for array in arrays]
        self.out = torch.zeros(half, dtype=rank.dtype)
        rank.local.barrier()

    def call(self) -> None:
        _core.reduce(self.sources, self.out, "sum", 1.0)

    def close(self) -> None:
        self.rank.local.barrier()
        if self.rank.rank == 0:
            for path in self.paths:
                path.unlink()


def shared(path: Path, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Map a file that all ranks map."""
    with path.open("ab") as file:
        os.truncate(file.fileno(), count * dtype.itemsize)
    return torch.from_numpy(np.memmap(path, np.uint8, "r+")).view(dtype)


class SharedNumpy(Shared):
    """The same with NumPy's loop, which does not support bfloat16."""

    def call(self) -> None:
        np.add(self.sources[0].numpy(), self.sources[1].numpy(), out=self.out.numpy())


# ---- mlstate ----


class Ours(Reduction):
    """`scatter_multiple` over a group."""

    def __init__(self, rank: Rank, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(rank)
        self.units = {
            name: FSDPShardingUnit(name, shape, rank.dtype, rank.rank)
            for name, shape in rank.shapes.items()
        }
        self.hook = FSDPBackwardHook(FSDP(rank.group, bucket_bytes=bucket_bytes))

    def call(self) -> None:
        self.hook.scatter_multiple(self.units, self.rank.gradients)

    def parts(self) -> Tensors | None:
        return {name: unit.local_gradient for name, unit in self.units.items()}


class OursHook(Ours):
    """Gradients arrive one after the other, as in a backward pass, from the last to the first."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self.hook.use_units(self.units)
        self.order = list(reversed(rank.gradients.items()))

    def call(self) -> None:
        for name, gradient in self.order:
            self.hook.add_gradient(name, gradient)
        self.hook.finish()

    def close(self) -> None:
        self.hook.close()


class OursStep(Ours):
    """A step of LEAVES micro-batches, each reduced by itself; parts are added up in float32."""

    def __init__(self, rank: Rank, order: Literal["rank", "tree"] = "rank") -> None:
        super().__init__(rank)
        settings = FSDP(rank.group, op="mean", order=order, reduce_dtype="float32")
        self.hook = FSDPBackwardHook(settings)
        self.hook.use_units(self.units, accumulate=order == "rank")
        self.is_tree = order == "tree"

    def call(self) -> None:
        for unit in self.units.values():  # as optimizers do
            unit.local_gradient = None
        for _ in range(LEAVES):
            for name, gradient in reversed(self.rank.gradients.items()):
                self.hook.add_gradient(name, gradient)
            self.hook.finish()
        if self.is_tree:
            self.hook.finish_step()

    def parts(self) -> None:
        return None

    def close(self) -> None:
        self.hook.close()


# ---- torch.distributed and MPI ----


def gloo_reduce(rank: Rank) -> Any:
    """Return the reduce-scatter of torch.distributed."""
    from torch.distributed import reduce_scatter_tensor

    return lambda packed, out: reduce_scatter_tensor(out, packed)


def mpi_reduce(rank: Rank) -> Any:
    """Return mpi4py's Reduce_scatter_block; bfloat16 by an operation of ours: MPI has none."""
    from mpi4py import MPI

    def add_bfloat16(inputs: Any, results: Any, _: Any) -> None:
        torch.frombuffer(results, dtype=torch.bfloat16).add_(
            torch.frombuffer(inputs, dtype=torch.bfloat16)
        )

    is_wide = rank.dtype == torch.float32
    op = MPI.SUM if is_wide else MPI.Op.Create(add_bfloat16, commute=True)

    def reduce(packed: torch.Tensor, out: torch.Tensor) -> None:
        integers = packed if is_wide else packed.view(torch.uint16)
        place = out if is_wide else out.view(torch.uint16)
        MPI.COMM_WORLD.Reduce_scatter_block(integers.numpy(), place.numpy(), op)

    return reduce


class Bucketed(Reduction):
    """Gradients packed rank after rank into one buffer, bucket by bucket."""

    def __init__(self, rank: Rank, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(rank)
        self.reduce = (gloo_reduce if rank.engine == "gloo" else mpi_reduce)(rank)
        self.buckets = buckets_of(rank.shapes, rank.dtype.itemsize, bucket_bytes)
        sizes = [sum(rank.gradients[n].numel() for n in bucket) for bucket in self.buckets]
        self.buffer = torch.zeros(max(sizes), dtype=rank.dtype)
        self.out = [torch.zeros(size // WORLD, dtype=rank.dtype) for size in sizes]

    def pack(self, bucket: list[str]) -> torch.Tensor:
        gradients = [self.rank.gradients[name].view(WORLD, -1) for name in bucket]
        count = sum(g.numel() for g in gradients)
        if len(gradients) == 1:  # already contiguous
            return gradients[0].view(-1)
        packed = self.buffer[:count].view(WORLD, -1)
        torch.cat(gradients, dim=1, out=packed)
        return packed.view(-1)

    def call(self) -> None:
        for bucket, out in zip(self.buckets, self.out, strict=True):
            self.reduce(self.pack(bucket), out)

    def parts(self) -> Tensors:
        parts: Tensors = {}
        for bucket, out in zip(self.buckets, self.out, strict=True):
            sizes = [self.rank.gradients[name].numel() // WORLD for name in bucket]
            parts |= dict(zip(bucket, out.split(sizes), strict=True))
        return parts


WAYS: dict[str, Callable[[Rank], Reduction]] = {
    "limit": Shared,
    "limit numpy": SharedNumpy,
    "ours": Ours,
    "ours each": partial(Ours, bucket_bytes=0),
    "ours hook": OursHook,
    "ours step": OursStep,
    "ours step, tree": partial(OursStep, order="tree"),
    "bucketed": Bucketed,
    "each": partial(Bucketed, bucket_bytes=0),
}
