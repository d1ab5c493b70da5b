"""`compress=`: codecs zlib and zstd of shards, their levels, safe decompression.

The C core calls these functions from several threads at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    Buffer = bytes | memoryview

NAMES = ("zlib", "zstd")

# The core compresses blocks of this size, so a larger window is never needed.
_FRAME = 1 << 20

# Level 6 takes up to four times as long and gains at most a few percent on byte-shuffled numbers.
_LEVEL = 1


def _zstandard() -> ModuleType:
    """Return the package zstandard; the ImportError names the extra to install."""
    try:
        import zstandard
    except ImportError:
        raise ImportError("zstd needs the package zstandard: pip install mlstate[zstd]") from None
    return zstandard


def check(name: str | None) -> None:
    """Raise ValueError for an unknown codec, ImportError if its package is missing."""
    if name is not None and name not in NAMES:
        raise ValueError(f"compress must be 'zlib', 'zstd' or None, got {name!r}")
    if name == "zstd":
        _zstandard()


def encode(name: str, data: Buffer, room: int) -> bytes:
    """Return the compressed bytes of `data`.

    `room`: longest useful result; the caller discards a longer one.
    """
    if name == "zlib":
        import zlib

        return zlib.compress(data, _LEVEL)
    result: bytes = _zstandard().ZstdCompressor(level=_LEVEL).compress(data)
    return result


def decode(name: str, data: Buffer, size: int) -> bytes:
    """Decompress to exactly `size` bytes, without ever allocating more memory than that.

    Raises ValueError if `data` is not the compressed form of `size` bytes.
    """
    return _inflate(data, size) if name == "zlib" else _decode_zstd(data, size)


def _inflate(data: Buffer, size: int) -> bytes:
    """Decompress a zlib block to exactly `size` bytes; raise ValueError if it has more or fewer."""
    import zlib

    stream = zlib.decompressobj()
    try:
        # One byte more than allowed shows that there are too many.
        result = stream.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"zlib cannot decode it: {error}") from None
    if len(result) != size or not stream.eof or stream.unused_data:
        raise ValueError(f"zlib does not decode it to {size} bytes")
    return result


def _decode_zstd(data: Buffer, size: int) -> bytes:
    """Decompress a zstd block to exactly `size` bytes; raise ValueError if it has more or fewer."""
    zstandard = _zstandard()
    try:
        # the header declares the content and window sizes; check both before trusting them, as
        # they determine how much memory is allocated
        stated_size = zstandard.frame_content_size(data)
        if stated_size == size:
            decompressor = zstandard.ZstdDecompressor(max_window_size=_FRAME)
            result: bytes = decompressor.decompress(data, allow_extra_data=False)
            if len(result) == size:
                return result
    except zstandard.ZstdError as error:
        raise ValueError(f"zstd cannot decode it: {error}") from None
    raise ValueError(f"zstd does not decode it to {size} bytes")
