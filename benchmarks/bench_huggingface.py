"""Hugging Face folders: written by two ranks and by one process, and read.

``python benchmarks/bench_huggingface.py [--quick] [--json] [--store] [--only PART]``; mlstate must
be installed, with torch; transformers and safetensors take part if they are.
See docs/huggingface.md.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_peers import join
from checkpoint_states import files_below
from checkpoint_states import sync as sync_file
from harness import Run, main
from processes import Processes, Ranks, answer
from resident import forget_peak, peak, trim
from rows import Bar, Row, Way, Ways

import mlstate
from mlstate.checkpoint import checksum, export_huggingface

RANKS = 2
TENSORS, ROWS, QUICK_ROWS, COLUMNS = 16, 4096, 64, 1024  # of float32: 16 MiB each
EXPORT = "mlstate export (durable, checksums)"
DCP = "torch DCP for Hugging Face, consolidated"
GATHER = "gather on rank 0, safetensors, fsync"
PRETRAINED = "transformers: save_pretrained"
LOAD = "mlstate.load"
CHECKED, UNCHECKED = f"{LOAD}, checksums compared", f"{LOAD}, verify=False"
CHECKED_BOUNDS = {1: 1.25, 2: 1.1}  # times the duration without, by threads
LOAD_ROWS = "mlstate.load of 1/8 of the rows"


def sync(folder: Path) -> None:
    """Wait until all files of a folder are on the disk."""
    for path in files_below(folder):
        sync_file(path)


def removing(folder: Path) -> Any:
    return partial(shutil.rmtree, folder, ignore_errors=True)


def raw_write(folder: Path, nbytes: int) -> Ways:
    """Write as many bytes to one file, and wait for the disk."""
    data = np.ones(min(nbytes, 16 << 20), np.uint8)

    def write() -> None:
        with (folder / "raw").open("wb", buffering=0) as file:
            for _ in range(max(1, nbytes // data.nbytes)):
                file.write(data.data)
            os.fsync(file.fileno())

    return {"raw write + fsync": Way(write, partial((folder / "raw").unlink, missing_ok=True))}


# ---- two ranks: each has half of the rows of every tensor ----


def serve(pipe: Connection, rows: int, rank: int, world: int, meeting: str) -> None:
    """Run the commands of one rank."""
    join(rank, world, meeting)
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.checkpoint import save as save_dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from mlstate.integrations.torch import TorchGroup

    mesh = init_device_mesh("cpu", (world,))
    module = torch.nn.ParameterDict()
    for number in range(TENSORS):
        local = torch.randn(rows // world, COLUMNS)
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        module[f"w{number}"] = torch.nn.Parameter(tensor, requires_grad=False)
    group = TorchGroup()

    def dcp(folder: Path) -> None:
        names = dict.fromkeys(module.state_dict(), 1)
        writer = HuggingFaceStorageWriter(
            str(folder), names, save_distributed=True, enable_consolidation=True
        )
        save_dcp(module.state_dict(), storage_writer=writer)

    def gather(folder: Path) -> None:
        from safetensors.torch import save_file

        full_state = {name: value.full_tensor() for name, value in module.state_dict().items()}
        if rank == 0:
            folder.mkdir()
            save_file(full_state, folder / "model.safetensors", {"format": "pt"})
            sync(folder)
        dist.barrier()

    calls = {
        EXPORT: lambda folder: export_huggingface(folder, module, group=group),
        DCP: dcp,
        GATHER: gather,
    }

    def grow(name: str, folder: Path) -> float:
        """Return the growth of the peak of resident memory in MiB."""
        trim()
        before = forget_peak()
        calls[name](folder)
        return peak() - before

    answer(pipe, {"grow": grow})


def way_of_ranks(ranks: Processes, name: str, folder: Path) -> Way:
    """Let all ranks export, and return the time and the largest growth."""

    def export() -> dict[str, float]:
        start = time.perf_counter()
        grown = max(ranks.ask("grow", name, folder))
        return {"ms": 1e3 * (time.perf_counter() - start), "MiB/rank": grown}

    return Way(export, removing(folder), measures_itself=True)


def by_ranks(run: Run) -> Iterator[Row]:
    """Compare exports by two ranks."""
    rows = QUICK_ROWS if run.quick else ROWS
    nbytes = TENSORS * rows * COLUMNS * 4
    with Ranks(serve, RANKS, rows) as ranks:
        names = [DCP] + [GATHER] * (find_spec("safetensors") is not None)
        yield Row(
            f"export by {RANKS} ranks: {TENSORS} tensors, {nbytes >> 20} MiB",
            {EXPORT: way_of_ranks(ranks, EXPORT, run.folder / "export")},
            {name: way_of_ranks(ranks, name, run.folder / name) for name in names},
            raw_write(run.folder, nbytes),
            [Bar(EXPORT, 2.0, DCP, faster=True)],
            nbytes=nbytes,
            frees=False,
        )


# ---- one process ----


def by_one_process(run: Run) -> Iterator[Row]:
    """Compare exports of a model of transformers, with random weights, of about 250 MiB."""
    if find_spec("transformers") is None:
        run.log("\ntransformers is not installed: save_pretrained is left out")
        return
    warnings.simplefilter("ignore")
    import transformers as tf

    width = 64 if run.quick else 1024
    model = tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=16 * width, hidden_size=width, intermediate_size=2 * width,
            num_hidden_layers=4, num_attention_heads=8, tie_word_embeddings=True,
        )
    )  # fmt: skip
    nbytes = sum(value.nbytes for value in model.parameters())
    exported, pretrained, synced = (run.folder / name for name in ("export", "peer", "synced"))
    save = partial(model.save_pretrained, pretrained)
    save_synced, synced_name = partial(model.save_pretrained, synced), f"{PRETRAINED} + fsync"
    yield Row(
        f"export by one process: Llama, {nbytes >> 20} MiB",
        {EXPORT: Way(partial(export_huggingface, exported, model), removing(exported))},
        {
            synced_name: Way(lambda: (save_synced(), sync(synced)), removing(synced)),
            PRETRAINED: Way(save, removing(pretrained)),
        },
        raw_write(run.folder, nbytes),
        [Bar(EXPORT, 1.0, synced_name, faster=True)],
        nbytes=nbytes,
        frees=False,
    )


# ---- reading ----


def reading(run: Run) -> Iterator[Row]:
    """Compare reading a folder of four files from the page cache."""
    if find_spec("safetensors") is None:
        run.log("\nsafetensors is not installed: reading is left out")
        return
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    rows = QUICK_ROWS if run.quick else ROWS
    source, copied_folder = run.folder / "read", run.folder / "plain"
    state = {f"w{i}": np.full((rows, COLUMNS), i, np.float32) for i in range(TENSORS)}
    export_huggingface(source, state, max_shard_bytes=TENSORS * rows * COLUMNS)
    shutil.copytree(source, copied_folder)
    files = sorted(copied_folder.glob("*.safetensors"))
    for path in files:  # as other programs write them: no checksums
        save_file(load_file(path), path, {"format": "pt"})
    nbytes = TENSORS * rows * COLUMNS * 4

    def slices() -> list[np.ndarray]:
        parts = []
        for path in files:
            with safe_open(path, "np") as file:
                parts += [file.get_slice(name)[rows // 8 : rows // 4] for name in file.keys()]  # noqa: SIM118
        return parts

    load, load_plain = (partial(mlstate.load, folder) for folder in (source, copied_folder))
    yield Row(
        f"load: {len(files)} files, {nbytes >> 20} MiB, in the system's cache",
        {
            f"{LOAD}, with checksums": load,
            f"{LOAD}, files without checksums": load_plain,
            f"{LOAD}(mmap=True)": partial(load_plain, mmap=True, verify=False),
        },
        {"safetensors: load_file": lambda: [load_file(path) for path in files]},
        nbytes=nbytes,
        frees=False,
    )
    part: dict[str, Any] = {"rank": 1, "world_size": 8, "layout": "rows"}
    yield Row(
        f"one of 8 ranks: {nbytes >> 23} MiB, in the system's cache",
        {
            f"{LOAD_ROWS}, with checksums": partial(load, **part),
            LOAD_ROWS: partial(load_plain, **part),
        },
        {"safetensors: get_slice of 1/8 of the rows": slices},
        nbytes=nbytes // 8,
        frees=False,
    )
    checksum(copied_folder)
    for threads, bound in CHECKED_BOUNDS.items():
        mlstate.threads.set_num_threads(threads)
        yield Row(
            f"load with checksums of `checksum`, {threads} threads",
            {CHECKED: load_plain, UNCHECKED: partial(load_plain, verify=False)},
            bars=[Bar(CHECKED, bound, UNCHECKED)],
            base=UNCHECKED,
            nbytes=nbytes,
            frees=False,
            rounds=2,
        )


if __name__ == "__main__":
    main(
        __doc__,
        "huggingface",
        "mlstate: Hugging Face folders",
        {"ranks": by_ranks, "save": by_one_process, "load": reading},
        quick="a few MB and 3 repeats",
        rounds=(7, 3),
    )
