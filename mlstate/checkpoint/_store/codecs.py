"""What compresses states: zlib, and zstd where it is installed.

The compiled module calls this from several threads at once.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    Buffer = bytes | memoryview

NAMES = ("zlib", "zstd")

# Bytes that the core codes at a time: nobody needs to look back further.
_FRAME = 1 << 20

# Level 6 takes up to four times as long, and gains at most a few percent of numbers put apart.
_LEVEL = 1


def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError:
        raise ImportError("zstd needs the package zstandard: pip install mlstate[zstd]") from None
    return zstandard


def check(name: str | None) -> None:
    """See that a codec can be used.

    Raises
    ------
    ValueError
        There is none of that name.
    ImportError
        It is not installed.
    """
    if name is not None and name not in NAMES:
        raise ValueError(f"compress must be 'zlib', 'zstd' or None, got {name!r}")
    if name == "zstd":
        _zstandard()


def encode(name: str, data: Buffer, room: int) -> bytes:
    """Compress; what comes of it may be longer than `room`, and then is of no use."""
    if name == "zlib":
        return zlib.compress(data, _LEVEL)
    result: bytes = _zstandard().ZstdCompressor(level=_LEVEL).compress(data)
    return result


def decode(name: str, data: Buffer, size: int) -> bytes:
    """Decompress what must be exactly `size` bytes; never more memory than that is taken.

    Raises
    ------
    ValueError
        It is not what `encode` gives of so many bytes.
    ImportError
        The codec is not installed.
    """
    return _inflate(data, size) if name == "zlib" else _decode_zstd(data, size)


def _inflate(data: Buffer, size: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        result = stream.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"zlib cannot decode it: {error}") from None
    if len(result) != size or not stream.eof or stream.unused_data:
        raise ValueError(f"zlib does not decode it to {size} bytes")
    return result


def _decode_zstd(data: Buffer, size: int) -> bytes:
    zstandard = _zstandard()
    try:
        # the header says how much memory is needed, and is not to be trusted: neither in how
        # long it becomes nor in how far back it looks
        said = zstandard.frame_content_size(data)
        if said == size:
            decompressor = zstandard.ZstdDecompressor(max_window_size=_FRAME)
            result: bytes = decompressor.decompress(data, allow_extra_data=False)
            if len(result) == size:
                return result
    except zstandard.ZstdError as error:
        raise ValueError(f"zstd cannot decode it: {error}") from None
    raise ValueError(f"zstd does not decode it to {size} bytes")
