"""A good checkpoint that tests damage in one place, and every way to detect the damage.

Every false document has a correct checksum, and the manifest describes the false index, so that no
checksum reveals it.
"""

import json
import shutil
import time

import numpy as np
from checkpoint_model import files_of
from index_tables import records_of, tables_of
from json_checksums import text_with_checksum

import mlstate
from mlstate import _core
from mlstate.checkpoint import inspect, reshard
from mlstate.errors import FormatError, MLStateError, StoreError


class Victim:
    """A good checkpoint; tests replace one item of it at a time."""

    def __init__(self, folder):
        self.folder = folder
        self.good = files_of(folder)
        self.patterns = True  # whether the manifest lists the patterns of the indexes

    def __str__(self):
        return str(self.folder)

    @property
    def manifest(self):
        document = json.loads(self.good["manifest.json"])
        if not self.patterns:
            document.pop("patterns", None)
        return document

    def index_path(self, rank=0):
        return f"index/{self.manifest['generation']}.{rank}.json"

    def index(self, rank=0):
        """Return an index, as records."""
        return records_of(json.loads(self.good[self.index_path(rank)]))

    def path(self, part):
        """Path of the first file in a folder."""
        return min(name for name in self.good if name.startswith(f"{part}/"))

    def put(self, name, data):
        """Overwrite a file; some systems write a file that was truncated to 0 to disk first."""
        with (self.folder / name).open("r+b") as file:
            file.write(data)
            file.truncate()

    def put_manifest(self, document):
        self.put("manifest.json", text_with_checksum(document))

    def put_index(self, data, rank=0):
        """Store an index, from records or text, and a manifest that describes it."""
        shards = data.get("shards") if isinstance(data, dict) else None
        data = text_with_checksum(tables_of(data)) if isinstance(data, dict) else data
        manifest = self.manifest
        record = {"bytes": max(len(data), 1)}
        if isinstance(shards, list):
            counts = [shard.get("bytes") for shard in shards if isinstance(shard, dict)]
            counts = [count for count in counts if type(count) is int and count >= 0]
            record.update(shards=len(shards), data_bytes=min(sum(counts), 2**63 - 1))
        columns = manifest["indexes"]
        for name, value in record.items():
            columns[name][rank] = value
        crcs = columns["crc32c"]
        columns["crc32c"] = f"{crcs[: 8 * rank]}{_core.crc32c(data):08x}{crcs[8 * rank + 8 :]}"
        self.put(self.index_path(rank), data)
        self.put_manifest(manifest)

    def replace(self, name):
        """Remove a file, and return its path for something else."""
        path = self.folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        return path

    def restore(self):
        self.patterns = True
        for path in [self.folder, *self.folder.iterdir()]:
            if path.is_symlink() or not path.is_dir():
                path.unlink()
        for name, data in self.good.items():
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.is_symlink() or path.exists():
                path.unlink()
            path.write_bytes(data)


def saved(folder):
    model = mlstate.ModelStateDict(
        {"w": np.arange(24, dtype=np.float32).reshape(4, 6), "b": np.ones(3, np.float16)},
        model_type="small",
        layer_count=1,
    )
    optimizer = mlstate.OptimizerStateDict.create("adam")
    optimizer["w.m"] = np.zeros((4, 6), np.float32)
    mlstate.save(str(folder), model, optimizer, step=3, metadata={"run": "a"})
    return folder


def ways(folder, target):
    """Every way to read a checkpoint."""
    arrays = {"w": np.zeros((4, 6), np.float32), "b": np.zeros(3, np.float16)}
    return {
        "load": lambda: mlstate.load(folder),
        "inspect": lambda: inspect(folder).tensors(),
        "mmap": lambda: mlstate.load(folder, mmap=True),
        "unverified": lambda: mlstate.load(folder, verify=False),
        "verified first": lambda: mlstate.load(folder, verify="first"),
        "part": lambda: mlstate.load(folder, rank=1, world_size=2, layout="rows"),
        "name": lambda: mlstate.load(folder, names="w"),
        "into": lambda: mlstate.load(folder, into={"model": arrays}),
        "reshard": lambda: reshard(folder, target, layout="flat", world_size=3, overwrite=True),
    }


def refused(victim, label, only=("load", "inspect"), kinds=(FormatError, StoreError)):
    """Every way raises, and verify names a problem; return the first error."""
    folder = str(victim)
    start = time.process_time()
    first = None
    for way, read in ways(folder, folder + "-other").items():
        if only and way not in only:
            continue
        try:
            got = read()
        except kinds as error:
            assert isinstance(error, MLStateError), (label, way)
            assert str(error.path).startswith(folder), (label, way, str(error))
            first = first or error
        else:
            raise AssertionError(f"{label}: {way} gave {got!r}")
    report = mlstate.verify(folder)
    assert not report, label
    assert report.problems[0].text, label
    assert time.process_time() - start < 5, label
    return first
