"""Libraries that save and load a state, for `bench_checkpoint.py`: mlstate and others.

Each method follows the documentation of its package.
"""

from __future__ import annotations

import importlib.util
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_states import STATES, Arrays, sync, touch
from processes import answer

import mlstate


class Library:
    """A library that saves and loads a state; `lazy` is None if it cannot map files."""

    name = ""
    lazy: Any = None
    durable = False  # whether `save` itself waits for the disk

    def __init__(self, state: Arrays) -> None:
        self.state = state

    def save(self, path: Path) -> None:
        raise NotImplementedError

    def save_durably(self, path: Path) -> None:
        """Save to one file and wait for the disk, which the package itself does not do."""
        self.save(path)
        sync(path)

    def load(self, path: Path) -> object:
        raise NotImplementedError


class Mlstate(Library):
    """A pool: a file for each array; small arrays share files."""

    name = "mlstate"
    durable = True

    def __init__(self, state: Arrays) -> None:
        super().__init__(state)
        self.optimizer = mlstate.OptimizerStateDict(
            state, optimizer_type="adam", step=300, learning_rate=6e-4
        )
        self.into: mlstate.OptimizerStateDict | None = None

    def save(self, path: Path) -> None:
        mlstate.save(path, optimizer=self.optimizer)

    def load(self, path: Path) -> object:
        return mlstate.load(path, verify=False)

    def load_verified(self, path: Path) -> object:
        return mlstate.load(path)

    def load_into(self, path: Path) -> None:
        if self.into is None:
            self.into = mlstate.OptimizerStateDict(
                {name: np.ones_like(array) for name, array in self.state.items()}
            )
        mlstate.load(path, into={"optimizer": self.into})

    def lazy(self, path: Path) -> None:
        touch(mlstate.load(path, mmap=True, verify=False).optimizer.values())


class Safetensors(Library):
    """safetensors.numpy; lazy loads use the torch API, which maps the file."""

    name = "safetensors"

    def save(self, path: Path) -> None:
        from safetensors.numpy import save_file

        save_file(self.state, path)

    def load(self, path: Path) -> object:
        from safetensors.numpy import load_file

        return load_file(path)

    def lazy(self, path: Path) -> None:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            touch([file.get_tensor(name).numpy() for name in file.keys()])  # noqa: SIM118


class Savez(Library):
    """np.savez; np.load checks zlib's CRC of each array."""

    name = "np.savez"

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, **self.state)

    def load(self, path: Path) -> object:
        with np.load(path) as file:
            return dict(file)


class Torch(Library):
    """torch.save and torch.load."""

    name = "torch.save"

    def __init__(self, state: Arrays) -> None:
        import torch

        super().__init__(state)
        self.tensors = {name: torch.from_numpy(array) for name, array in state.items()}

    def save(self, path: Path) -> None:
        import torch

        torch.save(self.tensors, path)

    def load(self, path: Path) -> object:
        import torch

        return torch.load(path)

    def lazy(self, path: Path) -> None:
        import torch

        touch([tensor.numpy() for tensor in torch.load(path, mmap=True).values()])


class Dcp(Torch):
    """torch.distributed.checkpoint in one process; it loads into existing tensors."""

    name = "torch DCP, 1 rank"
    durable = True

    def __init__(self, state: Arrays) -> None:
        super().__init__(state)
        self.into: dict[str, Any] = {}

    def save(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.tensors, storage_writer=dcp.FileSystemWriter(path), no_dist=True)

    def load(self, path: Path) -> object:
        import torch
        import torch.distributed.checkpoint as dcp

        if not self.into:
            self.into = {name: torch.ones_like(t) for name, t in self.tensors.items()}
        dcp.load(self.into, storage_reader=dcp.FileSystemReader(path), no_dist=True)
        return None

    lazy = None


def join(rank: int, world: int, meeting: str) -> None:
    """Join as one rank over gloo."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)


def serve(pipe: Connection, letter: str, quick: bool, rank: int, world: int, meeting: str) -> None:
    """Run one rank: obey the commands from the pipe."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    join(rank, world, meeting)
    tensors = rows_of_rank(STATES[letter](quick), rank, world)

    def save(path: Path) -> None:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path))

    def load(path: Path) -> None:
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path))

    answer(pipe, {"save": save, "load": load})
    dist.destroy_process_group()


def rows_of_rank(state: Arrays, rank: int, world: int) -> dict[str, Any]:
    """Divide each array into rows as FSDP2 does; keep only this rank's rows."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,))
    tensors = {}
    for name in list(state):
        tensor = torch.from_numpy(state.pop(name))
        count = -(-len(tensor) // world)
        tensors[name] = DTensor.from_local(
            tensor[rank * count : (rank + 1) * count].clone(),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensors


def libraries() -> list[type[Library]]:
    """All libraries that are installed, mlstate first."""
    kinds: list[type[Library]] = [Mlstate]
    if importlib.util.find_spec("safetensors"):
        kinds.append(Safetensors)
    kinds.append(Savez)
    if importlib.util.find_spec("torch"):
        kinds += [Torch, Dcp]
    return kinds
