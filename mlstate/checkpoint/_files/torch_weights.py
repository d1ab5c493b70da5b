"""Folders of files of torch.

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
from .._store.weight_files import (
    WeightFiles,
    bytes_of,
    list_set,
    listed,
    parse_index,
    warn_of_differences,
)
from .backend import FileBackend

if TYPE_CHECKING:
    from .._folder.protocol import Folder
    from .parts import Parts

_ENTRY = re.compile(r"(.+)_(\d+)\.pt\Z", re.ASCII)


def torch_weights_root(folder: Folder) -> str | None:
    """Return the root of a folder's ``.bin`` files, unless it has files of safetensors."""
    if not (folder.is_local and folder.has_checkpoint()) or folder.find_weights() is not None:
        return None
    return weights_root(folder.names(""), TORCH_SUFFIX)


def read_torch_weights(folder: Folder, root: str) -> StateDict:
    """Return the tensors of a folder's ``.bin`` files by name, read without running their code.

    `root`: names the files. Arrays may be views of mapped files.
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
    backend = torch_backend("files of torch", FileBackend)
    state: dict[str, Any] = {}
    files_by_name: dict[str, str] = {}
    copies: set[tuple[str, str]] = set()
    for file in weights.files:
        path = os.path.join(folder.path, file)
        parts = backend.read_pt(Path(path))
        if parts[0] is None or parts[1] is not None:
            raise format_error(f"{path}: holds an optimizer, not only weights", path)
        if others := sorted({**parts[2], **parts[3]}):
            find_caller().warn(f"{path}: entries beside the weights are left out: {listed(others)}")
        for name, array in dict(parts[0]).items():
            if name in state:
                _check_equal(path, name, array, state[name], files_by_name[name])
                copies.add((name, file))
            else:
                state[name], files_by_name[name] = array, file
    if weights.tensors is not None:
        warn_of_differences(folder, weights, files_by_name, copies)
    return StateDict(state)


def _check_equal(path: str, name: str, array: Any, first: Any, first_file: str) -> None:
    facts = [(each.dtype, each.shape) for each in (array, first)]
    if facts[0] != facts[1] or bytes_of(array) != bytes_of(first):
        error = format_error(f"{path}: {name!r} has other bytes than in {first_file}", path)
        error.name = name
        raise error


# ---- torch_checkpointing ----


def entry_files(folder: Folder) -> dict[str, str]:
    """Return the file of each entry in a local folder of torch_checkpointing; {} if it is another.

    Raises CompatibilityError if several ranks wrote it: their files hold parts of tensors.
    """
    names = [name for name in folder.names("") if name.endswith(".pt")]
    matches = [match for name in sorted(names) if (match := _ENTRY.match(name))]
    if len(matches) < len(names) or not any(match[2] == "0" for match in matches):
        return {}
    other = next((match[0] for match in matches if match[2] != "0"), None)
    if other is not None:
        raise CompatibilityError(
            f"{folder.path} holds {other!r}: several ranks wrote it with torch_checkpointing, and "
            "their parts are not joined here; load it there, and save it with mlstate.save"
        )
    return {match[1]: match[0] for match in matches}


def read_entries(folder: Folder) -> Parts:
    """Read a folder that one rank wrote with torch_checkpointing, without running code from it."""
    backend = torch_backend("files of torch", FileBackend)
    path = Path(folder.path)
    tree = {name: backend.read_tree(path / file) for name, file in entry_files(folder).items()}
    return backend.parts_of(tree, path)
