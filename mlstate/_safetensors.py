"""`save_file`, `load_file`, `load_metadata`: one safetensors file, its checksums, `mmap=`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from . import _core
from ._common.arguments import check_flags
from ._common.arrays import named_refusals, refuse_given_away, refuse_unstorable
from ._common.file_checksums import find_of_file
from ._common.folders import make_parents
from ._common.local_path import local_path
from ._common.overwrite import file_at, require_free, shapes_of
from ._common.set_module import set_module
from ._sharding.layout import Shard
from .errors import FormatError, StoreError
from .state._compatibility import as_dict
from .state._kind import KEY, describe, restore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ._common.file_checksums import Record
    from .state._state_dict import StateDict


def _require_array(name: object, value: object) -> object:
    """Return `value`; raise TypeError, with a hint, for a Shard, a number, a text or a list.

    `name`: its name in the state, for the error. The core checks all other values.
    """
    if isinstance(value, Shard):
        raise TypeError(
            f"{name!r} is a Shard, part {value.index} of {value.layout.parts}: state files hold "
            "whole arrays; pass a Shard to mlstate.save"
        )
    if type(value) in (bool, int, float, complex, str, bytes, list, tuple):
        raise TypeError(
            f"{name!r} is a {type(value).__name__}: state files hold arrays; "
            "wrap it in numpy.asarray with a dtype, or put it into metadata as text"
        )
    return value


def _entries(state: Any) -> dict[str, Any]:
    """Return a snapshot of the state's entries, because other threads may change the state.

    Raises TypeError, with a hint, for a path or another value that is not a mapping.
    """
    if isinstance(state, str | bytes | os.PathLike):
        raise TypeError(
            f"the state comes first, and then the path: save_file(state, path); got "
            f"{type(state).__name__} for the state"
        )
    state = as_dict(state)
    if not hasattr(state, "keys"):
        hint = ": pass its state_dict()" if hasattr(state, "state_dict") else ""
        raise TypeError(
            f"state must be a mapping of str to arrays, got {type(state).__name__}{hint}"
        )
    return dict(state)


@set_module("mlstate.checkpoint")
def save_file(
    state: Mapping[str, object],
    path: str | bytes | os.PathLike[str] | os.PathLike[bytes],
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool | None = None,
) -> None:
    """
    Write arrays to one safetensors file, atomically.

    The write is atomic and durable. Bytes go to a temporary file in the same folder, which is
    synced and renamed over the target; then the folder is synced. After a failure the old file
    is unchanged. Every program that reads safetensors can read the result.

    Parameters
    ----------
    state : mapping of str to array, or torch.nn.Module
        NumPy arrays (any strides, any byte order, read-only or not), ml_dtypes arrays, torch
        tensors in main memory (parameters too), or objects with ``__dlpack__``. The attributes
        of a `ModelStateDict` or `OptimizerStateDict` are stored too.
    path : str, bytes or os.PathLike
        File to write. A symbolic link is followed and kept. An existing file keeps its
        permission bits, and must be writable; a new file has mode 0666 less the umask. Missing
        parent folders are created.
    metadata : mapping of str to str, optional
        Texts to store in the header. Keys that start with ``"mlstate."`` are reserved.
    overwrite : bool, optional
        Default: a file that this function wrote, with the same names and shapes, is replaced. True:
        replace any file of tensors that `load` reads. False: replace nothing. See docs/files.md.

    Raises
    ------
    TypeError
        A name or text is not a str, a value is not a whole array, or the ``param_groups`` of an
        `OptimizerStateDict` contain values other than numbers, texts and lists.
    ValueError
        A name or text cannot be encoded as UTF-8 or is reserved, or `path` exists and is not
        a regular file.
    BufferError
        A tensor has no memory to export, such as one on torch's ``meta`` device.
    CompatibilityError
        Safetensors has no name for a dtype (``complex128``, ``datetime64``, ...), or the last
        axis of packed 4- or 6-bit floats is not a whole number of elements.
    CapacityError
        Names and metadata take more than the 100 MB that the format allows.
    StoreError
        The operating system refused: an `OSError` with its ``errno``. EEXIST: the path exists, and
        `overwrite` does not replace it.

    Notes
    -----
    Contiguous arrays are written without a copy; others pass through a buffer of 1 MiB. The
    extra memory is this buffer and about 2 KiB per tensor. Arrays must not change during the
    save; the mapping itself may. The GIL is released. The same state always gives the same
    bytes: tensors are sorted by descending item size, then by name. A process that is killed
    during the write may leave a file ``.mlstate-*.tmp``, which can be deleted.

    References
    ----------
    Checksums are CRC32C values in two metadata entries, ``mlstate.header.crc32c`` and
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
    refuse_given_away(entries := _entries(state))
    refuse_unstorable(entries)
    tensors = tuple((name, _require_array(name, value)) for name, value in entries.items())
    if metadata is not None and not hasattr(metadata, "keys"):
        raise TypeError(f"metadata must be a mapping, got {type(metadata).__name__}")
    texts = {} if metadata is None else dict(metadata)
    if KEY in texts:
        raise ValueError(
            f'metadata key "{KEY}" is reserved: choose one that does not start with "mlstate."'
        )
    kind = describe(state)
    if kind is not None:
        texts[KEY] = kind
    target = local_path(path)
    existing = file_at(target)
    require_free(
        os.fsdecode(target), existing, overwrite, "safetensors", lambda: shapes_of(entries)
    )
    make_parents(target)
    with named_refusals(entries):
        _core.file_save(target, tensors, tuple(texts.items()))


def _recorded_index(path: str, record: Record) -> _core.MergedIndex:
    """Return the index of the file `path`, after its header was compared with `record`.

    Raises ChecksumError or FormatError if the header or the size has changed.
    """
    folder, name = os.path.split(os.path.abspath(path))
    return _core.MergedIndex.of_files(folder, (name,), (record,))


def _load_recorded(path: str, record: Record, mmap: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arrays, in file order, and the metadata texts of a file with recorded checksums.

    `record`: its checksums, which all bytes are compared with. `mmap`: return read-only views of
    the file. Raises ChecksumError, or FormatError for another size, if the file has changed.
    """
    merged = _recorded_index(path, record)
    ranges = [(offset, size, key) for _, key, _, _, _, _, offset, size, *_ in merged.shards()]
    keys = [key for _, _, key in sorted(ranges)]  # in the order of the file
    folder = os.path.dirname(os.path.abspath(path))
    # section 0, the model; (None, 0, 0): whole tensors; True: compare the checksums; no progress
    arrays = merged.load(folder, 0, keys, (None, 0, 0), True, mmap, None)
    return arrays, _core.file_metadata(path, True)


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
        Safetensors file of any program, with any suffix; `mlstate.load` reads other formats.
    mmap : bool, default False
        Return read-only arrays over the memory-mapped file, which exists as long as any of
        them. Nothing is copied. With ``verify=False``, or without checksums, nothing but the
        header is read, and pages are read on first access.
    verify : bool, default True
        Verify the checksums that `save_file` or `checksum` stores, if the file has them, before
        the arrays are returned. With ``mmap=True`` this reads the file once, in pieces. Pass
        False to read the remains of a damaged file.

    Returns
    -------
    StateDict
        New NumPy arrays, or views of the mapping, in file order. A `ModelStateDict` or
        `OptimizerStateDict` if one was saved. bfloat16 and 8-bit floats have dtypes of
        ml_dtypes; without it they are uint16 and uint8, and
        ``array.dtype.metadata["mlstate.dtype"]`` names the true dtype. Packed 4- and 6-bit
        floats always are labelled uint8 in this way, with the shape in bytes. New arrays below
        4 MiB may be views of shared blocks of 4 to 20 MiB; a block stays allocated as long as
        any of its arrays exists.

    Raises
    ------
    FormatError
        The file is not a safetensors file, or is damaged: truncated, with overlaps, gaps,
        duplicate names or wrong shapes; or it has a tensor that no array can hold, of an
        unknown dtype. ``offset`` is the position, ``name`` the tensor. No allocation exceeds
        what the file's size justifies.
    ChecksumError
        The bytes changed since `save_file` wrote them. (A `FormatError`.)
    StoreError
        The operating system refused: an `OSError` with its ``errno``. Also a
        `FileNotFoundError` if the file does not exist.

    Notes
    -----
    Without ml_dtypes, `save_file` and every other function here treat the integers that
    represent bfloat16 and 8-bit floats as their true dtype. Slices, copies and pickles keep the
    true dtype; ``astype``, ``view``, ``numpy.concatenate`` and single elements do not. NumPy
    computes with the integers instead of the values they represent: install ml_dtypes for
    arithmetic (``pip install 'mlstate[dtypes]'``).

    Bytes are read directly into the arrays and checksummed while they are in the CPU cache. The
    GIL is released. With ``mmap=True``, if another process truncates the file while the arrays
    are in use, access ends this process (SIGBUS), as with every mapping. `save_file` never
    truncates: it replaces files.

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
    check_flags(mmap=mmap, verify=verify)
    file_path = local_path(path)
    recorded = find_of_file(os.fsdecode(file_path)) if verify else None
    if recorded is None:
        try:
            arrays, texts = _core.file_load(file_path, mmap, verify)
        except (FormatError, StoreError) as error:
            from ._common.file_kinds import explain

            raise explain(error, file_path) from None
    else:
        arrays, texts = _load_recorded(os.fsdecode(file_path), recorded[0], mmap)
    return restore(arrays, texts.get(KEY), file_path)


@set_module("mlstate.checkpoint")
def load_metadata(
    path: str | bytes | os.PathLike[str] | os.PathLike[bytes], *, verify: bool = True
) -> dict[str, str]:
    """
    Read the metadata texts in a safetensors file's header.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        File to read. Only its header is read.
    verify : bool, default True
        Verify the header's checksum, as for `load_file`.

    Returns
    -------
    dict of str to str
        The ``metadata`` given to `save_file`, or texts of another program; entries of mlstate
        itself are left out.

    Raises
    ------
    FormatError, ChecksumError, StoreError
        As for `load_file`.

    Examples
    --------
    >>> import tempfile, pathlib, numpy as np
    >>> from mlstate.checkpoint import load_metadata, save_file
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.safetensors"
    >>> save_file({"w": np.zeros(2)}, path, {"epoch": "3"})
    >>> load_metadata(path)
    {'epoch': '3'}
    """
    check_flags(verify=verify)
    file_path = local_path(path)
    if verify and (recorded := find_of_file(os.fsdecode(file_path))) is not None:
        _recorded_index(os.fsdecode(file_path), recorded[0])  # which compares the header
    try:
        texts = _core.file_metadata(file_path, verify)
    except FormatError as error:
        from ._common.file_kinds import explain

        raise explain(error, file_path) from None
    texts.pop(KEY, None)
    return texts
