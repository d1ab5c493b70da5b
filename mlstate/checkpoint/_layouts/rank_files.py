"""Folders of verl and SkyRL: ``(model|optim|extra_state)_world_size_N_rank_R.pt``, for each rank.

The first two have parts of tensors, which are joined. The values of ``extra_state`` are named
states; one that differs between the ranks is a list with one item for each rank.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._common.backend import torch_backend
from ...errors import StoreNotFoundError
from .._files.backend import PtBackend
from .._files.parts import MODEL, OPTIMIZER
from .._store.weight_files import listed
from .entries import refusal, sort_entries

if TYPE_CHECKING:
    from collections.abc import Collection

    from .._files.parts import Parts, Selection
    from .._folder.protocol import Folder

_FILE = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,6})_rank_(\d{1,6})\.pt\Z", re.ASCII)
_EXTRA = "extra_state"
_PARTS = {"model": MODEL, "optim": OPTIMIZER, _EXTRA: _EXTRA}


def is_layout(names: Collection[str]) -> bool:
    """Return whether a folder with these names has such files."""
    return any(map(_FILE.match, names))


def read(folder: Folder, selection: Selection) -> tuple[Parts, list[str]]:
    """Read the files of all ranks, without running code from them.

    Also return the names of other files. `selection`: a model or optimizer that it leaves out is
    not read. Raises StoreNotFoundError if a rank's file is missing, CompatibilityError for files of
    several numbers of ranks, or if ranks have different values of a model or optimizer other than
    parts of DTensors.
    """
    backend = torch_backend("files of torch", PtBackend)
    path = Path(folder.path)
    names = folder.names("")
    matches = [match for name in sorted(names) if (match := _FILE.match(name))]
    worlds = sorted({int(match[2]) for match in matches})
    if len(worlds) > 1:
        text = " and ".join(map(str, worlds))
        raise refusal(path, f"has the files of jobs of {text} ranks: move those of one job away")
    tree: dict[str, Any] = {}
    for kind in sorted({match[1] for match in matches}):
        part = _PARTS[kind]
        if part != _EXTRA and not selection.takes(part):
            continue
        files = [f"{kind}_world_size_{worlds[0]}_rank_{rank}.pt" for rank in range(worlds[0])]
        if missing := sorted(set(files) - set(names)):
            text = f"the files of all ranks are needed: {listed(missing)} is missing"
            raise StoreNotFoundError(2, text, str(path / missing[0]))
        paths = [path / name for name in files]
        tree[part] = backend.read_ranks(paths, keeps_differences=part == _EXTRA)
    extra = tree.get(_EXTRA)
    if isinstance(extra, dict) and not extra.keys() & tree.keys():
        del tree[_EXTRA]
        tree |= extra
    others = sorted(set(names) - {match[0] for match in matches})
    return sort_entries(tree, path, is_divided=True), others
