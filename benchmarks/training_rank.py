"""One of two ranks over gloo that save their halves of a state; see `training_async.py`.

A rank's tensors are DTensors sharded by rows; mlstate saves the same memory as shards of arrays. A
way to save is a call that returns when the state may be changed. It returns a function that waits
for the rest.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_peers import join, rows_of_rank
from checkpoint_states import STATES, keep_memory
from harness import no_op, settle
from resident import trim
from spawned import answer

import mlstate
from mlstate.checkpoint import Layout, Shard, Staging, save_async

Wait = Callable[[], object]
Begin = Callable[[Path], Wait]

MEMCPY, SAVE, DCP, DCP_KEPT = "memcpy", "save", "dcp", "dcp kept"
SHARES = (0, 25, 50, 100)  # % of the state that may be staged: a way for each, with that name


class Rank:
    """A state, its ways to save, and memory that is touched beforehand."""

    def __init__(self, letter: str, rank: int, world: int) -> None:
        import torch

        from mlstate.integrations.torch import TorchGroup

        self.letter, self.rank, self.world = letter, rank, world
        gloo = partial(torch.distributed.new_group, backend="gloo")
        self.own, self.theirs = gloo(), gloo()
        self.group = TorchGroup(self.own)
        self.tensors: dict[str, Any] = {}
        self.arrays: list[np.ndarray] = []  # their memory
        self.shards: dict[str, Shard] = {}  # the same memory as shards of mlstate
        self.ways: dict[str, Begin] = {}
        self.staging: Staging | None = None

    def load(self, quick: bool) -> int:
        """Make a new state; return this rank's bytes."""
        self.ways, self.staging = {}, None
        self.arrays, self.shards = [], {}
        self.tensors = rows_of_rank(STATES[self.letter](quick), self.rank, self.world)
        self.arrays = [tensor.to_local().numpy() for tensor in self.tensors.values()]
        self.shards = {
            name: Shard(array, Layout.rows(self.world), self.rank, shape=tuple(tensor.shape))
            for array, (name, tensor) in zip(self.arrays, self.tensors.items(), strict=True)
        }
        gc.collect()
        trim()
        return self.nbytes

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    # ---- ways ----

    def way(self, name: str) -> Begin:
        """Return a way, which keeps its memory between calls."""
        if name not in self.ways:
            if name.isdecimal():
                self.ways[name] = self.staged(int(name))
            else:
                makers = {
                    MEMCPY: self.memcpy,
                    SAVE: lambda: self.save,
                    DCP: self.dcp,
                    DCP_KEPT: partial(self.dcp, keeps_memory=True),
                }
                self.ways[name] = makers[name]()
        return self.ways[name]

    def memcpy(self) -> Begin:
        """Copy this rank's arrays to touched memory: a lower bound for any staging."""
        targets = [np.ones_like(array) for array in self.arrays]

        def begin(path: Path) -> Wait:
            for target, array in zip(targets, self.arrays, strict=True):
                np.copyto(target, array)
            return no_op

        return begin

    def save(self, path: Path) -> Wait:
        mlstate.save(path, optimizer=self.shards, group=self.group)
        return no_op

    def staged(self, share: int) -> Begin:
        """Save during training, with memory for a share of the state."""
        options: dict[str, Any] = {"max_staging_bytes": self.nbytes * share // 100}
        if self.staging is not None:
            options["staging"] = self.staging

        def begin(path: Path) -> Wait:
            handle = save_async(path, optimizer=self.shards, group=self.group, **options)
            handle.staged()
            return handle.wait

        return begin

    def dcp(self, *, keeps_memory: bool = False) -> Begin:
        """Save with torch DCP; `keeps_memory` keeps its stager, and so its memory."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        options: dict[str, Any] = {"process_group": self.theirs}
        if keeps_memory:  # its other options need CUDA
            options["async_stager"] = DefaultStager(StagingOptions(False, False, False, False))

        def begin(path: Path) -> Wait:
            return dcp.async_save(self.tensors, checkpoint_id=path, **options).result

        return begin

    # ---- commands of the benchmark ----

    def time(self, name: str, path: Path) -> tuple[float, float]:
        """Save once, both ranks at the same moment; return ms until staged, and until done.

        Memory for staging is allocated and touched before the first measurement.
        """
        if self.staging is None:
            self.staging = Staging(self.nbytes)
        begin = self.way(name)
        gc.collect()
        gc.disable()
        settle()
        self.group.barrier()
        start = time.perf_counter_ns()
        wait = begin(path)
        staged = time.perf_counter_ns()
        wait()
        done = time.perf_counter_ns()
        gc.enable()
        return (staged - start) * 1e-6, (done - start) * 1e-6


def serve(pipe: Connection, letter: str, rank: int, world: int, meeting: str) -> None:
    """Run one rank; freed memory stays with the process."""
    import torch

    keep_memory()
    join(rank, world, meeting)
    rank_object = Rank(letter, rank, world)
    answer(pipe, {"load": rank_object.load, "time": rank_object.time})
    rank_object.ways, rank_object.staging = {}, None
    torch.distributed.destroy_process_group()
