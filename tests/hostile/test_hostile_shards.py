"""Checkpoints with false shard files, folders, locks and manifests.

Each case must raise an exception of mlstate within little time, and with memory proportional to the
files. A save over it either repairs it or is refused, and loses no good data.
"""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import child
import numpy as np
import pytest
from checkpoint_model import flipped
from checkpoint_victim import Victim, refused, saved, ways
from index_tables import tables_of
from json_checksums import renew_checksum, text_with_checksum
from traced_memory import traced

import mlstate
from mlstate.checkpoint import CheckpointManager, inspect, reshard
from mlstate.errors import ChecksumError, FormatError, MLStateError, StoreError

# ---- shard files ----


def test_every_byte_of_a_header_flipped_is_found(one_rank):
    """Loading uses the index and does not read headers; verify does."""
    name = one_rank.path("params")
    good = one_rank.good[name]
    text = len(good[:4096].rstrip(b" "))
    for at in (*range(text), *range(text, 4096, 29)):  # of the spaces behind it, some
        one_rank.put(name, flipped(good, at, (0x01, 0x20, 0x80, 0xFF)[at % 4]))
        report = mlstate.verify(str(one_rank))
        assert [problem.path for problem in report.problems] == [name], at
        assert report.problems[0].kind in ("header", "foreign"), at


def test_every_byte_of_the_tensors_flipped_is_found(one_rank):
    name = one_rank.path("params")
    good = one_rank.good[name]
    assert len(good) == 4096 + 96 + 6
    for at in range(4096, len(good)):
        one_rank.put(name, flipped(good, at, 0x10))
        for way in ({}, {"verify": "first"}, {"names": ["w", "b"]}):
            with pytest.raises(ChecksumError) as caught:
                mlstate.load(str(one_rank), **way)
            assert caught.value.name == ("w" if at < 4096 + 96 else "b")
            assert caught.value.path == str(one_rank.folder / name)
        [problem] = mlstate.verify(str(one_rank)).problems
        assert (problem.kind, problem.path, problem.name) == ("altered", name, caught.value.name)
        assert problem.offset <= at < problem.offset + problem.length
        assert len(mlstate.load(str(one_rank), verify=False).model) == 2


def test_shard_files_of_another_length_are_refused(one_rank):
    name = one_rank.path("params")
    good = one_rank.good[name]
    for data in [good[:n] for n in (0, 1, 7, 8, 9, 4095, 4096, 4100, len(good) - 1)] + [
        good + b"\0",
        good * 2,
    ]:
        one_rank.put(name, data)
        refused(one_rank, len(data), only={"load", "mmap", "unverified", "into", "reshard", "part"})


def test_shard_files_that_are_others_are_found(one_rank, tmp_path):
    """The length and the checksums are correct, but it is not the committed file."""
    name = one_rank.path("params")
    other = Victim(saved(tmp_path / "other"))
    foreign = bytearray(other.good[other.path("params")])
    assert len(foreign) == len(one_rank.good[name])
    one_rank.put(name, foreign)  # it holds the same tensors, so loading is correct
    assert mlstate.verify(str(one_rank))
    for data in (bytes(len(foreign)), os.urandom(len(foreign)), b"{}" * (len(foreign) // 2)):
        one_rank.put(name, data)
        refused(one_rank, "another file", only={"load", "verified first", "into", "reshard"})


def test_false_header_lengths_are_detected(one_rank):
    name = one_rank.path("params")
    for length in (0, 1, 2, 4087, 4089, 5000, 2**31, 2**32, 2**62, 2**63, 2**64 - 8, 2**64 - 1):
        one_rank.put(name, length.to_bytes(8, "little") + one_rank.good[name][8:])
        report = mlstate.verify(str(one_rank))
        assert [problem.path for problem in report.problems] == [name]


# ---- a directory, socket or link in the place of a file ----


def put_link(path, good):
    elsewhere = path.parent.parent.parent / f"real-{path.name}"
    elsewhere.write_bytes(good)
    path.symlink_to(elsewhere)


def put_device(path, good):
    try:
        os.mknod(path, 0o20666, os.makedev(1, 5))
    except OSError:
        pytest.skip("only root makes devices")


def put_socket(path, good):
    bound = socket.socket(socket.AF_UNIX)
    previous = Path.cwd()
    os.chdir(path.parent)  # paths of sockets must be short
    try:
        bound.bind(path.name)
    except OSError:
        pytest.skip("a socket's name cannot be as long")
    finally:
        os.chdir(previous)
        bound.close()


def put_sparse(path, good):
    with path.open("wb") as file:
        file.truncate(1 << 40)


# What replaces a file, by functions of its path and its bytes.
OTHERS = {
    "directory": lambda path, good: path.mkdir(),
    "fifo": lambda path, good: os.mkfifo(path),
    "loop": lambda path, good: path.symlink_to(path),
    "link": put_link,
    "dangling": lambda path, good: path.symlink_to("nowhere"),
    "zeros": lambda path, good: path.symlink_to("/dev/zero"),
    "device": put_device,
    "socket": put_socket,
    "sparse": put_sparse,
    "nothing": lambda path, good: None,
    "empty": lambda path, good: path.write_bytes(b""),
}
no_folders = [kind for kind in OTHERS if kind not in ("directory", "link")]


@pytest.mark.skipif(os.name == "nt", reason="has other kinds of files")
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("part", ["manifest.json", "index", "params", "optim_state"])
def test_special_files_are_refused(part, kind, one_rank):
    name = part if part == "manifest.json" else one_rank.path(part)
    OTHERS[kind](one_rank.replace(name), one_rank.good[name])
    only = {"load", "mmap", "unverified", "verified first", "reshard"}
    refused(one_rank, f"{part}: {kind}", only | {"inspect"} if "i" in part[:2] else only)


@pytest.mark.skipif(os.name == "nt", reason="has other kinds of files")
@pytest.mark.parametrize("kind", no_folders)
@pytest.mark.parametrize("part", ["index", "params", "optim_state"])
def test_special_files_as_folders_are_refused(part, kind, one_rank):
    OTHERS[kind](one_rank.replace(part), b"")
    refused(one_rank, f"{part}: {kind}", {"load", "mmap", "unverified", "verified first"})


@pytest.mark.parametrize("data", [None, b"", b"x"])
def test_other_paths_are_refused(data, tmp_path):
    path = tmp_path / "none"
    if data is not None:
        path.write_bytes(data)
    kind = StoreError if data is None else FormatError
    for read in ways(str(path), str(tmp_path / "other")).values():
        with pytest.raises(kind):
            read()
    if data is None:
        with pytest.raises(StoreError):
            mlstate.verify(str(path))
    else:
        assert mlstate.verify(str(path)).problems


# ---- saving over false files ----


@pytest.mark.parametrize(
    "text",
    [
        b"", b"\xff" * 50, b"[" * 4000, b"{" * 4000, b'{"generation":"w"}', b'{"generation":5}',
        b'{"generation":"../../x"}', b'{"generation":"b"}', b'{"generation":null,"pid":-1}',
        b'{"generation":"0123456789abcde\\u0000"}', b'"' + b"x" * 5000, b"1" * 4096,
    ],
    ids=lambda text: text[:20].decode("latin-1"),
)  # fmt: skip
def test_false_lock_text_deletes_no_needed_file(text, tmp_path):
    """A lock names files of a dead writer; files that a manifest needs are kept all the same."""
    model = {"a.w-b": np.ones(4), "a.b-0": np.ones(3), "x": np.zeros(2)}
    path = str(tmp_path / "ckpt")
    mlstate.save(path, model, pack_below_bytes=0)
    (tmp_path / "ckpt" / "lock").write_bytes(text)
    mlstate.save(path, model, pack_below_bytes=0)
    assert mlstate.verify(path)
    assert len(mlstate.load(path).model) == 3


@pytest.mark.skipif(os.name == "nt", reason="has other kinds of files")
@pytest.mark.parametrize("kind", OTHERS)
def test_special_file_as_lock_is_refused(kind, one_rank):
    OTHERS[kind](
        one_rank.folder / "lock"
        if not (one_rank.folder / "lock").exists()
        else one_rank.replace("lock"),
        b"",
    )
    with suppress(StoreError):  # refused, with all files unchanged
        mlstate.save(str(one_rank), {"w": np.ones(2)}, overwrite=True)
    assert mlstate.verify(str(one_rank))


@pytest.mark.filterwarnings("ignore:old files of the checkpoint were not deleted")
@pytest.mark.filterwarnings("ignore:the existing checkpoint is damaged and will be replaced")
@pytest.mark.parametrize("kind", [*OTHERS, "x"])
@pytest.mark.parametrize("part", ["manifest.json", "index", "params"])
def test_saving_over_damage_is_refused_or_mends_it(part, kind, one_rank):
    name = part if part == "manifest.json" else one_rank.path(part)
    path = one_rank.replace(name)
    if kind == "x":
        path.write_bytes(b"x" * len(one_rank.good[name]))
    else:
        OTHERS[kind](path, one_rank.good[name])
    try:
        mlstate.save(str(one_rank), {"w": np.arange(3.0)}, overwrite=True)
    except MLStateError:
        assert part == "manifest.json"
        return
    assert mlstate.verify(str(one_rank))
    assert mlstate.load(str(one_rank)).model["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("data", [b"", b"{}", b"x" * 300, None], ids=["empty", "json", "x", "old"])
def test_false_roots_are_ignored(data, tmp_path):
    manager = CheckpointManager(str(tmp_path), keep=5)
    for step in (1, 2):
        manager.save(step, {"w": np.full(3, step)})
    newest = max((tmp_path / "roots").iterdir())
    if data is None:  # a manifest whose name contradicts its content
        data = newest.read_bytes().replace(b'"step": 2', b'"step": 1')
    newest.write_bytes(data)
    (tmp_path / "roots" / "99999999.0123456789abcdef.json").write_bytes(b"junk")
    (tmp_path / "roots" / ("9" * 19 + ".0123456789abcdef.json")).mkdir()
    (tmp_path / "roots" / ("9" * 25 + ".0123456789abcdef.json")).write_bytes(b"")
    with pytest.warns(UserWarning, match="cannot be restored"):
        state = manager.restore_latest()
    assert state.step == 1
    assert manager.steps() == [1]


def test_repair_ignores_false_roots(tmp_path):
    manager = CheckpointManager(str(tmp_path), keep=5)
    for step in (1, 2):
        manager.save(step, {"w": np.full(3, step)})
    (tmp_path / "manifest.json").write_bytes(b"junk")
    newest = max((tmp_path / "roots").iterdir())
    newest.write_bytes(newest.read_bytes()[:-20])
    report = mlstate.verify(str(tmp_path), repair=True)
    assert report.repaired is not None
    assert mlstate.load(str(tmp_path)).step == 1


# ---- memory ----


def lying_shard(**members):
    base = {"section": "params", "name": "huge", "dtype": "F64", "shape": [2**40], "layout": []}
    base |= {"part": 0, "version": 1, "file": 0, "offset": 4096, "bytes": 8, "crc32c": "00000000"}
    return base | members


HUGE = {
    "a part of a huge tensor": {"layout": [[0, 2**40]]},
    "the last part": {"layout": [["flat", 2**40]], "part": 2**40 - 1},
    "an empty part": {"layout": [[0, 2**41]], "part": 2**41 - 1, "bytes": 0},
    "a product of parts": {"shape": [2**30, 2**25], "layout": [[0, 2**30], [1, 2**25]]},
    "a small file that is said to be large": {"shape": [2**17], "bytes": 2**20},
}


@pytest.mark.skipif("MLSTATE_UNDER_SANITIZER" in os.environ, reason="ASan pads every block")
@pytest.mark.parametrize("name", HUGE)
def test_huge_tensors_of_small_files_take_no_memory(name, one_rank):
    index = one_rank.index()
    index["shards"] = [lying_shard(**HUGE[name])]
    index["files"] = index["files"][:1]
    if HUGE[name].get("bytes", 0) > 8:
        index["files"][0]["bytes"] = 2**44  # the largest size that is accepted
    one_rank.put_index(index)
    manifest = json.loads((one_rank.folder / "manifest.json").read_bytes())
    manifest["indexes"]["data_bytes"] = [index["shards"][0]["bytes"]]
    one_rank.put_manifest(manifest)
    inspect(str(one_rank)).tensors()  # the metadata are valid, but the memory cannot be allocated
    with traced() as trace:
        for mmap in (False, True):
            with pytest.raises(FormatError):
                mlstate.load(str(one_rank), mmap=mmap)
        assert not mlstate.verify(str(one_rank)) or "bytes" not in HUGE[name]
        with pytest.raises(FormatError):
            reshard(str(one_rank), str(one_rank) + "-other", layout="rows", world_size=2)
    assert trace.peak < 4 << 20


# The costliest documents for their length: bytes of the text -> peak memory, in a new process.
COSTLY = {
    "numbers": lambda n: b'"x":[' + b"1," * (n // 2) + b"1]",
    "lists": lambda n: b'"x":[' + b"[]," * (n // 3) + b"1]",
    "keys": lambda n: b'"x":{' + b",".join(b'"%x":1' % i for i in range(n // 9)) + b"}",
    "a key twice at the end": lambda n: (
        b'"x":{' + b",".join(b'"%x":1' % i for i in range(n // 9)) + b',"0":1}'
    ),
    "a text": lambda n: b'"x":"' + b"x" * n + b'"',
}

GROWTH = """
import json, sys, mlstate
before = status("VmHWM")
try:
    mlstate.load(sys.argv[1])
except mlstate.FormatError:
    pass
print(status("VmHWM") - before)
"""


@child.needs_status
@pytest.mark.parametrize("part", ["manifest", "index"])
@pytest.mark.parametrize("kind", COSTLY)
def test_memory_and_time_grow_with_the_text(kind, part, one_rank):
    document = one_rank.manifest if part == "manifest" else tables_of(one_rank.index())
    good = text_with_checksum(document)
    data = renew_checksum(good[:23] + COSTLY[kind](2_000_000) + b"," + good[23:])
    if part == "manifest":
        one_rank.put("manifest.json", data)
    else:
        one_rank.put_index(data)
    start = time.monotonic()
    growth = int(child.run(child.STATUS + GROWTH, one_rank, timeout=60))
    assert time.monotonic() - start < 20
    assert growth < 60 * len(data) + (8 << 20)
