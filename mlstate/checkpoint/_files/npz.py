"""``.npz`` files: names that zip cannot hold, bfloat16, damage, pickled objects refused.

``numpy.load`` can read these files. Names that a zip archive would not preserve are stored as
other names. bfloat16 and the other dtypes of ml_dtypes, which ``numpy.savez`` loses, are stored
as unsigned integers. The text entry ``mlstate.json`` records both, and metadata; a file with
neither has only the arrays.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ..._common.dtypes import label_of, name_of, stored_dtype
from ..._common.regular_file import open_regular
from ..._common.store_error import format_error
from ...errors import CompatibilityError, FormatError, MLStateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..._common.atomic_file import Target
    from ..._types import NDArray, NumpyDType
    from .parts import Parts

RECORD = "mlstate.json"
_SUFFIX = ".npy"
# Largest expansion ratio of deflate, plus a margin.
_MOST_PER_BYTE = 1100
_BFLOAT16_BYTES = 2  # no other dtype of ml_dtypes has as many
# Zip archives store name lengths in 16 bits; NumPy's reader removes the suffix once.
_LONGEST_NAME = 60_000


def _is_portable_name(name: str) -> bool:
    """Return whether every reader of zip archives, and NumPy's reader, preserves a name."""
    parts = name.split("/")
    return (
        name.isprintable()
        and name.isascii()
        and "\\" not in name
        and ":" not in name
        and all(part not in ("", ".", "..") for part in parts)
        and not name.endswith(_SUFFIX)
        and name not in (RECORD, "file")
        and len(name) < _LONGEST_NAME
    )


def _member_names(names: list[str]) -> dict[str, str]:
    """Return the name in the archive of each array, by `names`: its own, or ``array_<number>``.

    The second is for names that are not portable; numbers that would repeat a name are skipped.
    """
    used = set(names)
    # At most `len(names)` numbers are taken by names, and as many are needed.
    numbered = (name for i in range(2 * len(names) + 1) if (name := f"array_{i}") not in used)
    return {name: name if _is_portable_name(name) else next(numbered) for name in names}


def _is_ml_dtype(dtype: NumpyDType) -> bool:
    return bool(label_of(dtype)) or dtype.type.__module__.startswith("ml_dtypes")


def write_npz(target: Target, arrays: Mapping[str, NDArray], record: Mapping[str, object]) -> None:
    """Write arrays without object dtypes, and a record of additional JSON values, atomically.

    `record` must not have the keys ``names`` and ``dtypes``, which are added. A record of empty
    values is not written.
    """
    members = _member_names(list(arrays))
    dtypes = {name: name_of(a.dtype) for name, a in arrays.items() if _is_ml_dtype(a.dtype)}
    names = {member: name for name, member in members.items() if member != name}
    record = {**record, "names": names, "dtypes": dtypes}

    def write(file: IO[bytes]) -> None:
        archive = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)
        try:
            if any(record.values()):
                _write_member(archive, RECORD, np.array(json.dumps(record, sort_keys=True)))
            for name, array in arrays.items():
                stored = array.view(f"u{array.dtype.itemsize}") if name in dtypes else array
                _write_member(archive, members[name], stored)
            archive.close()
        finally:
            archive.fp = None  # after an exception, `close` would raise another one

    target.write_content(write)


def _write_member(archive: zipfile.ZipFile, name: str, array: NDArray) -> None:
    """Write an array as the entry `name`, without its ``.npy``, of the archive."""
    info = zipfile.ZipInfo(name + _SUFFIX)  # fixed date (1980), so equal states give equal bytes
    with archive.open(info, "w", force_zip64=True) as member:
        np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def read_npz(
    path: str | os.PathLike[str],
) -> tuple[dict[str, NDArray], dict[str, Any], dict[str, MLStateError]]:
    """Read arrays by name, and the record of `write_npz`, {} for files of other programs.

    The third result has the errors of arrays of objects, which are pickles. Raises FormatError for
    a damaged file.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            arrays, refused = _read_members(archive, path)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise _damage_error(path, None, error) from None
    record = _parse_record(path, arrays.pop(RECORD)) if RECORD in arrays else {}
    return _restore_names(path, arrays, record), record, refused


def _damage_error(path: str | os.PathLike[str], name: str | None, reason: object) -> FormatError:
    """Return a FormatError for the file `path`; `name`: of the damaged array, or None."""
    where = "" if name is None else f"array {name!r}: "
    text = f"{path}: {where}{reason or 'the file ends too early'}"
    return format_error(text, os.fspath(path), name)


def _read_members(
    archive: zipfile.ZipFile, path: str | os.PathLike[str]
) -> tuple[dict[str, NDArray], dict[str, MLStateError]]:
    """Return the arrays of the archive by name, without ``.npy``, and errors of refused ones.

    Raises FormatError if one is damaged, appears twice, or claims more bytes than deflate could
    have compressed; `path` is for this error.
    """
    arrays: dict[str, NDArray] = {}
    refused: dict[str, MLStateError] = {}
    for info in archive.infolist():
        name = info.filename.removesuffix(_SUFFIX)
        if name == info.filename:
            raise _damage_error(path, name, "is not a .npy entry")
        if name in arrays:
            raise _damage_error(path, name, "appears twice")
        # 1024: a margin for entries of a few bytes
        if info.file_size > info.compress_size * _MOST_PER_BYTE + 1024:
            raise _damage_error(path, name, "claims more bytes than it can hold")
        try:
            with archive.open(info) as member:
                array = _read_array(member, info.file_size)
        except MemoryError:
            raise
        except Exception as error:  # each codec raises its own class, such as zlib.error
            if getattr(error, "errno", None) is not None:  # of the disk; bz2 raises one without
                raise
            raise _damage_error(path, name, error) from None
        if array is None:
            text = "holds Python objects, which mlstate does not load"
            refused[name] = _damage_error(path, name, text)
        else:
            arrays[name] = array
    return arrays, refused


def _read_array(member: IO[bytes], size: int) -> NDArray | None:
    """Read one array of `size` bytes, header included; raise ValueError if they do not match.

    None for an array of Python objects. The shape is checked before memory is allocated.
    """
    version = np.lib.format.read_magic(member)
    readers = {(1, 0): "read_array_header_1_0", (2, 0): "read_array_header_2_0"}
    if version not in readers:
        raise ValueError(f"version {version} of .npy is not known")
    shape, _, dtype = getattr(np.lib.format, readers[version])(member)
    if dtype.hasobject:
        return None
    if math.prod(shape) * dtype.itemsize > size - member.tell():
        raise ValueError(f"shape {shape} of {dtype} does not fit {size} bytes")
    member.seek(0)
    array: NDArray = np.lib.format.read_array(member, allow_pickle=False)
    if member.read(1):
        raise ValueError("has bytes after its elements")
    return array


def _parse_record(path: str | os.PathLike[str], array: NDArray) -> dict[str, Any]:
    """Return the JSON object in the array of text that describes the file.

    Raises FormatError, with `path`, if it is malformed.
    """
    try:
        record = json.loads(str(array[()]))
        if not isinstance(record, dict):
            raise ValueError("is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise _damage_error(path, RECORD, f"does not describe the others: {error}") from None
    return record


def _restore_names(
    path: str | os.PathLike[str], arrays: dict[str, NDArray], record: dict[str, object]
) -> dict[str, NDArray]:
    """Return the arrays with their own names and dtypes, which .npy members cannot have.

    `record`: the file's JSON object; its members ``names`` and ``dtypes`` are removed. Raises
    FormatError, with `path`, if they are malformed or do not fit the arrays.
    """
    names, dtypes = record.pop("names", {}), record.pop("dtypes", {})
    if not isinstance(names, dict) or not isinstance(dtypes, dict):
        raise _damage_error(path, RECORD, "does not describe the others")
    renamed: dict[str, NDArray] = {}
    for member, array in arrays.items():
        name = names.get(member, member)
        if not isinstance(name, str) or name in renamed:
            raise _damage_error(path, RECORD, f"gives a wrong name to {member!r}")
        renamed[name] = _restore_dtype(path, name, array, dtypes[name]) if name in dtypes else array
    return renamed


def _restore_dtype(path: str | os.PathLike[str], name: str, array: NDArray, dtype: Any) -> NDArray:
    """Return a view of the array with the dtype of this name; raise FormatError if it cannot be."""
    try:
        return array.view(stored_dtype(dtype))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _damage_error(path, name, f"{array.dtype} does not hold {dtype!r}") from None


# ---- lost dtypes ----


def find_lost_dtypes(
    path: str | os.PathLike[str], arrays: Mapping[str, NDArray]
) -> dict[str, MLStateError]:
    """Return the errors of arrays whose dtype ``numpy.savez`` has lost, by name.

    It stores a dtype of ml_dtypes as bytes without a name, such as ``|V2``. `path`: for the errors.
    """
    errors: dict[str, MLStateError] = {}
    for name, array in arrays.items():
        if array.dtype.kind != "V" or array.dtype.names is not None or _is_ml_dtype(array.dtype):
            continue
        is_bfloat16 = array.dtype.itemsize == _BFLOAT16_BYTES
        text = "pass cast='bfloat16' if it is that, or " if is_bfloat16 else ""
        errors[name] = error = CompatibilityError(
            f"{os.fspath(path)}: {name!r} is {array.dtype.str}, bytes without a dtype: numpy.savez "
            f"loses those of ml_dtypes, such as bfloat16; {text}write the file by "
            "mlstate.save_file, which keeps them"
        )
        error.name, error.path, error.got = name, os.fspath(path), array.dtype.str
    return errors


def restore_lost_dtypes(parts: Parts, dtype: str) -> Parts:
    """Return the parts with arrays whose dtype was lost as `dtype`, if they can be of that.

    Only bfloat16 is known from the number of its bytes.
    """
    errors, model = dict(parts.unreadable.get("model", {})), parts.model
    if dtype != "bfloat16" or model is None:
        return parts
    for name in errors.keys() & model.keys():
        if model[name].dtype.itemsize == _BFLOAT16_BYTES:
            model[name] = model[name].view(stored_dtype(dtype))
            del errors[name]
    return parts._replace(unreadable={"model": errors} if errors else {})
