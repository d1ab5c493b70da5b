"""Check the files of an ``.aimodel``, and import Core AI; public through `mlstate.coreai`."""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING, Any

from .._common.local_path import local_path
from .._common.set_module import set_module
from .._common.store_error import store_error
from ..errors import ChecksumError, FormatError

if TYPE_CHECKING:
    from types import ModuleType

_PROGRAM, _HASH, _METADATA = "main.mlirb", "main.hash", "metadata.json"
_HASH_BYTES = 32  # SHA-256
_MOST_METADATA_BYTES = 64 << 20


def import_coreai(module: str) -> ModuleType:
    """Import a module of coreai-core; the ImportError names the extra to install."""
    from importlib import import_module

    try:
        return import_module(f"coreai.{module}")
    except ImportError as error:
        raise ImportError(
            "Core AI is not available: install it with pip install 'mlstate[coreai]' (Linux on "
            f"x86-64 with glibc 2.34 or newer, or macOS 26 on Apple silicon): {error}",
            name="coreai",
        ) from error


def _format_error(path: str, text: str) -> FormatError:
    error = FormatError(f"{path}: {text}")
    error.path = path
    return error


def _open(folder: str, name: str) -> Any:
    """Open a file of the asset."""
    path = os.path.join(folder, name)
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise _format_error(
            path, "the file is missing, so the .aimodel is incomplete: copy it again"
        ) from None
    except OSError as error:
        raise store_error(error, "cannot read", path) from error


def _read(folder: str, name: str, most_bytes: int) -> bytes:
    """Read a small file of the asset."""
    with _open(folder, name) as file:
        try:
            data: bytes = file.read(most_bytes + 1)
        except OSError as error:
            raise store_error(error, "cannot read", file.name) from error
    if len(data) > most_bytes:
        raise _format_error(os.path.join(folder, name), f"more than {most_bytes} bytes")
    return data


def _check_metadata(folder: str) -> None:
    path = os.path.join(folder, _METADATA)
    text = _read(folder, _METADATA, _MOST_METADATA_BYTES)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _format_error(path, f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise _format_error(path, f"expected a JSON object, got {type(document).__name__}")


def asset_folder(path: Any) -> str:
    """Return the folder of an ``.aimodel``, or raise StoreError if it is not a folder."""
    folder: str = os.fsdecode(local_path(path))
    reason: OSError | None = None
    if not os.path.exists(folder):
        reason = FileNotFoundError(errno.ENOENT, "no such folder")
    elif not os.path.isdir(folder):
        reason = NotADirectoryError(errno.ENOTDIR, "an .aimodel is a folder, and this is a file")
    if reason is not None:
        raise store_error(reason, "cannot read the model", folder)
    return folder


@set_module("mlstate.coreai")
def verify(path: str | os.PathLike[str]) -> str:
    """Check that an ``.aimodel`` is complete and unaltered.

    Call it before Core AI loads a model that was copied or downloaded: a loader that sees half
    of a model can keep a damaged specialization of it in its cache.

    Parameters
    ----------
    path : str or path-like
        The ``.aimodel`` folder.

    Returns
    -------
    str
        The SHA-256 of the program, 64 hexadecimal digits. It identifies the model.

    Raises
    ------
    ChecksumError
        ``main.mlirb`` does not have the SHA-256 of ``main.hash``: it was truncated or altered.
    FormatError
        A file is missing, ``main.hash`` is not a SHA-256, or ``metadata.json`` is not a JSON
        object.
    StoreError
        The folder or a file cannot be read; also a `FileNotFoundError` if the folder is missing.

    Notes
    -----
    All of ``main.mlirb`` is read, in blocks and without the GIL. The files are trusted if their
    hash agrees: this is a check for damage, not against an attacker. Core AI is not needed.

    Examples
    --------
    >>> import hashlib, pathlib, tempfile
    >>> from mlstate.coreai import verify
    >>> model = pathlib.Path(tempfile.mkdtemp(suffix=".aimodel"))
    >>> program = b"the program of a model"
    >>> for name, data in {
    ...     "main.mlirb": program,
    ...     "main.hash": hashlib.sha256(program).digest(),
    ...     "metadata.json": b"{}",
    ... }.items():
    ...     _ = (model / name).write_bytes(data)
    >>> verify(model)[:16]
    '823496d47d1f4570'
    >>> _ = (model / "main.mlirb").write_bytes(program[:-1])
    >>> verify(model)
    Traceback (most recent call last):
    mlstate.errors.ChecksumError: ...main.mlirb: the SHA-256 of its 21 bytes is ..., and \
main.hash has ...: the .aimodel was truncated or altered; copy it again
    """
    import hashlib

    folder = asset_folder(path)
    _check_metadata(folder)
    expected = _read(folder, _HASH, _HASH_BYTES)
    if len(expected) < _HASH_BYTES:
        raise _format_error(
            os.path.join(folder, _HASH),
            f"expected the {_HASH_BYTES} bytes of a SHA-256, got {len(expected)}: copy the "
            ".aimodel again",
        )
    with _open(folder, _PROGRAM) as file:
        try:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise store_error(error, "cannot read", file.name) from error
    if found != expected.hex():
        failure = ChecksumError(
            f"{os.path.join(folder, _PROGRAM)}: the SHA-256 of its {size} bytes is {found}, and "
            f"{_HASH} has {expected.hex()}: the .aimodel was truncated or altered; copy it again"
        )
        failure.path = os.path.join(folder, _PROGRAM)
        failure.expected, failure.got = expected.hex(), found
        raise failure
    return found
