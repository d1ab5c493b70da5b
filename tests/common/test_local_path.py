"""Every function that takes a local path refuses URLs before it creates anything."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from any_format import read_any, write_any

import mlstate
from mlstate import checkpoint
from mlstate._common.local_path import local_folder, local_path
from mlstate.checkpoint import CheckpointManager, TieredState
from mlstate.cli import main

URL = "s3://bucket/run"
STATE = {"w": np.ones(3)}
CALLS = {
    "save": lambda: mlstate.save(URL, STATE),
    "save a Path": lambda: mlstate.save(Path(URL), STATE),
    "save_async": lambda: checkpoint.save_async(URL, STATE),
    "load": lambda: mlstate.load(URL),
    "plan_load": lambda: checkpoint.plan_load(URL),
    "verify": lambda: mlstate.verify(URL),
    "inspect": lambda: checkpoint.inspect(URL),
    "prune": lambda: checkpoint.prune(URL),
    "reshard from": lambda: checkpoint.reshard(URL, "there", layout="rows", world_size=2),
    "reshard to": lambda: checkpoint.reshard("here", URL, layout="rows", world_size=2),
    "export": lambda: checkpoint.export_huggingface(URL, STATE),
    "export_async": lambda: checkpoint.export_huggingface_async(URL, STATE),
    "manager": lambda: CheckpointManager(URL),
    "save_file": lambda: mlstate.save_file(STATE, URL),
    "save_file, bytes": lambda: mlstate.save_file(STATE, URL.encode()),
    "load_file": lambda: mlstate.load_file(URL),
    "load_metadata": lambda: checkpoint.load_metadata(URL),
    "tiers": lambda: TieredState(STATE, None, URL),
    "read": lambda: read_any(URL),
    "write a checkpoint": lambda: write_any(URL, STATE),
    "state_specs": lambda: mlstate.coreml.state_specs(URL),
    "state_specs of Core AI": lambda: mlstate.coreai.state_specs(URL),
    "verify of Core AI": lambda: mlstate.coreai.verify(URL),
}
OF_STORES = ["save", "save_async", "load", "plan_load", "verify", "inspect", "prune", "manager",
             "reshard from", "reshard to", "read", "write a checkpoint"]  # fmt: skip
COMMANDS_OF_STORES = [
    ["inspect", URL],
    ["verify", URL],
    ["prune", URL, "--keep", "1"],
    ["diff", URL, "here"],
    ["diff", "here", URL],
    ["reshard", URL, "cut", "--layout", "rows=2"],
    ["reshard", "here", URL, "--layout", "rows=2"],
    ["convert", URL, "x.npz"],
    ["convert", "here", URL],
]
LOCAL_COMMANDS = [
    ["coreml", "states", URL],
    ["coreai", "verify", URL],
]
COMMANDS = COMMANDS_OF_STORES + LOCAL_COMMANDS


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with a checkpoint named ``here`` and nothing else."""
    monkeypatch.chdir(tmp_path)
    mlstate.save("here", STATE)
    return tmp_path


@pytest.mark.parametrize("name", [name for name in CALLS if name not in OF_STORES])
def test_every_other_function_refuses_a_url(place, name):
    with pytest.raises(ValueError, match=r"s3:.*a URL is not a local path"):
        CALLS[name]()
    assert [path.name for path in place.iterdir()] == ["here"]


@pytest.mark.parametrize("words", LOCAL_COMMANDS, ids=" ".join)
def test_every_other_command_refuses_a_url(place, capsys, words):
    assert main(words) == 2
    assert "a URL is not a local path" in capsys.readouterr().err
    assert [path.name for path in place.iterdir()] == ["here"]


@pytest.fixture
def without_engine(monkeypatch):
    """Make obstore look as if it were not installed."""
    for name in ("obstore", "obstore.store"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("name", OF_STORES)
def test_a_url_without_the_extra_is_an_import_error(place, without_engine, name):
    call = CALLS[name]
    if name == "manager":
        call = CheckpointManager(URL).steps
    with pytest.raises(ImportError, match=r"s3://bucket/run: .*pip install 'mlstate\[remote\]'"):
        call()
    assert [path.name for path in place.iterdir()] == ["here"]


@pytest.mark.parametrize("words", COMMANDS_OF_STORES, ids=" ".join)
def test_command_with_url_names_the_missing_extra(place, without_engine, capsys, words):
    assert main(words) == 2
    assert "pip install 'mlstate[remote]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    ["s3://b", "gs://b/a", "file:///a", "HTTPS://h/x", "abfs+x.y-z://a", b"s3://b", Path("hf://a")],
)
def test_paths_with_a_scheme_are_urls(url):
    with pytest.raises(ValueError, match="not a local path"):
        local_path(url)


@pytest.mark.parametrize(
    "path",
    [
        "a",
        "s3:/b",
        "./s3://b",
        "/s3://b",
        "1s://b",
        ":// ",
        "c://b",
        b"a",
        "a b://c",
        "a~",
        "./~",
        "/~",
    ],
)
def test_other_texts_are_paths(path):
    assert local_path(path) == path


def test_a_path_object_is_a_path():
    assert local_path(Path("a/b")) == "a/b"
    assert local_path(Path("/s3:/b")) == "/s3:/b"
    assert local_folder("a") == str(Path("a").absolute())
    with pytest.raises(TypeError, match=re.escape("os.PathLike")):
        local_path(3)


# ---- a deleted working directory ----


@pytest.fixture
def deleted(tmp_path, monkeypatch):
    """A working directory that no longer exists."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    monkeypatch.setitem(globals(), "URL", "run")
    yield
    monkeypatch.undo()


needs_deleted_folder = pytest.mark.skipif(os.name == "nt", reason="Windows keeps such a folder")


@needs_deleted_folder
@pytest.mark.parametrize("name", CALLS)
def test_every_function_reports_a_deleted_working_folder(deleted, name):
    with pytest.raises(mlstate.StoreError, match=r"working folder no longer exists") as caught:
        CALLS[name]()
    assert isinstance(caught.value, FileNotFoundError)
    assert Path(caught.value.path).name.startswith(("run", "here"))


@needs_deleted_folder
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_reports_a_deleted_working_folder(deleted, capsys, words):
    assert main([word.replace("s3://bucket/", "") for word in words]) == 2
    assert re.search("(run|here).*working folder no longer exists", capsys.readouterr().err)


@needs_deleted_folder
def test_an_absolute_path_needs_no_working_folder(deleted, tmp_path):
    mlstate.save(tmp_path / "ckpt", STATE)
    assert mlstate.load(tmp_path / "ckpt").model["w"].all()
    assert main(["verify", str(tmp_path / "ckpt")]) == 0
    for call in (mlstate.load, mlstate.verify, mlstate.checkpoint.prune):
        with pytest.raises(FileNotFoundError, match="no such folder"):
            call(tmp_path / "none")
