"""Hostile files of checksums raise exceptions, and `verify=False` reads the files without them."""

import json
import os
import shutil

import numpy as np
import pytest
from checkpoint_model import flipped
from json_checksums import START, renew_checksum, text_with_checksum
from tries import FEW
from weight_folder import write_folder

import mlstate
from mlstate._common.file_checksums import NAME
from mlstate.checkpoint import checksum, load_metadata
from mlstate.errors import FormatError, MLStateError

STATE = {"w": np.arange(300, dtype=np.float32), "v": np.ones(3, np.float32)}
HUGE = 1 << 62
KINDS = {
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": os.mkdir,
}


@pytest.fixture
def folder(tmp_path):
    folder = write_folder(tmp_path / "model", STATE)
    (folder / "config.json").write_text("{}")
    checksum(folder)
    return folder


def changes():
    """Changes of a document, by name; each makes it wrong."""
    weights = "model.safetensors"

    def entry(**members):
        return lambda document: document["files"][weights].update(members)

    def renamed(name):
        return lambda document: document["files"].update({name: document["files"].pop(weights)})

    yield "size 0", entry(bytes=0)
    yield "size huge", entry(bytes=HUGE)
    yield "size over 63 bits", entry(bytes=1 << 80)
    for value in (-1, 1.5, True, None, "1", [], 1e300):
        yield f"size {value!r}", entry(bytes=value)
    yield "no parts", entry(starts=[])
    yield "parts descending", entry(starts=[0, 90, 80])
    yield "parts repeated", entry(starts=[0, 0])
    yield "first part late", entry(starts=[1, 90])
    yield "part behind the end", entry(starts=[0, HUGE])
    yield "parts negative", entry(starts=[0, -1])
    yield "parts of bool", entry(starts=[False, True])
    yield "parts of float", entry(starts=[0.0, 90.0])
    yield "parts are no list", entry(starts={"0": 1})
    yield "many parts", entry(starts=list(range(100_000)))
    yield "digits short", entry(crc32c="00")
    yield "digits long", entry(crc32c="0" * 80_000)
    yield "digits upper", entry(crc32c="A" * 24)
    yield "digits none", entry(crc32c=None)
    yield "entry is no object", lambda document: document["files"].update({weights: 3})
    yield "files is no object", lambda document: document.update(files=[])
    yield "files missing", lambda document: document.pop("files")
    for name in ("../x", "/etc/passwd", "a/../../b", "", ".", "a//b", "a\\b", "x\0y", "..", "a/"):
        yield f"name {name!r}", renamed(name)
    yield "format", lambda document: document.update(format="x")
    for version in (2, 0, True, "1", None):
        yield f"version {version!r}", lambda document, v=version: document.update(format_version=v)
    for block in (0, 1 << 19, -1, "x"):
        yield f"block {block!r}", lambda document, b=block: document.update(block_bytes=b)


@pytest.mark.parametrize(("change"), [pytest.param(each, id=name) for name, each in changes()])
def test_wrong_document_is_refused(folder, change):
    document = json.loads((folder / NAME).read_text())
    change(document)
    (folder / NAME).write_bytes(text_with_checksum(document))
    for read in (
        lambda: mlstate.load(folder),
        lambda: mlstate.load_file(folder / "model.safetensors"),
        lambda: load_metadata(folder / "model.safetensors"),
    ):
        with pytest.raises(FormatError):
            read()
    assert mlstate.verify(folder).problems
    assert set(mlstate.load(folder, verify=False).model) == set(STATE)
    assert set(mlstate.load_file(folder / "model.safetensors", verify=False)) == set(STATE)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"x" * 100,
        b'{"checksum":"00000000"}',
        b"\xff" * 50,
        b"[" * 10_000,
    ],
)
def test_other_content_is_named_as_damage(folder, data):
    (folder / NAME).write_bytes(data)
    with pytest.raises(FormatError, match="the file of checksums is"):
        mlstate.load(folder)
    [problem] = mlstate.verify(folder).problems
    assert (problem.kind, problem.path) == ("checksums", NAME)
    mlstate.load(folder, verify=False)


def test_deep_or_duplicated_members_are_refused(folder):
    start = START + b',"format":"mlstate.checksums","format_version":1,'
    for files in (
        b'{"a":' * 500 + b"1" + b"}" * 500,
        b'{"a":{"bytes":0,"crc32c":""},"a":{"bytes":0,"crc32c":""}}',
    ):
        text = start + b'"block_bytes":1048576,"files":' + files + b"}"
        (folder / NAME).write_bytes(renew_checksum(text))
        with pytest.raises(FormatError):
            mlstate.load(folder)


def test_every_flipped_bit_of_the_checksums_is_found(folder):
    path = folder / NAME
    data = path.read_bytes()
    for bit in range(0, 8 * len(data), 23 if FEW else 3):
        path.write_bytes(flipped(data, bit // 8, 1 << bit % 8))
        with pytest.raises(FormatError):
            mlstate.load(folder)


@pytest.mark.skipif(os.name == "nt", reason="needs FIFOs")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [NAME, "config.json", "model.safetensors"])
def test_special_files_are_refused_without_waiting(folder, kind, name):
    (folder / name).unlink()
    KINDS[kind](folder / name)
    report = mlstate.verify(folder)
    assert report.problems
    if name != "config.json":
        with pytest.raises(MLStateError):
            mlstate.load(folder)
    if kind == "folder" and name != NAME:
        return  # its files are listed, and it has none
    if name != NAME:
        (folder / NAME).unlink()
        with pytest.raises(MLStateError):
            checksum(folder)


def test_broken_and_circular_links_are_refused(folder):
    (folder / "link").symlink_to("link")
    assert mlstate.verify(folder).strange == ["link"]
    with pytest.raises(MLStateError):
        checksum(folder, overwrite=True)
    (folder / "link").unlink()
    (folder / "link").symlink_to("none")
    with pytest.raises(MLStateError):
        checksum(folder, overwrite=True)
    assert mlstate.verify(folder).strange == ["link"]


def test_blob_name_of_a_link_is_only_compared(tmp_path, folder):
    (folder / "x").symlink_to("/blobs/" + "0" * 64)
    (folder / "y").symlink_to("../blobs/" + "0" * 40)
    kinds = {(each.kind, each.path) for each in mlstate.verify(folder).problems}
    assert kinds == {("missing", "x"), ("missing", "y")}
    (tmp_path / "blobs").mkdir()
    os.mkfifo(tmp_path / "blobs" / ("0" * 40))
    assert ("changed", "y") in {(each.kind, each.path) for each in mlstate.verify(folder).problems}


def test_checksums_of_another_folder_are_refused(folder, tmp_path):
    other = write_folder(tmp_path / "other", {"w": STATE["w"][:200]})
    shutil.copy(folder / NAME, other / NAME)
    with pytest.raises(FormatError, match="the file has changed since its checksums"):
        mlstate.load(other)
    assert {each.kind for each in mlstate.verify(other).problems} == {"changed"}
