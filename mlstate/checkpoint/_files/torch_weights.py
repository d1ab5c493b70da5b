"""Hugging Face folders of ``.bin`` files, read whole: one, or several with or without an index."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._common.backend import torch_backend
from ..._common.caller import find_caller
from ..._common.store_error import format_error
from ...state._state_dict import StateDict
from .._folder.weight_names import TORCH_SUFFIX, is_index, is_set
from .._store.weight_files import (
    WeightFiles,
    bytes_of,
    check_unlisted,
    list_set,
    listed,
    parse_index,
    warn_of_differences,
)
from .backend import PtBackend

if TYPE_CHECKING:
    from .._folder.protocol import Folder


def read_torch_weights(folder: Folder, root: str) -> StateDict:
    """Return the tensors of a folder's ``.bin`` files by name, read without running their code.

    `root`: one file, an index, or a pattern of numbered files. Arrays may be views of mapped files.
    Warns of entries that are not weights. Raises StoreNotFoundError if a file is missing, and
    FormatError if one holds an optimizer, or a tensor in several files does not have the same bytes
    in each.
    """
    if is_index(root):
        data = folder.read(root, follow_links=True)
        weights = parse_index(folder, root, data, TORCH_SUFFIX)
        check_unlisted(folder, weights, TORCH_SUFFIX)
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
        parts = backend.read_pt(Path(path)).refuse_unreadable()
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
        raise format_error(f"{path}: {name!r} has other bytes than in {first_file}", path, name)
