"""Which format a path has: by suffix, by the content of a folder; names of all formats.

The suffix of a path determines the format. For a directory, its content does.

The format ``torch_checkpointing`` is a directory of that package; it is only read.

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

A URL of an object store is a checkpoint of mlstate. As a source, it may also be a ``.safetensors``
file, or the index file of a Hugging Face folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..._common.local_path import local_path
from ..._common.text import names_hint
from .._folder.local import LocalFolder
from .._folder.names import MANIFEST
from .._folder.object import StoreURL
from .._folder.weight_names import is_index
from .._store.open_path import is_url, open_folder
from .lightning import SUFFIX
from .torch_weights import entry_files, torch_weights_root

if TYPE_CHECKING:
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
    "torch_checkpointing",
    "lightning",
)
SUFFIXES = {  # `format_of` decides about ".ckpt" itself
    ".safetensors": "safetensors",
    ".npz": "npz",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
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
    """Return the name of a path's format, from an existing directory's content or the suffix.

    If a directory has files of several formats, the one that `load` reads counts.
    A path without suffix is an mlstate checkpoint, and so is a URL without a suffix of another
    format. The index file of a Hugging Face folder at a URL is the folder. Raises ValueError for an
    unknown suffix.
    """
    place = place_of(path, reads=True)
    if not isinstance(place, Path):
        if place.folder.file:
            return "huggingface" if is_index(place.folder.file) else "safetensors"
        return SUFFIXES.get(os.path.splitext(place)[1].lower(), "mlstate")
    if place.is_dir():
        folder = folder_of(place)
        if folder.exists(MANIFEST):
            return "mlstate"
        if folder.find_weights() is not None:
            return "huggingface"
        if (place / ".metadata").exists():
            return "dcp"
        if torch_weights_root(folder) is not None:
            return "huggingface"
        if entry_files(folder):
            return "torch_checkpointing"
    elif is_index(place.name):
        return "huggingface"
    suffix = place.suffix.lower()
    if suffix == SUFFIX and not place.is_dir():  # a folder of MLStateCheckpointIO has it too
        return "lightning"
    if suffix and suffix not in SUFFIXES and not place.is_dir():
        raise ValueError(
            f"{place}: the suffix {place.suffix!r} belongs to no known format; known are "
            f"{' '.join(SUFFIXES)}, and folders of mlstate and torch. Otherwise pass format= "
            f"(--from or --to on the command line){names_hint(suffix, SUFFIXES, listed=False)}"
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
        remedy = "copy it from or to a local path by the store's own tool, and convert there"
        folder.require_local(f"the format {name}", remedy)
