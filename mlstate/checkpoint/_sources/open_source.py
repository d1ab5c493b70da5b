"""`open_source`: the source of a path or URL, decided by its content; the place of all formats.

A folder with a manifest is a checkpoint of mlstate. Any other path is recognized by the first bytes
of a file and the names in a zip archive, or by the names in a folder; a suffix only breaks a tie.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeGuard

from ..._common.caller import find_caller
from ...errors import FormatError, StoreError
from .._folder.local import LocalFolder
from .._folder.names import MANIFEST
from .._folder.protocol import require_local
from .._folder.weight_names import weights_root
from .._steps.step_choice import find_root
from .._store.checkpoint_files import CheckpointFiles
from .._store.open_path import FILE_SUFFIXES, RootPath, open_folder, refuse_format
from .._store.weight_files import listed
from .indexed import IndexedSource
from .weights import HuggingFaceSource, SafetensorsSource, weights_source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .._store.manifest import Manifest
    from .protocol import Source


def is_source(value: object) -> TypeGuard[Source]:
    """Return whether an internal caller passes an opened source instead of a path."""
    return hasattr(value, "fresh")


def open_source(
    path: Any,
    storage_options: Mapping[str, Any] | None = None,
    step: int | str | None = None,
    *,
    format: str | None = None,
    only_local: tuple[str, str] | None = None,
) -> Source:
    """Return the source of a local path, a URL, or an internal caller's `RootPath` or source.

    `step`: of a run; None: the newest. `format`: read the path as this format. `only_local`: the
    caller's use that needs local files, and the remedy. Raises StoreError if nothing is there,
    FormatError for content that mlstate does not read, and ValueError for a step of a path without
    steps, or a URL of what must be local.
    """
    is_open = isinstance(path, RootPath) or is_source(path)
    if is_open and (step is not None or storage_options is not None):
        raise ValueError(
            f"{os.fspath(path)}: this checkpoint is open, and its step is chosen: pass step= "
            "and storage_options= with the path"
        )
    files = getattr(path, "files", None)  # of an internal caller's source or root
    folder = open_folder(path, storage_options, reads=True) if files is None else files.folder
    if only_local is not None:
        require_local(folder, *only_local)
    if isinstance(path, RootPath):
        return IndexedSource(path.files, path.root, path.manifest, path.choose)
    if is_open:
        return path.fresh()  # type: ignore[no-any-return]
    source: Source
    if not folder.is_local:
        source = _open_store(CheckpointFiles(folder), step, format)
    elif format in (None, "mlstate") and folder.exists(MANIFEST):
        source = IndexedSource(CheckpointFiles(folder))
    else:
        from .open_foreign import open_foreign  # most loads are of checkpoints of mlstate

        source = open_foreign(folder.path, format)
    if step is None:
        return source
    if not isinstance(source, IndexedSource) or source.format != "mlstate":
        is_file = folder.file or os.path.isfile(folder.path)
        what = "one file" if is_file else f"of the format {source.format}"
        raise ValueError(f"{path} is {what}: it has no steps; leave the step out")
    return IndexedSource(source.files, find_root(source.files, step))


def known_source(path: str, format: str, root: str, manifest: Manifest) -> Source:
    """Return the source at a path whose format, root and manifest are known; nothing is read."""
    if format not in _INDEXED or not root:
        from .open_foreign import whole_source

        return whole_source(path, format, manifest)
    folder = open_folder(path, reads=True)
    if folder.is_local and format == "safetensors":
        folder = LocalFolder(os.path.dirname(folder.path), root)
    cls = _INDEXED[format]
    if format == "huggingface" and folder.is_local:
        from .._layouts.training_step import has_entries
        from .training_step import StepSource

        with suppress(StoreError):  # the folder may be gone
            cls = StepSource if has_entries(folder.names("")) else cls
    return cls(CheckpointFiles(folder), root, manifest)


_INDEXED: dict[str, type[IndexedSource]] = {
    "mlstate": IndexedSource,
    "huggingface": HuggingFaceSource,
    "safetensors": SafetensorsSource,
}


# ---- stores ----


def _open_store(
    files: CheckpointFiles, step: int | str | None, format: str | None
) -> IndexedSource:
    """Return the source of a URL; its manifest is read, unless a step is chosen.

    Raises StoreError if there is neither a checkpoint nor weights, ValueError for a format whose
    files must be local.
    """
    folder = files.folder
    if format is not None and format not in _INDEXED:
        refuse_format(folder, format)
    if folder.file:
        return weights_source(files, folder.file)
    if step is not None:
        return IndexedSource(files)
    manifest: Manifest | FormatError
    try:
        manifest = files.read_manifest()
    except FileNotFoundError:
        with suppress(StoreError):
            names = folder.names("")
            root = weights_root(names, folder=folder.path)
            if root is not None:
                _warn_of_entries(folder.path, names)
                return HuggingFaceSource(files, root)
        if files.list_roots():  # the manifest alone is missing: a repair restores it
            return IndexedSource(files)
        suffix = os.path.splitext(folder.path)[1].lower()
        if suffix in FILE_SUFFIXES:
            refuse_format(folder, suffix[1:])
        raise
    except FormatError as error:  # a load raises this, and verify reports it
        manifest = error
    return IndexedSource(files, MANIFEST, manifest)


def _warn_of_entries(path: str, names: list[str]) -> None:
    """Warn of the training entries of a step in a store, of which only the weights are read."""
    from .._layouts.training_step import step_entries

    files = sorted(file for each in step_entries(names).values() for file in each.values())
    if files:
        find_caller().warn(
            f"{path}: files that are not read from a store: {listed(files)}; load a local copy"
        )
