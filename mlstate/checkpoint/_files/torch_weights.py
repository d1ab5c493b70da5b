"""Hugging Face folders of ``.bin`` files, and folders of torch_checkpointing, read whole.

A Hugging Face folder has ``.bin`` files, one, or several with or without an index. A folder of
torch_checkpointing 0.1 has a file ``ENTRY_RANK.pt`` for each entry and rank.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._common.backend import torch_backend
from ..._common.caller import find_caller
from ..._common.store_error import format_error
from ...errors import CompatibilityError
from ...state._state_dict import StateDict
from .._folder.weight_names import TORCH_SUFFIX, is_index, is_set, weights_root
from .._layouts.entries import sort_entries
from .._store.weight_files import (
    WeightFiles,
    bytes_of,
    list_set,
    listed,
    parse_index,
    warn_of_differences,
)
from .backend import PtBackend

if TYPE_CHECKING:
    from .._folder.protocol import Folder
    from .parts import Parts, Selection

_ENTRY = re.compile(r"(.+)_(0|[1-9]\d{0,8})\.pt\Z", re.ASCII)


def torch_weights_root(folder: Folder) -> str | None:
    """Return the root of a local folder's ``.bin`` files; None if it has safetensors or neither."""
    if not (folder.is_local and folder.has_checkpoint()) or folder.find_weights() is not None:
        return None
    return weights_root(folder.names(""), TORCH_SUFFIX, folder=folder.path)


def read_torch_weights(folder: Folder, root: str) -> StateDict:
    """Return the tensors of a folder's ``.bin`` files by name, read without running their code.

    `root`: one file, an index, or a pattern of numbered files. Arrays may be views of mapped files.
    Warns of entries beside the weights. Raises StoreNotFoundError if a file is missing, and
    FormatError if one holds an optimizer, or a tensor in several files does not have the same bytes
    in each.
    """
    if is_index(root):
        data = folder.read(root, follow_links=True)
        weights = parse_index(folder, root, data, TORCH_SUFFIX)
    else:
        weights = list_set(folder, root) if is_set(root) else WeightFiles(root, (root,))
    infos = folder.note_files(weights.files)
    missing = tuple(name for name in weights.files if infos[name] is None)
    if missing:
        raise weights._replace(missing=missing).missing_error(folder)
    backend = torch_backend("files of torch", PtBackend)
    state: dict[str, Any] = {}
    files_by_name: dict[str, str] = {}
    copies: set[tuple[str, str]] = set()  # name and file of tensors that an earlier file has too
    for file in weights.files:
        path = os.path.join(folder.path, file)
        parts = backend.read_pt(Path(path))
        if parts.model is None or parts.optimizer is not None:
            raise format_error(f"{path}: holds an optimizer, not only weights", path)
        if others := sorted({**parts.metadata, **parts.states}):
            find_caller().warn(f"{path}: entries beside the weights are left out: {listed(others)}")
        for name, array in dict(parts.model).items():
            if name in state:
                _check_equal(path, name, array, state[name], files_by_name[name])
                copies.add((name, file))
            else:
                state[name], files_by_name[name] = array, file
    if weights.tensors is not None:
        warn_of_differences(folder, weights, files_by_name, copies)
    return StateDict(state)


def _check_equal(path: str, name: str, array: Any, first: Any, first_file: str) -> None:
    """Raise FormatError if the tensor `name` has other bytes in two files.

    `array`: of the file `path`. `first`: of `first_file`, which was read before.
    """
    facts = [(each.dtype, each.shape) for each in (array, first)]
    if facts[0] != facts[1] or bytes_of(array) != bytes_of(first):
        error = format_error(f"{path}: {name!r} has other bytes than in {first_file}", path)
        error.name = name
        raise error


# ---- torch_checkpointing ----


def entry_files(folder: Folder) -> dict[str, dict[int, str]]:
    """Return {entry: {rank: file name}} of a local folder of torch_checkpointing.

    The result is empty if the folder is of another kind.
    """
    names = [name for name in folder.names("") if name.endswith(".pt")]
    entries: dict[str, dict[int, str]] = {}
    for match in map(_ENTRY.match, sorted(names)):
        if match is None:
            return {}
        entries.setdefault(match[1], {})[int(match[2])] = match[0]
    return entries if any(0 in files for files in entries.values()) else {}


def read_entries(folder: Folder, selection: Selection) -> Parts:
    """Read a folder of torch_checkpointing, without running code from it.

    `selection`: entries that it leaves out are not read. Raises CompatibilityError if a rank's file
    is missing, or if ranks have different values other than parts of DTensors.
    """
    backend = torch_backend("files of torch", PtBackend)
    path = Path(folder.path)
    entries = entry_files(folder)
    ranks = range(max(len(files) for files in entries.values()))
    others = sorted(name for name in folder.names("") if not name.endswith((".pt", ".pkl")))
    if others:
        find_caller().warn(f"{path}: files beside the entries are left out: {listed(others)}")
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
            raise CompatibilityError(
                f"{path}: rank {missing[0]} has not saved each entry ({name}_{missing[0]}.pt); a "
                "folder of torch_checkpointing is read with the files of all ranks"
            )
        tree[name] = backend.read_ranks([path / files[rank] for rank in ranks])
    return sort_entries(tree, path)
