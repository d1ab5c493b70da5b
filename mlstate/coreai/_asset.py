"""`verify` of an ``.aimodel``: files and hash; error if the package coreai-core is missing."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from .._common.local_path import local_path
from .._common.regular_file import open_regular
from .._common.store_error import store_error
from ..errors import ChecksumError, StoreNotFoundError
from ..kv._model_states import format_error, read_file, read_metadata

if TYPE_CHECKING:
    from types import ModuleType

_FILES = ("metadata.json", "main.hash", "main.mlirb")
_HASH_BYTES = 32  # SHA-256


def import_coreai(module: str) -> ModuleType:
    """Import ``coreai.<module>`` of coreai-core; the ImportError names the extra to install."""
    from importlib import import_module

    try:
        return import_module(f"coreai.{module}")
    except ImportError as error:
        raise ImportError(
            "Core AI is not available: install it with pip install 'mlstate[coreai]' (Linux on "
            f"x86-64 with glibc 2.34 or newer, or macOS 26 on Apple silicon): {error}",
            name="coreai",
        ) from error


def asset_folder(path: str | os.PathLike[str]) -> str:
    """Return `path`, of an ``.aimodel``, as text; raise StoreError if it is not a folder."""
    folder: str = os.fsdecode(local_path(path))
    reason: OSError | None = None
    if not os.path.exists(folder):
        reason = FileNotFoundError(errno.ENOENT, "no such folder")
    elif not os.path.isdir(folder):
        reason = NotADirectoryError(errno.ENOTDIR, "an .aimodel is a folder, and this is a file")
    if reason is not None:
        raise store_error(reason, "cannot read the model", folder)
    return folder


def _check_metadata(path: str) -> None:
    """Raise FormatError unless the metadata.json at `path` is a JSON object."""
    document = read_metadata(path)
    if not isinstance(document, dict):
        raise format_error(path, f"expected a JSON object, got {type(document).__name__}")


def _read_hash(path: str) -> str:
    """Return the SHA-256 that the main.hash at `path` has as 32 bytes, as hex digits.

    Raises FormatError if the file has another size.
    """
    expected = read_file(path, _HASH_BYTES)
    if len(expected) < _HASH_BYTES:
        raise format_error(
            path,
            f"expected the {_HASH_BYTES} bytes of a SHA-256, got {len(expected)}: copy the "
            ".aimodel again",
        )
    return expected.hex()


def _hash_of(path: str) -> tuple[str, int]:
    """Return the SHA-256 of the file at `path` as hex digits, and its size in bytes.

    Raises StoreError if it cannot be read.
    """
    import hashlib

    try:
        with open_regular(path) as file:
            facts = os.fstat(file.fileno())
            return hashlib.file_digest(file, "sha256").hexdigest(), facts.st_size
    except OSError as error:
        raise store_error(error, "cannot read", path) from error


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
    folder = asset_folder(path)
    metadata, hashed, program = (os.path.join(folder, name) for name in _FILES)
    try:
        _check_metadata(metadata)
        expected = _read_hash(hashed)
        digest, size = _hash_of(program)
    except StoreNotFoundError as error:
        raise format_error(
            str(error.path), "the file is missing, so the .aimodel is incomplete: copy it again"
        ) from None
    if digest != expected:
        failure = ChecksumError(
            f"{program}: the SHA-256 of its {size} bytes is {digest}, and main.hash has "
            f"{expected}: the .aimodel was truncated or altered; copy it again"
        )
        failure.path = program
        failure.expected, failure.got = expected, digest
        raise failure
    return digest
