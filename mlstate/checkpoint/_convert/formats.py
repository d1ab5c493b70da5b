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

from ..._common.text import names_hint
from ...errors import CompatibilityError, MLStateError
from .._folder.weight_names import is_index
from .._layouts.folders import LAYOUTS
from .._sources.open_source import open_source
from .._store.open_path import open_folder, refuse_format

_ONLY_READ = tuple(layout.name for layout in LAYOUTS)
NAMES = ("mlstate", "safetensors", "npz", "torch", "dcp", "huggingface", *_ONLY_READ, "lightning")
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


def format_of(path: str | os.PathLike[str]) -> str:
    """Return the name of the format to write at a path.

    An existing folder has the format of its content. Otherwise the suffix decides: a path without
    one is a checkpoint of mlstate, and so is a URL without a suffix of another format. Raises
    ValueError for an unknown suffix.
    """
    folder = open_folder(path)
    suffix = os.path.splitext(folder.path)[1]
    format = SUFFIXES.get(suffix.lower(), "mlstate")
    if not folder.is_local:
        return format
    if os.path.isdir(folder.path):
        with suppress(MLStateError):
            return open_source(folder.path).format
        # a folder of MLStateCheckpointIO has the suffix of a file
        return "mlstate" if format == "lightning" else format
    if is_index(os.path.basename(folder.path)):
        return "huggingface"
    if suffix and suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"{folder.path}: the suffix {suffix!r} belongs to no known format; known are "
            f"{' '.join(SUFFIXES)}, and folders of mlstate and torch. Otherwise pass "
            f"format={names_hint(suffix, SUFFIXES, listed=False)}"
        )
    return format


def find_format(format: str | None, path: str | os.PathLike[str]) -> str:
    """Return the format's name, `format_of(path)` for None; raise ValueError if unknown.

    Also raises for a URL whose format cannot be in a store; CompatibilityError for a format that
    is only read.
    """
    name = format_of(path) if format is None else format
    if name not in NAMES:
        raise ValueError(f"format must be one of {', '.join(NAMES)}, got {format!r}")
    if name in _ONLY_READ:
        raise CompatibilityError(
            f"{path}: folders of the format {name} are only read; choose another, such as .pt"
        )
    if name != "mlstate":
        refuse_format(open_folder(path), name)
    return name
