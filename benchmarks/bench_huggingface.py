"""Hugging Face folders: written by two ranks and by one process, and read.

``python benchmarks/bench_huggingface.py [--quick] [--json] [--store] [--only PART]``; mlstate must
be installed, with torch; transformers and safetensors take part if they are.  PART is ranks, save
or load.  Files go to the folder for temporary files (TMPDIR), which should be on a disk.  See
docs/benchmarks.md.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import warnings
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_states import files_below
from checkpoint_states import sync as sync_file
from harness import Candidate, Report, Row, add_rates, option_parser
from resident import forget_peak, peak, trim
from spawned import Spawned, answer
from turns import Aim, take_turns

import mlstate
from mlstate.checkpoint import checksum, export_huggingface

RANKS = 2
TENSORS, ROWS, QUICK_ROWS, COLUMNS = 16, 4096, 64, 1024  # of float32: 16 MiB each
OURS = "mlstate export (durable, checksums)"
DCP = "torch DCP for Hugging Face, consolidated"
GATHER = "gather on rank 0, safetensors, fsync"
RAW = "raw write + fsync"
PRETRAINED = "transformers: save_pretrained"
LOAD, LOAD_PLAIN = "mlstate.load", "mlstate.load(mmap=True)"
SAFETENSORS = "safetensors: load_file"
SLICES = "safetensors: get_slice of 1/8 of the rows"
CHECKED, UNCHECKED = f"{LOAD}, checksums compared", f"{LOAD}, verify=False"
CHECKED_BOUNDS = {1: 1.25, 2: 1.1}  # times the duration without, by threads
OUR_ROWS = "mlstate.load of 1/8 of the rows"


def sync(folder: Path) -> None:
    """Wait until all files of a folder are on the disk."""
    for path in files_below(folder):
        sync_file(path)


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


# ---- two ranks: each has half of the rows of every tensor ----


def serve(pipe: Connection, rank: int, store: str, rows: int) -> None:
    """Run the commands of one rank."""
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.checkpoint import save as save_dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from mlstate.integrations.torch import TorchGroup

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    module = torch.nn.ParameterDict()
    for number in range(TENSORS):
        local = torch.randn(rows // RANKS, COLUMNS)
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        module[f"w{number}"] = torch.nn.Parameter(tensor, requires_grad=False)
    group = TorchGroup()

    def dcp(folder: str) -> None:
        names = dict.fromkeys(module.state_dict(), 1)
        writer = HuggingFaceStorageWriter(
            folder, names, save_distributed=True, enable_consolidation=True
        )
        save_dcp(module.state_dict(), storage_writer=writer)

    def gather(folder: str) -> None:
        from safetensors.torch import save_file

        full_state = {name: value.full_tensor() for name, value in module.state_dict().items()}
        if rank == 0:
            Path(folder).mkdir()
            save_file(full_state, Path(folder) / "model.safetensors", {"format": "pt"})
            sync(Path(folder))
        dist.barrier()

    def measured(call: Any, folder: str) -> float:
        """Return the growth of the peak of resident memory in MiB."""
        trim()
        before = forget_peak()
        call(folder)
        return peak() - before

    answer(pipe, {
        "export": partial(measured, lambda path: export_huggingface(path, module, group=group)),
        "dcp": partial(measured, dcp),
        "gather": partial(measured, gather),
    })  # fmt: skip


def by_ranks(report: Report, folder: Path, rows: int, repeats: int) -> None:
    """Time exports by two ranks."""
    store = str(folder / "store")
    ranks = Spawned(serve, [(rank, store, rows) for rank in range(RANKS)])
    grown: dict[str, list[float]] = {}
    nbytes = TENSORS * rows * COLUMNS * 4

    def run(name: str, command: str) -> None:
        rows_measured = ranks.ask(command, str(folder / command))
        grown.setdefault(name, []).append(max(rows_measured))

    def candidate(name: str, command: str, **keywords: Any) -> Candidate:
        before = partial(remove, folder / command)
        return Candidate(name, partial(run, name, command), before, **keywords)

    try:
        candidates = [candidate(OURS, "export"), candidate(DCP, "dcp", baseline=True)]
        if importlib.util.find_spec("safetensors") is not None:
            candidates.append(candidate(GATHER, "gather"))
        candidates.append(raw_write(folder, nbytes))
        rows_measured = take_turns(candidates, repeats)
    finally:
        ranks.close()
    for row in add_rates(rows_measured, nbytes):
        if row.name in grown:
            row.extra["MiB/rank"] = f"{sorted(grown[row.name])[len(grown[row.name]) // 2]:.0f}"
    report.table(f"export by {RANKS} ranks: {TENSORS} tensors, {nbytes >> 20} MiB", rows_measured)
    report.judge([Aim(OURS, 2.0, DCP, faster=True).verdict(rows_measured)])


def compare(
    report: Report, title: str, candidates: list[Candidate], repeats: int, nbytes: int
) -> list[Row]:
    """Time and print, with the rate."""
    rows = add_rates(take_turns(candidates, repeats), nbytes)
    report.table(title, rows)
    return rows


def raw_write(folder: Path, nbytes: int) -> Candidate:
    """Write as many bytes to one file, and wait for the disk."""
    data = np.ones(min(nbytes, 16 << 20), np.uint8)

    def write() -> None:
        with (folder / "raw").open("wb", buffering=0) as file:
            for _ in range(max(1, nbytes // data.nbytes)):
                file.write(data.data)
            os.fsync(file.fileno())

    return Candidate(RAW, write, partial(remove_file, folder / "raw"), limit=True)


def remove_file(path: Path) -> None:
    path.unlink(missing_ok=True)


# ---- one process ----


def llama(quick: bool) -> Any:
    """A model of transformers with random weights, of about 250 MiB."""
    warnings.simplefilter("ignore")
    import transformers as tf

    width = 64 if quick else 1024
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=16 * width, hidden_size=width, intermediate_size=2 * width,
            num_hidden_layers=4, num_attention_heads=8, tie_word_embeddings=True,
        )
    )  # fmt: skip


def by_one_process(report: Report, folder: Path, quick: bool, repeats: int) -> None:
    """Time exports of a model of transformers."""
    if importlib.util.find_spec("transformers") is None:
        report.log("\ntransformers is not installed: save_pretrained is left out")
        return
    model = llama(quick)
    nbytes = sum(value.nbytes for value in model.parameters())
    mlstate_folder, peer_folder, synced = (folder / name for name in ("ours", "theirs", "synced"))

    def pretrained_synced() -> None:
        model.save_pretrained(synced)
        sync(synced)

    export = partial(export_huggingface, mlstate_folder, model)
    save = partial(model.save_pretrained, peer_folder)
    candidates = [
        Candidate(OURS, export, partial(remove, mlstate_folder)),
        Candidate(PRETRAINED, save, partial(remove, peer_folder)),
        Candidate(f"{PRETRAINED} + fsync", pretrained_synced, partial(remove, synced), True),
        raw_write(folder, nbytes),
    ]
    title = f"export by one process: Llama, {nbytes >> 20} MiB"
    rows_measured = compare(report, title, candidates, repeats, nbytes)
    report.judge([Aim(OURS, 1.0, f"{PRETRAINED} + fsync", faster=True).verdict(rows_measured)])


# ---- reading ----


def reading(report: Report, folder: Path, rows: int, repeats: int) -> None:
    """Time reading a folder of four files from the page cache."""
    if importlib.util.find_spec("safetensors") is None:
        report.log("\nsafetensors is not installed: reading is left out")
        return
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    source, copied_folder = folder / "read", folder / "plain"
    state = {f"w{i}": np.full((rows, COLUMNS), i, np.float32) for i in range(TENSORS)}
    export_huggingface(source, state, max_shard_bytes=TENSORS * rows * COLUMNS)
    shutil.copytree(source, copied_folder)
    for path in copied_folder.glob("*.safetensors"):  # as other programs write them: no checksums
        save_file(load_file(path), path, {"format": "pt"})
    files = sorted(copied_folder.glob("*.safetensors"))
    nbytes = TENSORS * rows * COLUMNS * 4

    def slices() -> list[np.ndarray]:
        parts = []
        for path in files:
            with safe_open(path, "np") as file:
                parts += [file.get_slice(name)[rows // 8 : rows // 4] for name in file.keys()]  # noqa: SIM118
        return parts

    part = {"rank": 1, "world_size": 8, "layout": "rows"}
    candidates = [
        Candidate(f"{LOAD}, with checksums", partial(mlstate.load, source)),
        Candidate(f"{LOAD}, files without checksums", partial(mlstate.load, copied_folder)),
        Candidate(LOAD_PLAIN, partial(mlstate.load, copied_folder, mmap=True, verify=False)),
        Candidate(SAFETENSORS, lambda: [load_file(path) for path in files], baseline=True),
    ]
    title = f"load: {len(files)} files, {nbytes >> 20} MiB, in the system's cache"
    compare(report, title, candidates, repeats, nbytes)
    candidates = [
        Candidate(f"{OUR_ROWS}, with checksums", partial(mlstate.load, source, **part)),
        Candidate(OUR_ROWS, partial(mlstate.load, copied_folder, **part)),
        Candidate(SLICES, slices, baseline=True),
    ]
    title = f"one of 8 ranks: {nbytes >> 23} MiB, in the system's cache"
    compare(report, title, candidates, repeats, nbytes // 8)
    checksum(copied_folder)
    for threads, bound in CHECKED_BOUNDS.items():
        checked(report, copied_folder, threads, bound, nbytes, repeats)


def checked(
    report: Report, folder: Path, threads: int, bound: float, nbytes: int, repeats: int
) -> None:
    """Time a load of a folder with checksums of `checksum`, with and without comparing them."""
    before = mlstate.get_num_threads()
    mlstate.set_num_threads(threads)
    candidates = [
        Candidate(CHECKED, partial(mlstate.load, folder)),
        Candidate(UNCHECKED, partial(mlstate.load, folder, verify=False), baseline=True),
    ]
    title = f"load with checksums of `checksum`, {threads} threads"
    rows_measured = compare(report, title, candidates, 2 * repeats, nbytes)
    mlstate.set_num_threads(before)
    report.judge([Aim(CHECKED, bound, UNCHECKED).verdict(rows_measured)])


def main() -> None:
    parser = option_parser(__doc__, "a few MB and 3 repeats")
    parser.add_argument("--only", choices=("ranks", "save", "load"))
    options = parser.parse_args()
    report = Report.open("mlstate: Hugging Face folders", "huggingface", options)
    rows, repeats = (QUICK_ROWS, 3) if options.quick else (ROWS, 7)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.only in (None, "ranks"):
            by_ranks(report, folder, rows, repeats)
        if options.only in (None, "save"):
            by_one_process(report, folder, options.quick, repeats)
        if options.only in (None, "load"):
            reading(report, folder, rows, repeats)
    report.close()


if __name__ == "__main__":
    main()
