"""Clients that save and load a state in an object store, for `bench_remote.py`."""

from __future__ import annotations

import time
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
from remote_server import BUCKET, storage_options

import mlstate
from mlstate import checkpoint

RANK, RANKS = 3, 8  # the eighth of the rows that partial loads read

Arrays = dict[str, np.ndarray]


def part_of(state: Arrays) -> Arrays:
    """Return the rows of the rank that partial loads read."""
    return {
        name: array[len(array) * RANK // RANKS : len(array) * (RANK + 1) // RANKS]
        for name, array in state.items()
    }


def expect(actual: Any, state: Arrays) -> None:
    """Raise unless arrays or tensors equal the state."""
    for name, array in state.items():
        if not np.array_equal(np.asarray(actual[name]), array):
            raise AssertionError(f"{name}: not the saved values")


class Client:
    """A client that saves and loads a state; `needs` are the packages that it imports."""

    name = ""
    needs: tuple[str, ...] = ()

    def __init__(self, state: Arrays, endpoint: str, folder: Path) -> None:
        self.state, self.folder = state, folder
        self.access = storage_options(endpoint)

    @classmethod
    def missing(cls) -> str:
        """Return the packages that are not installed."""
        absent = []
        for package in cls.needs:
            try:
                import_module(package)
            except ImportError:
                absent.append(package)
        return ", ".join(absent)

    @classmethod
    def versions(cls) -> list[str]:
        return [f"{package} {metadata.version(package)}" for package in cls.needs]


class Mlstate(Client):
    """mlstate with its default options."""

    name = "mlstate"
    needs = ("obstore",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.url = f"s3://{BUCKET}/mlstate"
        self.options = self.access

    def save(self) -> None:
        mlstate.save(self.url, self.state, storage_options=self.options)

    def save_async(self) -> dict[str, float]:
        """Save in the background; return the milliseconds until the arrays may change."""
        start = time.perf_counter()
        handle = checkpoint.save_async(
            f"{self.url}_async", self.state, storage_options=self.options
        )
        handle.staged()
        staged = (time.perf_counter() - start) * 1e3
        handle.wait()
        return {"staged ms": staged}

    def load(self) -> Any:
        return mlstate.load(self.url, storage_options=self.options).model

    def rows(self, *, verify: bool = True) -> Any:
        how = {"layout": "rows", "rank": RANK, "world_size": RANKS, "verify": verify}
        return mlstate.load(self.url, storage_options=self.options, **how).model


class Obstore(Client):
    """One object with the bytes of all arrays: the engine of mlstate alone."""

    name = "obstore"
    needs = ("obstore",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.engine = import_module("obstore")
        self.store = import_module("obstore.store").S3Store(BUCKET, **self.access)
        self.data = b"".join(array.tobytes() for array in self.state.values())

    def save(self) -> None:
        self.engine.put(self.store, "raw", self.data)

    def load(self) -> Any:
        return self.views(self.engine.get(self.store, "raw").bytes())

    def views(self, data: Any) -> Arrays:
        arrays, at = {}, 0
        for name, array in self.state.items():
            flat = np.frombuffer(data, array.dtype, array.size, at)
            arrays[name], at = flat.reshape(array.shape), at + array.nbytes
        return arrays

    def rows(self) -> Any:
        starts, ends, at = [], [], 0
        parts = part_of(self.state)
        for name, array in self.state.items():
            starts.append(at + (len(array) * RANK // RANKS) * array[0].nbytes)
            ends.append(starts[-1] + parts[name].nbytes)
            at += array.nbytes
        got = self.engine.get_ranges(self.store, "raw", starts=starts, ends=ends)
        return {
            name: np.frombuffer(data, part.dtype).reshape(part.shape)
            for (name, part), data in zip(parts.items(), got, strict=True)
        }


class Boto3(Client):
    """Multipart transfers of one local file with the same bytes: parts of 8 MiB, 10 threads."""

    name = "boto3"
    needs = ("boto3",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.client = import_module("boto3").client(
            "s3",
            endpoint_url=self.access["endpoint"],
            region_name=self.access["region"],
            aws_access_key_id=self.access["access_key_id"],
            aws_secret_access_key=self.access["secret_access_key"],
        )
        self.source, self.target = self.folder / "source", self.folder / "target"
        with self.source.open("wb") as file:
            for array in self.state.values():
                file.write(array.data)

    def save(self) -> None:
        self.client.upload_file(str(self.source), BUCKET, "boto3")

    def load(self) -> None:
        self.client.download_file(BUCKET, "boto3", str(self.target))


class Dcp(Client):
    """torch DCP in one process, through fsspec and s3fs, into tensors that exist."""

    name = "torch DCP"
    needs = ("torch", "fsspec", "s3fs")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        torch = import_module("torch")
        self.dcp = import_module("torch.distributed.checkpoint")
        self.files = import_module("torch.distributed.checkpoint._fsspec_filesystem")
        self.tensors = {name: torch.from_numpy(array) for name, array in self.state.items()}
        self.into = {name: torch.ones_like(tensor) for name, tensor in self.tensors.items()}
        self.url = f"s3://{BUCKET}/dcp"
        self.options = {
            "key": self.access["access_key_id"],
            "secret": self.access["secret_access_key"],
            "client_kwargs": {
                "endpoint_url": self.access["endpoint"],
                "region_name": self.access["region"],
            },
        }

    def save(self) -> None:
        writer = self.files.FsspecWriter(self.url, **self.options)
        self.dcp.save(self.tensors, storage_writer=writer, no_dist=True)

    def load(self) -> Any:
        reader = self.files.FsspecReader(self.url, **self.options)
        self.dcp.load(self.into, storage_reader=reader, no_dist=True)
        return self.into
