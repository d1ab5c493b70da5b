"""Marks of damaged steps: a step that was found damaged does not count when old ones are deleted.

The mark is an empty file next to the step's root, ``roots/<sequence>.<generation>.damaged``. It is
created without the writers' lock, and deleted with the root, or when the step is found good.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from ... import _core
from ..._common.log import log
from ..._common.store_error import store_error
from ...errors import MLStateError, StoreError
from .._remote.remote_folder import RemoteFolder
from . import folder as _folder

if TYPE_CHECKING:
    from collections.abc import Collection

    from .manifest import Manifest


def is_marked(folder: str, manifest: Manifest) -> bool:
    """Return whether a step was found damaged by this or another process."""
    return _folder.exists(folder, _folder.mark_path(_folder.root_path(manifest)))


def mark(folder: str, root: str) -> None:
    """Mark the step of a root under ``roots/``; a folder that cannot be written stays as it is."""
    path = _folder.mark_path(root)
    try:
        if isinstance(folder, RemoteFolder):
            folder.store.put(path, b"")
        else:
            _create(folder, path)
    except StoreError as error:
        log("INFO", "%s: the damaged step %s cannot be marked: %s", folder, root, error)


def _create(folder: str, path: str) -> None:
    """Create an empty file durably; nothing that exists already is opened or changed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    _folder.refuse_link(os.path.join(folder, "roots"))
    try:
        with _core.Descriptor(os.path.join(folder, path), flags) as descriptor:
            os.fsync(descriptor.fileno())
        _core.folder_sync(os.path.join(folder, "roots"))
    except FileExistsError:
        pass
    except OSError as error:
        raise store_error(error, "cannot create the file", os.path.join(folder, path)) from None


def mark_steps(folder: str, generation: str, damaged: Collection[str]) -> None:
    """Mark the step of a generation, and every other step that needs one of the damaged files."""
    for root in _folder.list_roots(folder):
        is_damaged = root.generation == generation
        if not is_damaged:
            with suppress(MLStateError):  # an unreadable step does not count anyway
                merged = _folder.load_merged_index(folder, _folder.read_manifest(folder, root.path))
                is_damaged = not merged.files().keys().isdisjoint(damaged)
        if is_damaged:
            mark(folder, root.path)


def unmark(folder: str, manifest: Manifest) -> None:
    """Remove the mark of a step that was found good."""
    if not is_marked(folder, manifest):
        return
    with suppress(StoreError):
        _folder.remove_files(folder, [_folder.mark_path(_folder.root_path(manifest))])
