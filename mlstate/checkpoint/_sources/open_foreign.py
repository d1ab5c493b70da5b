"""`open_foreign`: the source of a local path that has no manifest, decided by its content."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from ..._common.file_kinds import (
    FileKind,
    dangling_blob,
    hub_snapshot,
    kind_of_file,
    kind_of_folder,
)
from ..._common.store_error import store_error
from ...errors import FormatError
from .._folder.local import LocalFolder
from .._folder.names import SECTIONS
from .._folder.weight_names import TORCH_SUFFIX, is_index, weights_root
from .._layouts.folders import find_layout
from .._layouts.lightning import is_lightning
from .._layouts.training_step import has_entries
from .._store.checkpoint_files import CheckpointFiles
from .indexed import IndexedSource
from .readers import has_optimizer, read_whole
from .training_step import StepSource
from .weights import HuggingFaceSource, weights_source
from .whole import WholeSource

if TYPE_CHECKING:
    from .._store.manifest import Manifest
    from .protocol import Source


def open_foreign(path: str, format: str | None) -> Source:
    """Return the source of a local path without a manifest; see `open_source`."""
    if not os.path.exists(path):
        if sentence := dangling_blob(path):
            raise _refusal(path, FileKind("link", sentence, is_damaged=True))
        CheckpointFiles(LocalFolder(path)).read_manifest()  # raises the error of a missing folder
    if os.path.isdir(path):
        return _open_folder(path, format)
    return _open_file(path, format)


def whole_source(path: str, name: str, manifest: Manifest | None = None) -> WholeSource:
    """Return the source of a path that is read as a whole, as the format `name`."""
    return WholeSource(path, name, partial(read_whole, path, name), manifest)


def _refusal(path: str, kind: FileKind) -> FormatError:
    """Return the error for content that mlstate does not read."""
    text, expected = f"{path}: {kind.sentence}", "a format that mlstate reads"
    error = FormatError(text, path=path, expected=expected, got=kind.name)
    error.__notes__ = []  # the sentence has the remedy
    return error


def _open_file(path: str, format: str | None) -> Source:
    """Return the source of a local file, by its content; raise FormatError for other kinds."""
    try:
        kind = FileKind(format) if format else kind_of_file(path)
    except OSError as error:
        raise store_error(error, "cannot read the file", path) from None
    name = kind.name
    folder_path, file = os.path.split(path)
    files = CheckpointFiles(LocalFolder(folder_path, file))
    if name == "weights index" or (format == "huggingface" and is_index(file)):
        if f"{TORCH_SUFFIX}.index" in file:
            return whole_source(path, "huggingface")
        return HuggingFaceSource(files, file)
    if name == "safetensors" and not has_optimizer(path):
        return weights_source(files, file)
    if format is None and name == "torch" and is_lightning(path):
        name = "lightning"
    if name in ("safetensors", "torch", "lightning", "npz", *(() if format is None else (format,))):
        return whole_source(path, name)
    raise _refusal(path, kind)


def _open_folder(path: str, format: str | None) -> Source:
    """Return the source of a local folder without a manifest, by the names in it.

    Raises FormatError for a recognized format that mlstate does not read, StoreError for any other
    folder.
    """
    folder = LocalFolder(path)
    files = CheckpointFiles(folder)
    names = folder.names("")
    if format == "mlstate" or ("roots" in names and files.list_roots()):
        return IndexedSource(files)
    if format in (None, "huggingface") and (source := _weights_in(files, names)) is not None:
        return source
    layout = find_layout(names)
    name = format or ("dcp" if ".metadata" in names else layout and layout.name)
    if name is not None:
        return whole_source(path, name)
    if "index" in names and not set(SECTIONS).isdisjoint(names):
        return IndexedSource(files)  # the manifest alone is missing
    if (snapshot := hub_snapshot(path)) is not None:
        return _open_folder(snapshot, format)
    kind = kind_of_folder(names)
    if kind is not None and kind.name != "unknown folder":
        raise _refusal(path, kind)
    text = "it is empty" if kind is None else kind.sentence
    raise store_error(FileNotFoundError(2, text), "cannot read the checkpoint", path)


def _weights_in(files: CheckpointFiles, names: list[str]) -> Source | None:
    """Return the source of the weights in a Hugging Face folder with these names; None without."""
    root = weights_root(names, folder=files.path)
    if root in names and not is_index(root) and has_optimizer(f"{files.path}/{root}"):
        return whole_source(f"{files.path}/{root}", "safetensors")
    if root is not None:
        return (StepSource if has_entries(names) else HuggingFaceSource)(files, root)
    if weights_root(names, TORCH_SUFFIX, folder=files.path):
        return whole_source(files.path, "huggingface")
    return None
