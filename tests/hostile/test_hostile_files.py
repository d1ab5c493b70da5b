"""safetensors files that are false, truncated, overlapping, nested or endless.

Each class of bad file must raise FormatError with the place of the error, within little time and
within memory proportional to the file; it must never crash, hang, or return arrays.
"""

import json
import struct
import time

import child
import numpy as np
import pytest
from checkpoint_model import flipped

import mlstate
from mlstate.checkpoint import load_file, load_metadata, save_file
from mlstate.errors import ChecksumError, FormatError, StoreError


def file_of(header, payload=b"", length=None):
    """A file made of a header (dict, str or bytes), a payload, and a claimed header length."""
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + payload


def entry(dtype="U8", shape=(1,), offsets=(0, 1), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def text_of(name, dtype="U8", shape="1", offsets="0,1"):
    return f'"{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{offsets}]}}'


GOOD = {"a": entry("F32", (2,), (0, 8)), "b": entry("U8", (3,), (8, 11))}
GOOD_FILE = file_of(GOOD, bytes(11))
HUGE = 2**63

# name of the class -> files of that class
CORPUS = {
    "truncated anywhere": [GOOD_FILE[:n] for n in range(len(GOOD_FILE))],
    "header length that lies": [
        file_of(GOOD, bytes(11), length)
        for length in (0, 1, 2, 99, 2**27, 100_000_001, 2**31, 2**32, HUGE - 1, HUGE, 2**64 - 1)
    ],
    "bytes behind the last tensor": [file_of(GOOD, bytes(n)) for n in (12, 19, 5000)],
    "overlap": [
        file_of({"a": entry(shape=[n], offsets=first), "b": entry(shape=[m], offsets=second)}, data)
        for n, first, m, second, data in (
            (2, (0, 2), 2, (1, 3), b"abc"), (2, (0, 2), 2, (0, 2), b"ab"),
            (4, (0, 4), 2, (1, 3), b"abcd"), (2, (0, 2), 0, (1, 1), b"ab"),
        )
    ],
    "hole": [
        file_of({"a": entry(offsets=(1, 2))}, b"ab"),
        file_of({"a": entry(), "b": entry(offsets=(2, 3))}, b"abc"),
        file_of({"e": entry(shape=[0], offsets=(1, 1)), "b": entry(offsets=(1, 2))}, b"ab"),
    ],
    "offsets that lie": [
        file_of({"a": entry(offsets=offsets)}, b"a")
        for offsets in (
            (1, 0), (0, 2), (0, 0), (0, HUGE), (HUGE, HUGE + 1), (2**64 - 1, 2**64),
            (-1, 0), (0.0, 1.0), ("0", "1"), (), (0,), (0, 1, 2), (None, 1), (True, False),
        )
    ],
    "duplicate key": [
        file_of("{" + text_of("a") + "," + text_of("a", offsets="1,2") + "}", b"ab"),
        file_of("{" + text_of("a") + "," + text_of("\\u0061", offsets="1,2") + "}", b"ab"),
        file_of('{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"a"),
        file_of('{"__metadata__":{},"__metadata__":{}}'),
        file_of('{"__metadata__":{"k":"1","k":"2"}}'),
    ],
    "deep nesting": [
        file_of('{"a":' + "[" * n + "]" * n + "}") for n in (20, 1000, 100_000, 1_000_000)
    ]
    + [file_of('{"a":' * n + "1" + "}" * n) for n in (20, 100_000)]
    + [file_of("{" + '"a":[' * n) for n in (1, 100_000)],
    "overflowing shape": [
        file_of({"a": entry("F64", shape, (0, 8))}, bytes(8))
        for shape in (
            (2**61,), (2**61 + 1,), (2**64 - 1,), (2**64,), (2**32, 2**32), (2**32, 2**32, 2),
            (2**16,) * 4, (3,) * 64, (-1,), (-1, -1), (1.0,), (1e0,), ("1",), (None,), ([1],),
            (True,), (10**400,),
        )
    ]
    + [file_of({"a": entry("F64", shape, (0, 0))}) for shape in ((2**63, 2, 0), (0, 2**64))]
    + [file_of({"a": entry("U8", (1,) * 65)}, b"a")],
    "bad UTF-8": [
        file_of(b'{"' + bad + b'":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"a")
        for bad in (b"\xff", b"\xc3", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80")
    ]
    + [file_of(b'{"\\ud800":1}'), file_of(b'{"__metadata__":{"k":"\xff"}}')],
    "wrong element type": [
        file_of({"a": entry(dtype)}, b"a") for dtype in ("", "F4", "F6_E2M3", 8, None, ["U8"])
    ],
    "missing field": [
        file_of({"a": {k: v for k, v in entry().items() if k != gone}}, b"a")
        for gone in ("dtype", "shape", "data_offsets")
    ],
    "wrong kind of value": [
        file_of({"a": value}) for value in (1, None, True, "x", [], {}, [entry()])
    ]
    + [file_of(text) for text in ("[]", "1", '"a"', "null", "true", "", " ", "{}}", "{} {}", " {}")]
    + [file_of({"__metadata__": value}) for value in (1, [], "x", {"k": 1}, {"k": None})],
    "not JSON": [
        file_of(text)
        for text in (
            "{", "}", "{'a':1}", "{a:1}", '{"a":01}', '{"a":1,}', '{"a":NaN}', '{"a":+1}',
            "{/**/}", '{"a":"\t"}', '{"a":"\\x"}', "{}\x00", "\x00" * 50, "\ufeff{}", '{"a":1.}',
        )
    ],
    "another format": [
        b"PK\x03\x04" + bytes(60), b"\x93NUMPY\x01\x00v\x00{'descr'" + bytes(80),
        b"\x89HDF\r\n\x1a\n" + bytes(100), b"GGUF\x03\x00\x00\x00" + bytes(60), b"{}" * 40,
    ],
}  # fmt: skip


def load_mapped(path):
    return load_file(path, mmap=True)


def refused(path, data, readers=(load_file, load_mapped, load_metadata)):
    path.write_bytes(data)
    start = time.monotonic()
    for load in readers:
        with pytest.raises(FormatError) as caught:
            load(path)
        error = caught.value
        assert error.path == str(path)
        # the whole path of a file in another known format
        assert str(error).startswith((path.name[:100] + ": ", f"{path}: "))
        assert error.offset is not None or isinstance(error, ChecksumError)
    assert time.monotonic() - start < 5
    return error


@pytest.mark.parametrize("kind", CORPUS)
def test_class_is_refused(kind, tmp_path):
    for data in CORPUS[kind]:
        error = refused(tmp_path / "bad.safetensors", data)
        assert error.offset <= len(data)


def test_the_good_file_of_the_corpus_is_good(tmp_path):
    path = tmp_path / "good"
    path.write_bytes(GOOD_FILE)
    assert {k: v.shape for k, v in load_file(path).items()} == {"a": (2,), "b": (3,)}


@pytest.mark.parametrize("dtype", ["u8", "U8 ", "F128", "float32", "U8\x00", "F3_X", "é" * 300])
def test_unknown_element_types_refuse_their_tensor_only(tmp_path, dtype):
    data = file_of({"__metadata__": {"k": "v"}, "a": entry(dtype)}, b"a")
    error = refused(tmp_path / "x", data, (load_file, load_mapped))
    assert error.name == "a" and dtype.startswith(error.got[:8])
    assert load_metadata(tmp_path / "x") == {"k": "v"}


def test_errors_name_tensor_and_place(tmp_path):
    tensors = (load_file, load_mapped)
    error = refused(tmp_path / "x", file_of({"layer.0.é": entry("F99")}, b"a"), tensors)
    assert error.name == "layer.0.é"
    assert error.got == "F99"
    assert "layer.0.é" in str(error)
    long = refused(tmp_path / ("n" * 200), file_of({"t" * 5000: entry("F99")}, b"a"), tensors)
    assert 100 <= len(long.name) < 200


def saved(tmp_path):
    path = tmp_path / "ours"
    save_file({"w": np.arange(5, dtype=np.float32), "x": np.ones(3, np.uint8)}, path, {"k": "v"})
    return path, path.read_bytes()


def test_every_byte_of_our_header_flipped(tmp_path):
    path, good = saved(tmp_path)
    header = 8 + struct.unpack("<Q", good[:8])[0]
    for at in range(header):
        for flip in (0x01, 0x20, 0x80, 0xFF):
            path.write_bytes(flipped(good, at, flip))
            with pytest.raises(FormatError):
                load_file(path)


def test_every_byte_of_our_tensors_flipped(tmp_path):
    path, good = saved(tmp_path)
    header = 8 + struct.unpack("<Q", good[:8])[0]
    for at in range(header, len(good)):
        path.write_bytes(flipped(good, at, 0x10))
        with pytest.raises(ChecksumError) as caught:
            load_file(path)
        assert caught.value.name == ("w" if at < header + 20 else "x")
        assert len(load_file(path, verify=False)) == 2


def test_truncated_and_extended_at_every_byte(tmp_path):
    path, good = saved(tmp_path)
    for length in range(len(good)):
        refused(path, good[:length])
    refused(path, good + b"\0")


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        load_file(tmp_path / "none")
    assert isinstance(caught.value, StoreError)
    assert caught.value.filename == str(tmp_path / "none")
    assert str(caught.value).startswith("[Errno 2] ")
    assert str(caught.value).endswith(f": {str(tmp_path / 'none')!r}")  # as for every OSError
    with pytest.raises(OSError, match="directory"):
        load_file(tmp_path)
    with pytest.raises(ValueError, match="null"):
        load_file("a\0b")
    with pytest.raises(TypeError):
        load_file(3)


# Costly headers: file bytes -> peak memory, each in a new process.
COSTLY = {
    "a list of numbers": lambda n: '{"a":[' + "1," * (n // 2) + "1]}",
    "empty lists": lambda n: '{"a":[' + "[]," * (n // 3) + "1]}",
    "many keys": lambda n: "{" + ",".join(f'"{i:x}":1' for i in range(n // 9)) + "}",
    "a long string": lambda n: '{"' + "x" * n + '":1}',
    "many empty tensors": lambda n: (
        "{"
        + ",".join(text_of(f"{i:x}", shape="0", offsets="0,0") for i in range(n // 55))
        + ',"z":1}'
    ),
}

GROWTH = """
import sys, mlstate
from mlstate.checkpoint import load_file
before = status("VmHWM")
try:
    load_file(sys.argv[1])
except mlstate.FormatError:
    print(status("VmHWM") - before)
"""


@child.needs_status
@pytest.mark.parametrize("kind", COSTLY)
def test_memory_and_time_grow_with_the_file(kind, tmp_path):
    path = tmp_path / "costly"
    data = file_of(COSTLY[kind](4_000_000))
    path.write_bytes(data)
    start = time.monotonic()
    growth = int(child.run(child.STATUS + GROWTH, path, timeout=60))
    assert time.monotonic() - start < 20
    assert growth < 24 * len(data) + (8 << 20)


def test_false_length_allocates_no_memory(tmp_path):
    path = tmp_path / "lies"
    path.write_bytes(struct.pack("<Q", 99_999_999) + b"{}")
    with pytest.raises(mlstate.FormatError, match="truncated"):
        load_file(path)
