"""Readers of the formats that are read as a whole, by name; checksums of `checksum` compared."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ... import _core
from ..._common.backend import torch_backend
from ..._common.caller import find_caller
from ..._common.file_checksums import require_unchanged
from ..._common.store_error import format_error
from ...errors import MLStateError, StoreError, StoreNotFoundError
from ...state._kind import KEY
from .._files.backend import DcpBackend, PtBackend
from .._files.flat_file import PARTS, read_file, read_npz_parts
from .._files.parts import Parts, Selection
from .._files.torch_weights import read_torch_weights
from .._folder.local import LocalFolder
from .._folder.weight_names import TORCH_SUFFIX, is_index, weights_root
from .._layouts.folders import LAYOUTS, Layout
from .._layouts.sharded_safetensors import refuse_part
from .._layouts.training_step import read_step_entries
from .._store.weight_files import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def store_errors(path: object) -> Iterator[None]:
    """Raise an OSError of the block as StoreError, which all of mlstate raises.

    `path`: named in the error if the OSError names none. ENOENT becomes StoreNotFoundError.
    """
    try:
        yield
    except MLStateError:
        raise
    except OSError as error:
        kind = StoreNotFoundError if error.errno == errno.ENOENT else StoreError
        # filename2 is the target of a failed rename of a temporary file
        named_path = error.filename2 or error.filename or path
        raise kind(error.errno, error.strerror, str(named_path)) from error


def has_optimizer(path: str) -> bool:
    """Return whether the metadata of a safetensors file describe an optimizer in it.

    False if the metadata cannot be read: reading the tensors reports this. Raises the error of a
    file that holds only a rank's parts.
    """
    try:
        texts = _core.file_metadata(path, False)
    except MLStateError:
        return False
    refuse_part(Path(path), texts)
    return PARTS in texts or '"kind": "optimizer"' in texts.get(KEY, "")


def _read_torch(path: Path, _selection: Selection) -> Parts:
    return torch_backend("files of torch", PtBackend).read_pt(path)


def _read_torch_weights(path: Path, selection: Selection) -> Parts:
    """Read the ``.bin`` files of a Hugging Face folder, or of an index in one."""
    folder = LocalFolder(str(path.parent if path.is_file() else path))
    root: str | None = path.name
    if not is_index(path.name):
        root = weights_root(folder.names(""), TORCH_SUFFIX, folder=folder.path)
    if root is None:
        raise format_error(f"{path}: holds no weights in files of Hugging Face", path)
    model = read_torch_weights(folder, root)
    return read_training_entries(str(path), selection, checked=False)._replace(model=model)


def read_training_entries(path: str, selection: Selection, *, checked: bool) -> Parts:
    """Return the training entries of a local folder; the model is None.

    These are files of accelerate or of a Trainer's step. A warning names files that are not read.
    `checked`: compare their files with checksums; False: unverified, or compared before.
    """
    if not os.path.isdir(path):
        return Parts(None, None, {}, {})
    folder = LocalFolder(path)
    with store_errors(path):
        read = read_step_entries(folder, folder.names(""), selection, checked=checked)
    return _with_warning(path, *read)


def _with_warning(path: str, parts: Parts, unread: list[str]) -> Parts:
    """Return `parts`, with a warning of files of their folder that are not read."""
    if unread:
        find_caller().warn(f"{path}: files that are not read: {listed(unread)}")
    return parts


def _read_layout(layout: Layout, path: Path, selection: Selection) -> Parts:
    return _with_warning(str(path), *layout.read(LocalFolder(str(path)), selection))


_READERS: dict[str, Callable[[Path, Selection], Parts]] = {
    "npz": lambda path, selection: read_npz_parts(path),
    "torch": _read_torch,
    "lightning": _read_torch,
    "dcp": lambda path, chosen: torch_backend("files of torch", DcpBackend).read_dcp(path, chosen),
    "huggingface": _read_torch_weights,
    **{layout.name: partial(_read_layout, layout) for layout in LAYOUTS},
}


def read_whole(path: str, name: str, checked: bool, selection: Selection | None = None) -> Parts:
    """Return the content of a local file or folder of the format `name`.

    Arrays of torch files may be views of the mapped file. If a file numbers the parameters of an
    optimizer, as ``optimizer.state_dict()`` does, the names are the ``param_names`` of its groups,
    else ``param_0``, ``param_1``, ... Metadata are the other plain values in the file, and states
    are all other entries. `checked`: compare files with the checksums of `checksum`. `selection`:
    entries to return; of a distributed checkpoint only these are read.
    """
    place, chosen = Path(path), selection or Selection()
    with store_errors(path):
        os.stat(path)  # a missing path raises FileNotFoundError for every format
        if name == "safetensors":
            return chosen.apply(read_file(place, checked=checked), place)
        if checked:
            require_unchanged(path)
        return chosen.apply(_READERS[name](place, chosen), place)
