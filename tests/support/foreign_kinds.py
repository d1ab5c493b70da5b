"""The registry of files and folders of other programs: how each is written, what mlstate does.

`KINDS` maps a title to a `Kind`, whose `write` writes into a new folder and returns a `Sample`: the
path, and the values that the program's own reader returns. foreign_files.py and foreign_folders.py
fill it. `python tests/support/foreign_folders.py` prints the table of docs/coming_from.md.
"""

from __future__ import annotations

import contextlib
import io
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

STORED = Path(__file__).parents[1] / "golden" / "foreign"
VERIFIED = {  # answers of `verify`: the exit status, and the cell of the table
    "good": (0, "good: checksums compared"),
    "structure": (0, "good: structure only"),
    "damaged": (1, "damaged, or not a checkpoint (1)"),
    "unparsed": (2, "refused (2)"),
    "intact": (3, "intact, not loadable (3)"),
}


class Sample(NamedTuple):
    """A written file or folder, and the tensors and values that its own reader returns.

    `optimizer` has keys ``"<parameter>.<state>"``. `states` and `metadata` may lack entries that do
    not matter. `by_rank` are the values of an entry on each rank. If `fills`, the file holds
    the run of `network`.
    """

    path: Path
    model: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    states: dict[str, Any] = {}  # noqa: RUF012 (not changed)
    metadata: dict[str, Any] = {}  # noqa: RUF012
    by_rank: tuple[Any, ...] = ()
    fills: bool = False


class Kind(NamedTuple):
    """What mlstate does with one kind of file.

    `holds` names what `load` returns, as "model, optimizer, states a, b"; after "…" it may return
    other states too. If it is empty, `load` refuses the file with an error that contains all
    `words`. `verify` is a key of `VERIFIED`. A load warns with text that matches `warns`, or not at
    all.
    """

    write: Callable[[Path], Sample | Path]
    holds: str
    words: tuple[str, ...]
    verify: str
    warns: str | None = None

    def sample(self, folder: Path) -> Sample:
        """Write the files without the warnings of the programs that write them."""
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            sample = self.write(folder)
        return sample if isinstance(sample, Sample) else Sample(sample)


KINDS: dict[str, Kind] = {}


def loads(title, holds, verify="good", warns=None):
    """Register the writer of a kind that `load` reads."""

    def register(write):
        KINDS[title] = Kind(write, holds, (), verify, warns)
        return write

    return register


def refused(title, verify, *words):
    """Register the writer of a kind that `load` refuses with an error that has these words."""

    def register(write):
        KINDS[title] = Kind(write, "", words, verify)
        return write

    return register


def table() -> str:
    """Return the table of docs/coming_from.md."""
    rows = ["| file or folder | load, inspect, convert | verify |", "| --- | --- | --- |"]
    for title, kind in KINDS.items():
        naming = ", naming " + ", ".join(f"`{word}`" for word in kind.words)
        cell = kind.holds or "refused" + naming * bool(kind.words)
        cell += "; a warning names the rest" * bool(kind.warns)
        rows.append(f"| {title} | {cell} | {VERIFIED[kind.verify][1]} |")
    return "\n".join(rows)


# ---- values ----


def network(seed=0, steps=2, shard=lambda model: model):
    """Return a trained model, its optimizer, and its scheduler; `shard` divides the model."""
    torch.manual_seed(seed)
    layers = OrderedDict(first=torch.nn.Linear(3, 4), second=torch.nn.Linear(4, 2))
    model = shard(torch.nn.Sequential(layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def run_tree():
    model, optimizer, _ = network()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def run_sample(path, tree):
    """Return the sample of a tree of model, optimizer and epoch that `path` holds."""
    optimizer = moments(tree["optimizer"])
    return Sample(path, tree["model"], optimizer, metadata={"epoch": 3}, fills=True)


def moments(optimizer):
    """Return the tensors of a state dict of torch by ``"<parameter>.<state>"``."""
    return {
        f"{f'param_{key}' if str(key).isdigit() else key}.{name}": value
        for key, states in optimizer["state"].items()
        for name, value in states.items()
    }


def read_torch(path):
    return torch.load(path, weights_only=False)


def read_safetensors(path):
    from safetensors.torch import load_file

    return load_file(path)


def saved(path, value, **options):
    """Write a file by ``torch.save``; return its path, and what ``torch.load`` returns."""
    torch.save(value, path, **options)
    return path, read_torch(path)


def stored(name, folder):
    """Unpack the files that a program wrote, of tests/golden/foreign; return the only entry."""
    with zipfile.ZipFile(STORED / f"{name}.zip") as archive:
        archive.extractall(folder)
    [path] = folder.iterdir()
    return path
