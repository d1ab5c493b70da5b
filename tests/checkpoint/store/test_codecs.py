"""The codecs alone: round trips, and rejection of invalid input."""

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced_memory import traced
from tries import tries

from mlstate.checkpoint._store import codecs as _codecs

zstandard = pytest.importorskip("zstandard")

MIB = 1 << 20
both = pytest.mark.parametrize("name", _codecs.NAMES)


def coded(name, data):
    return _codecs.encode(name, memoryview(data), len(data))


@both
@settings(max_examples=tries(25), deadline=None)
@given(st.binary(min_size=1, max_size=300), st.integers(1, 50))
def test_codecs_round_trip(name, data, times):
    data = data * times
    assert _codecs.decode(name, memoryview(coded(name, data)), len(data)) == data


@both
def test_other_lengths_are_refused(name):
    data = coded(name, b"abc" * 100)
    for size in (1, 299, 301, 600, MIB):
        with pytest.raises(ValueError, match=f"{name} .*{size}"):
            _codecs.decode(name, data, size)


@both
def test_damaged_codes_are_refused(name):
    data = coded(name, b"abc" * 100)
    empty = coded(name, b"")
    bad = [data[:n] for n in range(len(data))]
    bad += [data + b"\0", data + data, data + b"x" * 100, empty + data, data + empty, b"\0" * 50]
    bad += [data[1:], b"x" + data, coded("zstd" if name == "zlib" else "zlib", b"abc" * 100)]
    bad += [b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + data]  # a skippable frame of zstd
    for text in bad:
        with pytest.raises(ValueError, match=name):
            _codecs.decode(name, text, 300)


@both
@settings(max_examples=tries(60), deadline=None)
@given(st.binary(max_size=200), st.integers(0, 60), st.integers(0, 255))
def test_any_bytes_are_decoded_or_refused(name, data, at, bits):
    good = bytearray(coded(name, b"some text, some text, some numbers 0123456789"))
    good[at % len(good)] ^= bits
    start = bytes(good[:4]) if name == "zstd" else b"\x78\x01"
    for text in (bytes(good), data, start + data):
        try:
            assert len(_codecs.decode(name, memoryview(text), 45)) == 45
        except ValueError as error:
            assert name in str(error)


def peak(call):
    with traced() as trace, pytest.raises(ValueError, match=r"zlib|zstd"):
        call()
    return trace.peak


def test_oversized_output_is_not_allocated():
    zeros = bytes(64 * MIB)
    bomb = zlib.compress(zeros)
    assert peak(lambda: _codecs.decode("zlib", bomb, MIB)) < 5 * MIB
    bomb = zstandard.ZstdCompressor().compress(zeros)
    assert peak(lambda: _codecs.decode("zstd", bomb, MIB)) < 5 * MIB
    # the frame header ends with 4 bytes that hold the decompressed size
    at = bomb.index((64 * MIB).to_bytes(4, "little"))
    bomb = bomb[:at] + MIB.to_bytes(4, "little") + bomb[at + 4 :]
    assert zstandard.frame_content_size(bomb) == MIB
    assert peak(lambda: _codecs.decode("zstd", bomb, MIB)) < 5 * MIB
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(zeros)
    assert peak(lambda: _codecs.decode("zstd", unknown, MIB)) < 5 * MIB


def test_zstd_window_does_not_determine_memory():
    """A window of 128 MiB in a truncated frame that claims 1 MiB of content."""
    header = b"\x28\xb5\x2f\xfd" + bytes([0x80, (27 - 10) << 3]) + MIB.to_bytes(4, "little")
    assert zstandard.get_frame_parameters(header).window_size == 1 << 27
    with pytest.raises(ValueError, match="too much memory"):
        _codecs.decode("zstd", header, MIB)
