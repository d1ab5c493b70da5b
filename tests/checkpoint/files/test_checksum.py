"""Checksums next to files of other programs: nothing changes, and every later change is named."""

import json
import os
import shutil
import zipfile

import numpy as np
import pytest
from any_format import read_any
from checkpoint_model import flip
from weight_folder import write_folder, write_index, write_weight_file

import mlstate
from mlstate._common.file_checksums import NAME
from mlstate.checkpoint import checksum, inspect, load_metadata
from mlstate.cli import main
from mlstate.errors import CheckpointWarning, ChecksumError, FormatError, StoreError

STATE = {
    "a": np.arange(600_000, dtype=np.float32),  # three blocks
    "b": np.ones((3, 4), np.float16),
    "none": np.zeros((0, 3), np.float32),
    "c": np.arange(5, dtype=np.uint8),
}
FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model", STATE, files=2)


def problems_of(path):
    return [(each.kind, each.path, each.name) for each in mlstate.verify(path).problems]


def facts_of(folder):
    """Every fact of every file, except the checksums."""
    return {
        path: (path.read_bytes(), info.st_mtime_ns, info.st_mode, info.st_ino)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != NAME
        for info in [path.stat()]
    }


def test_files_do_not_change(folder):
    before = facts_of(folder)
    assert checksum(folder) == {
        path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != NAME
    }
    assert facts_of(folder) == before
    assert {path.name for path in folder.iterdir()} == {path.name for path in before} | {NAME}


def test_unchanged_folder_loads_and_verifies(folder):
    checksum(folder)
    for verify in (True, "first", False):
        for mmap in (False, True):
            model = mlstate.load(folder, verify=verify, mmap=mmap).model
            assert all(np.array_equal(model[name], STATE[name]) for name in STATE)
    report = mlstate.verify(folder)
    assert report and report.strange == []
    assert NAME in report.compared[0]
    assert all(shard.crc32c is not None for shard in inspect(folder).shards())


@pytest.mark.parametrize(
    ("at", "name"),
    [(3, None), (9, None), (60, None), (1_500_000, "a"), (-1, "c"), (-12, "b")],
)
def test_changed_byte_is_found_by_load_and_verify(folder, at, name):
    write_folder(folder, STATE)
    shutil.rmtree(folder)
    write_folder(folder, STATE)
    path = folder / "model.safetensors"
    checksum(folder)
    flip(path, at)
    with pytest.raises(ChecksumError, match="changed") as caught:
        mlstate.load(folder)
    assert caught.value.name == name
    with pytest.raises(ChecksumError, match="changed"):
        mlstate.load_file(path)
    with pytest.raises(FormatError):
        mlstate.load(folder, verify="first")
    kinds = problems_of(folder)
    assert ("changed", path.name, name) in kinds
    assert ("changed", path.name, name) in problems_of(path)


def test_flipped_dtype_in_a_header_is_found(folder):
    checksum(folder)
    path = folder / FIRST
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 1))
    assert mlstate.load(folder, verify=False).model["a"].dtype == np.int32
    with pytest.raises(ChecksumError, match="header has changed since its checksums"):
        mlstate.load(folder)
    with pytest.raises(ChecksumError, match="header has changed"):
        load_metadata(path)
    with pytest.raises(ChecksumError, match="header has changed"):
        mlstate.load(folder, mmap=True)
    assert problems_of(folder) == [("changed", FIRST, None)]


def test_rank_reads_and_verifies_its_part_only(tmp_path):
    state = {"w": np.arange(8 << 18, dtype=np.float32).reshape(8, -1)}
    folder = write_folder(tmp_path / "model", state)
    checksum(folder)
    flip(folder / "model.safetensors", -1)
    model = mlstate.load(folder, rank=3, world_size=8, layout="rows").model
    assert np.array_equal(model["w"], state["w"][3:4])
    with pytest.raises(ChecksumError):
        mlstate.load(folder, rank=7, world_size=8, layout="rows")


def test_config_and_index_are_covered(folder):
    checksum(folder)
    flip(folder / "config.json", 0)
    assert problems_of(folder) == [("changed", "config.json", None)]
    mlstate.load(folder)  # which does not read it
    checksum(folder, overwrite=True)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text() + " ")
    with pytest.raises(ChecksumError, match=r"index\.json: the file has changed"):
        mlstate.load(folder)
    assert problems_of(folder) == [("changed", index.name, None)]


def test_changed_size_is_named(folder):
    checksum(folder)
    path = folder / FIRST
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(FormatError, match=r"the file has changed .* and had"):
        mlstate.load(folder)
    assert ("changed", FIRST, None) in problems_of(folder)


def test_missing_and_added_files_are_named(folder):
    checksum(folder)
    (folder / "config.json").unlink()
    (folder / "added.py").write_text("")
    report = mlstate.verify(folder)
    assert [(each.kind, each.path) for each in report.problems] == [("missing", "config.json")]
    assert report.strange == ["added.py"]


def test_weights_that_are_not_listed_warn(folder):
    checksum(folder)
    entries = json.loads((folder / NAME).read_text())["files"]
    del entries[FIRST]
    from mlstate._common.file_checksums import build

    (folder / NAME).write_bytes(build(entries))
    with pytest.warns(UserWarning, match=f"does not list {FIRST}"):
        mlstate.load(folder)
    assert mlstate.verify(folder).strange == [FIRST]


def test_existing_checksums_need_overwrite(folder):
    checksum(folder)
    flip(folder / "config.json", 0)
    with pytest.raises(StoreError, match="the files no longer match it; overwrite=True"):
        checksum(folder)
    assert problems_of(folder)
    checksum(folder, overwrite=True)
    assert not problems_of(folder)


def test_one_file_has_its_checksums_beside_it(tmp_path):
    path = tmp_path / "x.safetensors"
    write_weight_file(path, STATE)
    assert checksum(path) == {path.name: path.stat().st_size}
    assert (tmp_path / f"x.safetensors.{NAME}").is_file()
    assert list(mlstate.load_file(path)) == list(STATE)
    assert list(mlstate.load_file(path, mmap=True)) == list(STATE)
    flip(path, -1)
    with pytest.raises(ChecksumError, match="'c'"):
        mlstate.load_file(path)
    mlstate.load_file(path, verify=False)
    assert problems_of(path) == [("changed", path.name, "c")]


def test_file_with_the_longest_name_can_be_loaded(tmp_path):
    path = tmp_path / ("w" * (255 - len(".safetensors")) + ".safetensors")
    mlstate.save_file({"w": np.ones(3)}, path)
    assert mlstate.load_file(path)["w"].tolist() == [1, 1, 1]


def test_checksums_that_cannot_be_looked_for_are_an_error(tmp_path):
    path = tmp_path / "w.safetensors"
    mlstate.save_file({"w": np.ones(3)}, path)
    (tmp_path / NAME).symlink_to(NAME)  # a loop
    with pytest.raises(StoreError, match="cannot read the checksums"):
        mlstate.load_file(path)


@pytest.mark.parametrize(
    "names",
    [
        ("model.fp16.safetensors", "model.bf16.safetensors"),
        ("model-00001-of-00002.safetensors", "model-00001-of-00003.safetensors"),
    ],
    ids=["variants", "models"],
)
def test_folder_of_several_models_is_verified_by_its_checksums(tmp_path, names):
    for name in names:
        mlstate.save_file({"w": np.ones(3)}, tmp_path / name)
    with pytest.raises(FormatError, match="the folder holds several"):
        mlstate.verify(tmp_path)
    checksum(tmp_path)
    assert mlstate.verify(tmp_path)
    flip(tmp_path / names[1], -1)
    assert problems_of(tmp_path) == [("changed", names[1], "w")]
    assert main(["verify", str(tmp_path)]) == 1


def test_checksums_of_the_parent_cover_a_subfolder(tmp_path):
    write_folder(tmp_path / "pipe" / "unet", STATE)
    (tmp_path / "pipe" / "model_index.json").write_text("{}")
    (tmp_path / "pipe" / ".cache").mkdir()
    (tmp_path / "pipe" / ".cache" / "lock").write_text("")
    assert set(checksum(tmp_path / "pipe")) == {
        "model_index.json",
        "unet/config.json",
        "unet/model.safetensors",
    }
    assert mlstate.verify(tmp_path / "pipe")
    flip(tmp_path / "pipe" / "unet" / "model.safetensors", -1)
    for path in (tmp_path / "pipe" / "unet", tmp_path / "pipe"):
        assert [kind for kind, *_ in problems_of(path)] == ["changed"]
    with pytest.raises(ChecksumError):
        mlstate.load(tmp_path / "pipe" / "unet")


@pytest.mark.parametrize("kind", ["text", "other JSON", "damaged", "newer", "folder", "empty"])
@pytest.mark.parametrize("is_named", [False, True])
def test_malformed_checksums_of_the_parent_matter_if_they_name_the_folder(tmp_path, kind, is_named):
    folder = write_folder(tmp_path / "model", STATE)
    other = write_folder(tmp_path / "other", STATE)
    checksum(tmp_path)
    path = tmp_path / NAME
    text = path.read_text()
    if not is_named:
        text = text.replace('"model/', '"third/')
    if kind == "folder":
        path.unlink()
        path.mkdir()
    else:
        texts = {"text": "not JSON", "other JSON": "{}", "damaged": text[:-9], "empty": ""}
        path.write_text(texts.get(kind, text.replace('"format_version": 1', '"format_version": 2')))
    if is_named and kind in ("damaged", "newer"):
        with pytest.raises(FormatError, match="file of checksums"):
            mlstate.load(folder)
    else:
        with pytest.warns(CheckpointWarning, match="does not name 'model', which is read without"):
            assert set(mlstate.load(folder).model) == set(STATE)
        if kind not in ("damaged", "newer"):
            with pytest.warns(CheckpointWarning, match="does not name 'other'"):
                mlstate.load_file(other / "model.safetensors")


def test_file_with_own_checksums_is_covered_too(tmp_path):
    mlstate.save_file(STATE, tmp_path / "model.safetensors")
    checksum(tmp_path)
    mlstate.save_file({**STATE, "a": STATE["a"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ChecksumError, match="changed"):
        mlstate.load(tmp_path)
    assert ("changed", "model.safetensors") in [each[:2] for each in problems_of(tmp_path)]


# ---- other formats ----


def write_npz(path):
    np.savez(path, **STATE)


def write_pt(path):
    torch = pytest.importorskip("torch")
    torch.save({"state_dict": {"w": torch.arange(9.0)}}, path)


def write_dcp(path):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": {"w": torch.arange(9.0)}}, checkpoint_id=path, no_dist=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "write"),
    [("x.npz", write_npz), ("x.pt", write_pt), ("x.ckpt", write_pt), ("x.dcp", write_dcp)],
)
def test_other_formats_are_compared_before_they_are_read(tmp_path, name, write):
    path = tmp_path / name
    write(path)
    files = [path] if path.is_file() else sorted(path.iterdir())
    checksum(path)
    read_any(path)
    assert mlstate.verify(path)
    for file in files:
        data = file.read_bytes()
        flip(file, len(data) // 2)
        with pytest.raises(ChecksumError, match="have changed since"):
            read_any(path)
        with pytest.raises(ChecksumError, match="have changed since"):
            mlstate.load(path)
        assert [kind for kind, *_ in problems_of(path)] == ["changed"]
        assert main(["verify", str(path)]) == 1
        file.write_bytes(data)


def test_comment_of_a_zip_archive_is_covered(tmp_path):
    path = tmp_path / "x.npz"
    write_npz(path)
    checksum(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"x"
    assert problems_of(path) == [("changed", "x.npz", None)]


# ---- refusals ----


def test_checkpoint_of_mlstate_is_refused(tmp_path):
    mlstate.save(tmp_path / "ckpt", STATE)
    with pytest.raises(ValueError, match="is a checkpoint of mlstate"):
        checksum(tmp_path / "ckpt")


def test_url_is_refused():
    with pytest.raises(ValueError, match="for a local copy"):
        checksum("s3://bucket/model")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "HTML page"),
        (bytes(100), "zero bytes"),
        (b"", "it is empty"),
    ],
    ids=["pointer", "page", "zeros", "empty"],
)
@pytest.mark.parametrize("name", ["model.safetensors", "model", "model.pt"])
def test_content_that_is_damaged_is_refused(tmp_path, capsys, name, content, text):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(FormatError, match=text):
        checksum(path)
    assert main(["checksum", str(path)]) == 2
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_formats_that_are_not_read_can_have_checksums(tmp_path):
    path = tmp_path / "model"
    path.write_bytes(b"GGUF" * 9)
    checksum(path)
    report = mlstate.verify(path)
    assert report and not report.good and "GGUF" in report.refusal
    flip(path, -1)
    assert problems_of(path) == [("changed", "model", None)]


def test_folder_without_files_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no files"):
        checksum(tmp_path)
    with pytest.raises(StoreError):
        checksum(tmp_path / "none")


def test_link_to_a_folder_is_refused(folder, tmp_path):
    (tmp_path / "other").mkdir()
    (folder / "link").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match="is a link to a folder"):
        checksum(folder)
    assert not (folder / NAME).exists()


def test_name_that_json_cannot_hold_is_refused(folder):
    (folder / os.fsdecode(b"\xff")).touch()
    with pytest.raises(ValueError):
        checksum(folder)
    assert not (folder / NAME).exists()


# ---- the Hub's cache ----


@pytest.fixture
def hub(tmp_path):
    """A cache as huggingface_hub makes it: links to blobs named after their digests."""
    import hashlib

    source = write_folder(tmp_path / "source", STATE)
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    for path in source.iterdir():
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        if path.suffix == ".json":
            digest = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        (repo / "blobs" / digest).write_bytes(data)
        (snapshot / path.name).symlink_to(f"../../blobs/{digest}")
    return snapshot


def test_blobs_of_the_hub_are_verified_offline(hub, capsys):
    report = mlstate.verify(hub)
    assert report and "2 blobs of the Hub" in report.compared[0]
    assert main(["verify", str(hub)]) == 0
    assert "compared with the SHA-256 or SHA-1" in capsys.readouterr().out
    for name in ("model.safetensors", "config.json"):
        path = (hub / name).resolve()
        flip(path, -1)
        assert problems_of(hub) == [("changed", name, None)]
        assert main(["verify", str(hub)]) == 1
        assert problems_of(hub.parents[1]) == [("changed", f"blobs/{path.name}", None)]
        flip(path, -1)
    assert mlstate.verify(hub.parents[1])


def test_snapshot_of_the_hub_can_have_checksums(hub):
    checksum(hub)
    assert len(mlstate.verify(hub).compared) == 2
    flip((hub / "model.safetensors").resolve(), -1)
    with pytest.raises(ChecksumError, match="'c'"):
        mlstate.load(hub)


# ---- the command ----


def test_command_writes_and_replaces(folder, capsys):
    assert main(["checksum", str(folder)]) == 0
    assert "checksums of 4 files" in capsys.readouterr().out
    assert main(["checksum", str(folder)]) == 0
    (folder / "config.json").write_bytes(b"[]")
    assert main(["checksum", str(folder)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["checksum", str(folder), "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"]["config.json"] == 2
    assert main(["inspect", str(folder)]) == 0
    assert "with checksums" in capsys.readouterr().out
    assert main(["verify", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compared"]
    write_index(folder, {}, 0)
    assert main(["verify", str(folder)]) == 1


@pytest.mark.parametrize("kind", ["file", "names", "own checksums", "whole", "checksum"])
@pytest.mark.parametrize("error", [OSError(5, "closed"), FormatError("bad"), StopIteration()])
def test_errors_of_progress_reach_the_caller_unchanged(tmp_path, kind, error):
    path = tmp_path / "model.safetensors"
    if kind == "own checksums":
        mlstate.save_file({"w": np.ones(9, np.float32)}, path)
    elif kind == "whole":
        path = tmp_path / "model.npz"
        np.savez(path, w=np.ones(9, np.float32))
    else:
        write_weight_file(path, {"w": np.ones(9, np.float32)})
    if kind != "own checksums":
        checksum(path)

    def fail(_):
        raise error

    options = {"names": "w"} if kind == "names" else {}
    with pytest.raises(type(error)) as caught:
        if kind == "checksum":
            checksum(path, overwrite=True, progress=fail)
        else:
            mlstate.verify(path, progress=fail, **options)
    assert caught.value is error and error.__context__ is None
    assert mlstate.verify(path)
