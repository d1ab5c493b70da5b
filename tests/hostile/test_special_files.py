"""Every reader refuses FIFOs, sockets, devices and folders in place of a file, without waiting."""

import hashlib
import json
import os
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
from any_format import read_any, write_any
from weight_folder import write_folder

import mlstate
from mlstate.checkpoint import (
    CheckpointManager,
    export_huggingface,
    inspect,
    load_metadata,
    verify,
)
from mlstate.cli import main
from mlstate.coreai import verify as verify_asset
from mlstate.coreml import state_specs

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="needs FIFOs"),
    pytest.mark.timeout(60),  # a reader that waits for a FIFO's writer never ends
]
STATE = {"w": np.arange(6, dtype=np.float32), "v": np.ones(3, np.float32)}
AIMODEL = {"main.mlirb": b"x", "main.hash": hashlib.sha256(b"x").digest(), "metadata.json": b"{}"}


def make_socket(path):
    """Make the file of a socket; its path may be long."""
    place = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{place}/{path.name}")
    finally:
        os.close(place)


KINDS = {
    "fifo": os.mkfifo,
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": os.mkdir,
}


def asset(folder):
    """Write an .aimodel."""
    folder.mkdir()
    for file, data in AIMODEL.items():
        (folder / file).write_bytes(data)


def package(folder):
    """Copy a Core ML package."""
    shutil.copytree(Path(mlstate.__file__).parent / "demo/data/model_256.mlpackage", folder)


def weights(folder):
    """Write a Hugging Face folder of two files."""
    write_folder(folder, STATE, files=2)


def torch_weights(folder):
    """Write a Hugging Face folder of two ``.bin`` files."""
    torch = pytest.importorskip("torch")
    folder.mkdir()
    files = {key: f"pytorch_model-0000{n}-of-00002.bin" for n, key in enumerate(STATE, 1)}
    for key, file in files.items():
        torch.save({key: torch.ones(1)}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))


def entries(folder):
    """Write a folder of torch_checkpointing."""
    torch = pytest.importorskip("torch")
    folder.mkdir()
    for entry in ("model", "ema"):
        torch.save({"w": torch.ones(1)}, folder / f"{entry}_0.pt")


def saved(folder):
    """Save a checkpoint."""
    mlstate.save(folder, STATE)


def dcp(folder):
    """Write a checkpoint of torch."""
    pytest.importorskip("torch")
    mlstate.save(folder.with_name("source"), STATE)
    convert(folder.with_name("source"), folder, format="dcp")


def convert(source, target, **keywords):
    write_any(target, *read_any(source)[:4], **keywords)


def converted(folder):
    convert(folder, folder.with_name("target"))


def verified(folder):
    """Raise the first problem that `verify` reports."""
    report = verify(folder)
    raise report.problems[0].as_error(report.path)


# name -> (make the folder; the path to replace, which may be missing; read the folder)
READERS = {
    "coreai metadata": (asset, "metadata.json", verify_asset),
    "coreai hash": (asset, "main.hash", verify_asset),
    "coreai program": (asset, "main.mlirb", verify_asset),
    "coreml manifest": (package, "Manifest.json", state_specs),
    "coreml model": (package, "Data/com.apple.CoreML/model.mlmodel", state_specs),
    "index": (weights, "model.safetensors.index.json", mlstate.load),
    "weights": (weights, "model-00001-of-00002.safetensors", mlstate.load),
    "weights verify": (weights, "model-00002-of-00002.safetensors", verified),
    "manifest": (saved, "manifest.json", mlstate.load),
    "manifest verify": (saved, "manifest.json", verified),
    "checkpoint index": (saved, "index/*", lambda f: inspect(f).files()),
    "shard": (saved, "params/*", mlstate.load),
    "shard verify": (saved, "params/*", verified),
    "lock": (saved, "lock", lambda f: mlstate.save(f, STATE)),
    "dcp metadata": (dcp, ".metadata", converted),
    "dcp data": (dcp, "__0_0.distcp", converted),
    "dcp rest": (dcp, "meta.pt", converted),
    "torch weights": (torch_weights, "pytorch_model-00002-of-00002.bin", converted),
    "torch weights index": (torch_weights, "pytorch_model.bin.index.json", converted),
    "torch entries": (entries, "ema_0.pt", converted),
    "weights by path": (
        weights,
        "model-00001-of-00002.safetensors",
        lambda f: mlstate.load(f / "model-00001-of-00002.safetensors"),
    ),
    "index by path": (
        weights,
        "model.safetensors.index.json",
        lambda f: mlstate.load(f / "model.safetensors.index.json"),
    ),
}


def texts_of(error):
    """The text of an error, and the file that it names."""
    return f"{error} {getattr(error, 'path', None)} {getattr(error, 'filename', None)}"


def replace(path, kind):
    """Replace a file by one of another kind."""
    if path.exists():
        path.unlink()
    KINDS[kind](path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_a_special_file_in_a_folder_is_refused(tmp_path, reader, kind):
    make, name, read = READERS[reader]
    folder = tmp_path / "m"
    make(folder)
    path = next(folder.glob(name), folder / name)
    replace(path, kind)
    with pytest.raises(mlstate.MLStateError) as caught:
        read(folder)
    assert path.name in texts_of(caught.value)
    assert str(folder) in texts_of(caught.value)
    assert kind == "folder" or reader == "lock" or "not a regular file" in str(caught.value)


FILES = {
    ".safetensors": [
        mlstate.load_file,
        load_metadata,
        lambda path: mlstate.load_file(path, mmap=True),
    ],
    ".npz": [converted],
    ".pt": [converted],
    ".pth": [converted],
    ".bin": [converted],
    ".mlmodel": [state_specs],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", FILES)
def test_a_special_file_is_refused(tmp_path, suffix, kind):
    if suffix in (".pt", ".pth", ".bin"):
        pytest.importorskip("torch")
    path = tmp_path / f"m{suffix}"
    KINDS[kind](path)
    for read in FILES[suffix]:
        with pytest.raises((mlstate.MLStateError, OSError)) as caught:
            read(path)
        assert path.name in texts_of(caught.value)
        assert kind == "folder" or "regular file" in str(caught.value)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
@pytest.mark.parametrize(
    "words", [["inspect"], ["verify"], ["diff", "{path}"], ["convert", "out"], ["prune"]]
)
def test_every_command_refuses_a_special_file(tmp_path, monkeypatch, capsys, words, kind):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "m.safetensors"
    KINDS[kind](path)
    command, *rest = words
    assert main([command, str(path), *(word.format(path=path) for word in rest)]) in (1, 2)
    captured = capsys.readouterr()
    assert "m.safetensors" in captured.err + captured.out


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
def test_files_to_copy_are_regular_files(tmp_path, kind):
    (tmp_path / "source").mkdir()
    KINDS[kind](tmp_path / "source" / "config.json")
    with pytest.raises(mlstate.FormatError, match=r"config\.json: not a regular file"):
        export_huggingface(tmp_path / "out", STATE, files_from=tmp_path / "source")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_broken_link_among_the_files_to_copy_is_an_error(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").symlink_to("nothing")
    with pytest.raises(mlstate.StoreError, match=r"files_from="):
        export_huggingface(tmp_path / "out", STATE, files_from=tmp_path / "source")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("kind", ["fifo", "socket"])
@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors"])
def test_only_a_regular_file_is_replaced(tmp_path, suffix, kind):
    if suffix == ".pt":
        pytest.importorskip("torch")
    KINDS[kind](tmp_path / f"m{suffix}")
    before = os.lstat(tmp_path / f"m{suffix}")
    mlstate.save(tmp_path / "source", STATE)
    with pytest.raises(ValueError, match="only a regular file can be replaced"):
        convert(tmp_path / "source", tmp_path / f"m{suffix}", overwrite=True)
    assert os.path.samestat(before, os.lstat(tmp_path / f"m{suffix}"))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_special_file_among_the_roots_is_a_damaged_step(tmp_path):
    manager = CheckpointManager(tmp_path / "run", warn_unchanged=False)
    for step in (1, 2):
        manager.save(step, STATE)
    newest = sorted((tmp_path / "run" / "roots").iterdir())[-1]
    replace(newest, "fifo")
    with pytest.warns(UserWarning, match="not a regular file"):
        assert manager.restore_latest().step == 1
