"""Folders of a new file or folder: created durably, with all missing parents."""

from __future__ import annotations

import os
import stat

from .. import _core
from .store_error import os_errors


def is_folder(path: str) -> bool:
    """Return whether a path is a folder; unlike os.path.isdir, raise errors other than ENOENT."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def make_folder(path: str, mode: int = 0o777) -> None:
    """Create one folder with permissions `mode`; do nothing if it exists already.

    Raises FileExistsError if a file has the name.
    """
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not is_folder(path):
            raise


def make_path(folder: str) -> None:
    """Create a folder and its missing parents durably.

    Raises the system's OSError; parents that were created stay.
    """
    missing = []
    path = os.path.abspath(folder)
    while not is_folder(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        make_folder(path)
        _core.folder_sync(os.path.dirname(path))


def make_parents(path: str | bytes) -> None:
    """Create the missing parents of a new file or folder durably; raise StoreError."""
    folder = os.path.dirname(os.path.abspath(os.fsdecode(path)))
    with os_errors("cannot create the folder", folder):
        make_path(folder)
