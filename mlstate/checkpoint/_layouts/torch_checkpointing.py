"""Folders of torch_checkpointing 0.1: a file ``ENTRY_RANK.pt`` for each entry and rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._common.backend import torch_backend
from .._files.backend import PtBackend
from .entries import refusal, sort_entries

if TYPE_CHECKING:
    from collections.abc import Collection

    from .._files.parts import Parts, Selection
    from .._folder.protocol import Folder

_ENTRY = re.compile(r"(.+)_(0|[1-9]\d{0,8})\.pt\Z", re.ASCII)


def entry_files(names: Collection[str]) -> dict[str, dict[int, str]]:
    """Return {entry: {rank: file name}} of a folder with the files `names`.

    The result is empty if the folder is of another kind.
    """
    entries: dict[str, dict[int, str]] = {}
    for match in map(_ENTRY.match, sorted(name for name in names if name.endswith(".pt"))):
        if match is None:
            return {}
        entries.setdefault(match[1], {})[int(match[2])] = match[0]
    return entries if any(0 in files for files in entries.values()) else {}


def read(folder: Folder, selection: Selection) -> tuple[Parts, list[str]]:
    """Read a folder of torch_checkpointing, without running code from it.

    Also return the names of other files. `selection`: entries that it leaves out are not read.
    Raises CompatibilityError if a rank's file is missing, or if ranks have different values other
    than parts of DTensors.
    """
    backend = torch_backend("files of torch", PtBackend)
    path = Path(folder.path)
    entries = entry_files(folder.names(""))
    ranks = range(max(len(files) for files in entries.values()))
    others = sorted(name for name in folder.names("") if not name.endswith((".pt", ".pkl")))
    # Other names may be of values inside an entry, so then all entries are read.
    only = selection.only if selection.only <= entries.keys() else set()
    left_out = selection.skip | (entries.keys() - only if only else set())
    tree: dict[str, Any] = {}
    for name, files in entries.items():
        if name in left_out and not selection.takes(name):
            continue
        # `ranks` is as long as the most files of an entry: each entry must have just these ranks
        missing = [rank for rank in (*ranks, *files) if rank not in files or rank not in ranks]
        if missing:
            file = f"{name}_{missing[0]}.pt"
            text = f"rank {missing[0]} has not saved each entry ({file}); a folder of "
            raise refusal(path, f"{text}torch_checkpointing is read with the files of all ranks")
        tree[name] = backend.read_ranks([path / files[rank] for rank in ranks])
    return sort_entries(tree, path), others
