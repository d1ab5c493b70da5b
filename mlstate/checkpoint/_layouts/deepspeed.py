"""Folders of DeepSpeed's ZeRO 1 and 2: ``latest``, and ``TAG/mp_rank_00_model_states.pt``.

``module`` in that file is the model, whole. The partitions of the optimizer, in
``*_optim_states.pt``, are not read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..._common.backend import torch_backend
from .._files.backend import PtBackend
from .._folder.local import LocalFolder
from .._store.weight_files import listed
from .entries import refusal

if TYPE_CHECKING:
    from collections.abc import Collection

    from .._files.parts import Parts, Selection
    from .._folder.protocol import Folder

LATEST = "latest"  # file with the name of the subfolder to read
_MODEL = re.compile(r"mp_rank_\d+_model_states\.pt\Z", re.ASCII)
_PARTITION = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt\Z", re.ASCII)


def is_layout(names: Collection[str]) -> bool:
    """Return whether a folder with these names is one of DeepSpeed."""
    return LATEST in names or any(_MODEL.match(name) or _PARTITION.match(name) for name in names)


def step_folder(folder: Folder) -> Folder:
    """Return the folder with the files of the newest step: this folder, or one in it."""
    names = folder.names("")
    if any(_MODEL.match(name) or _PARTITION.match(name) for name in names):
        return folder
    tag = folder.read(LATEST).decode("utf-8", "replace").strip()
    if Path(tag).name != tag or not tag:
        raise refusal(folder.path, f"the file {LATEST!r} names {tag[:80]!r}, not a subfolder")
    return LocalFolder(f"{folder.path}/{tag}")


def read(folder: Folder, _selection: Selection) -> tuple[Parts, list[str]]:
    """Read the model of a folder of DeepSpeed, and other entries of its file.

    Also return the names of files that are not read. Raises CompatibilityError for the files of
    several ranks of a model, which DeepSpeed alone can join.
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
