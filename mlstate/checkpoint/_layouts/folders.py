"""Folders of other programs, by the names in them, and their readers; no code of a file runs.

===================  =============================================================================
name                 files
===================  =============================================================================
rank_files           verl and SkyRL: ``(model|optim|extra_state)_world_size_N_rank_R.pt``
deepspeed            ZeRO 1 and 2: ``latest``, and ``TAG/mp_rank_00_model_states.pt``
sharded_safetensors  see sharded_safetensors.py
torch_checkpointing  0.1: ``ENTRY_RANK.pt`` for each entry and rank
===================  =============================================================================
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._common.backend import torch_backend
from ...errors import StoreNotFoundError
from .._files.backend import PtBackend
from .._files.parts import MODEL, OPTIMIZER, Parts, Selection
from .._folder.local import LocalFolder
from .._store.weight_files import listed
from . import sharded_safetensors
from .entries import refusal, sort_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from .._folder.protocol import Folder


class Layout(NamedTuple):
    """The layout of a folder of another program, and its reader."""

    name: str
    recognizes: Callable[[Collection[str]], object]  # the names in a folder
    # the content, and names of files that are not read; entries that the selection leaves out may
    # be read
    read: Callable[[Folder, Selection], tuple[Parts, list[str]]]


def files_of_ranks(path: Path, files: Mapping[int, str], ranks: int) -> list[Path]:
    """Return the paths of one entry's files in rank order.

    `files`: names by rank, which differ in this number only. Raises StoreNotFoundError if one of
    the ranks 0 to `ranks` - 1 has no file.
    """
    for rank in range(ranks):
        if rank not in files:
            name = re.sub(r"\d+(?=\.\w+\Z)", str(rank), min(files.values()))
            text = f"the files of all ranks are needed, and that of rank {rank} is missing"
            raise StoreNotFoundError(2, text, str(path / name))
    return [path / files[rank] for rank in range(ranks)]


# ---- verl and SkyRL ----

_OF_RANK = re.compile(
    r"(model|optim|extra_state)_world_size_(\d{1,6})_rank_(\d{1,6})\.pt\Z", re.ASCII
)
_EXTRA = "extra_state"
_PARTS = {_EXTRA: _EXTRA, "model": MODEL, "optim": OPTIMIZER}


def has_rank_files(names: Collection[str]) -> bool:
    """Return whether a folder with these names has files of verl."""
    return any(map(_OF_RANK.match, names))


def _read_rank_files(folder: Folder, selection: Selection) -> tuple[Parts, list[str]]:
    """Read the files of all ranks; parts of the model's and the optimizer's tensors are joined.

    The values of ``extra_state`` are named states; one that differs between the ranks is a list
    with one item for each rank. `selection`: a model or optimizer that it leaves out is not read.
    Raises CompatibilityError for files of several numbers of ranks, or if ranks have different
    values of a model or optimizer other than parts of DTensors.
    """
    backend = torch_backend("files of torch", PtBackend)
    path, names = Path(folder.path), folder.names("")
    matches = [match for name in sorted(names) if (match := _OF_RANK.match(name))]
    worlds = sorted({int(match[2]) for match in matches})
    if len(worlds) > 1:
        text = " and ".join(map(str, worlds))
        raise refusal(path, f"has the files of jobs of {text} ranks: move those of one job away")
    tree: dict[str, Any] = {}
    for kind, part in _PARTS.items():
        files = {int(match[3]): match[0] for match in matches if match[1] == kind}
        if files and (part == _EXTRA or selection.takes(part)):
            paths = files_of_ranks(path, files, worlds[0])
            tree[part] = backend.read_ranks(paths, keeps_differences=part == _EXTRA)
    extra = tree.get(_EXTRA)
    if isinstance(extra, dict) and not extra.keys() & tree.keys():
        del tree[_EXTRA]
        tree |= extra
    others = sorted(set(names) - {match[0] for match in matches})
    return sort_entries(tree, path, is_divided=True), others


# ---- DeepSpeed ----

LATEST = "latest"  # file with the name of the subfolder to read
_MODEL = re.compile(r"mp_rank_\d+_model_states\.pt\Z", re.ASCII)
_PARTITION = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt\Z", re.ASCII)


def _is_step(names: Collection[str]) -> bool:
    """Return whether a folder with these names is a step of DeepSpeed."""
    return any(_MODEL.match(name) or _PARTITION.match(name) for name in names)


def step_folder(folder: Folder) -> Folder:
    """Return the folder with the files of DeepSpeed's newest step: this folder, or one in it."""
    if _is_step(folder.names("")):
        return folder
    tag = folder.read(LATEST).decode("utf-8", "replace").strip()
    if Path(tag).name != tag or not tag:
        raise refusal(folder.path, f"the file {LATEST!r} names {tag[:80]!r}, not a subfolder")
    return LocalFolder(f"{folder.path}/{tag}")


def _read_deepspeed(folder: Folder, _selection: Selection) -> tuple[Parts, list[str]]:
    """Read ``module``, which is the whole model, and other entries of its file.

    The partitions of the optimizer, in ``*_optim_states.pt``, are not read. Raises
    CompatibilityError for the files of several ranks of a model, which DeepSpeed alone can join.
    """
    folder = step_folder(folder)
    names, path = folder.names(""), Path(folder.path)
    models = sorted(filter(_MODEL.match, names))
    if partitions := sorted(filter(_PARTITION.match, names)):
        raise refusal(
            path,
            f"has a model that ZeRO 3 has partitioned ({listed(partitions)}): join it by "
            "zero_to_fp32.py, which DeepSpeed writes beside the folder, and load the result",
        )
    if len(models) != 1:
        text = f"several parts ({listed(models)})" if models else "no mp_rank_*_model_states.pt"
        raise refusal(
            path,
            f"has {text}: only DeepSpeed can join a model that is divided among ranks; load it "
            "there, and save its state_dict()",
        )
    parts = torch_backend("files of torch", PtBackend).read_pt(path / models[0])
    return parts, sorted(set(names) - set(models))


# ---- torch_checkpointing ----

_ENTRY = re.compile(r"(.+)_(0|[1-9]\d{0,8})\.pt\Z", re.ASCII)


def _entry_files(names: Collection[str]) -> dict[str, dict[int, str]]:
    """Return {entry: {rank: file name}} of a folder with the files `names`.

    The result is empty if the folder is of another kind.
    """
    entries: dict[str, dict[int, str]] = {}
    for match in map(_ENTRY.match, sorted(name for name in names if name.endswith(".pt"))):
        if match is None:
            return {}
        entries.setdefault(match[1], {})[int(match[2])] = match[0]
    return entries if any(0 in files for files in entries.values()) else {}


def _read_entry_files(folder: Folder, selection: Selection) -> tuple[Parts, list[str]]:
    """Read the files of all ranks; entries that `selection` leaves out are not read.

    Raises CompatibilityError if ranks have different values other than parts of DTensors.
    """
    backend = torch_backend("files of torch", PtBackend)
    path, names = Path(folder.path), folder.names("")
    entries = _entry_files(names)
    ranks = 1 + max(rank for files in entries.values() for rank in files)
    # other names may be of values inside an entry, so then all entries are read
    is_inside = not selection.only <= entries.keys()
    tree = {
        name: backend.read_ranks(files_of_ranks(path, files, ranks))
        for name, files in entries.items()
        if selection.takes(name) or (is_inside and name not in selection.skip)
    }
    others = sorted(name for name in names if not name.endswith((".pt", ".pkl")))
    return sort_entries(tree, path), others


# ---- all ----

# The first that recognizes a folder reads it.
LAYOUTS = (
    Layout("rank_files", has_rank_files, _read_rank_files),
    Layout("deepspeed", lambda names: LATEST in names or _is_step(names), _read_deepspeed),
    Layout("sharded_safetensors", sharded_safetensors.is_layout, sharded_safetensors.read),
    Layout("torch_checkpointing", _entry_files, _read_entry_files),
)


def find_layout(names: Collection[str]) -> Layout | None:
    """Return the layout of a folder with these names; None for another folder.

    Folders of mlstate, torch.distributed.checkpoint and Hugging Face come first: the caller has
    excluded them.
    """
    return next((layout for layout in LAYOUTS if layout.recognizes(names)), None)
