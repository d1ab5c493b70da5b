"""Deltas between Hugging Face folders, as slime and Miles publish them."""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ChecksumError, CompatibilityError, FormatError
from .._delta import Delta, compare_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..._types import NDArray

    Files = Mapping[str, tuple[Mapping[str, NDArray], Mapping[str, str]]]

_FACTS = ("version", "base_version", "delta_encoding", "compression_format", "checksum_format")
_VERSION = re.compile(r"\d{1,18}", re.ASCII)
_ENCODINGS = ("overwrite", "xor")
_HASHES = {"xxh3-128": ("xxhash", "xxh3_128"), "blake3": ("blake3", "blake3")}
_FILE = "model-00001-of-00001.safetensors"


@dataclass(frozen=True, slots=True)
class CheckpointDelta:
    """The deltas of one version, by tensor."""

    version: int
    base_version: int
    deltas: dict[str, Delta]


def read_checkpoint_delta(
    index: Mapping[str, Any], files: Files, bases: Mapping[str, NDArray]
) -> CheckpointDelta:
    """Return the deltas of a published version.

    Each new tensor is built in a copy of its base and compared with the published checksum. So a
    delta for another base is found before it is applied, and applying a delta twice does no harm:
    an XOR becomes values.

    Parameters
    ----------
    index : dict
        Content of ``model.safetensors.index.json``.
    files : dict of (tensors, metadata)
        Content of the safetensors files, by name.
    bases : dict of array
        The tensors of version ``base_version``, in C order.

    Raises
    ------
    FormatError
        The index or a delta is damaged, or it has an unknown encoding.
    CompatibilityError
        A tensor is not in `bases`.
    ChecksumError
        A tensor does not have its checksum after the change.
    ImportError
        The package of the compression or of the checksums is missing.
    """
    facts = _facts_of(index)
    weight_map = index.get("weight_map", {})
    if not isinstance(weight_map, dict):
        raise FormatError("the weight_map of an index must be an object")
    deltas = {}
    for tensors, checksums in files.values():
        for name, packed in tensors.items():
            if name in deltas:
                raise _error(FormatError, name, "is in two files")
            if name not in bases:
                raise CompatibilityError(f"the delta changes {name!r}, which this model lacks")
            base = bases[name]
            new = base.copy()
            _change_bytes(name, new.reshape(-1).view(np.uint8), packed, facts["delta_encoding"])
            checksum = _checksum(facts["checksum_format"], new)
            if checksum != checksums.get(name):
                raise _error(
                    ChecksumError,
                    name,
                    f"leads to checksum {checksum} instead of {checksums.get(name)}: it belongs to "
                    "another base, or it is damaged",
                )
            deltas[name] = compare_arrays(base, new)
    missing = set(weight_map) - deltas.keys()
    if missing:
        raise FormatError(f"the index names {min(missing)!r}, but no file has it")
    return CheckpointDelta(int(facts["version"]), int(facts["base_version"]), deltas)


def write_checkpoint_delta(
    version: int,
    base_version: int,
    pairs: Mapping[str, tuple[NDArray, NDArray]],
    *,
    encoding: str = "overwrite",
    checksum_format: str = "adler32",
) -> tuple[dict[str, Any], Files]:
    """Return the index and the files of a version; the arguments of `read_checkpoint_delta`.

    Parameters
    ----------
    version, base_version : int
        The new version, and the one before.
    pairs : dict of (base, new)
        Tensors in C order; those that did not change are left out.
    encoding : {"overwrite", "xor"}
        Of a tensor's change: positions and new values of its changed bytes, or all bytes combined
        with those of the base by XOR.
    checksum_format : {"adler32", "xxh3-128", "blake3"}
        Of the new tensors; the last two need the packages xxhash and blake3.

    Raises
    ------
    CompatibilityError
        A tensor has 4 GiB or more, which the positions of "overwrite" cannot number. Or its base
        has another shape or dtype.
    FormatError
        `checksum_format` is unknown.
    ValueError
        `encoding` is unknown.
    ImportError
        The package of the compression or of the checksums is missing.
    """
    if encoding not in _ENCODINGS:
        raise ValueError(f"encoding must be one of {', '.join(_ENCODINGS)}, got {encoding!r}")
    tensors: dict[str, NDArray] = {}
    checksums: dict[str, str] = {}
    compress = _zstandard().ZstdCompressor().compress
    for name, (base, new) in pairs.items():
        if (base.shape, base.dtype) != (new.shape, new.dtype):
            raise _error(CompatibilityError, name, "has a base of another shape or dtype")
        before, after = (array.reshape(-1).view(np.uint8) for array in (base, new))
        differences = before ^ after
        if not differences.any():
            continue
        raw = differences.tobytes()
        if encoding == "overwrite":
            if after.size >= 1 << 32:
                raise _error(
                    CompatibilityError, name, f"has {after.size} bytes: use encoding 'xor'"
                )
            positions = np.flatnonzero(differences).astype("<u4")
            count = struct.pack("<I", len(positions))
            raw = count + positions.tobytes() + after[positions].tobytes()
        tensors[name] = np.frombuffer(compress(raw), np.uint8)
        checksums[name] = _checksum(checksum_format, new)
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{base_version:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum_format,
    }
    index = {"metadata": metadata, "weight_map": dict.fromkeys(tensors, _FILE)}
    return index, {_FILE: (tensors, checksums)}


def _facts_of(index: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of an index: the keys of `_FACTS`, which are all present and text.

    Raises FormatError if one is missing or malformed, or names an encoding that is not supported.
    """
    metadata = index.get("metadata", {})
    if not isinstance(metadata, dict):
        raise FormatError("the metadata of an index must be an object")
    facts: dict[str, str] = {}
    for key in _FACTS:
        value = metadata.get(key)
        if not isinstance(value, str) or (
            key.endswith("version") and not _VERSION.fullmatch(value)
        ):
            raise FormatError(f"the index of a delta has {key} {value!r}")
        facts[key] = value
    if facts["delta_encoding"] not in _ENCODINGS or facts["compression_format"] != "zstd":
        raise FormatError(
            f"a delta with encoding {facts['delta_encoding']!r} and compression "
            f"{facts['compression_format']!r} is not supported"
        )
    return facts


def _change_bytes(name: str, new: NDArray, packed: NDArray, encoding: str) -> None:
    """Decompress the delta of the tensor `name`, and apply it to `new`.

    `new`: the bytes of a copy of the base, changed in place. `packed`: compressed bytes.
    `encoding`: "xor" (all bytes, to be combined with the base) or "overwrite" (a count, positions
    of 4 bytes, and as many bytes). Raises FormatError if the delta does not fit; `new` is unchanged
    then.
    """
    # The longest form of "overwrite" has every byte: 4 for the count, and 5 for each byte.
    most = new.size if encoding == "xor" else 4 + 5 * new.size
    raw = _decompress(name, np.asarray(packed), most)
    if encoding == "xor":
        if raw.size != new.size:
            raise _error(FormatError, name, f"has {raw.size} bytes instead of {new.size}")
        new ^= raw
        return
    count = int.from_bytes(raw[:4].tobytes(), "little")
    if raw.size < 4 or raw.size != 4 + 5 * count:
        raise _error(FormatError, name, f"has {raw.size} bytes for {count} positions")
    positions = raw[4 : 4 + 4 * count].view("<u4")
    if count and int(positions.max()) >= new.size:
        raise _error(FormatError, name, f"changes bytes beyond the last of {new.size}")
    new[positions] = raw[4 + 4 * count :]


def _decompress(name: str, packed: NDArray, most: int) -> NDArray:
    """Return the decompressed bytes of the delta of the tensor `name`.

    Raises FormatError if `packed` does not decompress, or to more than `most` bytes.
    """
    zstandard = _zstandard()
    try:
        with zstandard.ZstdDecompressor().stream_reader(packed.tobytes()) as reader:
            raw = reader.read(most + 1)
    except zstandard.ZstdError as error:
        raise _error(FormatError, name, f"does not decompress: {error}") from None
    if len(raw) > most:
        raise _error(FormatError, name, f"has more than {most} bytes")
    return np.frombuffer(raw, np.uint8)


def _checksum(algorithm: str, array: NDArray) -> str:
    """Return the checksum of an array's bytes, as hexadecimal digits.

    `array`: contiguous. `algorithm`: "adler32" or a key of `_HASHES`; FormatError for another one.
    Raises ImportError if its package is missing.
    """
    memory = array.reshape(-1).view(np.uint8)
    if algorithm == "adler32":
        return f"{zlib.adler32(memory.data):08x}"
    if algorithm not in _HASHES:
        raise FormatError(f"checksums of format {algorithm!r} are not supported")
    module, function = _HASHES[algorithm]
    try:
        hasher = getattr(import_module(module), function)
    except ImportError:
        raise ImportError(
            f"checksums of format {algorithm} need the package {module}: pip install {module}",
            name=module,
        ) from None
    return str(hasher(memory).hexdigest())


def _zstandard() -> Any:
    """Return the module zstandard; the ImportError names the extra to install."""
    try:
        import zstandard
    except ImportError:
        raise ImportError(
            "deltas of checkpoints need the package zstandard: pip install mlstate[zstd]",
            name="zstandard",
        ) from None
    return zstandard


def _error(kind: type[Any], name: str, text: str) -> Any:
    return kind(f"the delta of {name!r} {text}", name=name)
