"""One plain safetensors file, atomic and checked; public through `mlstate.checkpoint`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from . import _core
from ._common.arrays import refuse_given_away
from ._common.local_path import local_path
from ._common.set_module import set_module
from ._sharding.layout import Shard
from .state._kind import KEY, describe, restore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .state._state_dict import StateDict


def _checked(name: object, value: object) -> object:
    """Refuse what is no whole array, with what to do instead; the core views all others."""
    if isinstance(value, Shard):
        raise TypeError(
            f"{name!r} is a Shard, part {value.index} of {value.layout.parts}: state files hold "
            "whole arrays; a Shard goes into mlstate.save"
        )
    if type(value) in (bool, int, float, complex, str, bytes, list, tuple):
        raise TypeError(
            f"{name!r} is a {type(value).__name__}: state files hold arrays; "
            "wrap it in numpy.asarray with a dtype, or put it into metadata as text"
        )
    return value


def _entries(state: Any) -> dict[str, Any]:
    """The state's own entries, as they are at one moment: other threads may change it."""
    if isinstance(state, str | bytes | os.PathLike):
        raise TypeError(
            f"the state comes first, and then the path: save_file(state, path); got "
            f"{type(state).__name__} for the state"
        )
    if not hasattr(state, "keys"):
        hint = ": pass its state_dict()" if hasattr(state, "state_dict") else ""
        raise TypeError(
            f"state must be a mapping of str to arrays, got {type(state).__name__}{hint}"
        )
    return dict(state)


@set_module("mlstate.checkpoint")
def save_file(
    state: Mapping[str, Any],
    path: str | bytes | os.PathLike[str] | os.PathLike[bytes],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """
    Write arrays to one safetensors file, atomically.

    The file appears whole and on the disk, or the old one stays as it was: bytes go to a
    temporary file in the same folder, which is synced, renamed over the target, and the
    folder is synced too. Every program that reads safetensors reads the result.

    Parameters
    ----------
    state : mapping of str to array
        NumPy arrays (any strides, either byte order, read-only), ml_dtypes arrays, torch
        tensors in main memory (parameters too), or anything else with ``__dlpack__``. What
        a `ModelStateDict` or `OptimizerStateDict` knows besides is stored too.
    path : str, bytes or os.PathLike
        File to write. A symbolic link is followed and stays. An existing file keeps its
        permission bits, and must be writable; a new one gets 0666 less the umask.
    metadata : mapping of str to str, optional
        Texts to store in the header. Keys that start with ``"mlstate."`` are reserved.

    Raises
    ------
    TypeError
        A name or text is not a str, a value is not a whole array, or the ``param_groups`` of an
        `OptimizerStateDict` are more than numbers, texts and lists.
    ValueError
        A name or text cannot be written as UTF-8 or is reserved, or `path` is neither
        absent nor a regular file.
    BufferError
        A tensor has no memory to export, such as one on torch's ``meta`` device.
    CompatibilityError
        A dtype that safetensors has no name for (``complex128``, ``datetime64``, ...).
    CapacityError
        Names and metadata take more than the 100 MB that the format allows.
    StoreError
        The operating system refused: an `OSError` with its ``errno``.

    Notes
    -----
    Contiguous arrays are written from where they lie; others pass through a buffer of
    1 MiB, so the extra memory is that and about 2 KiB a tensor. Arrays must not be changed
    while they are being saved; the mapping itself may. The GIL is released. The same state
    gives the same bytes, in whatever order it is handed over: tensors lie by falling item
    size and then by name. A process that is killed while it writes may leave a file
    ``.mlstate-*.tmp`` behind, which can be deleted.

    References
    ----------
    Our checksums are CRC32C values in two metadata entries, ``mlstate.header.crc32c`` and
    ``mlstate.blocks.crc32c``, which other readers ignore.

    Examples
    --------
    >>> import tempfile, pathlib, numpy as np
    >>> from mlstate import load_file, save_file
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "cache.safetensors"
    >>> save_file({"k": np.ones((2, 4), np.float16), "v": np.zeros((2, 4), np.float16)}, path)
    >>> sorted(load_file(path))
    ['k', 'v']
    """
    refuse_given_away(plain := _entries(state))
    tensors = tuple((name, _checked(name, value)) for name, value in plain.items())
    texts = {} if metadata is None else dict(metadata)
    if KEY in texts:
        raise ValueError(
            f'metadata key "{KEY}" is reserved: choose one that does not start with "mlstate."'
        )
    kind = describe(state)
    if kind is not None:
        texts[KEY] = kind
    _core.file_save(local_path(path), tensors, tuple(texts.items()))


@set_module("mlstate.checkpoint")
def load_file(
    path: str | bytes | os.PathLike[str] | os.PathLike[bytes],
    *,
    mmap: bool = False,
    verify: bool = True,
) -> StateDict:
    """
    Read the arrays of a safetensors file.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        File to read, of any program that writes safetensors.
    mmap : bool, default False
        Return read-only arrays over the mapped file instead of reading it: nothing is
        copied, pages come in when they are touched, and the mapping lives as long as any
        of the arrays. Checksums of tensors are not looked at then, since that would read
        all of them; the header's is.
    verify : bool, default True
        Compare the checksums that `save_file` stores, where the file has them. Pass False
        to get at what is left of a damaged file.

    Returns
    -------
    StateDict
        New NumPy arrays, or views of the mapping, in the file's order. bfloat16 and the
        8-bit floats are dtypes of ml_dtypes; without it they are uint16 and uint8, and
        ``array.dtype.metadata["mlstate.dtype"]`` names the true dtype. A `ModelStateDict`
        or `OptimizerStateDict` where one was saved. Many new arrays below 4 MiB are views of
        blocks that they share, of 4 to 20 MiB; a block lives as long as any of its arrays.

    Raises
    ------
    FormatError
        Not a safetensors file, or a damaged one: cut off, overlaps, gaps, duplicate names,
        shapes that do not fit, an unknown element type. ``offset`` says where, ``name``
        which tensor. Nothing larger than the file accounts for is allocated.
    ChecksumError
        The bytes changed since `save_file` wrote them. (A `FormatError`.)
    StoreError
        The operating system refused: an `OSError` with its ``errno``; a missing file is a
        `FileNotFoundError` too.

    Notes
    -----
    Without ml_dtypes, `save_file` and every other function here take the integers that stand
    for bfloat16 and 8-bit floats by their true dtype. Slices, copies and pickles keep it;
    ``astype``, ``view``, ``numpy.concatenate`` and single elements do not. NumPy computes with
    the integers, not with what they mean: install ml_dtypes for arithmetic
    (``pip install 'mlstate[dtypes]'``).

    Bytes are read straight into the arrays and checksummed while they are in the cache.
    The GIL is released. With ``mmap=True``, a process that cuts the file short while the
    arrays are in use ends this one with SIGBUS, as with every mapping; `save_file` never
    does that, because it replaces files instead of writing into them.

    Examples
    --------
    >>> import tempfile, pathlib, numpy as np
    >>> from mlstate import load_file, save_file
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.safetensors"
    >>> save_file({"w": np.arange(4, dtype=np.int32)}, path)
    >>> mapped = load_file(path, mmap=True)["w"]
    >>> mapped, mapped.flags.writeable
    (array([0, 1, 2, 3], dtype=int32), False)
    """
    plain = local_path(path)
    arrays, texts = _core.file_load(plain, mmap, verify)
    return restore(arrays, texts.get(KEY), plain)


@set_module("mlstate.checkpoint")
def load_metadata(
    path: str | bytes | os.PathLike[str] | os.PathLike[bytes], *, verify: bool = True
) -> dict[str, str]:
    """
    Read the texts that are stored in a safetensors file's header.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        File to read. Only its header is.
    verify : bool, default True
        As for `load_file`, for the header's checksum.

    Returns
    -------
    dict of str to str
        What was given to `save_file` as ``metadata``, or what another program stored;
        our own entries are left out.

    Raises
    ------
    FormatError, ChecksumError, StoreError
        As `load_file`.

    Examples
    --------
    >>> import tempfile, pathlib, numpy as np
    >>> from mlstate.checkpoint import load_metadata, save_file
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.safetensors"
    >>> save_file({"w": np.zeros(2)}, path, {"epoch": "3"})
    >>> load_metadata(path)
    {'epoch': '3'}
    """
    texts = _core.file_metadata(local_path(path), verify)
    texts.pop(KEY, None)
    return texts
