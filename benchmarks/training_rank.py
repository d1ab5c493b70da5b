"""One of two ranks over gloo that save their halves of a state, for `bench_training.py`.

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
from processes import answer
from rows import no_op, settle

import mlstate
from mlstate.checkpoint import Layout, Shard, Staging, save_async

Wait = Callable[[], object]
Begin = Callable[[Path], Wait]

MEMCPY, SAVE = "memcpy, touched memory", "mlstate.save"
STAGED = "mlstate.save_async, staging {} %"
DCP, DCP_KEPT = "torch DCP async_save", "torch DCP async_save, stager kept"
SHARES = (0, 25, 50, 100)  # % of the state that may be staged


class Rank:
    """Half of a state, its ways to save by name, and memory that is touched beforehand."""

    def __init__(self, tensors: dict[str, Any], rank: int, world: int) -> None:
        import torch

        from mlstate.integrations.torch import TorchGroup

        self.tensors = tensors
        self.dcp_group = torch.distributed.new_group(backend="gloo")
        self.group = TorchGroup(torch.distributed.new_group(backend="gloo"))
        self.arrays = [tensor.to_local().numpy() for tensor in tensors.values()]
        self.nbytes = sum(array.nbytes for array in self.arrays)
        self.shards = {
            name: Shard(array, Layout.rows(world), rank, shape=tuple(tensor.shape))
            for array, (name, tensor) in zip(self.arrays, tensors.items(), strict=True)
        }
        self.staging = Staging(self.nbytes)
        self.ways: dict[str, Begin] = {
            MEMCPY: self.memcpy(),
            SAVE: self.save,
            **{STAGED.format(share): partial(self.save_staged, share) for share in SHARES},
            DCP: self.dcp(),
            DCP_KEPT: self.dcp(keeps_memory=True),
        }

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

    def save_staged(self, share: int, path: Path) -> Wait:
        """Save during training, with memory for a share of the state."""
        handle = save_async(
            path,
            optimizer=self.shards,
            group=self.group,
            max_staging_bytes=self.nbytes * share // 100,
            staging=self.staging,
        )
        handle.staged()
        return handle.wait

    def dcp(self, *, keeps_memory: bool = False) -> Begin:
        """Save with torch DCP; `keeps_memory` keeps its stager, and so its memory."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        options: dict[str, Any] = {"process_group": self.dcp_group}
        if keeps_memory:  # its other options need CUDA
            options["async_stager"] = DefaultStager(StagingOptions(False, False, False, False))

        def begin(path: Path) -> Wait:
            return dcp.async_save(self.tensors, checkpoint_id=path, **options).result

        return begin

    def time(self, name: str, path: Path) -> tuple[float, float]:
        """Save once, both ranks at the same moment; return ms until staged, and until done."""
        gc.collect()
        gc.disable()
        settle()
        self.group.barrier()
        start = time.perf_counter_ns()
        wait = self.ways[name](path)
        staged = time.perf_counter_ns()
        wait()
        done = time.perf_counter_ns()
        gc.enable()
        return (staged - start) * 1e-6, (done - start) * 1e-6


def serve(pipe: Connection, letter: str, quick: bool, rank: int, world: int, meeting: str) -> None:
    """Run one rank; freed memory stays with the process."""
    keep_memory()
    join(rank, world, meeting)
    rank_object = Rank(rows_of_rank(STATES[letter](quick), rank, world), rank, world)
    answer(pipe, {"nbytes": lambda: rank_object.nbytes, "time": rank_object.time})
