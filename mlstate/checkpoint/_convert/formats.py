"""Formats by name, and the format of a path to write: by its suffix, or an existing folder's.

The content decides about a path to read: see `open_source`.

The formats of `LAYOUTS`, such as ``torch_checkpointing``, are directories that are only read.

==============  ==========================  ====================================================
format          path                        holds
==============  ==========================  ====================================================
``mlstate``     a directory                 a checkpoint of `mlstate.save`
``safetensors`` ``.safetensors``            arrays and texts
``npz``         ``.npz``                    arrays of `numpy.savez`
``torch``       ``.pt .pth .bin``           what ``torch.load`` reads with ``weights_only``
``dcp``         a directory, or ``.dcp``    a checkpoint of torch.distributed.checkpoint
``huggingface`` a directory                 weights of a Hugging Face model
``lightning``   ``.ckpt``                   a checkpoint of Lightning
==============  ==========================  ====================================================

A URL of an object store is a checkpoint of mlstate.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..._common.local_path import local_path
from ..._common.text import names_hint
from ...errors import MLStateError
from .._folder.local import LocalFolder
from .._folder.object import StoreURL
from .._folder.weight_names import is_index
from .._layouts.folders import LAYOUTS
from .._sources.open_source import open_source
from .._store.open_path import is_url, open_folder, refuse_format

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    from .._folder.protocol import Folder

    Place: TypeAlias = Path | StoreURL

NAMES = (
    "mlstate",
    "safetensors",
    "npz",
    "torch",
    "dcp",
    "huggingface",
    *(layout.name for layout in LAYOUTS),
    "lightning",
)
SUFFIXES = {
    ".safetensors": "safetensors",
    ".npz": "npz",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "lightning",
    ".dcp": "dcp",
}
FLAT = ("safetensors", "npz")  # formats with one level of names


def place_of(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, object] | None = None,
    *,
    reads: bool = False,
) -> Place:
    """Return a local path, or the URL of a folder in an object store.

    `storage_options`: of the store; None: the defaults. ValueError for options of a local path.
    `reads`: the path may name one file of weights, as for `open_folder`.
    """
    if is_url(path) or storage_options is not None:
        url = open_folder(path, storage_options, reads=reads).path
        assert isinstance(url, StoreURL)  # options of a local path are refused
        return url
    return Path(local_path(path))


def folder_of(place: Place) -> Folder:
    """Return the folder of a place."""
    return LocalFolder(str(place)) if isinstance(place, Path) else place.folder


def format_of(path: str | os.PathLike[str]) -> str:
    """Return the name of the format to write at a path.

    An existing folder has the format of its content. Otherwise the suffix decides: a path without
    one is a checkpoint of mlstate, and so is a URL without a suffix of another format. Raises
    ValueError for an unknown suffix.
    """
    place = place_of(path)
    suffix = os.path.splitext(place)[1].lower()
    if not isinstance(place, Path):
        return SUFFIXES.get(suffix, "mlstate")
    if place.is_dir():
        with suppress(MLStateError):
            return open_source(place).format
        # a folder of MLStateCheckpointIO has the suffix of a file
        return "mlstate" if suffix == ".ckpt" else SUFFIXES.get(suffix, "mlstate")
    if is_index(place.name):
        return "huggingface"
    if suffix and suffix not in SUFFIXES:
        raise ValueError(
            f"{place}: the suffix {place.suffix!r} belongs to no known format; known are "
            f"{' '.join(SUFFIXES)}, and folders of mlstate and torch. Otherwise pass format= "
            f"(--to on the command line){names_hint(suffix, SUFFIXES, listed=False)}"
        )
    return SUFFIXES.get(suffix, "mlstate")


def find_format(format: str | None, path: Place) -> str:
    """Return the format's name, `format_of(path)` for None; raise ValueError if unknown.

    Also raises for a URL whose format cannot be in a store.
    """
    name = format_of(path) if format is None else format
    if name not in NAMES:
        raise ValueError(f"format must be one of {', '.join(NAMES)}, got {format!r}")
    check_format(path, name)
    return name


def check_format(path: Place, name: str) -> None:
    """Raise ValueError if `path` is a URL and the format `name` cannot be in a store."""
    folder = folder_of(path)
    if name != "mlstate" and not folder.file:
        refuse_format(folder, name)
