"""Ways to reduce gradients, for `bench_dist.py`: mlstate and other packages, for one rank.

Each method follows the documentation of its package. It keeps its memory from one step to the next,
as a training loop does.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dist_model import (
    DTYPES,
    WORLD,
    Model,
    Shapes,
    Tensors,
    buckets_of,
    gradients_of,
    shapes_of,
    sums_in_order,
)

from mlstate import _core
from mlstate.collectives import LocalGroup
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit

BUCKET_BYTES = 25 << 20
LIMIT_SECONDS = 60.0


class Rank:
    """This process: its rank, its gradients and its groups."""

    def __init__(self, engine: str, job: str, rank: int, folder: Path) -> None:
        self.engine = engine
        self.rank = rank
        self.folder = folder
        self.local = LocalGroup.join(job, rank, WORLD, operation_timeout=LIMIT_SECONDS)
        self.shapes: Shapes = {}
        self.dtype = torch.float32
        self.gradients: Tensors = {}

    def load(self, dtype: str, quick: bool) -> None:
        """Make the gradients of one part of the benchmark."""
        self.dtype = DTYPES[dtype]
        self.shapes = shapes_of(quick)
        self.gradients = gradients_of(self.rank, self.shapes, self.dtype)

    def bounds(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return start and end of this rank's elements in a full gradient: equal chunks."""
        chunk = prod(shape) // WORLD
        return self.rank * chunk, (self.rank + 1) * chunk


class Way(ABC):
    """A way to reduce; `call` is timed, on every rank at the same moment."""

    divisor = 1.0

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def before(self) -> None:  # noqa: B027 - most ways have nothing to prepare
        """Prepare for a call, untimed."""

    @abstractmethod
    def call(self) -> None:
        """Reduce the gradients once."""

    def parts(self) -> Tensors | None:
        """This rank's parts of the sums, flat, by parameter; None if there is nothing to check."""
        return None

    def expected(self, name: str, total: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a sum."""
        start, end = self.rank.bounds(self.rank.shapes[name])
        return total.view(-1)[start:end]

    def close(self) -> None:  # noqa: B027 - or to give back
        """Release resources other than memory."""

    def check(self) -> str:
        """Compare with sums in the order of ranks."""
        parts = self.parts()
        if parts is None:
            return ""
        differ = count = 0
        for name, total in sums_in_order(self.rank.shapes, self.rank.dtype, self.divisor):
            expected = self.expected(name, total)
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


class Shared(Way):
    """Every rank's gradients in shared memory: each rank adds up its half."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        count = sum(prod(shape) for shape in rank.shapes.values())
        self.paths = [rank.folder / f"{type(self).__name__}-{number}" for number in range(WORLD)]
        arrays = [shared(path, count, rank.dtype) for path in self.paths]
        at = 0
        for gradient in rank.gradients.values():
            arrays[rank.rank][at : at + gradient.numel()] = gradient.view(-1)
            at += gradient.numel()
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


class Ours(Way):
    """`scatter_multiple` over a group."""

    bucket_bytes = BUCKET_BYTES

    def __init__(self, rank: Rank, group: Any) -> None:
        super().__init__(rank)
        self.group = group
        self.units = {
            name: FSDPShardingUnit(name, shape, rank.dtype, rank.rank)
            for name, shape in rank.shapes.items()
        }
        fsdp = FSDP(group, bucket_bytes=self.bucket_bytes)
        self.hook = FSDPBackwardHook(fsdp)

    def call(self) -> None:
        self.hook.scatter_multiple(self.units, self.rank.gradients)

    def parts(self) -> Tensors:
        return {name: unit.local_gradient for name, unit in self.units.items()}


class OursEach(Ours):
    """The same with a bucket for each parameter."""

    bucket_bytes = 0


class OursHook(Ours):
    """Gradients arrive one after the other, as in a backward pass, from the last to the first."""

    def __init__(self, rank: Rank, group: Any) -> None:
        super().__init__(rank, group)
        self.hook.use_units(self.units)
        self.order = list(reversed(rank.gradients.items()))

    def call(self) -> None:
        for name, gradient in self.order:
            self.hook.add_gradient(name, gradient)
        self.hook.finish()

    def close(self) -> None:
        self.hook.close()


# ---- torch.distributed ----


Reduce = Callable[[torch.Tensor, torch.Tensor], None]
MakeReduce = Callable[[torch.dtype], Reduce]


def gloo_reduce(dtype: torch.dtype) -> Reduce:
    """Return the reduce-scatter of torch.distributed."""
    from torch.distributed import reduce_scatter_tensor

    return lambda packed, out: reduce_scatter_tensor(out, packed)


class Each(Way):
    """A reduce-scatter for each parameter."""

    def __init__(self, rank: Rank, make_reduce: MakeReduce) -> None:
        super().__init__(rank)
        self.reduce = make_reduce(rank.dtype)
        self.out = {
            name: torch.zeros(g.numel() // WORLD, dtype=rank.dtype)
            for name, g in rank.gradients.items()
        }

    def call(self) -> None:
        for name, gradient in self.rank.gradients.items():
            self.reduce(gradient.view(-1), self.out[name])

    def parts(self) -> Tensors:
        return self.out


class Bucketed(Way):
    """Gradients packed rank after rank into one buffer, bucket by bucket."""

    def __init__(self, rank: Rank, make_reduce: MakeReduce) -> None:
        super().__init__(rank)
        self.reduce = make_reduce(rank.dtype)
        self.buckets = buckets_of(rank.shapes, rank.dtype.itemsize, BUCKET_BYTES)
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


class Backward(Way):
    """A backward pass that makes each gradient by a copy, and reduces it; forward is untimed."""

    divisor = float(WORLD)

    def __init__(self, rank: Rank, wrap: Callable[[Model], Any]) -> None:
        super().__init__(rank)
        self.model = Model(rank.gradients).to(rank.dtype)
        self.wrapped = wrap(self.model)
        self.loss: Any = None

    def before(self) -> None:
        self.loss = None
        self.wrapped.zero_grad(set_to_none=True)
        self.loss = self.wrapped(torch.ones(1, dtype=self.rank.dtype, requires_grad=True)).sum()

    def call(self) -> None:
        self.loss.backward()

    def parts(self) -> Tensors:
        gradients = self.model.gradients()
        return {n: g.to_local() if hasattr(g, "to_local") else g for n, g in gradients.items()}

    def expected(self, name: str, total: torch.Tensor) -> torch.Tensor:
        gradient = self.model.gradients()[name]
        if hasattr(gradient, "to_local"):  # rows of the first dimension
            pieces = total.chunk(WORLD)
            total = pieces[self.rank.rank]
        return total.reshape(-1)


class Alone(Backward):
    """The same without any reduction."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank, lambda model: model)

    def parts(self) -> None:
        return None


def ddp(model: Model) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model)


def fsdp2(model: Model) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for part in model.parts:
        if len(list(part.parameters())) > 2:  # the blocks; other parameters belong to the root
            fully_shard(part, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def fsdp2_with(group: Any, model: Model) -> Any:
    from mlstate.integrations.torch import reduce_scatter_with

    wrapped = fsdp2(model)
    reduce_scatter_with(wrapped, group)
    return wrapped


def ddp_with(group: Any, model: Model) -> Any:
    from mlstate.integrations.torch import all_reduce_with

    wrapped = ddp(model)
    all_reduce_with(wrapped, group)
    return wrapped


# ---- MPI ----


def _add_bfloat16(inputs: Any, results: Any, _: Any) -> None:
    """Add as MPI requires: the incoming values to the existing ones."""
    torch.frombuffer(results, dtype=torch.bfloat16).add_(
        torch.frombuffer(inputs, dtype=torch.bfloat16)
    )


def mpi_reduce(dtype: torch.dtype) -> Reduce:
    """Return mpi4py's Reduce_scatter_block; bfloat16 by an operation of ours: MPI has none."""
    from mpi4py import MPI

    is_wide = dtype == torch.float32
    op = MPI.SUM if is_wide else MPI.Op.Create(_add_bfloat16, commute=True)

    def reduce(packed: torch.Tensor, out: torch.Tensor) -> None:
        integers = packed if is_wide else packed.view(torch.uint16)
        place = out if is_wide else out.view(torch.uint16)
        MPI.COMM_WORLD.Reduce_scatter_block(integers.numpy(), place.numpy(), op)

    return reduce


# ---- by name ----


def ways_of(rank: Rank) -> dict[str, Callable[[], Way]]:
    """All ways of an engine's rank, by the names used by the benchmark."""
    ways: dict[str, Callable[[], Way]] = {}
    if rank.engine == "local":
        ways = {
            "limit": partial(Shared, rank),
            "limit numpy": partial(SharedNumpy, rank),
        }
        ways |= mlstate_ways(rank, rank.local)
    elif rank.engine == "gloo":
        from mlstate.integrations.torch import TorchGroup

        group = TorchGroup(torch.distributed.new_group())
        ways = {
            "each": partial(Each, rank, gloo_reduce),
            "bucketed": partial(Bucketed, rank, gloo_reduce),
            "alone": partial(Alone, rank),
            "ddp": partial(Backward, rank, ddp),
            "ddp ours": partial(Backward, rank, partial(ddp_with, rank.local)),
            "fsdp2": partial(Backward, rank, fsdp2),
            "fsdp2 ours": partial(Backward, rank, partial(fsdp2_with, rank.local)),
            "fsdp2 ours gloo": partial(Backward, rank, partial(fsdp2_with, group)),
        }
        ways |= mlstate_ways(rank, group)
    else:
        from mlstate.integrations.mpi import MPIGroup

        ways = {
            "each": partial(Each, rank, mpi_reduce),
            "bucketed": partial(Bucketed, rank, mpi_reduce),
        }
        ways |= mlstate_ways(rank, MPIGroup())
    return ways


def mlstate_ways(rank: Rank, group: Any) -> dict[str, Callable[[], Way]]:
    """mlstate's ways, on any engine."""
    return {
        "ours": partial(Ours, rank, group),
        "ours each": partial(OursEach, rank, group),
        "ours hook": partial(OursHook, rank, group),
    }
