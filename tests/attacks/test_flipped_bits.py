"""Every flipped bit of a file with checksums is found, in six formats of other programs."""

import json
import mmap
import random
from contextlib import suppress

import numpy as np
import pytest
from amounts import TRIED, amount
from weight_folder import write_folder, write_weight_file

import mlstate
from mlstate._common.file_checksums import NAME, find_of_folder
from mlstate.checkpoint import checksum
from mlstate.checkpoint._files.checksums_verify import record_problems
from mlstate.checkpoint._folder.local import LocalFolder

ALL = 1_000_000 // 6 + 1  # flips of a format in `make faults`; six formats are a million
SLICE, SAMPLE = 2_000, 50  # of a format in its slice, and in an ordinary run
STATE = {
    "layers.0.weight": np.arange(900, dtype=np.float32).reshape(30, 30),
    "layers.0.bias": np.ones(7, np.float16),
    "step": np.array(3, np.int64),
}


def write_safetensors(folder):
    write_weight_file(folder / "weights.safetensors", STATE)


def write_huggingface(folder):
    write_folder(folder, STATE, files=2)


def write_adapter(folder):
    write_weight_file(folder / "adapter_model.safetensors", STATE)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "target_modules": ["q"]}))


def write_npz(folder):
    np.savez(folder / "state.npz", **STATE)


def write_pt(folder):
    torch = pytest.importorskip("torch")
    torch.save({name: torch.from_numpy(array) for name, array in STATE.items()}, folder / "x.pt")


def write_dcp(folder):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    state = {name: torch.from_numpy(array) for name, array in STATE.items()}
    dcp.save({"model": state}, checkpoint_id=folder, no_dist=True)


FORMATS = [write_safetensors, write_huggingface, write_adapter, write_npz, write_pt, write_dcp]


@pytest.fixture(params=FORMATS, ids=lambda write: write.__name__.removeprefix("write_"))
def folder(request, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    request.param(folder)
    checksum(folder)
    return folder


class Flips:
    """Files of a folder, mapped, so that a flip costs no write."""

    def __init__(self, folder, seed):
        self.random = random.Random(seed)
        self.names = [path.name for path in sorted(folder.iterdir()) if path.name != NAME]
        self.maps = {}
        for name in self.names:
            with (folder / name).open("r+b") as file, suppress(ValueError):  # an empty file
                self.maps[name] = mmap.mmap(file.fileno(), 0)
        self.names = list(self.maps)
        self.sizes = [len(self.maps[name]) for name in self.names]

    def choose(self):
        """Return a file, an offset and the mask of a bit; each byte is equally likely."""
        (name,) = self.random.choices(self.names, self.sizes)
        return name, self.random.randrange(len(self.maps[name])), 1 << self.random.randrange(8)

    def flip(self, name, offset, mask):
        """Flip the bit, or flip it back."""
        self.maps[name][offset] ^= mask


@pytest.mark.filterwarnings("ignore")
def test_each_flipped_bit_is_found(folder):
    """Of a few flips, `verify` names the file; of all, the comparison that it makes does."""
    count = amount(SAMPLE, SLICE, ALL)
    flips = Flips(folder, seed=count)
    records = find_of_folder(str(folder)).records
    for number in range(count):
        name, offset, mask = flips.choose()
        flips.flip(name, offset, mask)
        if number < SAMPLE:
            problems = mlstate.verify(folder).problems
            changed = {problem.path for problem in problems if problem.kind == "changed"}
            assert changed == {name}, (name, offset, mask)
        problems = record_problems(LocalFolder(str(folder)), name, records[name], None)
        assert problems, (name, offset, mask)
        assert problems[0].offset <= offset < problems[0].offset + problems[0].length
        flips.flip(name, offset, mask)
    TRIED["flipped bits"] += count
    assert mlstate.verify(folder)


@pytest.mark.parametrize("files", [1, 3])
def test_load_finds_each_flipped_bit_that_it_reads(tmp_path, files):
    folder = write_folder(tmp_path / "model", STATE, files=files)
    checksum(folder)
    flips = Flips(folder, seed=files)
    for _ in range(SAMPLE):
        name, offset, mask = flips.choose()
        flips.flip(name, offset, mask)
        if name == "config.json":  # `load` does not read it
            mlstate.load(folder)
        else:
            with pytest.raises(mlstate.errors.FormatError):
                mlstate.load(folder)
        flips.flip(name, offset, mask)
    mlstate.load(folder)
