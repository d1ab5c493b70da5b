"""`open_source`: the source of a path or URL, decided by its content; the place of all formats.

A folder with a manifest is a checkpoint of mlstate. Any other path is recognized by the first bytes
of a file and the names in a zip archive, or by the names in a folder; a suffix only breaks a tie.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ..._common.file_kinds import (
    FileKind,
    dangling_blob,
    hub_snapshot,
    kind_of_file,
    kind_of_folder,
)
from ..._common.store_error import format_error, store_error
from ...errors import FormatError, StoreError
from .._folder.local import LocalFolder
from .._folder.names import MANIFEST
from .._folder.weight_names import (
    TORCH_SUFFIX,
    find_weights,
    is_index,
    weights_root,
)
from .._layouts.folders import find_layout
from .._steps.step_choice import choose_root
from .._store.checkpoint_files import CheckpointFiles
from .._store.open_path import RootPath, open_folder
from .indexed import IndexedSource
from .readers import has_optimizer, read_whole
from .training_step import StepSource, has_entries
from .weights import HuggingFaceSource, SafetensorsSource
from .whole import WholeSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .._store.manifest import Manifest
    from .protocol import Source

SOURCES = (IndexedSource, WholeSource)
Choice = tuple[Any, Any, Any]  # step=, monitor=, mode=
_NO_CHOICE: Choice = (None, None, None)


def open_source(
    path: Any,
    storage_options: Mapping[str, Any] | None = None,
    choice: Choice = _NO_CHOICE,
    *,
    format: str | None = None,
) -> Source:
    """Return the source of a local path, a URL, or an internal caller's `RootPath` or source.

    `choice`: step, monitor and mode of a run. `format`: read the path as this format. Raises
    StoreError if nothing is there, FormatError for content that mlstate does not read, and
    ValueError for a step of a path without steps.
    """
    if isinstance(path, SOURCES):
        return path.fresh()
    if isinstance(path, RootPath) and storage_options is None:
        return _chosen(IndexedSource(path.files, path.root, path.manifest), choice)
    folder = open_folder(path, storage_options, reads=True)
    if not folder.is_local:
        return _open_store(CheckpointFiles(folder), choice)
    source = _open_local(folder.path, format)
    if not isinstance(source, IndexedSource) or source.format != "mlstate":
        if choice != _NO_CHOICE:
            what = "one file" if os.path.isfile(folder.path) else f"of the format {source.format}"
            raise ValueError(f"{path} is {what}: it has no steps; leave the step out")
        return source
    return _chosen(source, choice)


def _chosen(source: IndexedSource, choice: Choice) -> IndexedSource:
    """Return the source of the chosen step; of "best", one that chooses again if it is deleted."""
    if choice == _NO_CHOICE:
        return source
    choose = partial(choose_root, source.files, source.root, *choice)
    root = choose()
    return IndexedSource(source.files, root, None, choose if choice[0] == "best" else None)


def known_source(path: str, format: str, root: str, manifest: Manifest) -> Source:
    """Return the source at a path whose format, root and manifest are known; nothing is read."""
    if format not in _INDEXED or not root:
        return WholeSource(path, format, partial(read_whole, path, format), manifest)
    folder = open_folder(path, reads=True)
    if folder.is_local and root and format == "safetensors":
        folder = LocalFolder(os.path.dirname(folder.path), root)
    return _INDEXED[format](CheckpointFiles(folder), root, manifest)


_INDEXED = {
    "mlstate": IndexedSource,
    "huggingface": HuggingFaceSource,
    "safetensors": SafetensorsSource,
}


def kind_of_refused(path: str) -> FileKind | None:
    """Return the kind of a local file or dangling link that `open_source` refuses, else None."""
    if not os.path.exists(path):
        sentence = dangling_blob(path)
        return FileKind("link", sentence, is_damaged=True) if sentence else None
    if os.path.isdir(path):
        return None
    try:
        kind = kind_of_file(path)
    except FormatError as error:  # a FIFO, socket or device
        return FileKind("special file", str(error), is_damaged=True)
    except OSError as error:
        raise store_error(error, "cannot read the file", path) from None
    return kind if kind.sentence else None


# ---- stores ----


def _open_store(files: CheckpointFiles, choice: Choice) -> IndexedSource:
    """Return the source of a URL; its manifest is read, unless a step is chosen.

    Raises StoreError if there is neither a checkpoint nor weights.
    """
    folder = files.folder
    if folder.file:
        return _weights_source(files, folder.file)
    if choice != _NO_CHOICE:
        return _chosen(IndexedSource(files), choice)
    manifest = None
    try:
        manifest = files.read_manifest()
    except FileNotFoundError:
        with suppress(StoreError):
            root = find_weights(folder)
            if root is not None:
                return HuggingFaceSource(files, root)
        if not files.list_roots():  # else the manifest alone is missing: a repair restores it
            raise
    except FormatError:  # damaged: a load raises this, and verify reports it
        pass
    return IndexedSource(files, MANIFEST, manifest)


def _weights_source(files: CheckpointFiles, name: str) -> HuggingFaceSource:
    """Return the source of the weights that the file `name` of a folder describes, or is."""
    is_folder = weights_root([name]) is not None
    return (HuggingFaceSource if is_folder else SafetensorsSource)(files, name)


# ---- local paths ----


def _open_local(path: str, format: str | None) -> Source:
    """Return the source of a local path; see `open_source`."""
    if format in (None, "mlstate") and os.path.lexists(os.path.join(path, MANIFEST)):
        return IndexedSource(CheckpointFiles(LocalFolder(path)))
    if not os.path.exists(path):
        if sentence := dangling_blob(path):
            raise format_error(f"{path}: {sentence}", path)
        CheckpointFiles(LocalFolder(path)).read_manifest()  # raises the error of a missing folder
    if os.path.isdir(path):
        return _open_folder(path, format)
    return _open_file(path, format)


def _whole(path: str, name: str) -> WholeSource:
    return WholeSource(path, name, partial(read_whole, path, name))


def _refusal(path: str, kind: FileKind) -> FormatError:
    """Return the error for content that mlstate does not read."""
    error = format_error(f"{path}: {kind.sentence}", path)
    error.expected, error.got = "a format that mlstate reads", kind.name
    return error


def _open_file(path: str, format: str | None) -> Source:
    """Return the source of a local file, by its content; raise FormatError for other kinds."""
    try:
        name = format or kind_of_file(path).name
    except OSError as error:
        raise store_error(error, "cannot read the file", path) from None
    folder_path, file = os.path.split(path)
    files = CheckpointFiles(LocalFolder(folder_path, file))
    if name == "weights index" or (format == "huggingface" and is_index(file)):
        if f"{TORCH_SUFFIX}.index" in file:
            return _whole(path, "huggingface")
        return HuggingFaceSource(files, file)
    if name == "safetensors" and not has_optimizer(path):
        return _weights_source(files, file)
    if name in ("safetensors", "torch", "lightning", "npz", *(() if format is None else (format,))):
        return _whole(path, name)
    raise _refusal(path, kind_of_file(path))


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
    root = weights_root(names, folder=path) if format in (None, "huggingface") else None
    if root is not None:
        return (StepSource if has_entries(names) else HuggingFaceSource)(files, root)
    if format in (None, "huggingface") and weights_root(names, TORCH_SUFFIX, folder=path):
        return _whole(path, "huggingface")
    layout = find_layout(names)
    known = format or ("dcp" if ".metadata" in names else layout and layout.name)
    if known is not None:
        return _whole(path, known)
    snapshot = hub_snapshot(path)
    if snapshot is not None:
        return _open_local(snapshot, format)
    kind = kind_of_folder(names)
    if kind is not None and kind.name != "unknown folder":
        raise _refusal(path, kind)
    text = "it is empty" if kind is None else kind.sentence
    raise store_error(FileNotFoundError(2, text), "cannot read the checkpoint", path)
