"""Local paths that callers pass: made absolute; URLs are refused, and a deleted working folder."""

from __future__ import annotations

import os
import re
from typing import overload

from ..errors import StoreNotFoundError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
# pathlib collapses two slashes into one; a single letter before the colon is a Windows drive
_URL_OF_PATHLIB = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


@overload
def local_path(path: str | os.PathLike[str]) -> str: ...
@overload
def local_path(path: bytes | os.PathLike[bytes]) -> bytes: ...
@overload
def local_path(
    path: str | bytes | os.PathLike[str] | os.PathLike[bytes],
) -> str | bytes: ...


def local_path(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str | bytes:
    """Return a path as str or bytes; all paths of callers pass through this or `local_folder`.

    A first part ``~`` or ``~user`` becomes the home folder, as in a shell. Raises ValueError for a
    URL, an empty path, a null character and an unknown user, and StoreNotFoundError for a relative
    path whose base, the working folder, was deleted.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(
            f"a path must be a str or os.PathLike, got {type(path).__name__}; it comes first: "
            "save(path, model, optimizer), load(path, into=model)"
        )
    raw_path = os.fspath(path)
    pattern = _URL if isinstance(path, str | bytes) else _URL_OF_PATHLIB
    text = os.fsdecode(raw_path)
    if not text or "\0" in text:
        problem = "has a null character (NUL)" if text else "is empty"
        raise ValueError(f"{text!r}: the path {problem}; pass the name of a file or folder")
    if pattern.match(text):
        hint = ""
        if text.lower().endswith(".safetensors"):
            hint = "; mlstate.load and mlstate convert read such a file at a URL"
        raise ValueError(
            f"{text}: a URL is not a local path: only save, load, verify, inspect, reshard, prune "
            "and mlstate convert of checkpoints, and CheckpointManager, take URLs of object "
            f"stores, as str; use a local or mounted folder here{hint}"
        )
    if text.startswith("~"):
        raw_path = os.path.expanduser(raw_path)
        if raw_path == os.fspath(path):
            name = text.partition("/")[0]
            raise ValueError(
                f"{text}: {name!r} is not the home folder of a user; for a file of this name, pass "
                f"{os.path.join('.', text)!r}"
            )
    elif not os.path.isabs(text):
        _check_working_folder(text)
    return raw_path


def _check_working_folder(path: str) -> None:
    """Raise StoreNotFoundError if the working folder was deleted; `path` is relative to it."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise StoreNotFoundError(
            error.errno,
            "cannot use a relative path, since the working folder no longer exists: pass an "
            "absolute path, or change to a folder that exists",
            path,
            path=path,
        ) from None


def local_folder(path: str | os.PathLike[str]) -> str:
    """Return a path as an absolute str; see `local_path`. Raises TypeError for bytes."""
    name = local_path(path)
    if not isinstance(name, str):
        raise TypeError(f"the path must be a str or os.PathLike of str, got bytes: {name!r}")
    return os.path.abspath(name)


def refuse_same_path(source: str, target: str, kind: str = "path") -> None:
    """Raise ValueError if two paths are the same file or folder, or the same URL.

    `kind`: the word for a path in the error.
    """
    both_exist = os.path.exists(source) and os.path.exists(target)
    if source == target or (both_exist and os.path.samefile(source, target)):
        raise ValueError(f"the target must be another {kind} than the source")
