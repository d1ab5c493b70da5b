"""`convert` and `reshard` refuse an existing target unless asked to overwrite all of it."""

import errno
from pathlib import Path

import numpy as np
import pytest
from any_format import read_any, write_any
from checkpoint_model import files_of, same

import mlstate
from mlstate import _core
from mlstate._common.store_error import store_error
from mlstate.checkpoint import CheckpointManager, reshard
from mlstate.cli import main

NEW = {"w": np.arange(6.0)}
WRITERS = {
    "reshard": lambda target, **how: reshard("source", target, layout="rows", world_size=2, **how),
    "convert": lambda target, **how: write_any(target, NEW, **how),
}
COMMANDS = {
    "reshard": ["reshard", "source", "run", "--layout", "rows=2"],
    "convert": ["convert", "source", "run"],
}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A source checkpoint, and a run of three steps."""
    monkeypatch.chdir(tmp_path)
    mlstate.save("source", NEW, step=9)
    manager = CheckpointManager("run", keep=None)
    for step in (1, 2, 3):
        manager.save(step, {"old": np.full(3, step)})
    return tmp_path


@pytest.mark.parametrize("name", WRITERS)
def test_an_existing_target_is_refused_and_stays(name):
    before = files_of("run")
    with pytest.raises(mlstate.StoreError, match=r"exists already; overwrite=True") as info:
        WRITERS[name]("run")
    assert info.value.errno == errno.EEXIST
    assert files_of("run") == before


@pytest.mark.parametrize("name", COMMANDS)
def test_the_commands_refuse_and_replace(name, capsys):
    before = files_of("run")
    assert main(COMMANDS[name]) == 2
    assert "--force" in capsys.readouterr().err
    assert files_of("run") == before
    assert main([*COMMANDS[name], "--force"]) == 0
    assert same(NEW, mlstate.load("run").model)
    assert CheckpointManager("run").steps() == []


@pytest.mark.parametrize("name", WRITERS)
def test_overwriting_replaces_all_steps_of_a_run(name):
    WRITERS[name]("run", overwrite=True)
    assert same(NEW, mlstate.load("run").model)
    assert CheckpointManager("run").steps() == []
    report = mlstate.verify("run")
    assert report
    assert not report.leftover
    with pytest.raises(FileNotFoundError, match=r"checkpoint of mlstate\.save"):
        CheckpointManager("run").restore_latest()


@pytest.mark.parametrize("name", WRITERS)
def test_a_failed_overwrite_leaves_the_run(name, monkeypatch):
    def fail(path, *_):
        raise store_error(OSError(errno.ENOSPC, "full"), "cannot write", path)

    with monkeypatch.context() as patch:
        patch.setattr(_core, "file_replace", fail)
        with pytest.raises(mlstate.StoreError, match="full"):
            WRITERS[name]("run", overwrite=True)
    assert CheckpointManager("run").steps() == [1, 2, 3]
    assert mlstate.load("run").step == 3
    assert mlstate.verify("run")


@pytest.mark.parametrize("name", WRITERS)
def test_overwriting_a_damaged_checkpoint_removes_old_files(name):
    Path("run/manifest.json").write_bytes(b"{")
    for root in Path("run/roots").iterdir():
        root.write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"):
        WRITERS[name]("run", overwrite=True)
    assert mlstate.verify("run")
    assert not mlstate.verify("run").leftover


@pytest.mark.parametrize("name", WRITERS)
def test_empty_folder_needs_no_overwrite(name):
    Path("empty").mkdir()
    WRITERS[name]("empty")
    assert same(NEW, mlstate.load("empty").model)


def stop(_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", WRITERS)
def test_the_folder_of_a_stopped_first_save_needs_no_overwrite(name):
    with pytest.raises(KeyboardInterrupt):
        mlstate.save("stopped", {"w": np.ones(2)}, progress=stop)
    Path("stopped/params/w.0123456789abcdef-0.safetensors").touch()  # of a killed save
    WRITERS[name]("stopped")
    assert same(NEW, mlstate.load("stopped").model)


@pytest.mark.parametrize("other", ["params/letter", "letter", "roots/letter"])
@pytest.mark.parametrize("name", WRITERS)
def test_other_files_in_the_folders_of_a_save_need_overwrite(name, other):
    path = Path("other") / other
    path.parent.mkdir(parents=True)
    path.write_text("dear")
    for part in ("params", "roots", "index"):
        Path("other", part).mkdir(exist_ok=True)
    with pytest.raises(mlstate.StoreError, match="exists already"):
        WRITERS[name]("other")
    assert path.read_text() == "dear"


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt", ".dcp"])
def test_files_of_other_formats_are_refused_and_replaced(suffix):
    if suffix in (".pt", ".dcp"):
        pytest.importorskip("torch")
    path = Path(f"x{suffix}")
    write_any(path, {"old": np.ones(2)})
    with pytest.raises(mlstate.StoreError, match="exists already"):
        write_any(path, NEW)
    assert list(read_any(path)[0]) == ["old"]
    write_any(path, NEW, overwrite=True)
    assert same(NEW, read_any(path)[0])
    assert sorted(entry.name for entry in Path().iterdir()) == ["run", "source", path.name]


def test_a_folder_of_another_program_is_never_replaced():
    pytest.importorskip("torch")
    Path("home.dcp").mkdir()
    Path("home.dcp/letter").write_text("dear")
    with pytest.raises(ValueError, match="needs a new directory"):
        write_any("home.dcp", NEW, overwrite=True)
    assert Path("home.dcp/letter").read_text() == "dear"


def test_reshard_refuses_a_link_to_itself(tmp_path):
    mlstate.save(tmp_path / "source", {"w": np.ones(4)})
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(mlstate.StoreError, match="it exists already"):
        reshard(tmp_path / "source", tmp_path / "loop", layout="rows", world_size=2)


def test_reshard_names_a_missing_source(tmp_path):
    (tmp_path / "target").mkdir()
    with pytest.raises(mlstate.StoreError) as caught:
        reshard(tmp_path / "missing", tmp_path / "target", layout="rows", world_size=2)
    assert caught.value.path
