"""One flipped bit in the default checkpoints of libraries: found, silently wrong or harmless.

``python benchmarks/flips.py [--flips N] [--libraries NAME...]`` prints a table in Markdown. For
each library that is installed, a state is written with its defaults, and N times one bit of the
files is flipped, evenly over all of their bytes, and the state is loaded. A flip is found if the
load raises, silently wrong if it returns other values, and harmless if all values are right.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from optional import optional
from summary import markdown

import mlstate

if TYPE_CHECKING:
    from collections.abc import Callable

State = dict[str, Any]
RNG = np.random.default_rng(0)
STATE = {f"layers.{i}.w": RNG.standard_normal((64, 128), np.float32) for i in range(8)}
OUTCOMES = ("found", "silently wrong", "harmless")


def tensors() -> State:
    """The state as tensors of torch."""
    import torch

    return {name: torch.from_numpy(array.copy()) for name, array in STATE.items()}


def zeros() -> State:
    """Tensors to fill."""
    return {name: tensor * 0 for name, tensor in tensors().items()}


# ---- libraries: each writes to a folder, and returns a function that loads ----


def by_mlstate(folder: Path) -> Callable[[], State]:
    """The library of this project."""
    mlstate.save(folder / "c", STATE)
    return lambda: dict(mlstate.load(folder / "c").model)


def by_torch(folder: Path) -> Callable[[], State]:
    """`torch.save`."""
    import torch

    torch.save(tensors(), folder / "w.pt")
    return lambda: torch.load(folder / "w.pt")  # type: ignore[no-any-return]


def by_safetensors(folder: Path) -> Callable[[], State]:
    """Safetensors' own NumPy functions."""
    from safetensors.numpy import load_file, save_file

    save_file(STATE, folder / "w.safetensors")
    return lambda: load_file(folder / "w.safetensors")


def by_dcp(folder: Path) -> Callable[[], State]:
    """torch.distributed.checkpoint."""
    from torch.distributed import checkpoint

    checkpoint.save(tensors(), checkpoint_id=folder / "c", no_dist=True)

    def load() -> State:
        state = zeros()
        checkpoint.load(state, checkpoint_id=folder / "c", no_dist=True)
        return state

    return load


def by_torch_checkpointing(folder: Path) -> Callable[[], State]:
    """torch_checkpointing, in this process, without direct I/O, which some disks refuse."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    config = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage)
    manager = CheckpointManager(config)
    manager.save(str(folder / "c"), {"model": tensors()})
    return lambda: dict(manager.load(folder / "c", into={"model": zeros()})["model"])


def by_orbax(folder: Path) -> Callable[[], State]:
    """Orbax, arrays of NumPy in a tree."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as writer:
        writer.save(folder / "c", STATE)

    def load() -> State:
        with ocp.PyTreeCheckpointer() as reader:
            return reader.restore(folder / "c")  # type: ignore[no-any-return]

    return load


def by_zarr(folder: Path) -> Callable[[], State]:
    """Zarr, a group with an array for each tensor."""
    import zarr

    zarr.save_group(str(folder / "c"), **STATE)
    return lambda: {name: zarr.open(str(folder / "c"))[name][:] for name in STATE}


def by_tensorstore(folder: Path) -> Callable[[], State]:
    """Tensorstore, a zarr3 array for each tensor."""
    import tensorstore as ts

    async def opened(name: str, **keywords: Any) -> Any:
        path = str(folder / "c" / name)
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
        return await ts.open(spec, **keywords)

    async def write() -> None:
        for name, array in STATE.items():
            store = await opened(name, create=True, dtype=array.dtype, shape=array.shape)
            await store.write(array)

    async def read() -> State:
        return {name: await (await opened(name, open=True)).read() for name in STATE}

    asyncio.run(write())
    return lambda: asyncio.run(read())


LIBRARIES = {
    "torch": by_torch,
    "safetensors": by_safetensors,
    "torch DCP": by_dcp,
    "torch_checkpointing": by_torch_checkpointing,
    "orbax-checkpoint": by_orbax,
    "zarr": by_zarr,
    "tensorstore": by_tensorstore,
    "mlstate": by_mlstate,
}
MODULES = {"torch DCP": "torch", "orbax-checkpoint": "orbax.checkpoint"}


def places_of(folder: Path, flips: int) -> list[tuple[Path, int, int]]:
    """Files, bytes and bits to flip, evenly over all bytes of a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    ends = np.cumsum([path.stat().st_size for path in files])
    places = []
    for number in range(flips):
        at = int(ends[-1]) * (2 * number + 1) // (2 * flips)
        index = int(np.searchsorted(ends, at, side="right"))
        size = files[index].stat().st_size
        places.append((files[index], at - int(ends[index]) + size, number % 8))
    return places


def outcome_of(load: Callable[[], State]) -> str:
    """What a load of the damaged files does."""
    try:
        loaded = load()
        equal = loaded.keys() == STATE.keys() and all(
            np.asarray(loaded[name]).tobytes() == array.tobytes() for name, array in STATE.items()
        )
    except KeyboardInterrupt:
        raise
    except BaseException:  # CheckpointException of torch is no Exception
        return "found"
    return "harmless" if equal else "silently wrong"


def outcomes_of(write: Callable[[Path], Callable[[], State]], flips: int) -> Counter[str]:
    """Count what each flip does."""
    folder = Path(tempfile.mkdtemp())
    try:
        load = write(folder)
        if outcome_of(load) != "harmless":
            raise RuntimeError("the undamaged state is not loaded")
        counts: Counter[str] = Counter()
        for path, at, bit in places_of(folder, flips):
            data = path.read_bytes()
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            counts[outcome_of(load)] += 1
            path.write_bytes(data)
        return counts
    finally:
        shutil.rmtree(folder)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=12)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=[*LIBRARIES])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in arguments.libraries:
        if optional(MODULES.get(name, name)) is None:
            print(f"{name} is not installed", file=sys.stderr)
            continue
        try:
            counts = outcomes_of(LIBRARIES[name], arguments.flips)
        except Exception as error:  # of any library
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        label = f"{name} {version(name.split()[0])}"
        rows.append([label, *(str(counts[outcome]) for outcome in OUTCOMES)])
    print(markdown(["library, defaults", *OUTCOMES], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
